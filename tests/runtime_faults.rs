//! Programs, inputs and weights that are wrong give errors: no panic, and no device that waits for ever.

mod runtime_support;

use std::ops::Range;

use radpack::diag::{Failure, FailureKind, Result};
use radpack::graph::{Op, Programs, ValueId, WeightRef};
use radpack::runtime::{
    Executor, LocalWeights, Memory, Outcome, Placed, SourceWeights, Value, View,
};
use runtime_support::{KEEP, Loaded};

const MEMORY: Memory = Memory { blocks: 3, weights: 1 << 30 };

/// Weights of which one device cannot read some.
struct Broken<'a> {
    inner: Placed<SourceWeights<'a>>,
    rank: usize,
    name: &'static str,
}

impl LocalWeights for Broken<'_> {
    fn rows(
        &self,
        weight: &WeightRef,
        rank: usize,
        rows: Range<u64>,
        out: &mut [f32],
    ) -> Result<()> {
        if rank == self.rank && weight.name == self.name {
            return Err(Failure::plain(FailureKind::Failed, "the disk is gone"));
        }
        self.inner.rows(weight, rank, rows, out)
    }

    fn table_columns(&self, name: &str) -> Option<u64> {
        self.inner.table_columns(name)
    }

    fn table_row(&self, name: &str, row: u64, out: &mut [f32]) -> Result<()> {
        self.inner.table_row(name, row, out)
    }
}

fn ints(shape: &[usize], values: Vec<i64>) -> Value {
    Value::ints(shape, values).unwrap_or_else(|f| panic!("{f}"))
}

/// Inputs of a decode step of tiny-llama.
fn step(id: i64, at: i64, block: i64) -> Vec<(&'static str, Value)> {
    vec![
        ("input_ids", ints(&[1, 1], vec![id])),
        ("cache_position", ints(&[1, 1], vec![at])),
        ("block_tables", ints(&[1, 5], vec![block; 5])),
    ]
}

fn executor<'a>(
    loaded: &'a Loaded,
    devices: u32,
    broken: (usize, &'static str),
    change: impl FnOnce(&mut Programs),
) -> Result<Executor<'a>> {
    let mut compiled = loaded.compile(KEEP, &loaded.sizes(), devices, &[0]).expect("it splits");
    change(&mut compiled.programs);
    let inner = Placed::new(loaded.weights(&compiled.assignment), compiled.placement);
    Executor::new(compiled.programs, Broken { inner, rank: broken.0, name: broken.1 }, MEMORY)
}

const SOUND: (usize, &str) = (99, "");

#[test]
fn unsound_programs_are_not_run() {
    let loaded = Loaded::new("tiny-llama");
    let kind = |change: fn(&mut Programs)| {
        executor(&loaded, 2, SOUND, change).err().map(|f| (f.kind, f.problems.len()))
    };
    assert_eq!(kind(|_| ()), None);
    let dangling = kind(|p| p.programs[0].nodes[4].inputs[0] = ValueId(u32::MAX));
    assert_eq!(dangling.map(|(kind, _)| kind), Some(FailureKind::Invalid));
    let partial = kind(|p| {
        let nodes = &mut p.programs[0].nodes;
        let at = nodes.iter().position(|n| matches!(n.op, Op::AllReduce)).expect("a sum");
        nodes[at].op = Op::Affine { scale: 1.0, shift: 0.0 };
    });
    assert_eq!(partial.map(|(kind, _)| kind), Some(FailureKind::Invalid));
    let crowd = kind(|p| p.programs.iter_mut().for_each(|p| p.devices = 1 << 30));
    assert!(crowd.is_some(), "a billion devices");
}

#[test]
fn a_device_that_fails_ends_the_run_for_all() {
    let loaded = Loaded::new("tiny-llama");
    for name in ["blk.0.attn_q.weight", "blk.3.ffn_down.weight", "output.weight"] {
        let mut executor =
            executor(&loaded, 4, (2, name), |_| ()).unwrap_or_else(|f| panic!("{f}"));
        for _ in 0..20 {
            let failure = executor.run("decode_b1", &step(5, 0, 0), &View::default());
            let failure = failure.expect_err("a fault");
            assert!(failure.headline.ends_with("the disk is gone"), "{}", failure.headline);
            assert!(failure.headline.starts_with("decode_b1, operation "), "{}", failure.headline);
        }
    }
}

#[test]
fn inputs_that_point_outside_are_errors() {
    let loaded = Loaded::new("tiny-llama");
    for devices in [1, 4] {
        let mut executor =
            executor(&loaded, devices, SOUND, |_| ()).unwrap_or_else(|f| panic!("{f}"));
        let mut run = |inputs: &[(&str, Value)]| -> Result<Outcome> {
            executor.run("decode_b1", inputs, &View::default())
        };
        let fine = run(&step(5, 0, 0)).unwrap_or_else(|f| panic!("{f}"));
        let logits = fine.output("logits").and_then(Value::as_floats).expect("floats");
        assert_eq!(logits.len(), 512);
        assert!(fine.output("nothing").is_err());
        let text = |r: Result<Outcome>| r.expect_err("a fault").headline;
        assert!(text(run(&step(5, 0, 3))).ends_with("the cache has no block or ring 3"));
        assert!(text(run(&step(5, 0, -1))).ends_with("the cache has no block or ring -1"));
        assert!(
            text(run(&step(5, 160, 0))).ends_with("slot 160 lies outside of a table of 5 blocks")
        );
        assert!(
            text(run(&step(5, -1, 0))).ends_with("slot -1 lies outside of a table of 5 blocks")
        );
        // An id beyond the table has no row on any device.
        assert!(run(&step(1 << 40, 0, 0)).is_ok());
        let short = &step(5, 0, 0)[1..];
        assert!(text(run(short)).ends_with("decode_b1 needs the input input_ids"));
        let mut wide = step(5, 0, 0);
        wide[2].1 = ints(&[1, 6], vec![0; 6]);
        assert!(
            text(run(&wide)).ends_with("the input block_tables is [1, 6], i16 [1, 5] is needed")
        );
    }
    let mut executor = executor(&loaded, 1, SOUND, |_| ()).unwrap_or_else(|f| panic!("{f}"));
    let none = executor.run("decode_b3", &[], &View::default()).expect_err("a fault");
    assert_eq!(none.problems[0].message, "there is no program decode_b3");
}
