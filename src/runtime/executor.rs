//! Runs programs on simulated devices: one thread each, collectives in the order of ranks.

use super::activations::Precision;
use super::device::{Call, Device, Stop};
use super::exchange::Exchange;
use super::value::{Value, fault};
use super::weights::{Kept, LocalWeights};
use crate::diag::{Diagnostic, Failure, FailureKind, Problems, Result};

use crate::graph::{self, Op, Program, Programs, ValueId};

/// How much memory an executor may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Blocks of the paged cache.
    pub blocks: u64,
    /// Bytes of decoded weights that are kept; the others are decoded at every use.
    pub weights: u64,
}

/// The devices of one model, with their caches.
pub struct Executor<'w> {
    programs: Programs,
    weights: Box<dyn LocalWeights + 'w>,
    kept: Kept,
    devices: Vec<Device>,
    precision: Precision,
}

/// What is looked at beside a program's outputs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    /// Whether logits (and the final hidden state) are computed for every row of a prefill, not for the last alone.
    pub all_rows: bool,
    /// Whether the rows that enter each layer, and those that enter the head, are given.
    pub layers: bool,
}

/// What a run gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    outputs: Vec<(String, Value)>,
    /// With [`View::layers`]: the rows that enter layer 0, 1, …, and at last the head.
    pub layers: Vec<Value>,
}

impl Outcome {
    /// The output of that name.
    ///
    /// # Errors
    /// There is none.
    pub fn output(&self, name: &str) -> Result<&Value> {
        let found = self.outputs.iter().find(|(n, _)| n == name);
        found.map(|(_, v)| v).ok_or_else(|| fault(format!("there is no output {name}")))
    }

    /// The output of that name, if there is one.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.outputs.iter().find(|(n, _)| n == name).map(|(_, v)| v)
    }
}

impl<'w> Executor<'w> {
    /// Devices for programs, with empty caches.
    ///
    /// # Errors
    /// Programs that do not verify ([`FailureKind::Invalid`]); more devices or larger values than can be simulated; caches
    /// that do not fit the address space.
    pub fn new(
        programs: Programs,
        weights: impl LocalWeights + 'w,
        memory: Memory,
    ) -> Result<Executor<'w>> {
        graph::verify(&programs).finish(
            FailureKind::Invalid,
            "the programs are unsound and cannot be run",
            (),
        )?;
        sizes(&programs).finish(FailureKind::Refused, "the programs cannot be run here", ())?;
        let count = programs.programs.iter().map(|p| p.devices).max().unwrap_or(1);
        let blocks = usize::try_from(memory.blocks).map_err(fault)?;
        let devices = (0..count as usize)
            .map(|rank| Device::new(rank, &programs, blocks))
            .collect::<Result<_>>()?;
        let kept = Kept::new(memory.weights);
        let precision = Precision::Reference;
        Ok(Executor { programs, weights: Box::new(weights), kept, devices, precision })
    }

    /// In which arithmetic runs are from now on; at first in [`Precision::Reference`].
    pub fn set_precision(&mut self, precision: Precision) {
        self.precision = precision;
    }

    /// The programs.
    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    /// The weights.
    pub fn weights(&self) -> &(dyn LocalWeights + 'w) {
        &*self.weights
    }

    /// Runs the program of that name. `inputs` gives values by the names of its inputs; others are ignored.
    ///
    /// # Errors
    /// No such program, an input that is absent or of another shape or kind, ids, positions and tables that point
    /// outside, weights that cannot be read.
    pub fn run(&mut self, name: &str, inputs: &[(&str, Value)], view: &View) -> Result<Outcome> {
        let Executor { programs, weights, kept, devices, precision } = self;
        let program = programs.get(name).ok_or_else(|| {
            let known: Vec<&str> = programs.programs.iter().map(|p| p.name.as_str()).collect();
            let problem = Diagnostic::new("runtime", format!("there is no program {name}"))
                .help(format!("programs: {}", crate::diag::list(&known, 20)));
            Failure::one(FailureKind::Failed, "a program is missing", problem)
        })?;
        let inputs = arguments(program, inputs)?;
        let mut wanted: Vec<ValueId> = program.outputs.iter().map(|p| p.value).collect();
        if view.layers {
            wanted.extend(layer_inputs(program));
        }
        let store = kept.open(&**weights);
        let group = devices.get_mut(..program.devices as usize).unwrap_or_default();
        let exchange = (group.len() > 1).then(|| Exchange::new(group.len()));
        let call = Call {
            program,
            inputs: &inputs,
            wanted: &wanted,
            all_rows: view.all_rows,
            store: &store,
            precision: *precision,
            exchange: exchange.as_ref(),
        };
        let result = run_all(group, &call);
        kept.close(store);
        let mut values = result?.into_iter();
        let names = program.outputs.iter().map(|p| p.name.clone());
        let outputs = names.zip(values.by_ref()).collect();
        Ok(Outcome { outputs, layers: values.collect() })
    }
}

/// Most devices that are simulated, and most elements of a value or of a weight's share: 16 GiB in f32.
const MAX_DEVICES: u32 = 1024;
const MAX_ELEMENTS: u64 = 1 << 32;

/// What is too large to run, or empty.
fn sizes(programs: &Programs) -> Problems {
    let mut problems = Problems::new();
    for program in &programs.programs {
        if program.devices > MAX_DEVICES {
            problems.push(Diagnostic::new(
                "runtime",
                format!(
                    "{} runs on {} devices; at most {MAX_DEVICES}",
                    program.name, program.devices
                ),
            ));
        }
        let shapes = program.values.iter().map(|v| &v.shape);
        for shape in shapes.chain(program.weights.iter().map(|w| &w.shape)) {
            if !shape.elements().is_some_and(|n| (1..=MAX_ELEMENTS).contains(&n)) {
                problems.push(Diagnostic::new(
                    "runtime",
                    format!(
                        "{} has a value of shape {shape}; 1 to {} elements can be held",
                        program.name,
                        crate::diag::count(MAX_ELEMENTS)
                    ),
                ));
                break;
            }
        }
    }
    problems
}

/// Runs a call on every device; gives what the first one has.
fn run_all(devices: &mut [Device], call: &Call<'_>) -> Result<Vec<Value>> {
    let results: Vec<std::result::Result<Vec<Value>, Stop>> = match devices {
        [one] => vec![one.run(call)],
        all => std::thread::scope(|scope| {
            let handles: Vec<_> = (all.iter_mut())
                .map(|device| {
                    scope.spawn(move || {
                        let leaving = Leaving(call.exchange);
                        let result = device.run(call);
                        if result.is_ok() {
                            std::mem::forget(leaving);
                        }
                        result
                    })
                })
                .collect();
            let ended = |result: std::thread::Result<_>| {
                result.unwrap_or_else(|_| Err(Stop::Failed(fault("a device stopped in a panic"))))
            };
            handles.into_iter().map(|h| ended(h.join())).collect()
        }),
    };
    let mut first = None;
    let mut alone = false;
    for result in results {
        match result {
            Ok(values) => first = first.or(Some(values)),
            Err(Stop::Failed(failure)) => return Err(failure),
            Err(Stop::Alone) => alone = true,
        }
    }
    match first {
        Some(values) if !alone => Ok(values),
        _ => Err(fault("no device finished")),
    }
}

/// Frees the other devices when one leaves early.
struct Leaving<'a>(Option<&'a Exchange>);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if let Some(exchange) = self.0 {
            exchange.give_up();
        }
    }
}

/// Inputs in the program's order.
fn arguments(program: &Program, given: &[(&str, Value)]) -> Result<Vec<Value>> {
    let mut out = Vec::with_capacity(program.inputs.len());
    for port in &program.inputs {
        let declared = program.value(port.value).ok_or_else(|| fault("an input without a type"))?;
        let found = given.iter().find(|(name, _)| *name == port.name).map(|(_, v)| v);
        let value = found
            .ok_or_else(|| fault(format!("{} needs the input {}", program.name, port.name)))?;
        let shape: Vec<u64> = value.shape().iter().map(|d| *d as u64).collect();
        if shape != declared.shape.extents() || value.is_float() != declared.dtype.is_float() {
            return Err(fault(format!(
                "{}: the input {} is {:?}, {} {} is needed",
                program.name,
                port.name,
                value.shape(),
                declared.dtype,
                declared.shape
            )));
        }
        out.push(value.clone());
    }
    Ok(out)
}

/// What the norm before attention of each layer reads, and what the norm before the head makes.
fn layer_inputs(program: &Program) -> Vec<ValueId> {
    let mut found = Vec::new();
    for node in &program.nodes {
        let Op::RmsNorm { weight: Some(weight), .. } = &node.op else { continue };
        let Some(weight) = program.weight(*weight) else { continue };
        let name = weight.name.strip_prefix("draft.").unwrap_or(&weight.name);
        let layer = name.strip_prefix("blk.").and_then(|n| n.split_once('.'));
        if layer.is_some_and(|(_, part)| part == "attn_norm.weight") {
            found.extend(node.inputs.first());
        } else if name == "output_norm.weight" {
            found.extend(node.outputs.first());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Program, ProgramKind, ValueType};
    use crate::tensor::{DType, Shape};

    #[test]
    fn programs_that_are_run_have_a_number_of_devices_and_of_elements() {
        let said = |devices: u32, elements: u64| {
            let shape = Shape::new(vec![elements]);
            let program = Program {
                name: "p".to_owned(),
                kind: ProgramKind::Prefill { chunk: 1 },
                devices,
                weights: Vec::new(),
                inputs: Vec::new(),
                outputs: Vec::new(),
                values: vec![ValueType { dtype: DType::BF16, shape }],
                nodes: Vec::new(),
            };
            let problems = sizes(&Programs { kv: Vec::new(), programs: vec![program] });
            problems.iter().map(|p| p.message.clone()).collect::<Vec<_>>()
        };
        assert_eq!(said(1024, 1 << 32), Vec::<String>::new());
        assert_eq!(said(1025, 1), ["p runs on 1025 devices; at most 1024"]);
        let wrong = "p has a value of shape [4294967297]; 1 to 4,294,967,296 elements can be held";
        assert_eq!(said(1, (1 << 32) + 1), [wrong]);
    }
}
