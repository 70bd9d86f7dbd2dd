//! Where everything lies in a container, and seeded changes of it. Knows the format by itself, from its description.

// Every test file compiles this module for itself and uses a part of it.
#![allow(dead_code)]

use std::ops::Range;

/// splitmix64.
#[derive(Debug)]
pub struct Seeded(pub u64);

impl Seeded {
    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// One place of a file that is changed as a whole.
#[derive(Debug, Clone)]
pub struct Field {
    /// Which table, row and field it is.
    pub name: String,
    /// Its bytes.
    pub at: Range<usize>,
}

/// A table of rows: where it is, how long a row is.
#[derive(Debug, Clone, Copy)]
pub struct Table {
    /// Its name.
    pub name: &'static str,
    /// First byte.
    pub at: usize,
    /// Rows.
    pub rows: usize,
    /// Bytes of a row.
    pub row: usize,
}

/// The number at an offset.
pub fn number(bytes: &[u8], at: usize) -> usize {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes")) as usize
}

/// Names and widths of the fields of a row; `name*n` is n fields of that width.
type Row = &'static [(&'static str, usize, usize)];

const HEADER: Row = &[
    ("magic", 4, 1),
    ("version", 4, 1),
    ("file_bytes", 8, 1),
    ("text", 8, 5),
    ("section", 8, 16),
    ("reserved", 8, 8),
];
const META: Row = &[("key", 8, 1), ("kind", 4, 1), ("pad", 4, 1), ("value", 8, 1)];
const DIR: Row = &[
    ("name", 8, 1),
    ("quantizer", 8, 1),
    ("options", 8, 1),
    ("enc", 4, 1),
    ("rank", 4, 1),
    ("shape", 8, 6),
    ("layer", 4, 1),
    ("expert", 4, 1),
    ("slot", 4, 1),
    ("n_planes", 4, 1),
    ("plane_first", 8, 1),
    ("offset", 8, 1),
    ("bytes", 8, 1),
    ("reserved", 8, 2),
];
const PLANE: Row = &[("offset", 8, 1), ("bytes", 8, 1)];
const ENC: Row = &[("scheme", 24, 1), ("transform", 24, 1), ("n_planes", 4, 1), ("reserved", 4, 1)];
const ENC_PLANE: Row =
    &[("role", 24, 1), ("dtype", 4, 1), ("kind", 4, 1), ("block", 8, 2), ("extent", 8, 2)];
const VOCAB: Row = &[
    ("count", 4, 4),
    ("array", 8, 5),
    ("special", 4, 6),
    ("add_bos", 4, 1),
    ("add_eos", 4, 1),
    ("chat_template", 8, 1),
    ("reserved", 8, 4),
];
const STEP: Row =
    &[("kind", 4, 1), ("flags", 4, 1), ("arg0", 8, 1), ("arg1", 8, 1), ("iarg", 8, 1)];

fn row(out: &mut Vec<Field>, name: &str, mut at: usize, fields: Row) -> usize {
    for (field, width, count) in fields {
        for k in 0..*count {
            out.push(Field { name: format!("{name}.{field}[{k}]"), at: at..at + width });
            at += width;
        }
    }
    at
}

/// The tables of a file.
pub fn tables(bytes: &[u8]) -> [Table; 4] {
    let of =
        |name, at, row| Table { name, at: number(bytes, at), rows: number(bytes, at + 8), row };
    [of("meta", 72, 24), of("dir", 88, 136), of("plane", 104, 16), of("enc", 120, 568)]
}

/// Every field of the header and of every row of every table.
pub fn fields(bytes: &[u8]) -> Vec<Field> {
    let mut out = Vec::new();
    assert_eq!(row(&mut out, "header", 0, HEADER), 248);
    for table in tables(bytes) {
        for i in 0..table.rows {
            let at = table.at + i * table.row;
            let name = format!("{}[{i}]", table.name);
            let end = match table.name {
                "meta" => row(&mut out, &name, at, META),
                "dir" => row(&mut out, &name, at, DIR),
                "plane" => row(&mut out, &name, at, PLANE),
                _ => {
                    let first = row(&mut out, &name, at, ENC);
                    (0..8).fold(first, |at, k| row(&mut out, &format!("{name}.{k}"), at, ENC_PLANE))
                }
            };
            assert_eq!(end - at, table.row);
        }
    }
    let vocab = number(bytes, 136);
    if number(bytes, 144) > 0 {
        row(&mut out, "vocab", vocab, VOCAB);
        let count =
            |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4")) as usize;
        let steps = number(bytes, vocab + 48);
        for i in (0..count(vocab + 12)).filter(|_| steps > 0) {
            row(&mut out, &format!("vocab.step[{i}]"), steps + 32 * i, STEP);
        }
    }
    out
}

/// A change of a field, as any of the ways in which numbers and names go wrong.
pub fn change(bytes: &mut [u8], field: &Field, all: &[Field], rng: &mut Seeded) {
    let at = field.at.clone();
    let old = bytes[at.clone()].to_vec();
    let width = at.len();
    let put = |bytes: &mut [u8], value: u64| {
        let le = value.to_le_bytes();
        let n = width.min(8);
        bytes[at.start..at.start + n].copy_from_slice(&le[..n]);
    };
    let mut low = [0; 8];
    low[..width.min(8)].copy_from_slice(&old[..width.min(8)]);
    let value = u64::from_le_bytes(low);
    match rng.below(9) {
        0 => put(bytes, value.wrapping_add(1)),
        1 => put(bytes, value.wrapping_sub(1)),
        2 => bytes[at.clone()].fill(0),
        3 => bytes[at.clone()].fill(0xff),
        4 => put(bytes, rng.next() % bytes.len() as u64),
        5 => put(bytes, rng.next()),
        6 => {
            // Another field's value of the same width.
            let same: Vec<&Field> = all.iter().filter(|f| f.at.len() == width).collect();
            let from = same[rng.below(same.len())].at.clone();
            bytes.copy_within(from, at.start);
        }
        7 => put(bytes, value ^ 1 << 62),
        _ => bytes[at.start + rng.below(width)] ^= 1 << rng.below(8),
    }
    if bytes[at.clone()] == old[..] {
        bytes[at.start + rng.below(width)] ^= 1 << rng.below(8);
    }
}

/// Two rows of a table change places, or one takes the other's.
pub fn change_rows(bytes: &mut [u8], table: Table, rng: &mut Seeded) {
    if table.rows < 2 {
        return;
    }
    let (a, b) = (rng.below(table.rows), rng.below(table.rows));
    let at = |i: usize| table.at + i * table.row;
    let first = bytes[at(a)..at(a) + table.row].to_vec();
    bytes.copy_within(at(b)..at(b) + table.row, at(a));
    if rng.below(2) == 0 {
        bytes[at(b)..at(b) + table.row].copy_from_slice(&first);
    }
}
