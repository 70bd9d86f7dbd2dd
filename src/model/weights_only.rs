//! Weights of an unknown architecture: names as in the checkpoint, kinds guessed from names and ranks.
//!
//! The guess is for quantization rules only, and timid: what is not plainly a matrix, a table or a norm is
//! [`Class::Other`].

use std::collections::BTreeMap;

use serde_json::Value;

use crate::diag::{self, Diagnostic, FailureKind, Problems};
use crate::tensor::{MAX_RANK, Shape, TensorInfo};

use super::weights::{Class, Origin, Part, Tower, Weight, WeightTable};

/// Every tensor of a checkpoint as a weight of the same name.
///
/// Tensors without elements are left out; integer tensors are kept as [`Class::Other`]; scalars read as `[1]`.
/// `config` is taken for symmetry with [`super::read`] and decides nothing: an unknown architecture's keys mean
/// nothing certain.
///
/// # Errors
/// [`FailureKind::Refused`] with every tensor of more than six dimensions, and when there are no tensors at all.
pub fn weights_only(
    _config: Option<&Value>,
    tensors: &BTreeMap<String, TensorInfo>,
) -> diag::Result<WeightTable> {
    let mut table = WeightTable::default();
    let mut problems = Problems::new();
    for (name, info) in tensors {
        let rank = info.shape.rank();
        if rank > MAX_RANK {
            problems.push(
                Diagnostic::new(
                    "tensors",
                    format!(
                        "`{name}` has {rank} dimensions; the container holds at most {MAX_RANK}"
                    ),
                )
                .help("reshape it in the checkpoint, or leave it out"),
            );
            continue;
        }
        if info.shape.elements() == Some(0) {
            table.unused.push((name.clone(), "holds no elements".to_owned()));
            continue;
        }
        let shape = if rank == 0 { Shape::from([1]) } else { info.shape.clone() };
        table.weights.push(Weight {
            name: name.clone(),
            origin: Origin::Main,
            tower: Tower::Text,
            class: class(name, info),
            layer: layer(name),
            expert: -1,
            slot: 0,
            dtype: info.dtype,
            shape,
            parts: vec![Part { tensor: name.clone(), index: None }],
            tied_to: None,
            fused_set: None,
            may_be_infinite: false,
            stored: None,
        });
    }
    if table.weights.is_empty() && problems.is_empty() {
        problems.push(Diagnostic::new("tensors", "the checkpoint holds no values"));
    }
    table.sort();
    problems.finish(FailureKind::Refused, "these tensors do not fit a container", table)
}

fn class(name: &str, info: &TensorInfo) -> Class {
    let lower = name.to_ascii_lowercase();
    if !info.dtype.is_float() {
        return Class::Other;
    }
    match info.shape.rank() {
        1 if lower.contains("norm") || lower.contains("ln_") || lower.contains(".ln") => {
            Class::Norm
        }
        2 if lower.contains("embed") || lower.contains("token_embd") => Class::Embedding,
        2 if lower.ends_with("lm_head.weight") || lower == "output.weight" => Class::LmHead,
        2 if lower.ends_with(".weight") => Class::Linear,
        _ => Class::Other,
    }
}

/// The number after the first segment that names a stack of layers, or -1.
fn layer(name: &str) -> i32 {
    let mut segments = name.split('.');
    while let Some(segment) = segments.next() {
        if ["layers", "layer", "blocks", "blk", "h"].contains(&segment) {
            let number = segments.clone().next().unwrap_or("");
            if !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()) {
                return number.parse().unwrap_or(-1);
            }
        }
    }
    -1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    fn tensors(list: &[(&str, DType, &[u64])]) -> BTreeMap<String, TensorInfo> {
        list.iter()
            .map(|(n, dtype, s)| {
                ((*n).to_owned(), TensorInfo { dtype: *dtype, shape: Shape::from(*s) })
            })
            .collect()
    }

    #[test]
    fn an_encoder_of_the_bert_kind_gets_kinds_and_layers() {
        let map = tensors(&[
            ("embeddings.word_embeddings.weight", DType::F32, &[30522, 384]),
            ("embeddings.position_ids", DType::I64, &[1, 512]),
            ("embeddings.LayerNorm.weight", DType::F32, &[384]),
            ("encoder.layer.11.attention.self.query.weight", DType::F32, &[384, 384]),
            ("encoder.layer.11.attention.self.query.bias", DType::F32, &[384]),
            ("scaled_fp8", DType::F8E4M3, &[0]),
            ("logit_scale", DType::F32, &[]),
            ("conv.weight", DType::F32, &[8, 3, 4, 4]),
            ("transformer.h.3.ln_1.weight", DType::F32, &[384]),
            ("lm_head.weight", DType::F32, &[30522, 384]),
        ]);
        let table = weights_only(None, &map).expect("all fit");
        let seen: Vec<(&str, Class, i32)> =
            table.weights.iter().map(|w| (w.name.as_str(), w.class, w.layer)).collect();
        assert_eq!(
            seen,
            [
                ("conv.weight", Class::Other, -1),
                ("embeddings.LayerNorm.weight", Class::Norm, -1),
                ("embeddings.position_ids", Class::Other, -1),
                ("embeddings.word_embeddings.weight", Class::Embedding, -1),
                ("lm_head.weight", Class::LmHead, -1),
                ("logit_scale", Class::Other, -1),
                ("transformer.h.3.ln_1.weight", Class::Norm, 3),
                ("encoder.layer.11.attention.self.query.bias", Class::Other, 11),
                ("encoder.layer.11.attention.self.query.weight", Class::Linear, 11),
            ]
        );
        assert_eq!(table.get("logit_scale").map(|w| w.shape.clone()), Some(Shape::from([1])));
        assert_eq!(table.unused, [("scaled_fp8".to_owned(), "holds no elements".to_owned())]);
    }

    #[test]
    fn seven_dimensions_are_refused_with_all_names() {
        let map = tensors(&[
            ("a", DType::F32, &[1, 1, 1, 1, 1, 1, 1]),
            ("b", DType::F32, &[1, 1, 1, 1, 1, 1, 1, 1]),
        ]);
        let failure = weights_only(None, &map).expect_err("rank 7 and 8");
        assert_eq!(failure.kind, FailureKind::Refused);
        assert_eq!(failure.problems.len(), 2);
        assert!(
            failure.problems[1]
                .message
                .contains("`b` has 8 dimensions; the container holds at most 6")
        );
        assert!(weights_only(None, &BTreeMap::new()).is_err());
    }

    #[test]
    fn layer_numbers_out_of_range_are_model_level() {
        assert_eq!(layer("model.layers.99999999999.w"), -1);
        assert_eq!(layer("model.layers.x.h.4.w"), 4);
        assert_eq!(layer("layers"), -1);
        assert_eq!(layer("blk.3.attn_q.weight"), 3);
    }
}
