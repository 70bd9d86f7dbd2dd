//! Rows of codes narrower than a byte: a little-endian bit stream, lowest bits first, every row starting on a byte.

/// Bytes of a row of `n` codes of `bits` bits; `None` on overflow.
pub fn row_bytes(n: usize, bits: u32) -> Option<usize> {
    Some(n.checked_mul(bits as usize)?.div_ceil(8))
}

/// Packs one row of codes into `out`, which must hold exactly [`row_bytes`]; unused bits of the last byte are 0.
/// Bits of a code above `bits` (1 to 32) are ignored.
///
/// # Panics
/// When `out` has another length.
pub fn pack(codes: &[u32], bits: u32, out: &mut [u8]) {
    assert_eq!(Some(out.len()), row_bytes(codes.len(), bits), "row of {} codes", codes.len());
    match bits {
        8 => return out.iter_mut().zip(codes).for_each(|(o, code)| *o = *code as u8),
        16 => {
            let halves = out.as_chunks_mut::<2>().0.iter_mut().zip(codes);
            return halves.for_each(|(o, code)| *o = (*code as u16).to_le_bytes());
        }
        _ => {}
    }
    let mask = u64::MAX >> (64 - bits);
    let (mut word, mut held, mut at) = (0u64, 0u32, 0usize);
    for &code in codes {
        // At most 7 bits are held over, so 39 fit.
        word |= (u64::from(code) & mask) << held;
        held += bits;
        while held >= 8 {
            out[at] = word as u8;
            at += 1;
            word >>= 8;
            held -= 8;
        }
    }
    if held > 0 {
        out[at] = word as u8;
    }
}

/// Reads one row of codes; `bytes` must hold at least [`row_bytes`]. Codes are zero-extended.
///
/// # Panics
/// When `bytes` is shorter.
pub fn unpack(bytes: &[u8], bits: u32, codes: &mut [u32]) {
    let need = row_bytes(codes.len(), bits);
    assert!(need.is_some_and(|n| n <= bytes.len()), "row of {} codes", codes.len());
    match bits {
        8 => return codes.iter_mut().zip(bytes).for_each(|(code, b)| *code = (*b).into()),
        16 => {
            let halves = codes.iter_mut().zip(bytes.as_chunks::<2>().0);
            return halves.for_each(|(code, b)| *code = u16::from_le_bytes(*b).into());
        }
        _ => {}
    }
    let mask = u64::MAX >> (64 - bits);
    let (mut word, mut held, mut at) = (0u64, 0u32, 0usize);
    for code in codes {
        while held < bits {
            word |= u64::from(bytes[at]) << held;
            at += 1;
            held += 8;
        }
        *code = (word & mask) as u32;
        word >>= bits;
        held -= bits;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn elements_lie_lowest_bits_first_and_straddle_bytes() {
        let mut out = [0u8; 2];
        pack(&[0x1, 0xa, 0xf], 4, &mut out);
        assert_eq!(out, [0xa1, 0x0f]);
        // 3-bit codes 1,2,3,4,5: bits 001 010 011 100 101 from the lowest upwards.
        pack(&[1, 2, 3, 4, 5], 3, &mut out);
        assert_eq!(u16::from_le_bytes(out), 1 | 2 << 3 | 3 << 6 | 4 << 9 | 5 << 12);
        let mut one = [0u8; 1];
        pack(&[0xffff_ffff], 3, &mut one);
        assert_eq!(one, [7]);
    }

    proptest! {
        #[test]
        fn unpacking_gives_back_what_was_packed(bits in 1u32..=32, codes in prop::collection::vec(any::<u32>(), 0..70)) {
            let mut bytes = vec![0u8; row_bytes(codes.len(), bits).expect("small")];
            pack(&codes, bits, &mut bytes);
            let mut back = vec![0u32; codes.len()];
            unpack(&bytes, bits, &mut back);
            let mask = (u64::MAX >> (64 - bits)) as u32;
            let want: Vec<u32> = codes.iter().map(|c| c & mask).collect();
            prop_assert_eq!(back, want);
        }
    }
}
