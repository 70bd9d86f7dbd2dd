//! Blobs of a hub cache: files that are named by a digest of what they hold.
//!
//! The hub's ETag is the name. Files in Git LFS (all weights) have the sha256 of their bytes, files in git itself the
//! id of the git object: the sha1 of `blob LENGTH NUL` and the bytes. SHA-1 is no proof against somebody who makes a
//! collision on purpose; it tells every accident, and it is all that the hub gives for these files.

use std::path::Path;

use sha2::{Digest, Sha256};

use super::folder::Found;
use crate::diag::Diagnostic;

/// A digest that names a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BlobName {
    /// Of a file in Git LFS.
    Sha256([u8; 32]),
    /// Of a file in git.
    Git([u8; 20]),
}

impl BlobName {
    /// Reads 64 or 40 hex digits.
    pub fn parse(text: &str) -> Option<BlobName> {
        let digits = text.as_bytes();
        let mut bytes = Vec::with_capacity(32);
        for pair in digits.chunks(2) {
            let pair = std::str::from_utf8(pair).ok().filter(|p| !p.starts_with('+'))?;
            bytes.push(u8::from_str_radix(pair, 16).ok().filter(|_| pair.len() == 2)?);
        }
        match bytes.len() {
            32 => bytes.try_into().ok().map(BlobName::Sha256),
            20 => bytes.try_into().ok().map(BlobName::Git),
            _ => None,
        }
    }

    /// The name that the place of a file in a hub cache gives it; `None` for a file that lies elsewhere.
    pub fn of(found: &Found) -> Option<BlobName> {
        let name = |path: Option<&Path>| Some(path?.file_name()?.to_str()?.to_owned());
        let blobs = found.location.parent()?;
        let in_cache =
            name(Some(blobs))? == "blobs" && name(blobs.parent())?.starts_with("models--");
        in_cache.then(|| BlobName::parse(&name(Some(&found.location))?))?
    }

    /// In lower-case hex.
    pub fn hex(&self) -> String {
        let bytes: &[u8] = match self {
            BlobName::Sha256(bytes) => bytes,
            BlobName::Git(bytes) => bytes,
        };
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// `sha256` or `git sha1`.
    pub fn kind(&self) -> &'static str {
        match self {
            BlobName::Sha256(_) => "sha256",
            BlobName::Git(_) => "git sha1",
        }
    }

    /// A digest of the same kind on its way, for a file of that many bytes.
    #[cfg(feature = "hub")]
    pub fn hasher(&self, bytes: u64) -> BlobHasher {
        match self {
            BlobName::Sha256(_) => BlobHasher::Sha256(Sha256::new()),
            BlobName::Git(_) => BlobHasher::git(bytes),
        }
    }

    /// What is wrong with a file that should have this name; `None` where `found` is this name.
    pub fn mismatch(&self, path: &str, found: &BlobName) -> Option<Diagnostic> {
        let what = format!(
            "{path}: {} {} was expected, {} was found",
            self.kind(),
            self.hex(),
            found.hex()
        );
        (self != found).then(|| Diagnostic::new("hub", what))
    }
}

/// A digest on its way.
pub(super) enum BlobHasher {
    /// For [`BlobName::Sha256`].
    #[cfg_attr(not(feature = "hub"), expect(dead_code, reason = "only downloads begin one"))]
    Sha256(Sha256),
    /// For [`BlobName::Git`].
    Git(Sha1),
}

impl BlobHasher {
    /// The id of a git blob of that many bytes.
    pub fn git(bytes: u64) -> BlobHasher {
        let mut sha1 = Sha1::new();
        sha1.update(format!("blob {bytes}\0").as_bytes());
        BlobHasher::Git(sha1)
    }

    /// Takes more of the file.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            BlobHasher::Sha256(hasher) => hasher.update(bytes),
            BlobHasher::Git(hasher) => hasher.update(bytes),
        }
    }

    /// The name of what was taken.
    pub fn finish(self) -> BlobName {
        match self {
            BlobHasher::Sha256(hasher) => BlobName::Sha256(hasher.finalize().into()),
            BlobHasher::Git(hasher) => BlobName::Git(hasher.finish()),
        }
    }
}

/// SHA-1 (FIPS 180-4, section 6.1).
pub(super) struct Sha1 {
    state: [u32; 5],
    block: [u8; 64],
    /// Bytes taken in all.
    taken: u64,
}

impl Sha1 {
    fn new() -> Sha1 {
        let state = [0x6745_2301, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476, 0xc3d2_e1f0];
        Sha1 { state, block: [0; 64], taken: 0 }
    }

    fn update(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            let at = (self.taken % 64) as usize;
            self.block[at] = byte;
            self.taken += 1;
            if at == 63 {
                self.compress();
            }
        }
    }

    fn compress(&mut self) {
        let mut w = [0u32; 80];
        for (word, bytes) in w.iter_mut().zip(self.block.chunks_exact(4)) {
            *word = bytes.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        }
        for t in 16..80 {
            w[t] = (w[t - 3] ^ w[t - 8] ^ w[t - 14] ^ w[t - 16]).rotate_left(1);
        }
        let [mut a, mut b, mut c, mut d, mut e] = self.state;
        for (t, word) in w.iter().enumerate() {
            let (f, k) = match t / 20 {
                0 => ((b & c) | (!b & d), 0x5a82_7999),
                1 => (b ^ c ^ d, 0x6ed9_eba1),
                2 => ((b & c) | (b & d) | (c & d), 0x8f1b_bcdc),
                _ => (b ^ c ^ d, 0xca62_c1d6u32),
            };
            let next = a
                .rotate_left(5)
                .wrapping_add(f)
                .wrapping_add(e)
                .wrapping_add(k)
                .wrapping_add(*word);
            (e, d, c, b, a) = (d, c, b.rotate_left(30), a, next);
        }
        for (sum, part) in self.state.iter_mut().zip([a, b, c, d, e]) {
            *sum = sum.wrapping_add(part);
        }
    }

    fn finish(mut self) -> [u8; 20] {
        let bits = self.taken.wrapping_mul(8);
        self.update(&[0x80]);
        while self.taken % 64 != 56 {
            self.update(&[0]);
        }
        self.update(&bits.to_be_bytes());
        let mut digest = [0; 20];
        for (bytes, word) in digest.chunks_exact_mut(4).zip(self.state) {
            bytes.copy_from_slice(&word.to_be_bytes());
        }
        digest
    }
}

#[cfg(test)]
mod tests {
    use super::super::folder::Stamp;
    use super::*;

    #[test]
    fn sha1_has_the_values_of_its_standard() {
        let of = |bytes: &[u8]| {
            let mut sha1 = Sha1::new();
            bytes.chunks(7).for_each(|part| sha1.update(part));
            BlobName::Git(sha1.finish()).hex()
        };
        assert_eq!(of(b""), "da39a3ee5e6b4b0d3255bfef95601890afd80709");
        assert_eq!(of(b"abc"), "a9993e364706816aba3e25717850c26c9cd0d89d");
        let two_blocks = b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
        assert_eq!(of(two_blocks), "84983e441c3bd26ebaae4aa1f95129e5e54670f1");
        assert_eq!(of(&[b'a'; 1_000_000]), "34aa973cd4c4daa4f61eeb2bdbad27316534016f");
    }

    #[test]
    fn a_file_in_git_has_the_id_that_git_gives_it() {
        // `git hash-object` of an empty file and of "hello\n".
        let of = |bytes: &[u8]| {
            let mut hasher = BlobHasher::git(bytes.len() as u64);
            hasher.update(bytes);
            hasher.finish().hex()
        };
        assert_eq!(of(b""), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
        assert_eq!(of(b"hello\n"), "ce013625030ba8dba906f756967f9e9ca394464a");
    }

    #[test]
    fn names_are_digests_and_nothing_else() {
        let sha256 = "ab".repeat(32);
        assert_eq!(BlobName::parse(&sha256), Some(BlobName::Sha256([0xab; 32])));
        assert_eq!(BlobName::parse(&sha256[..40]).map(|n| n.hex()), Some("ab".repeat(20)));
        for odd in ["", "ab", &sha256[..63], &"+a".repeat(20), &"zz".repeat(32), &"é".repeat(20)] {
            assert_eq!(BlobName::parse(odd), None, "{odd}");
        }
        let at = |path: String| {
            BlobName::of(&Found { location: path.into(), bytes: 0, stamp: Stamp::default() })
        };
        assert!(at(format!("/c/models--a--b/blobs/{sha256}")).is_some());
        assert_eq!(at(format!("/c/models--a--b/blobs/{sha256}.incomplete")), None);
        assert_eq!(at(format!("/c/blobs/{sha256}")), None);
        assert_eq!(at(format!("/c/models--a--b/{sha256}")), None);
    }
}
