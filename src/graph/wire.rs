//! The stored form of programs: what many programs share (weights, types, cache) is written once.
//!
//! An artifact holds one index and one section for each program. A section refers to weights and types by their place in
//! the index, so it stays small: a few dozen bytes an operation. Everything is checked when it is put together again:
//! [`WireIndex::program`] for places, [`verify`](super::verify) for meaning.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::ir::{KvTensor, Node, Port, Program, ProgramKind, Programs, ValueType, WeightRef};

/// Version of the stored form.
pub const VERSION: u32 = 3;

/// Most dimensions of a value: far more than any operation has.
const MAX_TYPE_RANK: usize = 8;

/// What the programs of an artifact share.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WireIndex {
    /// [`VERSION`].
    pub version: u32,
    /// Cache tensors.
    pub kv: Vec<KvTensor>,
    /// Every weight that a program reads.
    pub weights: Vec<WeightRef>,
    /// Every type that a value has.
    pub types: Vec<ValueType>,
    /// Names of the programs, in order; each is a section of its own.
    pub programs: Vec<String>,
}

/// One program; numbers are places in the index.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WireProgram {
    /// Its kind.
    pub kind: ProgramKind,
    /// Devices that run it.
    pub devices: u32,
    /// Its weights.
    pub weights: Vec<u32>,
    /// Inputs.
    pub inputs: Vec<Port>,
    /// Outputs.
    pub outputs: Vec<Port>,
    /// Types of its values.
    pub values: Vec<u32>,
    /// Operations.
    pub nodes: Vec<Node>,
}

/// Why sections are no programs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A version that this program does not know.
    #[error("version {0} of the graph sections; this program reads {VERSION}")]
    Version(u32),
    /// A section refers beyond the index.
    #[error("program {program} refers to {what} {number}, the index has {have}")]
    Beyond {
        /// The program.
        program: String,
        /// `weight` or `type`.
        what: &'static str,
        /// The reference.
        number: u32,
        /// Length of the list.
        have: usize,
    },
    /// What would be copied out of the index more often than any compiler needs.
    #[error("{0}")]
    Repeats(String),
}

/// The sections of programs.
pub fn to_wire(programs: &Programs) -> (WireIndex, Vec<WireProgram>) {
    let mut weights: BTreeMap<&str, u32> = BTreeMap::new();
    let mut types: Vec<&ValueType> = Vec::new();
    let mut index = WireIndex {
        version: VERSION,
        kv: programs.kv.clone(),
        weights: Vec::new(),
        types: Vec::new(),
        programs: programs.programs.iter().map(|p| p.name.clone()).collect(),
    };
    let mut sections = Vec::new();
    for program in &programs.programs {
        let refs = program.weights.iter().map(|w| {
            *weights.entry(&w.name).or_insert_with(|| {
                index.weights.push(w.clone());
                index.weights.len() as u32 - 1
            })
        });
        let refs = refs.collect();
        let values = program.values.iter().map(|v| match types.iter().position(|t| *t == v) {
            Some(i) => i as u32,
            None => {
                types.push(v);
                types.len() as u32 - 1
            }
        });
        sections.push(WireProgram {
            kind: program.kind,
            devices: program.devices,
            weights: refs,
            inputs: program.inputs.clone(),
            outputs: program.outputs.clone(),
            values: values.collect(),
            nodes: program.nodes.clone(),
        });
    }
    index.types = types.into_iter().cloned().collect();
    (index, sections)
}

impl WireIndex {
    /// A program from its section.
    ///
    /// # Errors
    /// A reference beyond the index.
    pub fn program(&self, name: &str, section: WireProgram) -> Result<Program, WireError> {
        let beyond = |what, number, have| WireError::Beyond {
            program: name.chars().take(80).collect(),
            what,
            number,
            have,
        };
        // A reference takes 4 bytes, what it stands for may take any number: it is copied once.
        let mut taken = vec![false; self.weights.len()];
        for number in &section.weights {
            if let Some(before) = taken.get_mut(*number as usize)
                && std::mem::replace(before, true)
            {
                let name: String = name.chars().take(80).collect();
                return Err(WireError::Repeats(format!(
                    "program {name} lists weight {number} twice"
                )));
            }
        }
        let mut weights = Vec::new();
        for number in section.weights {
            let found = self.weights.get(number as usize).cloned();
            weights.push(found.ok_or_else(|| beyond("weight", number, self.weights.len()))?);
        }
        let mut values = Vec::new();
        for number in section.values {
            let found = self.types.get(number as usize).cloned();
            values.push(found.ok_or_else(|| beyond("type", number, self.types.len()))?);
        }
        Ok(Program {
            name: name.to_owned(),
            kind: section.kind,
            devices: section.devices,
            weights,
            inputs: section.inputs,
            outputs: section.outputs,
            values,
            nodes: section.nodes,
        })
    }

    /// The programs from their sections, in the index's order.
    ///
    /// # Errors
    /// Another version, or a reference beyond the index.
    pub fn programs(&self, sections: Vec<WireProgram>) -> Result<Programs, WireError> {
        if self.version != VERSION {
            return Err(WireError::Version(self.version));
        }
        if let Some(long) = self.types.iter().find(|t| t.shape.rank() > MAX_TYPE_RANK) {
            let (rank, most) = (long.shape.rank(), MAX_TYPE_RANK);
            let what = format!("a type of the index has {rank} dimensions; {most} are the most");
            return Err(WireError::Repeats(what));
        }
        let named = self.programs.iter().zip(sections);
        let programs: Result<Vec<Program>, WireError> =
            named.map(|(name, section)| self.program(name, section)).collect();
        Ok(Programs { kv: self.kv.clone(), programs: programs? })
    }
}
