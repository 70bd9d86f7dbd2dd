//! Programs from their stored form: text, verification, arenas, StableHLO.

use radpack::artifact::codec;
use radpack::graph::{self, Text, WireIndex, WireProgram};
use radpack::hash::sha256;
use radpack::tensor::{DType, Encoding};

use super::Outcome;

/// Operations of a program that is printed as StableHLO.
const MOST_NODES: usize = 2000;

/// An index and its sections, one after the other in one binary list.
pub fn programs(input: &[u8]) -> Outcome {
    let (index, sections): (WireIndex, Vec<WireProgram>) =
        codec::decode(input, &sha256([input])).map_err(|e| e.to_string())?;
    assert_eq!(codec::encode(&(&index, &sections)), input, "the bytes that were read");
    let programs = index.programs(sections).map_err(|e| e.to_string())?;
    for program in &programs.programs {
        let text = Text { program, kv: &programs.kv }.to_string();
        assert!(text.ends_with("}\n"));
    }
    let faults = graph::verify(&programs);
    if !faults.is_empty() {
        let faults: Vec<&str> = faults.iter().take(8).map(|f| f.message.as_str()).collect();
        return Err(faults.join("\n"));
    }
    let (index, sections) = graph::to_wire(&programs);
    assert_eq!(index.programs(sections).as_ref(), Ok(&programs), "programs are stored as they are");
    let mut outcome = format!("{} programs", programs.programs.len());
    for program in &programs.programs {
        if graph::arena(program).is_none() {
            outcome.push_str("; an arena beyond 64 bits");
        }
        if program.nodes.len() > MOST_NODES {
            continue;
        }
        let plain = |_: &str| Some(Encoding::plain(DType::BF16));
        match graph::module(&programs, program, &plain, 4) {
            Ok(module) => outcome.push_str(&format!("; {} arguments", module.arguments.len())),
            Err(refused) => outcome.push_str(&format!("; {refused}")),
        }
    }
    Ok(outcome)
}
