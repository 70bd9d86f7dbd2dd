//! Whether programs are what they claim to be. Run on every compilation, and on every artifact that is read: nothing
//! after it has to check an index, a shape or the meaning of a collective again.

use std::collections::BTreeSet;

use super::infer::{Context, MAX_ELEMENTS, Spread, infer, spread};
use super::ir::{KvId, KvTensor, Op, Program, Programs, ValueId, ValueType};
use crate::diag::{Diagnostic, Problems};
use crate::model::{RopeScaling, RopeSpec};
use crate::tensor::Shape;

/// Most programs, values or nodes that are looked at; far above any model's.
const MAX_PROGRAMS: usize = 4096;
const MAX_NODES: usize = 1 << 22;

/// Every fault of the programs; empty for sound ones.
pub fn verify(programs: &Programs) -> Problems {
    let mut problems = Problems::new();
    let mut say = |what: String| problems.push(Diagnostic::new("graph", what));
    if programs.programs.len() > MAX_PROGRAMS {
        say(format!("{} programs; at most {MAX_PROGRAMS}", programs.programs.len()));
        return problems;
    }
    let mut names = BTreeSet::new();
    for program in &programs.programs {
        if !names.insert(program.name.as_str()) {
            say(format!("two programs are called {}", program.name));
        }
    }
    let mut names = BTreeSet::new();
    for tensor in &programs.kv {
        if !names.insert(tensor.name.as_str()) {
            say(format!("two cache tensors are called {}", tensor.name));
        }
        if tensor.unit_bytes().is_none_or(|b| b == 0 || b > MAX_ELEMENTS) {
            say(format!("{}: a cache tensor of no or too many bytes", tensor.name));
        }
    }
    for program in &programs.programs {
        for fault in faults(program, &programs.kv) {
            say(format!("{}: {fault}", program.name));
        }
    }
    problems
}

fn too_many(nodes: usize, values: usize) -> Option<String> {
    (nodes.max(values) > MAX_NODES)
        .then(|| format!("{nodes} nodes and {values} values; at most {MAX_NODES} of each"))
}

/// An extent of 0 does not excuse the others.
fn too_large(shape: &Shape) -> Option<String> {
    let mut extents = shape.extents().iter();
    let elements = extents.try_fold(1u64, |n, extent| n.checked_mul((*extent).max(1)));
    elements
        .is_none_or(|n| n > MAX_ELEMENTS)
        .then(|| format!("a value or weight {shape}; at most {MAX_ELEMENTS} elements"))
}

/// The faults of one program, first ones first; after a fault in a node its results count as declared.
fn faults(program: &Program, kv: &[KvTensor]) -> Vec<String> {
    let mut faults = Vec::new();
    if program.devices == 0 {
        faults.push("no device runs it".to_owned());
    }
    if let Some(fault) = too_many(program.nodes.len(), program.values.len()) {
        faults.push(fault);
        return faults;
    }
    let values = program.values.iter().map(|v| &v.shape);
    let large: Vec<String> =
        values.chain(program.weights.iter().map(|w| &w.shape)).filter_map(too_large).collect();
    if !large.is_empty() {
        faults.extend(large);
        return faults;
    }
    let mut names = BTreeSet::new();
    for port in program.inputs.iter() {
        if !names.insert(port.name.as_str()) {
            faults.push(format!("two inputs are called {}", port.name));
        }
    }
    let mut weights = BTreeSet::new();
    for weight in &program.weights {
        if !weights.insert(weight.name.as_str()) {
            faults.push(format!("{} is listed twice", weight.name));
        }
    }
    let context = Context { weights: &program.weights, kv, devices: program.devices };
    let mut known: Vec<Option<Spread>> = vec![None; program.values.len()];
    for port in &program.inputs {
        match known.get_mut(port.value.0 as usize) {
            Some(slot @ None) => *slot = Some(Spread::Equal),
            Some(_) => faults.push(format!("input {} shares a value", port.name)),
            None => faults.push(format!("input {} has no value", port.name)),
        }
    }
    // Rings that this program has written: a reader after it would miss what the write replaced.
    let mut written: BTreeSet<KvId> = BTreeSet::new();
    let mut used: BTreeSet<u32> = BTreeSet::new();
    for (n, node) in program.nodes.iter().enumerate() {
        let at = format!("operation {n} ({})", node.op.name());
        let state = |id: &ValueId| known.get(id.0 as usize).copied().flatten();
        let spreads: Option<Vec<Spread>> = node.inputs.iter().map(state).collect();
        let types: Option<Vec<&ValueType>> =
            node.inputs.iter().map(|id| program.value(*id)).collect();
        let (Some(spreads), Some(types)) = (spreads, types) else {
            faults.push(format!("{at} reads a value that nothing has made before"));
            declare(&mut known, &node.outputs, Spread::Equal);
            continue;
        };
        let mut fail = |why: String| faults.push(format!("{at}: {why}"));
        constants(&node.op).into_iter().filter_map(Constant::fault).for_each(&mut fail);
        let wanted = node.outputs.first().and_then(|id| program.value(*id)).map(|v| &v.shape);
        match infer(&node.op, &types, wanted, &context) {
            Err(why) => fail(why),
            Ok(results) => {
                let declared: Vec<Option<&ValueType>> =
                    node.outputs.iter().map(|id| program.value(*id)).collect();
                let embed = matches!(node.op, Op::Embed { .. } | Op::EmbedAxes { .. });
                let fits = results.len() == declared.len()
                    && results.iter().zip(&declared).all(|(r, d)| {
                        d.is_some_and(|d| d.shape == r.shape && (embed || d.dtype == r.dtype))
                    });
                if !fits {
                    fail(format!("gives {results:?}, declared are {declared:?}"));
                }
            }
        }
        let lies = match spread(&node.op, &spreads, &context) {
            Ok(lies) => lies,
            Err(why) => {
                fail(why);
                Spread::Equal
            }
        };
        if let Some((pair, write)) = node.op.kv() {
            let window = matches!(node.op, Op::WindowAttention { .. } | Op::WindowWrite { .. });
            if window && written.contains(&pair.key) {
                fail("touches a ring that was written before".to_owned());
            }
            if !window && !write && !written.contains(&pair.key) && program.writes(pair.key) {
                fail("reads blocks before this call's rows are in them".to_owned());
            }
            if write && !written.insert(pair.key) {
                fail("writes a cache tensor twice".to_owned());
            }
        }
        used.extend(node.op.weights().iter().map(|w| w.0));
        if !declare(&mut known, &node.outputs, lies) {
            faults
                .push(format!("{at} makes a value that there is already, or that does not exist"));
        }
    }
    for (i, weight) in program.weights.iter().enumerate() {
        if !u32::try_from(i).is_ok_and(|i| used.contains(&i)) {
            faults.push(format!("{} is listed and never read", weight.name));
        }
    }
    if program.outputs.is_empty() {
        faults.push("it has no output".to_owned());
    }
    for port in &program.outputs {
        match known.get(port.value.0 as usize).copied().flatten() {
            Some(Spread::Equal) => {}
            Some(lies) => {
                faults.push(format!("output {} lies as {lies:?} over the devices", port.name))
            }
            None => faults.push(format!("output {} is never made", port.name)),
        }
    }
    faults
}

/// A number in an operation, and what it may be beside finite.
struct Constant {
    name: &'static str,
    value: f64,
    range: Range,
}

#[derive(PartialEq)]
enum Range {
    Any,
    NotNegative,
    Positive,
}

impl Constant {
    fn fault(self) -> Option<String> {
        let Constant { name, value, range } = self;
        let (fits, wanted) = match range {
            Range::Any => (true, "a finite number"),
            Range::NotNegative => (value >= 0.0, "a finite number of at least 0"),
            Range::Positive => (value > 0.0, "a finite number above 0"),
        };
        (!fits || !value.is_finite()).then(|| format!("{name} is {value}; it has to be {wanted}"))
    }
}

/// The constants of an operation. One that is not a number makes everything after it so.
fn constants(op: &Op) -> Vec<Constant> {
    let constant = |name, value, range| Constant { name, value, range };
    let attention = |scale: f64, softcap: Option<f64>| {
        let softcap = softcap.map(|cap| constant("softcap", cap, Range::Positive));
        std::iter::once(constant("scale", scale, Range::Any)).chain(softcap).collect()
    };
    match op {
        Op::Embed { scale, .. } | Op::DenseAttention { scale } => attention(*scale, None),
        Op::RmsNorm { eps, .. } | Op::LayerNorm { eps, .. } => {
            vec![constant("eps", *eps, Range::NotNegative)]
        }
        Op::Rope { rope } => rotation(rope),
        Op::AxialRope { theta } => vec![constant("theta", *theta, Range::Positive)],
        Op::Affine { scale, shift } => {
            vec![constant("scale", *scale, Range::Any), constant("shift", *shift, Range::Any)]
        }
        Op::Softcap { cap } => vec![constant("cap", *cap, Range::Positive)],
        Op::PagedAttention { scale, softcap, .. } | Op::WindowAttention { scale, softcap, .. } => {
            attention(*scale, *softcap)
        }
        _ => Vec::new(),
    }
}

fn rotation(rope: &RopeSpec) -> Vec<Constant> {
    let positive = |name, value| Constant { name, value, range: Range::Positive };
    let mut all = vec![positive("theta", rope.theta)];
    match rope.scaling {
        RopeScaling::Default => {}
        RopeScaling::Linear { factor } | RopeScaling::Proportional { factor } => {
            all.push(positive("factor", factor));
        }
        RopeScaling::Llama3 { factor, low, high, .. } => {
            all.extend([positive("factor", factor), positive("low", low), positive("high", high)]);
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, attention_factor, .. } => all.extend([
            positive("factor", factor),
            positive("beta_fast", beta_fast),
            positive("beta_slow", beta_slow),
            positive("attention_factor", attention_factor),
        ]),
    }
    all
}

fn declare(known: &mut [Option<Spread>], outputs: &[ValueId], lies: Spread) -> bool {
    let mut fresh = true;
    for id in outputs {
        match known.get_mut(id.0 as usize) {
            Some(slot @ None) => *slot = Some(lies),
            _ => fresh = false,
        }
    }
    fresh
}

impl Program {
    /// Whether an operation of the program writes that cache tensor.
    fn writes(&self, key: KvId) -> bool {
        self.nodes.iter().any(|n| n.op.kv().is_some_and(|(pair, write)| write && pair.key == key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_have_a_number_of_nodes_and_of_values() {
        assert_eq!(too_many(MAX_NODES, MAX_NODES), None);
        let said = "4194305 nodes and 0 values; at most 4194304 of each";
        assert_eq!(too_many(MAX_NODES + 1, 0).as_deref(), Some(said));
        assert!(too_many(0, MAX_NODES + 1).is_some());
    }

    #[test]
    fn values_and_weights_have_a_number_of_elements() {
        assert_eq!(too_large(&Shape::from([MAX_ELEMENTS / 2, 2])), None);
        let said = "a value or weight [2, 140737488355329]; at most 281474976710656 elements";
        assert_eq!(too_large(&Shape::from([2, MAX_ELEMENTS / 2 + 1])).as_deref(), Some(said));
        assert!(too_large(&Shape::from([u64::MAX, u64::MAX])).is_some());
        assert!(too_large(&Shape::from([0, u64::MAX])).is_some());
    }

    /// What is wrong with the constants of an operation.
    fn wrong(op: Op) -> Vec<String> {
        constants(&op).into_iter().filter_map(Constant::fault).collect()
    }

    #[test]
    fn constants_are_finite_and_of_their_sign() {
        let norm = |eps| Op::RmsNorm { weight: None, eps, one_plus: false };
        assert_eq!(wrong(norm(0.0)), [""; 0]);
        let wanted = "it has to be a finite number of at least 0";
        for (eps, shown) in [(f64::NAN, "NaN"), (f64::INFINITY, "inf"), (-1e-9, "-0.000000001")] {
            assert_eq!(wrong(norm(eps)), [format!("eps is {shown}; {wanted}")]);
        }
        assert_eq!(
            wrong(Op::Affine { scale: f64::NEG_INFINITY, shift: f64::NAN }),
            [
                "scale is -inf; it has to be a finite number",
                "shift is NaN; it has to be a finite number"
            ]
        );
        assert_eq!(wrong(Op::Affine { scale: -1.0, shift: 0.0 }), [""; 0]);
        let positive = |name: &str| format!("{name} is 0; it has to be a finite number above 0");
        assert_eq!(wrong(Op::Softcap { cap: 0.0 }), [positive("cap")]);
        assert_eq!(wrong(Op::Softcap { cap: f64::MIN_POSITIVE }), [""; 0]);
        assert_eq!(wrong(Op::AxialRope { theta: 0.0 }), [positive("theta")]);
        let rope = |scaling| Op::Rope { rope: RopeSpec { theta: 0.0, rotary_dims: 2, scaling } };
        for (scaling, names) in [
            (RopeScaling::Default, &[][..]),
            (RopeScaling::Linear { factor: 0.0 }, &["factor"]),
            (RopeScaling::Proportional { factor: 0.0 }, &["factor"]),
            (
                RopeScaling::Llama3 { factor: 0.0, low: 0.0, high: 0.0, original_positions: 0 },
                &["factor", "low", "high"],
            ),
            (
                RopeScaling::Yarn {
                    factor: 0.0,
                    original_positions: 0,
                    beta_fast: 0.0,
                    beta_slow: 0.0,
                    truncate: true,
                    attention_factor: 0.0,
                },
                &["factor", "beta_fast", "beta_slow", "attention_factor"],
            ),
        ] {
            let all: Vec<String> =
                std::iter::once("theta").chain(names.iter().copied()).map(positive).collect();
            assert_eq!(wrong(rope(scaling)), all);
        }
    }
}
