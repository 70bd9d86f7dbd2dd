//! The container's rows as they lie in the file: little-endian, no padding.
//!
//! Fields are read and written one by one, so the host's byte order and struct layout do not matter.

use super::layout::NAME_BYTES;

/// A value of fixed width in a row.
pub(super) trait Field: Copy + Sized {
    /// Width in bytes.
    const SIZE: usize;
    /// Takes the value off the front; `None` when too few bytes are left.
    fn take(bytes: &mut &[u8]) -> Option<Self>;
    /// Appends the value.
    fn put(self, out: &mut Vec<u8>);
}

macro_rules! number {
    ($($t:ty)*) => {$(
        impl Field for $t {
            const SIZE: usize = size_of::<$t>();
            fn take(bytes: &mut &[u8]) -> Option<Self> {
                let (head, rest) = bytes.split_first_chunk()?;
                *bytes = rest;
                Some(<$t>::from_le_bytes(*head))
            }
            fn put(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
number!(u8 u32 u64 i32 i64 f32);

impl<T: Field + Default, const N: usize> Field for [T; N] {
    const SIZE: usize = N * T::SIZE;
    fn take(bytes: &mut &[u8]) -> Option<Self> {
        let mut out = [T::default(); N];
        for x in &mut out {
            *x = T::take(bytes)?;
        }
        Some(out)
    }
    fn put(self, out: &mut Vec<u8>) {
        self.into_iter().for_each(|x| x.put(out));
    }
}

/// A row of a table.
pub(super) trait Row: Field {
    /// The row at the start of `bytes`.
    fn read(mut bytes: &[u8]) -> Option<Self> {
        Self::take(&mut bytes)
    }

    /// Every row of a table of whole rows.
    fn rows(mut bytes: &[u8]) -> impl Iterator<Item = Self> {
        std::iter::from_fn(move || Self::take(&mut bytes))
    }
}

macro_rules! row {
    ($(#[$meta:meta])* $name:ident, $size:literal { $($(#[$note:meta])* $field:ident: $t:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub(super) struct $name {
            $($(#[$note])* pub $field: $t,)*
        }
        impl Field for $name {
            const SIZE: usize = $size;
            fn take(bytes: &mut &[u8]) -> Option<Self> {
                Some($name { $($field: Field::take(bytes)?,)* })
            }
            fn put(self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }
        }
        impl Row for $name {}
        const _: () = assert!(0 $(+ <$t as Field>::SIZE)* == $size);
    };
}

row! {
    /// Offset and length of every section, and the strings that describe the file.
    Header, 248 {
        magic: u32,
        version: u32,
        file_bytes: u64,
        arch_id: u64,
        model_name: u64,
        quant: u64,
        recipe: u64,
        created_by: u64,
        str_off: u64,
        str_bytes: u64,
        meta_off: u64,
        meta_count: u64,
        dir_off: u64,
        dir_count: u64,
        plane_off: u64,
        plane_count: u64,
        enc_off: u64,
        enc_count: u64,
        vocab_off: u64,
        vocab_bytes: u64,
        prof_off: u64,
        prof_count: u64,
        data_off: u64,
        data_bytes: u64,
        reserved: [u64; 8],
    }
}

row! {
    /// A metadata row; `value` holds an integer, a float's bits or a string offset.
    MetaRow, 24 {
        key: u64,
        kind: u32,
        pad: u32,
        value: u64,
    }
}

row! {
    /// A directory row.
    DirRow, 136 {
        name: u64,
        quantizer: u64,
        options: u64,
        enc: u32,
        rank: u32,
        shape: [i64; 6],
        layer: i32,
        expert: i32,
        slot: i32,
        n_planes: u32,
        plane_first: u64,
        offset: u64,
        bytes: u64,
        reserved: [u64; 2],
    }
}

row! {
    /// Where a plane lies.
    PlaneRow, 16 {
        offset: u64,
        bytes: u64,
    }
}

row! {
    /// One plane slot of an encoding.
    EncPlaneRow, 64 {
        role: [u8; NAME_BYTES],
        dtype: u32,
        kind: u32,
        block: [i64; 2],
        extent: [i64; 2],
    }
}

row! {
    /// An encoding.
    EncRow, 568 {
        scheme: [u8; NAME_BYTES],
        transform: [u8; NAME_BYTES],
        n_planes: i32,
        reserved: i32,
        planes: [EncPlaneRow; 8],
    }
}

impl Default for EncPlaneRow {
    fn default() -> EncPlaneRow {
        EncPlaneRow { role: [0; NAME_BYTES], dtype: 0, kind: 0, block: [0; 2], extent: [0; 2] }
    }
}

row! {
    /// The vocabulary's header.
    VocabRow, 128 {
        kind: u32,
        n_tokens: u32,
        n_merges: u32,
        n_steps: u32,
        /// Token text, scores, types, merges, steps; 0 = absent.
        arrays: [u64; 5],
        /// bos, eos, eot, pad, unk, sep; -1 = none.
        specials: [i32; 6],
        add_bos: u32,
        add_eos: u32,
        chat_template: u64,
        reserved: [u64; 4],
    }
}

row! {
    /// A tokenizer step.
    StepRow, 32 {
        kind: u32,
        flags: u32,
        arg0: u64,
        arg1: u64,
        iarg: i64,
    }
}

row! {
    /// Share of a layer's tokens that an expert sees.
    ProfRow, 16 {
        layer: i32,
        expert: i32,
        share: f32,
        reserved: u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_reads_back_what_it_wrote_in_little_endian() {
        let row = ProfRow { layer: -1, expert: 2, share: 0.5, reserved: 0x0403_0201 };
        let mut bytes = Vec::new();
        row.put(&mut bytes);
        assert_eq!(bytes, [255, 255, 255, 255, 2, 0, 0, 0, 0, 0, 0, 63, 1, 2, 3, 4]);
        assert_eq!(ProfRow::read(&bytes), Some(row));
        assert_eq!(ProfRow::read(&bytes[..15]), None);
    }

    #[test]
    fn fields_lie_where_container_version_2_puts_them() {
        let bytes: Vec<u8> = (0..248u32).map(|i| i as u8).collect();
        let at = |o: usize| u64::from_le_bytes(*bytes[o..].first_chunk().expect("8 bytes"));
        let h = Header::read(&bytes).expect("whole");
        assert_eq!((h.file_bytes, h.created_by, h.str_off), (at(8), at(48), at(56)));
        assert_eq!((h.enc_off, h.vocab_bytes, h.data_off), (at(120), at(144), at(168)));
        assert_eq!((h.data_bytes, h.reserved[0]), (at(176), at(184)));
        let d = DirRow::read(&bytes).expect("whole");
        assert_eq!((d.shape[0] as u64, d.plane_first, d.bytes), (at(32), at(96), at(112)));
        assert_eq!(d.layer.to_le_bytes(), bytes[80..84]);
        assert_eq!(d.n_planes.to_le_bytes(), bytes[92..96]);
        let v = VocabRow::read(&bytes).expect("whole");
        assert_eq!((v.arrays[0], v.arrays[4], v.chat_template), (at(16), at(48), at(88)));
        assert_eq!(v.specials[0].to_le_bytes(), bytes[56..60]);
        assert_eq!(v.add_bos.to_le_bytes(), bytes[80..84]);
    }
}
