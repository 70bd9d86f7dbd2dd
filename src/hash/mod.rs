//! SHA-256 of many things: two messages at a time on a core.
//!
//! The instructions that processors have for SHA-256 wait for one another: a round begins when the one before it has ended. A
//! second message whose rounds come in between costs a core little more than one alone. Files and entries are hashed by the
//! dozen, so there is nearly always a second one; [`streams`] finds it. The digests are the usual ones (FIPS 180-4).

mod streams;
#[cfg(target_arch = "x86_64")]
mod x86;

use sha2::block_api::compress256;

pub use streams::{Item, Parts, Stream, each, here, read};

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

    /// Appends `x` to `a` and `y` to `b`, both at once as far as the shorter one goes.
    pub fn update_both(a: &mut Sha256, x: &[u8], b: &mut Sha256, y: &[u8]) {
        let (x, y) = (a.enter(x), b.enter(y));
        let both = x.len().min(y.len());
        let ((x, x_rest), (y, y_rest)) = (x.split_at(both), y.split_at(both));
        compress_two(&mut a.state, x, &mut b.state, y);
        compress256(&mut a.state, x_rest);
        compress256(&mut b.state, y_rest);
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

/// Compresses as many blocks of one message as of another, a block of each at a time where the processor gains by it.
fn compress_two(a: &mut [u32; 8], x: &[[u8; BLOCK]], b: &mut [u32; 8], y: &[[u8; BLOCK]]) {
    #[cfg(target_arch = "x86_64")]
    if let Some(instructions) = x86::Instructions::new() {
        return instructions.compress_two(a, x, b, y);
    }
    compress256(a, x);
    compress256(b, y);
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
        fn two_messages_at_once_have_the_digests_that_each_has_alone(
            x in proptest::collection::vec(any::<u8>(), 0..2000),
            y in proptest::collection::vec(any::<u8>(), 0..2000),
            cuts in proptest::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..6),
        ) {
            let ends = |bytes: &[u8], cuts: Vec<usize>| {
                let mut cuts: Vec<usize> = cuts.into_iter().chain([0, bytes.len()]).collect();
                cuts.sort_unstable();
                cuts
            };
            let at = |i: &prop::sample::Index, bytes: &[u8]| i.index(bytes.len() + 1);
            let first = ends(&x, cuts.iter().map(|(i, _)| at(i, &x)).collect());
            let second = ends(&y, cuts.iter().map(|(_, i)| at(i, &y)).collect());
            let (mut a, mut b) = (Sha256::new(), Sha256::new());
            for (p, q) in first.windows(2).zip(second.windows(2)) {
                Sha256::update_both(&mut a, &x[p[0]..p[1]], &mut b, &y[q[0]..q[1]]);
            }
            let want = |bytes: &[u8]| -> [u8; 32] { sha2::Sha256::digest(bytes).into() };
            prop_assert_eq!(a.finish(), want(&x));
            prop_assert_eq!(b.finish(), want(&y));
        }
    }
}
