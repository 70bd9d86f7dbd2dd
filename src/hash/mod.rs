//! SHA-256 of many things: several messages at a time on a core.
//!
//! The instructions that processors have for SHA-256 wait for one another: a round begins when the one before it has ended. A
//! second message whose rounds come in between costs a core little more than one alone (`pair`). Sixteen messages, a lane of
//! a vector each, are faster still where the vectors are long enough (`wide`), though no instruction of those is made for it.
//! Files and entries are hashed by the dozen; `streams` finds who goes together. The digests are the usual ones (FIPS 180-4).

#[cfg(target_arch = "x86_64")]
mod pair;
mod streams;
#[cfg(target_arch = "x86_64")]
mod wide;

use sha2::block_api::compress256;

pub use streams::{Item, Parts, Stream, each, here, read, take};

/// Bytes that are compressed at once.
const BLOCK: usize = 64;

/// The first 32 bits of the fractional parts of the square roots of the first eight primes (FIPS 180-4, 5.3.3).
const START: [u32; 8] = [
    0x6a09_e667,
    0xbb67_ae85,
    0x3c6e_f372,
    0xa54f_f53a,
    0x510e_527f,
    0x9b05_688c,
    0x1f83_d9ab,
    0x5be0_cd19,
];

/// The first 32 bits of the fractional parts of the cube roots of the first sixty-four primes (FIPS 180-4, 4.2.2).
#[cfg(target_arch = "x86_64")]
const K: [u32; 64] = [
    0x428a_2f98,
    0x7137_4491,
    0xb5c0_fbcf,
    0xe9b5_dba5,
    0x3956_c25b,
    0x59f1_11f1,
    0x923f_82a4,
    0xab1c_5ed5,
    0xd807_aa98,
    0x1283_5b01,
    0x2431_85be,
    0x550c_7dc3,
    0x72be_5d74,
    0x80de_b1fe,
    0x9bdc_06a7,
    0xc19b_f174,
    0xe49b_69c1,
    0xefbe_4786,
    0x0fc1_9dc6,
    0x240c_a1cc,
    0x2de9_2c6f,
    0x4a74_84aa,
    0x5cb0_a9dc,
    0x76f9_88da,
    0x983e_5152,
    0xa831_c66d,
    0xb003_27c8,
    0xbf59_7fc7,
    0xc6e0_0bf3,
    0xd5a7_9147,
    0x06ca_6351,
    0x1429_2967,
    0x27b7_0a85,
    0x2e1b_2138,
    0x4d2c_6dfc,
    0x5338_0d13,
    0x650a_7354,
    0x766a_0abb,
    0x81c2_c92e,
    0x9272_2c85,
    0xa2bf_e8a1,
    0xa81a_664b,
    0xc24b_8b70,
    0xc76c_51a3,
    0xd192_e819,
    0xd699_0624,
    0xf40e_3585,
    0x106a_a070,
    0x19a4_c116,
    0x1e37_6c08,
    0x2748_774c,
    0x34b0_bcb5,
    0x391c_0cb3,
    0x4ed8_aa4a,
    0x5b9c_ca4f,
    0x682e_6ff3,
    0x748f_82ee,
    0x78a5_636f,
    0x84c8_7814,
    0x8cc7_0208,
    0x90be_fffa,
    0xa450_6ceb,
    0xbef9_a3f7,
    0xc671_78f2,
];

/// Messages that go together at most.
const LANES: usize = 16;

/// From so many messages on the lanes of long vectors are faster than pairs, though some stay empty: 3.2 GB/s in all 16, and
/// 1.95 in pairs, were measured on one core of an Intel Xeon (model 207).
const WIDE: usize = 11;

/// SHA-256 of the parts, one after the other.
pub fn sha256<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; 32] {
    let mut hash = Sha256::new();
    parts.into_iter().for_each(|part| hash.update(part));
    hash.finish()
}

/// A message that is still being read.
#[derive(Debug, Clone)]
pub struct Sha256 {
    state: [u32; 8],
    /// The last `length % 64` bytes, which fill no block yet.
    begun: [u8; BLOCK],
    /// Bytes so far.
    length: u64,
}

impl Default for Sha256 {
    fn default() -> Sha256 {
        Sha256 { state: START, begun: [0; BLOCK], length: 0 }
    }
}

impl Sha256 {
    /// The empty message.
    pub fn new() -> Sha256 {
        Sha256::default()
    }

    /// Appends bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        let blocks = self.enter(bytes);
        compress256(&mut self.state, blocks);
    }

    /// Appends bytes to each of up to 16 messages, to all of them at once as far as the shortest goes.
    pub fn update_all(messages: &mut [(&mut Sha256, &[u8])]) {
        let mut lanes: Vec<(&mut [u32; 8], &[[u8; BLOCK]])> = messages
            .iter_mut()
            .map(|(hash, bytes)| {
                let blocks = hash.enter(bytes);
                (&mut hash.state, blocks)
            })
            .collect();
        let together = lanes.iter().map(|(_, blocks)| blocks.len()).min().unwrap_or(0);
        compress_together(&mut lanes, together);
        for (state, blocks) in lanes {
            compress256(state, blocks.get(together..).unwrap_or_default());
        }
    }

    /// Counts the bytes in, completes the block that was begun and begins another with the last of them. The blocks in
    /// between are the caller's to compress.
    fn enter<'a>(&mut self, mut bytes: &'a [u8]) -> &'a [[u8; BLOCK]] {
        let begun = (self.length % BLOCK as u64) as usize;
        self.length = self.length.wrapping_add(bytes.len() as u64);
        if begun > 0 {
            let (first, rest) = bytes.split_at(bytes.len().min(BLOCK - begun));
            self.begun[begun..begun + first.len()].copy_from_slice(first);
            if begun + first.len() < BLOCK {
                return &[];
            }
            compress256(&mut self.state, &[self.begun]);
            bytes = rest;
        }
        let (blocks, last) = bytes.as_chunks::<BLOCK>();
        self.begun[..last.len()].copy_from_slice(last);
        blocks
    }

    /// The digest of everything that was appended.
    pub fn finish(mut self) -> [u8; 32] {
        // The message, a bit, zeros, and its length in bits as the last eight bytes of a block.
        let bits = self.length.wrapping_mul(8);
        let begun = (self.length % BLOCK as u64) as usize;
        let mut end = [0u8; 2 * BLOCK];
        end[..begun].copy_from_slice(&self.begun[..begun]);
        end[begun] = 0x80;
        let bytes = if begun + 1 + 8 > BLOCK { 2 * BLOCK } else { BLOCK };
        end[bytes - 8..bytes].copy_from_slice(&bits.to_be_bytes());
        compress256(&mut self.state, end[..bytes].as_chunks::<BLOCK>().0);
        let mut digest = [0; 32];
        for (bytes, word) in digest.as_chunks_mut::<4>().0.iter_mut().zip(self.state) {
            *bytes = word.to_be_bytes();
        }
        digest
    }
}

/// How many messages go together on this processor when there are enough: 16, two, or one.
fn most_together() -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        if wide::Instructions::new().is_some() {
            return LANES;
        }
        if pair::Instructions::new().is_some() {
            return 2;
        }
    }
    1
}

/// Compresses the first `blocks` blocks of every message, a block of each at a time where the processor gains by it.
fn compress_together(lanes: &mut [(&mut [u32; 8], &[[u8; BLOCK]])], blocks: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        if (WIDE..=LANES).contains(&lanes.len())
            && let Some(instructions) = wide::Instructions::new()
        {
            return instructions.compress(lanes, blocks);
        }
        if let Some(instructions) = pair::Instructions::new() {
            let (pairs, last) = lanes.as_chunks_mut::<2>();
            for [(a, x), (b, y)] in pairs {
                instructions.compress_two(a, &x[..blocks], b, &y[..blocks]);
            }
            last.iter_mut().for_each(|(state, all)| compress256(state, &all[..blocks]));
            return;
        }
    }
    lanes.iter_mut().for_each(|(state, all)| compress256(state, &all[..blocks]));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sha2::Digest;

    use super::*;

    fn hex(digest: [u8; 32]) -> String {
        digest.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// FIPS 180-4's messages, and no bytes at all.
    #[test]
    fn the_published_messages_have_their_published_digests() {
        let long = b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq".as_slice();
        for (message, digest) in [
            (b"".as_slice(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            (long, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"),
        ] {
            assert_eq!(hex(sha256([message])), digest);
        }
        let mut million = Sha256::new();
        (0..1000).for_each(|_| million.update(&[b'a'; 1000]));
        let digest = "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0";
        assert_eq!(hex(million.finish()), digest);
    }

    /// Around every border of blocks and of padding.
    #[test]
    fn messages_of_every_length_up_to_three_blocks_are_hashed_as_sha2_hashes_them() {
        let bytes: Vec<u8> = (0..200u8).map(|i| i.wrapping_mul(37)).collect();
        for length in 0..=bytes.len() {
            let message = &bytes[..length];
            let want: [u8; 32] = sha2::Sha256::digest(message).into();
            assert_eq!(sha256([message]), want, "{length}");
            for cut in 0..=length {
                assert_eq!(sha256([&message[..cut], &message[cut..]]), want, "{cut} of {length}");
            }
        }
    }

    proptest! {
        #[test]
        fn messages_together_have_the_digests_that_each_has_alone(
            messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..1200), 1..17),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let mut hashes = vec![Sha256::new(); messages.len()];
            // Every message in as many parts, of other lengths: the cuts move from one to the next.
            let ends: Vec<Vec<usize>> = (messages.iter().enumerate())
                .map(|(i, bytes)| {
                    let at = |cut: &prop::sample::Index| {
                        (cut.index(bytes.len() + 1) + 7 * i) % (bytes.len() + 1)
                    };
                    let mut ends: Vec<usize> = cuts.iter().map(at).chain([0, bytes.len()]).collect();
                    ends.sort_unstable();
                    ends
                })
                .collect();
            for part in 0..=cuts.len() {
                let parts = messages.iter().zip(&ends).map(|(m, ends)| &m[ends[part]..ends[part + 1]]);
                let mut together: Vec<(&mut Sha256, &[u8])> = hashes.iter_mut().zip(parts).collect();
                Sha256::update_all(&mut together);
            }
            for (hash, message) in hashes.into_iter().zip(&messages) {
                let want: [u8; 32] = sha2::Sha256::digest(message).into();
                prop_assert_eq!(hash.finish(), want);
            }
        }
    }
}
