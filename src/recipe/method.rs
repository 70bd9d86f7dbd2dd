//! How a weight's values become planes: the instruction that a rule gives and a quantizer follows.

use std::fmt;

use super::Rounding;
use crate::tensor::{DType, Encoding, PlaneLayout, PlaneSpec, role};

/// How a weight is stored.
#[derive(Debug, Clone, PartialEq)]
pub enum Method {
    /// The checkpoint's own bytes.
    Keep,
    /// Every value converted to a plain type, round to nearest even.
    Cast(DType),
    /// Codes on a grid of scales.
    Grid(Grid),
}

/// A quantization grid: code type or codebook, blocks, scale levels, and the rule that picks the scales.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid {
    /// Element type of the codes; for a codebook the narrowest unsigned type that can index it.
    pub codes: DType,
    /// Codebook, when codes index one.
    pub table: Option<Codebook>,
    /// Rows and columns that share a first-level scale; 0 spans the extent.
    pub block: [u64; 2],
    /// Type of the first-level scale.
    pub scale: DType,
    /// Second scale level.
    pub scale2: Option<SecondScale>,
    /// Type of the zero point of an asymmetric grid.
    pub zero: Option<DType>,
    /// Block width of a Walsh–Hadamard rotation of the rows before quantization.
    pub fwht: Option<u32>,
    /// How scales are chosen.
    pub rule: ScaleRule,
    /// Whether the most negative integer code may be used.
    pub clamp: Clamp,
    /// Whose arithmetic is reproduced.
    pub rounding: Rounding,
}

/// A codebook of scalar values.
#[derive(Debug, Clone, PartialEq)]
pub struct Codebook {
    /// Name (`nf4`) or the values joined by `;`.
    pub name: String,
    /// The values a code stands for.
    pub values: Vec<f32>,
}

/// The second scale level.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SecondScale {
    /// Its type.
    pub dtype: DType,
    /// Rows and columns that share it; a multiple of the first level's block, 0 spans the extent.
    pub block: [u64; 2],
}

/// How scales are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ScaleRule {
    /// Largest magnitude over the largest code.
    Absmax,
    /// Power of two from the exponent of the largest magnitude (e8m0 scales).
    Mx,
    /// Least squared error over candidate scales.
    Search,
    /// One given scale.
    Fixed(f64),
}

/// Range of signed integer codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clamp {
    /// −2^(b−1) to 2^(b−1)−1.
    Full,
    /// −(2^(b−1)−1) to 2^(b−1)−1.
    Symmetric,
}

impl Codebook {
    /// Least and greatest value, 0 included.
    pub fn ends(&self) -> (f32, f32) {
        self.values.iter().fold((0.0, 0.0), |(lo, hi), v| (v.min(lo), v.max(hi)))
    }
}

impl Grid {
    /// A symmetric absmax grid of one scale level.
    pub fn absmax(codes: DType, block: [u64; 2], scale: DType) -> Grid {
        Grid {
            codes,
            table: None,
            block,
            scale,
            scale2: None,
            zero: None,
            fwht: None,
            rule: ScaleRule::Absmax,
            clamp: Clamp::Full,
            rounding: Rounding::Rad,
        }
    }

    /// The planes this grid is stored in, in the container's order: codes, scale, zero, scale.1, table.
    pub fn encoding(&self) -> Encoding {
        let mut rest = vec![PlaneSpec::tiled(role::SCALE, self.scale, self.block)];
        if let Some(zero) = self.zero {
            rest.push(PlaneSpec::tiled(role::ZERO, zero, self.block));
        }
        if let Some(second) = self.scale2 {
            rest.push(PlaneSpec::tiled(role::SCALE_1, second.dtype, second.block));
        }
        if let Some(table) = &self.table {
            // Integers that fit are stored as i8, anything else as f32.
            let small = |v: &f32| v.fract() == 0.0 && (-128.0..=127.0).contains(v);
            let dtype = if table.values.iter().all(small) { DType::I8 } else { DType::F32 };
            rest.push(PlaneSpec::table(role::TABLE, dtype, [1, table.values.len() as u64]));
        }
        let mut encoding = Encoding::affine(self.codes, rest);
        if let Some(n) = self.fwht {
            encoding.transform = format!("fwht{n}");
        }
        encoding
    }
}

impl Method {
    /// The encoding of a weight whose checkpoint type is `source`.
    pub fn encoding(&self, source: DType) -> Encoding {
        match self {
            Method::Keep => Encoding::plain(source),
            Method::Cast(dtype) => Encoding::plain(*dtype),
            Method::Grid(grid) => grid.encoding(),
        }
    }

    /// Name of the quantizer as the container records it: empty, `cast` or `rtn`.
    pub fn quantizer(&self) -> &'static str {
        match self {
            Method::Keep => "",
            Method::Cast(_) => "cast",
            Method::Grid(_) => "rtn",
        }
    }

    /// Options of the quantizer as the container records them: `key=value` sorted by key, joined by commas.
    pub fn options(&self) -> String {
        let mut options: Vec<String> = Vec::new();
        match self {
            Method::Keep => {}
            Method::Cast(dtype) => options.push(format!("dtype={dtype}")),
            Method::Grid(grid) => {
                match grid.block {
                    [1, n] if n > 0 => options.push(format!("group={n}")),
                    block => options.push(format!("block={}", Block(block))),
                }
                match &grid.table {
                    Some(table) => options.push(format!("table={}", table.name)),
                    None => options.push(format!("codes={}", grid.codes)),
                }
                options.push(format!("scale={}", grid.scale));
                if let Some(second) = grid.scale2 {
                    options.push(format!("scale2={}", second.dtype));
                    match second.block {
                        [0, 0] => {}
                        [1, n] if n > 0 => options.push(format!("group2={n}")),
                        block => options.push(format!("block2={}", Block(block))),
                    }
                }
                if let Some(zero) = grid.zero {
                    options.push(format!("zero={zero}"));
                }
                if let Some(n) = grid.fwht {
                    options.push(format!("transform=fwht{n}"));
                }
                match grid.rule {
                    ScaleRule::Absmax => {}
                    // e8m0 scales imply it.
                    ScaleRule::Mx => {}
                    ScaleRule::Search => options.push("rule=search".into()),
                    ScaleRule::Fixed(value) => {
                        options.push("rule=fixed".into());
                        options.push(format!("scale_value={value}"));
                    }
                }
                if grid.clamp == Clamp::Symmetric {
                    options.push("clamp=sym".into());
                }
                if grid.rounding != Rounding::Rad {
                    options.push(format!("rounding={}", grid.rounding.name()));
                }
            }
        }
        options.sort_by(|a, b| a.split('=').next().cmp(&b.split('=').next()));
        options.join(",")
    }
}

/// `128x128`, `1x*`, `*x*`.
struct Block([u64; 2]);

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |n: u64| if n == 0 { "*".to_owned() } else { n.to_string() };
        write!(f, "{}x{}", side(self.0[0]), side(self.0[1]))
    }
}

/// Columns of the first-level block of an encoding's scale plane that must divide a row for whole groups; `None`
/// where blocks span the row or there is no scale.
pub fn group_columns(encoding: &Encoding) -> Option<u64> {
    match encoding.plane(role::SCALE)?.1.layout {
        PlaneLayout::Tiled { block: [_, cols] } if cols > 0 => Some(cols),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_and_encodings_read_as_radiance_writes_them() {
        let int8 = Method::Grid(Grid::absmax(DType::I8, [1, 128], DType::BF16));
        assert_eq!(int8.options(), "codes=i8,group=128,scale=bf16");
        assert_eq!(int8.encoding(DType::BF16).to_string(), "i8*bf16[1x128]");
        let mut nvfp4 = Grid::absmax(DType::F4E2M1, [1, 16], DType::F8E4M3);
        nvfp4.scale2 = Some(SecondScale { dtype: DType::F32, block: [0, 0] });
        let nvfp4 = Method::Grid(nvfp4);
        assert_eq!(nvfp4.options(), "codes=fp4_e2m1,group=16,scale=fp8_e4m3,scale2=f32");
        assert_eq!(nvfp4.encoding(DType::BF16).to_string(), "fp4_e2m1*fp8_e4m3[1x16]*f32[*x*]");
        let block = Method::Grid(Grid::absmax(DType::F8E4M3, [128, 128], DType::BF16));
        assert_eq!(block.options(), "block=128x128,codes=fp8_e4m3,scale=bf16");
        assert_eq!(Method::Cast(DType::F16).options(), "dtype=f16");
        assert_eq!(Method::Keep.options(), "");
    }
}
