//! Reads an operand once for all matrices that it is multiplied with: query, key and value, gate and up.
//!
//! An engine then rounds the operand once and starts one kernel instead of three. No number changes: every projection keeps
//! its own sum. Other rewrites are not made, since they would change numbers: the factors that are left between operations
//! (1/√2 of per-layer inputs, 1/√H of a router) are powers of two in no published model, so that folding them into a
//! stored scale would round twice; those that fold exactly are attributes already (`embed`, the attentions).

use std::collections::BTreeMap;

use super::ir::{Node, Op, Program, ValueId, WeightRef, WeightShare};
use crate::recipe::Activations;

/// Joins linear layers of one operand, one rounding and one share over devices, at the place of the first. They depend on
/// nothing but the operand and weights, so each may run as early as any of them.
pub(super) fn fuse(program: &mut Program) {
    let mut by_operand: BTreeMap<ValueId, Vec<(Option<Activations>, WeightShare, usize)>> =
        BTreeMap::new();
    let mut nodes: Vec<Node> = Vec::with_capacity(program.nodes.len());
    for node in std::mem::take(&mut program.nodes) {
        let Some((x, activations, share)) = read(&node, &program.weights) else {
            nodes.push(node);
            continue;
        };
        let layers = by_operand.entry(x).or_default();
        let alike = |(a, s, at): &(_, _, usize)| (*a == activations && *s == share).then_some(*at);
        match (layers.iter().find_map(alike).and_then(|at| nodes.get_mut(at)), node.op) {
            (
                Some(Node { op: Op::Linear { projections, .. }, outputs, .. }),
                Op::Linear { projections: more, .. },
            ) => {
                projections.extend(more);
                outputs.extend(node.outputs);
            }
            (_, op) => {
                layers.push((activations, share, nodes.len()));
                nodes.push(Node { op, ..node });
            }
        }
    }
    program.nodes = nodes;
}

/// Operand, rounding and share of a linear layer; `None` for other operations.
fn read(node: &Node, weights: &[WeightRef]) -> Option<(ValueId, Option<Activations>, WeightShare)> {
    let (Op::Linear { projections, activations }, [x]) = (&node.op, &node.inputs[..]) else {
        return None;
    };
    let weight = weights.get(projections.first()?.weight.0 as usize)?;
    Some((*x, *activations, weight.share))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::build::Builder;
    use crate::graph::ir::{ProgramKind, Projection, WeightId};
    use crate::tensor::{DType, Shape};

    fn weight(b: &mut Builder<'_>, name: &str, share: WeightShare) -> WeightId {
        b.weight(WeightRef { name: name.to_owned(), shape: Shape::from([4, 8]), share })
    }

    fn linear(
        b: &mut Builder<'_>,
        x: ValueId,
        weight: WeightId,
        activations: Option<Activations>,
    ) -> ValueId {
        let projections = vec![Projection { weight, bias: None }];
        b.op(Op::Linear { projections, activations }, &[x])
    }

    /// The weights of every linear layer, after fusion.
    fn fused(program: &mut Program) -> Vec<Vec<&str>> {
        fuse(program);
        let name = |id: WeightId| program.weight(id).map_or("?", |w| w.name.as_str());
        let linear = program.nodes.iter().filter(|n| matches!(n.op, Op::Linear { .. }));
        linear.map(|n| n.op.weights().into_iter().map(name).collect()).collect()
    }

    #[test]
    fn layers_of_one_operand_become_one_unless_rounding_or_share_differ() {
        let mut b = Builder::new("p".into(), ProgramKind::Decode { batch: 1 }, 2, DType::F32, &[]);
        let x = b.float_input("x", [1, 1, 8]);
        let y = b.float_input("y", [1, 1, 8]);
        let rows = WeightShare::Rows;
        let mut outs = Vec::new();
        for (from, name, share, activations) in [
            (x, "q", rows, None),
            (y, "other operand", rows, None),
            (x, "k", rows, None),
            (x, "whole", WeightShare::Whole, None),
            (x, "rounded", rows, Some(Activations::Int8Token)),
            (x, "v", rows, None),
        ] {
            let weight = weight(&mut b, name, share);
            outs.push(linear(&mut b, from, weight, activations));
        }
        for (n, out) in outs.iter().enumerate() {
            b.output(&format!("out{n}"), *out);
        }
        let mut program = b.finish().expect("sound");
        assert_eq!(
            fused(&mut program),
            [vec!["q", "k", "v"], vec!["other operand"], vec!["whole"], vec!["rounded"]]
        );
        let first = &program.nodes[0];
        assert_eq!(first.outputs, [outs[0], outs[2], outs[5]]);
        assert_eq!(first.inputs, [x]);
    }
}
