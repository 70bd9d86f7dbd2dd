//! The readable form of a program, for `inspect --graph` and for people who compare two of them.

use std::fmt::{self, Display, Write};

use super::ir::{KvLayout, KvTensor, Op, Program, ValueId, WeightId, WeightShare};

/// A program as text, with the cache tensors that it names.
pub struct Text<'a> {
    /// The program.
    pub program: &'a Program,
    /// Cache tensors of the model.
    pub kv: &'a [KvTensor],
}

impl Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let p = self.program;
        let devices = if p.devices == 1 { "device" } else { "devices" };
        writeln!(f, "program {} on {} {devices} {{", p.name, p.devices)?;
        for port in &p.inputs {
            writeln!(f, "  input {}: {}", self.value(port.value), port.name)?;
        }
        for node in &p.nodes {
            write!(f, "  ")?;
            if !node.outputs.is_empty() {
                let out: Vec<String> = node.outputs.iter().map(|v| self.value(*v)).collect();
                write!(f, "{} = ", out.join(", "))?;
            }
            let operands: Vec<String> = node.inputs.iter().map(|v| format!("%{}", v.0)).collect();
            writeln!(
                f,
                "{}({}){}",
                node.op.name(),
                operands.join(", "),
                self.attributes(&node.op)
            )?;
        }
        for port in &p.outputs {
            writeln!(f, "  output %{}: {}", port.value.0, port.name)?;
        }
        writeln!(f, "}}")
    }
}

impl Text<'_> {
    fn value(&self, id: ValueId) -> String {
        match self.program.value(id) {
            Some(v) => format!("%{} {}{}", id.0, v.dtype, v.shape),
            None => format!("%{} ?", id.0),
        }
    }

    fn weight(&self, id: WeightId) -> String {
        let Some(w) = self.program.weight(id) else { return format!("@{}?", id.0) };
        let share = match w.share {
            WeightShare::Whole => "",
            WeightShare::Rows => " rows",
            WeightShare::Cols => " columns",
            WeightShare::Expert => " expert",
        };
        format!("@{}{}{share}", w.name, w.shape)
    }

    fn cache(&self, op: &Op) -> String {
        let Some((pair, _)) = op.kv() else { return String::new() };
        let Some(key) = self.kv.get(pair.key.0 as usize) else { return " ?".to_owned() };
        let layout = match key.layout {
            KvLayout::Paged { block } => format!("blocks of {block}"),
            KvLayout::Window { slots, tokens } => format!("{slots} rings of {tokens}"),
        };
        format!(" layer {} ({layout}, {} heads of {})", key.layer, key.heads, key.head_dim)
    }

    fn attributes(&self, op: &Op) -> String {
        let mut out = self.cache(op);
        let mut put = |text: String| {
            let _ = write!(out, " {text}"); // writing to a String cannot fail
        };
        match op {
            Op::Embed { table, scale } => {
                put(self.weight(*table));
                put(format!("scale {scale}"));
            }
            Op::Linear { projections, activations } => {
                let each = projections.iter().map(|p| {
                    let bias = p.bias.map(|b| format!(" + {}", self.weight(b)));
                    self.weight(p.weight) + &bias.unwrap_or_default()
                });
                put(each.collect::<Vec<String>>().join(", "));
                activations.iter().for_each(|a| put(format!("activations {}", a.name())));
            }
            Op::RmsNorm { weight, eps, one_plus } => {
                weight.iter().for_each(|w| put(self.weight(*w)));
                put(format!("eps {eps}"));
                if *one_plus {
                    put("factor 1 + w".to_owned());
                }
            }
            Op::LayerNorm { weight, bias, eps } => {
                put(self.weight(*weight));
                bias.iter().for_each(|b| put(format!("+ {}", self.weight(*b))));
                put(format!("eps {eps}"));
            }
            Op::Rope { rope } => put(format!(
                "theta {} dims {} scaling {:?}",
                rope.theta, rope.rotary_dims, rope.scaling
            )),
            Op::AxialRope { theta } => put(format!("theta {theta}")),
            Op::Columns { start } => put(format!("from {start}")),
            Op::Affine { scale, shift } => put(format!("· {scale} + {shift}")),
            Op::ScaleBy { weight } => put(self.weight(*weight)),
            Op::Shift { weight, subtract } => {
                put(format!("{} {}", if *subtract { "-" } else { "+" }, self.weight(*weight)));
            }
            Op::Clamp { low, high } => {
                put(format!("{} to {}", self.weight(*low), self.weight(*high)));
            }
            Op::Gated { activation } | Op::Activate { activation } => {
                put(format!("{activation:?}"))
            }
            Op::Softcap { cap } => put(format!("{cap}")),
            Op::PagedAttention { scale, softcap, own, .. } => {
                put(format!("scale {scale} own {own:?}"));
                softcap.iter().for_each(|c| put(format!("softcap {c}")));
            }
            Op::WindowAttention { window, scale, softcap, own, .. } => {
                put(format!("window {window} scale {scale} own {own:?}"));
                softcap.iter().for_each(|c| put(format!("softcap {c}")));
            }
            Op::DenseAttention { scale } => put(format!("scale {scale}")),
            Op::Route { top_k, normalize, expert_scale } => {
                put(format!("top {top_k}{}", if *normalize { " normalized" } else { "" }));
                expert_scale.iter().for_each(|w| put(self.weight(*w)));
            }
            Op::Experts { gate_up, down, activation, activations } => {
                for (what, list) in [("gate_up", gate_up), ("down", down)] {
                    let ends = [list.first(), list.last()].map(|w| w.map(|w| self.weight(*w)));
                    if let [Some(first), Some(last)] = ends {
                        put(format!("{what} {first} … {last} ({})", list.len()));
                    }
                }
                put(format!("{activation:?}"));
                activations.iter().for_each(|a| put(format!("activations {}", a.name())));
            }
            Op::EmbedAxes { table, .. } => put(self.weight(*table)),
            Op::PoolPatches { side } => put(format!("cells of {side} x {side}")),
            Op::OrderedHead { head, ordering, top_k } => {
                put(format!("{} by {} top {top_k}", self.weight(*head), self.weight(*ordering)));
            }
            Op::AllGather { keep } => put(format!("keep {keep}")),
            Op::EmbedPatches { kernel, bias } => {
                put(self.weight(*kernel));
                bias.iter().for_each(|b| put(format!("+ {}", self.weight(*b))));
            }
            Op::AddRows { table } => put(self.weight(*table)),
            Op::PoolGrid { side } => put(format!("squares of {side} x {side}")),
            Op::Product { weight } => put(self.weight(*weight)),
            Op::Reshape
            | Op::Concat
            | Op::Add
            | Op::Mul
            | Op::SelectRow
            | Op::FillUnscored
            | Op::AllReduce
            | Op::KvWrite { .. }
            | Op::WindowWrite { .. } => {}
        }
        out
    }
}
