//! Whose arithmetic turns values into codes, and which grids that arithmetic is defined for.

use super::settings::name_of;
use super::{Clamp, Grid, ScaleRule};
use crate::tensor::DType;

/// Whose arithmetic is reproduced, bit for bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Rounding {
    /// radiance container version 2's own converter.
    #[default]
    Rad,
    /// compressed-tensors 0.19 on the CPU: every step, the quotient included, is rounded to the source's type.
    CompressedTensors,
    /// compressed-tensors 0.19 with its GPU kernel's quotient: the scales of the CPU, the quotient left in f32.
    CompressedTensorsF32,
    /// NVIDIA ModelOpt 0.47.
    ModelOpt,
    /// The fine-grained fp8 quantizer of transformers 5.17.
    Transformers,
}

/// What a grid is to the packages that have a name for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scheme {
    /// Signed 4- or 8-bit integers under one scale.
    Int,
    /// Unsigned 4- or 8-bit integers with a zero point.
    Asymmetric,
    /// fp8 e4m3 under one scale.
    Fp8,
    /// fp4 e2m1 under an fp8 scale for 16 columns and an f32 scale for the weight.
    Nvfp4,
    /// fp4 or fp8 under a power of two for 32 columns.
    Mx,
}

/// Which values share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Strategy {
    Tensor,
    Channel,
    Group,
    Block,
}

/// Why a rounding does not fit, and what would.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Clash {
    /// The rule and what breaks it.
    pub message: String,
    /// What works.
    pub help: String,
}

impl Scheme {
    /// The scheme and strategy of a grid; none for grids that the packages do not have.
    pub(crate) fn of(grid: &Grid) -> Option<(Scheme, Strategy)> {
        let plain_rule = match grid.rule {
            ScaleRule::Absmax => grid.scale != DType::E8M0,
            ScaleRule::Mx => grid.scale == DType::E8M0,
            ScaleRule::Search | ScaleRule::Fixed(_) => false,
        };
        if !plain_rule || grid.table.is_some() || grid.fwht.is_some() || grid.clamp != Clamp::Full {
            return None;
        }
        let strategy = match grid.block {
            [0, 0] => Strategy::Tensor,
            [1, 0] => Strategy::Channel,
            [1, _] => Strategy::Group,
            [rows, cols] if rows > 0 && cols > 0 => Strategy::Block,
            _ => return None,
        };
        let wide = matches!(grid.scale, DType::BF16 | DType::F16 | DType::F32);
        let scheme = match (grid.codes, grid.zero, grid.scale2) {
            (DType::I4 | DType::I8, None, None) if wide => Scheme::Int,
            (DType::U4 | DType::U8, Some(_), None) if wide => Scheme::Asymmetric,
            (DType::F4E2M1 | DType::F8E4M3, None, None)
                if grid.scale == DType::E8M0 && grid.block == [1, 32] =>
            {
                Scheme::Mx
            }
            (DType::F8E4M3, None, None) if wide || grid.scale == DType::E8M0 => Scheme::Fp8,
            (DType::F4E2M1, None, Some(second))
                if grid.scale == DType::F8E4M3
                    && grid.block == [1, 16]
                    && second.dtype == DType::F32
                    && second.block == [0, 0] =>
            {
                Scheme::Nvfp4
            }
            _ => return None,
        };
        Some((scheme, strategy))
    }
}

impl Rounding {
    /// Every choice with its name in recipes.
    pub const NAMES: [(&'static str, Rounding); 5] = [
        ("rad", Rounding::Rad),
        ("compressed-tensors", Rounding::CompressedTensors),
        ("compressed-tensors-f32", Rounding::CompressedTensorsF32),
        ("modelopt", Rounding::ModelOpt),
        ("transformers", Rounding::Transformers),
    ];

    /// Name in recipes.
    pub fn name(self) -> &'static str {
        name_of(&Rounding::NAMES, &self)
    }

    /// Why the package has no such grid; `None` when it has one.
    pub fn clash(self, grid: &Grid) -> Option<Clash> {
        if self == Rounding::Rad {
            return None;
        }
        let name = self.name();
        let clash = |message: String, help: &str| Some(Clash { message, help: help.to_owned() });
        if grid.rule == ScaleRule::Search {
            return clash(
                format!("quantizer \"search\" chooses scales its own way, which {name} does not"),
                "rounding = \"rad\" goes with quantizer = \"search\"",
            );
        }
        let found = Scheme::of(grid);
        let has = match (self, found) {
            (_, None) | (Rounding::Rad, _) => false,
            (Rounding::CompressedTensors | Rounding::CompressedTensorsF32, Some(found)) => {
                match found {
                    (Scheme::Int | Scheme::Asymmetric, strategy) => strategy != Strategy::Block,
                    (Scheme::Fp8, strategy) => {
                        strategy != Strategy::Group && grid.scale != DType::E8M0
                    }
                    (Scheme::Nvfp4 | Scheme::Mx, _) => true,
                }
            }
            (Rounding::ModelOpt, Some(found)) => match found {
                (Scheme::Int, Strategy::Channel) => {
                    grid.codes == DType::I8 && grid.scale == DType::F32
                }
                (Scheme::Int, Strategy::Group) => {
                    grid.codes == DType::I8 || grid.scale == DType::F32
                }
                (Scheme::Fp8, Strategy::Group) => false,
                (Scheme::Fp8, _) => grid.scale == DType::F32,
                (Scheme::Nvfp4 | Scheme::Mx, _) => true,
                _ => false,
            },
            (Rounding::Transformers, Some(found)) => {
                found == (Scheme::Fp8, Strategy::Block)
                    && matches!(grid.scale, DType::F32 | DType::E8M0)
            }
        };
        if has {
            return None;
        }
        let help = match self {
            Rounding::CompressedTensors | Rounding::CompressedTensorsF32 => {
                "it has i4 and i8 (u4 and u8 with `zero`) under bf16, f16 or f32 scales for a group, a row or the \
                 weight, fp8_e4m3 for a row, the weight or a block, nvfp4, mxfp4 and mxfp8"
            }
            Rounding::ModelOpt => {
                "it has fp8_e4m3 under f32 scales for a row, the weight or a block, i8 under f32 scales for a row, \
                 i8 for a group, i4 under f32 scales for a group, nvfp4, mxfp4 and mxfp8"
            }
            Rounding::Transformers | Rounding::Rad => {
                "it has fp8_e4m3 under f32 or e8m0 scales for blocks, \
                 e.g. { codes = \"fp8_e4m3\", block = [128, 128], scale = \"f32\" }"
            }
        };
        clash(format!("{name} has no encoding {}", grid.encoding()), help)
    }

    /// Why the package would not treat a weight of element type `source` so; `None` when it would. For grids
    /// without [`Rounding::clash`].
    pub fn source_clash(self, grid: &Grid, source: DType) -> Option<Clash> {
        if self == Rounding::Rad {
            return None;
        }
        let name = self.name();
        if !matches!(source, DType::BF16 | DType::F16 | DType::F32) {
            return Some(Clash {
                message: format!("{name} has no rule for values of type {source}"),
                help: "rounding = \"rad\" takes every type".to_owned(),
            });
        }
        let found = Scheme::of(grid);
        let f32_holds_it = match (self, found) {
            (
                Rounding::CompressedTensors | Rounding::CompressedTensorsF32,
                Some((Scheme::Int | Scheme::Asymmetric | Scheme::Fp8, _)),
            ) => true,
            (Rounding::ModelOpt, Some((Scheme::Int, Strategy::Group)))
                if grid.codes == DType::I8 =>
            {
                false
            }
            _ => return None,
        };
        // A scale rounded to bf16 or f16 is an f32, too.
        let fits = grid.scale == source || f32_holds_it && grid.scale == DType::F32;
        (!fits).then(|| Clash {
            message: format!(
                "{name} gives scales the type of the weight, which is {source}, and the encoding has {} scales",
                grid.scale
            ),
            help: format!("spell the encoding out with scale = \"{source}\", or take rounding = \"rad\""),
        })
    }

    /// Columns that the package divides a row into without remainder, if it insists.
    pub fn whole_columns(self, grid: &Grid) -> Option<u64> {
        let insists = match self {
            Rounding::Rad | Rounding::Transformers => false,
            Rounding::CompressedTensors | Rounding::CompressedTensorsF32 | Rounding::ModelOpt => {
                true
            }
        };
        (insists && grid.block[0] == 1 && grid.block[1] > 0).then_some(grid.block[1])
    }
}
