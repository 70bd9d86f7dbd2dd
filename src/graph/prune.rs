//! Removes operations whose results nobody reads, with the values and weights that go with them.

use std::collections::BTreeMap;

use super::ir::{Node, Op, Program, ValueId, WeightId};

/// Drops dead operations; inputs stay, whether they are read or not, since the host counts on them.
pub(super) fn prune(program: &mut Program) {
    let mut live = vec![false; program.values.len()];
    let mark = |id: ValueId, live: &mut Vec<bool>| {
        if let Some(slot) = live.get_mut(id.0 as usize) {
            *slot = true;
        }
    };
    for port in program.outputs.iter().chain(&program.inputs) {
        mark(port.value, &mut live);
    }
    let is_live = |id: &ValueId, live: &[bool]| live.get(id.0 as usize).copied().unwrap_or(false);
    let mut keep = vec![false; program.nodes.len()];
    for (i, node) in program.nodes.iter().enumerate().rev() {
        let writes = node.op.kv().is_some_and(|(_, write)| write);
        if writes || node.outputs.iter().any(|id| is_live(id, &live)) {
            keep[i] = true;
            for id in node.inputs.iter().chain(&node.outputs) {
                mark(*id, &mut live);
            }
        }
    }
    let mut nodes: Vec<Node> = std::mem::take(&mut program.nodes)
        .into_iter()
        .zip(keep)
        .filter_map(|(node, keep)| keep.then_some(node))
        .collect();

    let mut values = BTreeMap::new();
    let mut types = Vec::new();
    for (i, v) in std::mem::take(&mut program.values).into_iter().enumerate() {
        if live.get(i).copied().unwrap_or(false) {
            values.insert(i as u32, ValueId(types.len() as u32));
            types.push(v);
        }
    }
    program.values = types;
    let renumber = |id: &mut ValueId| {
        if let Some(new) = values.get(&id.0) {
            *id = *new;
        }
    };
    for port in program.inputs.iter_mut().chain(&mut program.outputs) {
        renumber(&mut port.value);
    }
    let mut weights: BTreeMap<u32, WeightId> = BTreeMap::new();
    for node in &nodes {
        for id in node.op.weights() {
            weights.insert(id.0, id);
        }
    }
    let mut listed = Vec::new();
    for (i, weight) in std::mem::take(&mut program.weights).into_iter().enumerate() {
        if let Some(new) = weights.get_mut(&(i as u32)) {
            *new = WeightId(listed.len() as u32);
            listed.push(weight);
        }
    }
    program.weights = listed;
    for node in &mut nodes {
        node.inputs.iter_mut().chain(&mut node.outputs).for_each(renumber);
        for_each_weight(&mut node.op, |id| {
            if let Some(new) = weights.get(&id.0) {
                *id = *new;
            }
        });
    }
    program.nodes = nodes;
}

fn for_each_weight(op: &mut Op, mut f: impl FnMut(&mut WeightId)) {
    match op {
        Op::Embed { table, .. } | Op::EmbedAxes { table, .. } | Op::AddRows { table } => f(table),
        Op::EmbedPatches { kernel, bias } => {
            f(kernel);
            bias.iter_mut().for_each(f);
        }
        Op::Product { weight } => f(weight),
        Op::Linear { projections, .. } => {
            for projection in projections {
                f(&mut projection.weight);
                projection.bias.iter_mut().for_each(&mut f);
            }
        }
        Op::RmsNorm { weight, .. } => weight.iter_mut().for_each(f),
        Op::LayerNorm { weight, bias, .. } => {
            f(weight);
            bias.iter_mut().for_each(f);
        }
        Op::ScaleBy { weight } | Op::Shift { weight, .. } => f(weight),
        Op::Clamp { low, high } => {
            f(low);
            f(high);
        }
        Op::Route { expert_scale, .. } => expert_scale.iter_mut().for_each(f),
        Op::Experts { gate_up, down, .. } => gate_up.iter_mut().chain(down).for_each(f),
        Op::OrderedHead { head, ordering, .. } => {
            f(head);
            f(ordering);
        }
        Op::Rope { .. }
        | Op::AxialRope { .. }
        | Op::Reshape
        | Op::Columns { .. }
        | Op::Concat
        | Op::Add
        | Op::Mul
        | Op::Affine { .. }
        | Op::Gated { .. }
        | Op::Activate { .. }
        | Op::Softcap { .. }
        | Op::KvWrite { .. }
        | Op::PagedAttention { .. }
        | Op::WindowAttention { .. }
        | Op::WindowWrite { .. }
        | Op::DenseAttention { .. }
        | Op::SelectRow
        | Op::PoolPatches { .. }
        | Op::PoolGrid { .. }
        | Op::FillUnscored
        | Op::AllReduce
        | Op::AllGather { .. } => {}
    }
}
