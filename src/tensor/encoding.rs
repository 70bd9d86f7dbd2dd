//! How a weight's values are laid out over planes.
//!
//! A plane is a matrix of elements: TILED planes hold one element per block of the weight's matrix, TABLE planes a
//! matrix of their own extents. The value of element (r, c) under the [`Scheme::Affine`] scheme is, in f32 and in
//! this order: code (or `table[code]`), negated by `signs`, minus `zero`, times every `scale` level, minus the
//! product of the `min` levels, then the inverse of the row transform.

use std::fmt;

use super::{DType, Shape};

/// Planes an encoding can have.
pub const MAX_PLANES: usize = 8;

/// Plane roles that the affine scheme knows.
pub mod role {
    /// Codes of the elements; always plane 0.
    pub const CODES: &str = "codes";
    /// First-level scale.
    pub const SCALE: &str = "scale";
    /// Second-level scale.
    pub const SCALE_1: &str = "scale.1";
    /// Minimum, subtracted from the scaled code.
    pub const MIN: &str = "min";
    /// Scale of the minimum.
    pub const MIN_1: &str = "min.1";
    /// Zero point, subtracted from the code.
    pub const ZERO: &str = "zero";
    /// Codebook of scalars, indexed by the code.
    pub const TABLE: &str = "table";
}

/// What a weight's planes mean.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// One plane; the value is the code.
    Plain,
    /// Codes with scales, zero points, codebooks (module doc).
    Affine,
    /// A producer's own scheme, carried but not decoded here.
    Other(String),
}

impl Scheme {
    /// The name stored in a container.
    pub fn name(&self) -> &str {
        match self {
            Scheme::Plain => "plain",
            Scheme::Affine => "affine",
            Scheme::Other(name) => name,
        }
    }
}

/// Where a plane's elements lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PlaneLayout {
    /// One element per `block` = [rows, columns] of the weight; a block extent 0 spans the whole extent.
    Tiled {
        /// Rows and columns one element covers.
        block: [u64; 2],
    },
    /// A matrix of `extent` = [rows, columns] of its own.
    Table {
        /// Rows and columns of the table.
        extent: [u64; 2],
    },
}

/// One plane of an encoding.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PlaneSpec {
    /// What the plane holds: `codes`, `scale`, `zero`, …
    pub role: String,
    /// Element type.
    pub dtype: DType,
    /// Element placement.
    pub layout: PlaneLayout,
}

impl PlaneSpec {
    /// A plane with one element per `block` of the weight.
    pub fn tiled(role: &str, dtype: DType, block: [u64; 2]) -> PlaneSpec {
        PlaneSpec { role: role.to_owned(), dtype, layout: PlaneLayout::Tiled { block } }
    }

    /// A plane with extents of its own.
    pub fn table(role: &str, dtype: DType, extent: [u64; 2]) -> PlaneSpec {
        PlaneSpec { role: role.to_owned(), dtype, layout: PlaneLayout::Table { extent } }
    }

    /// Rows and columns of the plane's own elements for a weight of `rows` × `cols`.
    pub fn grid(&self, rows: u64, cols: u64) -> (u64, u64) {
        let blocks = |n: u64, b: u64| if b == 0 { 1 } else { n.div_ceil(b) };
        match self.layout {
            PlaneLayout::Tiled { block: [br, bc] } => (blocks(rows, br), blocks(cols, bc)),
            PlaneLayout::Table { extent: [r, c] } => (r, c),
        }
    }

    /// Bytes of one row of the plane: elements are a little-endian bit stream and every row starts on a byte.
    /// `None` when the product exceeds 64 bits.
    pub fn row_bytes(&self, cols: u64) -> Option<u64> {
        let (_, n) = self.grid(1, cols);
        Some(n.checked_mul(u64::from(self.dtype.bits()))?.div_ceil(8))
    }

    /// Level of this plane among the planes of `base` (`scale` or `min`): 0 for `base` itself, N for `base.N`.
    pub fn level(&self, base: &str) -> Option<u64> {
        level(&self.role, base).map(i64::unsigned_abs)
    }

    /// Bytes of the whole plane for a weight of `rows` × `cols`; `None` when the product exceeds 64 bits.
    pub fn bytes(&self, rows: u64, cols: u64) -> Option<u64> {
        self.grid(rows, cols).0.checked_mul(self.row_bytes(cols)?)
    }
}

/// How the values of one weight are laid out over its planes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Encoding {
    /// Meaning of the planes.
    pub scheme: Scheme,
    /// Row transform that decoding undoes: empty, `fwhtN`, `perm` or `givens`.
    pub transform: String,
    /// The planes, `codes` first, at most [`MAX_PLANES`].
    pub planes: Vec<PlaneSpec>,
}

/// Why an encoding is malformed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct EncodingError(pub String);

impl Encoding {
    /// Values stored as they are in `dtype`.
    pub fn plain(dtype: DType) -> Encoding {
        Encoding {
            scheme: Scheme::Plain,
            transform: String::new(),
            planes: vec![PlaneSpec::tiled(role::CODES, dtype, [1, 1])],
        }
    }

    /// Codes with further planes (scales, zero points, tables).
    pub fn affine(codes: DType, rest: Vec<PlaneSpec>) -> Encoding {
        let mut planes = vec![PlaneSpec::tiled(role::CODES, codes, [1, 1])];
        planes.extend(rest);
        Encoding { scheme: Scheme::Affine, transform: String::new(), planes }
    }

    /// The plane of that role and its index.
    pub fn plane(&self, role: &str) -> Option<(usize, &PlaneSpec)> {
        self.planes.iter().enumerate().find(|(_, p)| p.role == role)
    }

    /// Block width N of the transform `fwhtN`, read as a container reader does; `None` for another transform.
    pub fn fwht(&self) -> Option<u64> {
        let n = lenient(self.transform.strip_prefix("fwht")?);
        (n >= 2 && n & (n - 1) == 0).then_some(n.unsigned_abs())
    }

    /// Element type of the codes.
    pub fn codes(&self) -> DType {
        self.planes[0].dtype
    }

    /// Columns of one first-level scale block (0 = the whole row); `None` without a scale.
    pub fn group(&self) -> Option<u64> {
        match self.plane(role::SCALE)?.1.layout {
            PlaneLayout::Tiled { block } => Some(block[1]),
            PlaneLayout::Table { .. } => None,
        }
    }

    /// Bytes of all planes, without alignment gaps; `None` on overflow or for a shape that has no matrix form.
    pub fn bytes(&self, shape: &Shape) -> Option<u64> {
        let (rows, cols) = shape.matrix()?;
        self.planes.iter().try_fold(0u64, |sum, p| sum.checked_add(p.bytes(rows, cols)?))
    }

    /// Stored bits per weight, scales included.
    pub fn bits_per_weight(&self, shape: &Shape) -> f64 {
        match (self.bytes(shape), shape.elements()) {
            (Some(bytes), Some(n)) if n > 0 => bytes as f64 * 8.0 / n as f64,
            _ => 0.0,
        }
    }

    /// Checks every rule that a container reader enforces on an encoding.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn check(&self) -> Result<(), EncodingError> {
        let fail = |why: String| Err(EncodingError(why));
        if self.planes.is_empty() || self.planes.len() > MAX_PLANES {
            return fail(format!("{} planes, not 1 to {MAX_PLANES}", self.planes.len()));
        }
        if self.scheme.name().is_empty() {
            return fail("empty scheme".into());
        }
        for (i, p) in self.planes.iter().enumerate() {
            if p.role.is_empty() {
                return fail(format!("plane {i} has an empty role"));
            }
            if self.planes[..i].iter().any(|q| q.role == p.role) {
                return fail(format!("duplicate role `{}`", p.role));
            }
            if let PlaneLayout::Table { extent } = p.layout
                && extent.contains(&0)
            {
                return fail(format!("table `{}` has an empty extent", p.role));
            }
        }
        let codes = &self.planes[0];
        let code_cols = match codes.layout {
            PlaneLayout::Tiled { block: [1, cols] } if codes.role == role::CODES && cols >= 1 => {
                cols
            }
            _ => {
                return fail(
                    "plane 0 is not tiled `codes` with block rows 1 and columns ≥ 1".into(),
                );
            }
        };
        match self.scheme {
            Scheme::Plain
                if self.planes.len() > 1 || !self.transform.is_empty() || code_cols != 1 =>
            {
                fail("`plain` is one bare plane of block 1 × 1".into())
            }
            Scheme::Affine => self.check_affine(code_cols),
            _ => Ok(()),
        }
    }

    fn check_affine(&self, code_cols: u64) -> Result<(), EncodingError> {
        let fail = |why: String| Err(EncodingError(why));
        let table = |role: &str| self.plane(role).map(|(_, p)| p.layout);
        if self.planes.len() == 1 && self.transform.is_empty() {
            return fail("`affine` needs a second plane or a transform".into());
        }
        match table("grid") {
            Some(PlaneLayout::Table { extent }) if extent[1] == code_cols => {}
            None if code_cols == 1 => {}
            _ => {
                return fail(
                    "codes wider than one column need a `grid` table of that width".into(),
                );
            }
        }
        if table(role::TABLE).is_some() && table("grid").is_some() {
            return fail("both `table` and `grid`".into());
        }
        for p in &self.planes[1..] {
            let tiled = matches!(p.layout, PlaneLayout::Tiled { .. });
            let base = ["scale", "min"].into_iter().find_map(|b| Some((b, level(&p.role, b)?)));
            let known = if tiled {
                base.is_some() || p.role == role::ZERO || p.role == "signs"
            } else {
                p.role == role::TABLE || p.role == "grid" || p.role.starts_with("t.")
            };
            if !known {
                let kind = if tiled { "tiled" } else { "table" };
                return fail(format!("no such {kind} role in `affine`: `{}`", p.role));
            }
            if let Some((base, n)) = base
                && n > 0
            {
                // The level below goes by its exact name: `scale.01` is a level, but not the one `scale.2` needs.
                let below = if n == 1 { base.to_owned() } else { format!("{base}.{}", n - 1) };
                if self.plane(&below).is_none() {
                    return fail(format!("`{}` without level {}", p.role, n - 1));
                }
            }
            if p.role == "signs"
                && (p.dtype != DType::U1 || p.layout != (PlaneLayout::Tiled { block: [1, 1] }))
            {
                return fail("`signs` is not u1 of block 1 × 1".into());
            }
        }
        let has = |roles: &[&str]| roles.iter().all(|r| self.plane(r).is_some());
        let transform_ok = match self.transform.as_str() {
            "" => true,
            "perm" => has(&["t.perm"]),
            "givens" => has(&["t.pairs", "t.angle"]),
            other => other
                .strip_prefix("fwht")
                .is_some_and(|n| matches!(lenient(n), n if n >= 2 && n & (n - 1) == 0)),
        };
        if transform_ok {
            Ok(())
        } else {
            fail(format!("transform `{}`, or its tables", self.transform))
        }
    }
}

/// A number inside a name as radiance's reader takes it (C's `strtoll`): blanks and a sign may stand before it,
/// anything after it; no digits read as 0.
fn lenient(text: &str) -> i64 {
    let text = text.trim_start_matches([' ', '\t', '\n', '\x0b', '\x0c', '\r']);
    let (sign, digits) = match text.as_bytes().first() {
        Some(b'-') => (-1i64, &text[1..]),
        Some(b'+') => (1, &text[1..]),
        _ => (1, text),
    };
    digits
        .bytes()
        .take_while(u8::is_ascii_digit)
        .fold(0i64, |n, d| n.saturating_mul(10).saturating_add(i64::from(d - b'0')))
        .saturating_mul(sign)
}

/// Level of `base` (0) or `base.N` (N ≥ 1), else `None`.
fn level(role: &str, base: &str) -> Option<i64> {
    if role == base {
        return Some(0);
    }
    let n = lenient(role.strip_prefix(base)?.strip_prefix('.')?);
    (n >= 1).then_some(n)
}

impl fmt::Display for Encoding {
    /// `bf16`, `i8*bf16[1x128]`, `fp4_e2m1*fp8_e4m3[1x16]*f32[*x*]`, else every plane spelled out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let extent = |b: u64| if b == 0 { "*".to_owned() } else { b.to_string() };
        let at = |l: PlaneLayout| match l {
            PlaneLayout::Tiled { block: [r, c] } => format!("[{}x{}]", extent(r), extent(c)),
            PlaneLayout::Table { extent: [r, c] } => format!("{{{r}x{c}}}"),
        };
        let short = |p: &PlaneSpec| {
            p.role == role::SCALE || p.role.starts_with("scale.") || p.role == role::ZERO
        };
        let mut out = String::new();
        match self.scheme {
            Scheme::Plain => out.push_str(self.codes().name()),
            Scheme::Affine if self.planes[1..].iter().all(short) => {
                out.push_str(self.codes().name());
                for p in &self.planes[1..] {
                    let op = if p.role == role::ZERO { '-' } else { '*' };
                    out.push_str(&format!("{op}{}{}", p.dtype, at(p.layout)));
                }
            }
            _ => {
                let planes: Vec<String> = self
                    .planes
                    .iter()
                    .map(|p| format!("{}={}{}", p.role, p.dtype, at(p.layout)))
                    .collect();
                out = format!("{}:{}", self.scheme.name(), planes.join(","));
            }
        }
        if !self.transform.is_empty() {
            out.push_str(&format!("/{}", self.transform));
        }
        f.pad(&out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn int8_g128() -> Encoding {
        Encoding::affine(DType::I8, vec![PlaneSpec::tiled(role::SCALE, DType::BF16, [1, 128])])
    }

    #[test]
    fn plane_sizes_follow_blocks_and_byte_rows() {
        let shape = Shape::from([130, 140]);
        let fp8 = Encoding::affine(
            DType::F8E4M3,
            vec![PlaneSpec::tiled(role::SCALE, DType::BF16, [128, 128])],
        );
        assert_eq!(fp8.bytes(&shape), Some(130 * 140 + 2 * 2 * 2));
        // u3 rows of 50 elements start on bytes: 19 bytes each.
        let u3 = PlaneSpec::tiled(role::CODES, DType::U3, [1, 1]);
        assert_eq!(u3.bytes(6, 50), Some(6 * 19));
        let whole = PlaneSpec::tiled(role::SCALE_1, DType::F32, [0, 0]);
        assert_eq!(whole.bytes(7, 9), Some(4));
        assert_eq!(u3.bytes(u64::MAX, 50), None);
    }

    #[test]
    fn encodings_print_as_radiance_spells_them() {
        assert_eq!(int8_g128().to_string(), "i8*bf16[1x128]");
        assert_eq!(Encoding::plain(DType::BF16).to_string(), "bf16");
        let nf4 = Encoding::affine(
            DType::U4,
            vec![
                PlaneSpec::tiled(role::SCALE, DType::BF16, [1, 64]),
                PlaneSpec::table(role::TABLE, DType::F32, [1, 16]),
            ],
        );
        assert_eq!(nf4.to_string(), "affine:codes=u4[1x1],scale=bf16[1x64],table=f32{1x16}");
    }

    #[test]
    fn each_rule_of_a_well_formed_encoding_is_checked() {
        assert_eq!(int8_g128().check(), Ok(()));
        type Mutation = fn(&mut Encoding);
        let broken: [(&str, Mutation); 9] = [
            ("0 planes", |e| e.planes.clear()),
            ("duplicate role", |e| e.planes.push(e.planes[1].clone())),
            ("empty role", |e| e.planes[1].role.clear()),
            ("plane 0 is not", |e| e.planes.swap(0, 1)),
            ("`affine` needs", |e| e.planes.truncate(1)),
            ("no such tiled role", |e| e.planes[1].role = "offset".into()),
            ("without level 1", |e| e.planes.push(PlaneSpec::tiled("scale.2", DType::F32, [0, 0]))),
            ("transform", |e| e.transform = "fwht3".into()),
            ("`signs` is not", |e| e.planes.push(PlaneSpec::tiled("signs", DType::U8, [1, 1]))),
        ];
        for (text, mutate) in broken {
            let mut e = int8_g128();
            mutate(&mut e);
            let why = e.check().expect_err(text).0;
            assert!(why.contains(text), "{why} / {text}");
        }
        let mut levels = int8_g128();
        levels.planes.push(PlaneSpec::tiled("scale.01", DType::F32, [0, 0]));
        assert_eq!(levels.check(), Ok(()), "numbers in roles are read leniently");
        levels.planes.push(PlaneSpec::tiled("scale.2", DType::F32, [0, 0]));
        assert!(levels.check().is_err(), "but the level below is looked up by name");
        let mut plain = Encoding::plain(DType::BF16);
        plain.transform = "fwht2".into();
        assert!(plain.check().is_err());
    }
}
