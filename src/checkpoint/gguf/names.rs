//! Names of tensors: llama.cpp's on one side, Hugging Face's on the other.
//!
//! llama.cpp's names are those of gguf 0.19's `TENSOR_NAMES`; which module of a family each stands for is said by its
//! `TensorNameMap` and by llama.cpp's converters.

use std::collections::BTreeMap;

use crate::model::{Part, WeightTable};
use crate::tensor::{Shape, TensorInfo};

/// Most experts of a model, times three matrices, that are seen as single tensors; families refuse more experts.
const MAX_EXPERTS: u64 = 3 << 20;

const LAYERS: &str = "model.layers.";

/// Tensors outside the layers.
const TOP: [(&str, &str); 6] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
    ("per_layer_token_embd.weight", "model.embed_tokens_per_layer.weight"),
    ("per_layer_model_proj.weight", "model.per_layer_model_projection.weight"),
    ("per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight"),
];

/// Modules of a layer in every family; a weight or a bias follows.
const LAYER: [(&str, &str); 10] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

const LLAMA: [(&str, &str); 2] =
    [("ffn_norm", "post_attention_layernorm"), ("ffn_gate_inp", "mlp.gate")];

const GEMMA: [(&str, &str); 3] = [
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

const GEMMA_4: [(&str, &str); 6] = [
    ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
    ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    ("inp_gate", "per_layer_input_gate"),
    ("proj", "per_layer_projection"),
    ("post_norm", "post_per_layer_input_norm"),
];

/// Gemma 4's names that end in more or less than `.weight`.
const GEMMA_4_WHOLE: [(&str, &str); 6] = [
    ("ffn_gate_inp.weight", "router.proj.weight"),
    ("ffn_gate_inp.scale", "router.scale"),
    ("ffn_down_exps.scale", "router.per_expert_scale"),
    ("ffn_gate_up_exps.weight", "experts.gate_up_proj"),
    ("ffn_down_exps.weight", "experts.down_proj"),
    ("layer_output_scale.weight", "layer_scalar"),
];

/// Tensors that stack the experts of a layer, which Hugging Face keeps apart.
const STACKS: [(&str, &str); 3] = [
    ("ffn_gate_exps.weight", "gate_proj"),
    ("ffn_up_exps.weight", "up_proj"),
    ("ffn_down_exps.weight", "down_proj"),
];

/// The names of one kind of decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Names {
    /// One norm before each half of a layer.
    Llama,
    /// Norms after the halves, too.
    Gemma,
    /// Gemma with experts and per-layer inputs.
    Gemma4,
}

impl Names {
    fn modules(self) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
        let own: (&[_], &[_]) = match self {
            Names::Llama => (&LLAMA, &[]),
            Names::Gemma => (&GEMMA, &[]),
            Names::Gemma4 => (&GEMMA, &GEMMA_4),
        };
        LAYER.iter().chain(own.0).chain(own.1)
    }

    fn whole(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Names::Gemma4 => &GEMMA_4_WHOLE,
            Names::Llama | Names::Gemma => &[],
        }
    }

    /// Hugging Face's name of what follows the layer's number.
    fn leaf(self, leaf: &str) -> Option<String> {
        if let Some((_, to)) = self.whole().iter().find(|(from, _)| *from == leaf) {
            return Some((*to).to_owned());
        }
        let (module, kind) =
            leaf.rsplit_once('.').filter(|(_, k)| ["weight", "bias"].contains(k))?;
        let (_, to) = self.modules().find(|(from, _)| *from == module)?;
        Some(format!("{to}.{kind}"))
    }

    fn original(self, name: &str) -> Option<String> {
        if let Some((_, to)) = TOP.iter().find(|(from, _)| *from == name) {
            return Some((*to).to_owned());
        }
        let (number, leaf) = name.strip_prefix("blk.")?.split_once('.')?;
        Some(format!("{LAYERS}{number}.{}", self.leaf(leaf)?))
    }

    /// What the file calls a tensor of that Hugging Face name, or a part of one; other names are left as they are.
    pub fn in_file(self, name: &str) -> String {
        if let Some((from, _)) = TOP.iter().find(|(_, to)| *to == name) {
            return (*from).to_owned();
        }
        let Some(rest) = name.strip_prefix(LAYERS) else { return name.to_owned() };
        let Some((number, leaf)) = rest.split_once('.') else { return format!("blk.{rest}") };
        if let Some((from, _)) = self.whole().iter().find(|(_, to)| *to == leaf) {
            return format!("blk.{number}.{from}");
        }
        if self == Names::Llama
            && let Some((_, projection)) =
                leaf.strip_prefix("mlp.experts.").and_then(|l| l.split_once('.'))
            && let Some((from, _)) =
                STACKS.iter().find(|(_, p)| projection.strip_suffix(".weight") == Some(p))
        {
            return format!("blk.{number}.{from}");
        }
        let module = leaf.rsplit_once('.').and_then(|(module, kind)| {
            let (from, _) = self.modules().find(|(_, to)| *to == module)?;
            Some(format!("{from}.{kind}"))
        });
        format!("blk.{number}.{}", module.as_deref().unwrap_or(leaf))
    }
}

/// Hugging Face's name of a tensor of a GGUF file, or of one index of it; whether that index is a tensor of its own
/// there. `model_type` is that of the configuration that the file's metadata stand for; `None` for a model or a tensor
/// that is not read.
pub fn original_name(model_type: &str, tensor: &str, index: Option<u64>) -> Option<(String, bool)> {
    let names = match model_type {
        "llama" | "qwen2" | "qwen3" | "qwen3_moe" => Names::Llama,
        "gemma3_text" => Names::Gemma,
        "gemma4_text" => Names::Gemma4,
        _ => return None,
    };
    if let (Names::Llama, Some(index)) = (names, index) {
        let (number, leaf) = tensor.strip_prefix("blk.")?.split_once('.')?;
        let (_, projection) = STACKS.iter().find(|(stack, _)| *stack == leaf)?;
        return Some((format!("{LAYERS}{number}.mlp.experts.{index}.{projection}.weight"), true));
    }
    names.original(tensor).map(|name| (name, false))
}

/// The tensors of a file under Hugging Face's names.
pub(super) struct View {
    /// Types and shapes.
    pub tensors: BTreeMap<String, TensorInfo>,
    /// Where each is in the file.
    parts: BTreeMap<String, Part>,
    /// Matrices of experts so far.
    experts: u64,
}

impl View {
    /// Names every tensor that the kind of decoder has; others keep the names of the file.
    pub fn new(names: Names, tensors: &BTreeMap<String, TensorInfo>) -> View {
        let mut view = View { tensors: BTreeMap::new(), parts: BTreeMap::new(), experts: 0 };
        for (name, info) in tensors {
            if names == Names::Llama && view.stack(name, info) {
                continue;
            }
            let part = Part { tensor: name.clone(), index: None };
            view.add(names.original(name).unwrap_or_else(|| name.clone()), info.clone(), part);
        }
        view
    }

    fn add(&mut self, name: String, info: TensorInfo, part: Part) {
        self.tensors.insert(name.clone(), info);
        self.parts.insert(name, part);
    }

    /// Splits a tensor of stacked experts into single ones, if it is one.
    fn stack(&mut self, name: &str, info: &TensorInfo) -> bool {
        let found = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let Some((number, leaf)) = found else { return false };
        let (Some((_, projection)), &[experts, rows, cols]) =
            (STACKS.iter().find(|(stack, _)| *stack == leaf), info.shape.extents())
        else {
            return false;
        };
        self.experts = self.experts.saturating_add(experts);
        if self.experts > MAX_EXPERTS {
            return false;
        }
        for n in 0..experts {
            let name_of_one = format!("{LAYERS}{number}.mlp.experts.{n}.{projection}.weight");
            let one = TensorInfo { dtype: info.dtype, shape: Shape::from([rows, cols]) };
            self.add(name_of_one, one, Part { tensor: name.to_owned(), index: Some(n) });
        }
        true
    }

    /// Gives a table of weights the names of the file.
    pub fn restore(&self, table: &mut WeightTable) {
        for part in table.weights.iter_mut().flat_map(|w| &mut w.parts) {
            if let Some(found) = self.parts.get(&part.tensor) {
                // A part that is an index already (Gemma 4's experts) is one of a tensor that is whole here.
                let index = part.index.or(found.index);
                *part = Part { tensor: found.tensor.clone(), index };
            }
        }
        for (name, _) in &mut table.unused {
            if let Some(found) = self.parts.get(name) {
                name.clone_from(&found.tensor);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    fn info(shape: &[u64]) -> TensorInfo {
        TensorInfo { dtype: DType::F32, shape: Shape::from(shape) }
    }

    #[test]
    fn names_go_there_and_back() {
        for (names, gguf, original) in [
            (Names::Llama, "token_embd.weight", "model.embed_tokens.weight"),
            (Names::Llama, "blk.7.attn_q.bias", "model.layers.7.self_attn.q_proj.bias"),
            (
                Names::Llama,
                "blk.7.ffn_norm.weight",
                "model.layers.7.post_attention_layernorm.weight",
            ),
            (Names::Llama, "blk.0.ffn_gate_inp.weight", "model.layers.0.mlp.gate.weight"),
            (
                Names::Gemma,
                "blk.7.ffn_norm.weight",
                "model.layers.7.pre_feedforward_layernorm.weight",
            ),
            (
                Names::Gemma,
                "blk.7.post_attention_norm.weight",
                "model.layers.7.post_attention_layernorm.weight",
            ),
            (Names::Gemma4, "blk.0.ffn_gate_inp.weight", "model.layers.0.router.proj.weight"),
            (Names::Gemma4, "blk.0.layer_output_scale.weight", "model.layers.0.layer_scalar"),
            (Names::Gemma4, "blk.0.ffn_down_exps.weight", "model.layers.0.experts.down_proj"),
            (Names::Gemma4, "blk.0.proj.weight", "model.layers.0.per_layer_projection.weight"),
        ] {
            assert_eq!(names.original(gguf).as_deref(), Some(original), "{names:?}");
            assert_eq!(names.in_file(original), gguf, "{names:?}");
        }
        assert_eq!(Names::Llama.original("blk.0.ssm_in.weight"), None);
        assert_eq!(Names::Llama.original("blk.0.attn_q.scale"), None);
        assert_eq!(Names::Llama.in_file(LAYERS), "blk.");
        let one = "model.layers.{0-3}.mlp.experts.7.up_proj.weight";
        assert_eq!(Names::Llama.in_file(one), "blk.{0-3}.ffn_up_exps.weight");
    }

    #[test]
    fn stacked_experts_are_seen_one_by_one_and_named_as_stacked_again() {
        let tensors = BTreeMap::from([
            ("blk.1.ffn_up_exps.weight".to_owned(), info(&[2, 3, 4])),
            ("blk.1.odd".to_owned(), info(&[5])),
        ]);
        let view = View::new(Names::Llama, &tensors);
        let names: Vec<&str> = view.tensors.keys().map(String::as_str).collect();
        let expert = |n| format!("model.layers.1.mlp.experts.{n}.up_proj.weight");
        assert_eq!(names, ["blk.1.odd", &expert(0), &expert(1)]);
        assert_eq!(view.tensors[&expert(1)], info(&[3, 4]));
        let mut table = WeightTable { weights: Vec::new(), unused: vec![(expert(1), "x".into())] };
        view.restore(&mut table);
        assert_eq!(table.unused[0].0, "blk.1.ffn_up_exps.weight");
        let stack = "blk.1.ffn_up_exps.weight";
        assert_eq!(original_name("qwen3_moe", stack, Some(1)), Some((expert(1), true)));
        let down = "blk.1.ffn_down_exps.weight";
        let whole = Some(("model.layers.1.experts.down_proj".to_owned(), false));
        assert_eq!(original_name("gemma4_text", down, Some(1)), whole);
        assert_eq!(original_name("bert", stack, None), None);
        let many = BTreeMap::from([(stack.to_owned(), info(&[MAX_EXPERTS + 1, 1, 1]))]);
        let whole: Vec<String> = View::new(Names::Llama, &many).tensors.into_keys().collect();
        assert_eq!(whole, [stack], "left whole, for the census to refuse");
        let mut full = View { experts: MAX_EXPERTS - 2, ..View::new(Names::Llama, &many) };
        assert!(full.stack(stack, &info(&[2, 1, 1])), "as many as may be");
        assert!(!full.stack("blk.2.ffn_up_exps.weight", &info(&[1, 1, 1])), "one more");
        let gemma = View::new(Names::Gemma4, &tensors);
        assert!(gemma.tensors.contains_key("blk.1.ffn_up_exps.weight"));
    }
}
