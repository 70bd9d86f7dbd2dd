//! The comparison with transformers can fail: programs and weights with one mistake each are told apart.

mod runtime_support;

use std::collections::BTreeMap;
use std::ops::Range;

use radpack::graph::Programs;
use radpack::graph::ir::{Node, Op, OwnRows, Program, ValueId, ValueType};
use radpack::model::{Activation, RopeScaling};
use radpack::runtime::{Engine, Memory, Placed, WholeWeights};
use radpack::tensor::Shape;
use runtime_support::{KEEP, Loaded, Reference, TOLERANCE, difference};

/// Whole weights in memory.
#[derive(Default)]
struct Held(BTreeMap<String, (Shape, Vec<f32>)>);

impl Held {
    fn of(loaded: &Loaded, assignment: &radpack::recipe::Assignment) -> Held {
        let weights = loaded.weights(assignment);
        let mut held = Held::default();
        for (_, weight) in assignment.stored(&loaded.model.table) {
            let shape = weights.shape(&weight.name).expect("a shape");
            let (rows, columns) = shape.matrix().expect("a matrix");
            let mut data = vec![0.0; (rows * columns) as usize];
            weights.rows(&weight.name, 0..rows, &mut data).unwrap_or_else(|f| panic!("{f}"));
            held.0.insert(weight.name.clone(), (shape, data));
        }
        held
    }

    /// Changes the rows of every weight whose name ends so; false when there is none.
    fn edit(&mut self, suffix: &str, change: impl Fn(usize, &mut Vec<f32>)) -> bool {
        let mut found = false;
        for (name, (shape, data)) in &mut self.0 {
            if name.ends_with(suffix) && !name.starts_with("vision.") {
                let (_, columns) = shape.matrix().expect("a matrix");
                change(columns as usize, data);
                found = true;
            }
        }
        found
    }
}

impl WholeWeights for Held {
    fn shape(&self, name: &str) -> Option<Shape> {
        Some(self.0.get(name)?.0.clone())
    }

    fn rows(&self, name: &str, rows: Range<u64>, out: &mut [f32]) -> radpack::diag::Result<()> {
        let (shape, data) = &self.0[name];
        let (_, columns) = shape.matrix().expect("a matrix");
        let range = (rows.start * columns) as usize..(rows.end * columns) as usize;
        out.copy_from_slice(&data[range]);
        Ok(())
    }
}

/// Largest difference of the logits of a run with a mistake.
fn with_mistake(
    name: &str,
    devices: u32,
    programs: impl FnOnce(&mut Programs),
    weights: impl FnOnce(&mut Held),
) -> f32 {
    let loaded = Loaded::new(name);
    let mut compiled = loaded.compile(KEEP, &loaded.sizes(), devices, &[0]).expect("it splits");
    programs(&mut compiled.programs);
    let mut held = Held::of(&loaded, &compiled.assignment);
    weights(&mut held);
    let reference = Reference::of(name);
    let placed = Placed::new(held, compiled.placement);
    let memory = Memory { blocks: 20, weights: 1 << 30 };
    let spec = &loaded.model.spec;
    let mut engine = Engine::new(compiled.programs, &compiled.sizes, spec, placed, memory)
        .unwrap_or_else(|f| panic!("{f}"));
    let tokens = reference.tokens("text.input_ids");
    let rows = engine.prefill_all(0, &tokens, &[]).unwrap_or_else(|f| panic!("{f}"));
    difference(&rows.logits, reference.floats("text.logits"))
}

/// Applies `f` to every operation of the language programs; it has to change some.
fn ops(programs: &mut Programs, f: impl Fn(&mut Op) -> bool) {
    let all = programs.programs.iter_mut().filter(|p| !p.name.starts_with("vision"));
    let changed =
        all.flat_map(|p: &mut Program| &mut p.nodes).filter_map(|n| f(&mut n.op).then_some(()));
    assert!(changed.count() > 0);
}

fn caught(mistake: &str, name: &str, difference: f32) {
    println!("{mistake:28} {name:20} {difference:.1e}");
    assert!(difference > 20.0 * TOLERANCE, "{mistake} in {name} changes logits by {difference}");
}

fn nothing(_: &mut Held) {}

#[test]
fn without_a_mistake_the_same_comparison_passes() {
    for name in ["tiny-llama", "tiny-gemma3", "tiny-gemma4-moe"] {
        let found = with_mistake(name, 1, |_| (), nothing);
        assert!(found < TOLERANCE, "{name}: {found}");
    }
}

#[test]
fn wrong_rope_pairing_is_caught() {
    // Elements (2i, 2i + 1) of a head turn together when they lie where i and i + d/2 are looked for; scores do not change
    // otherwise, since queries and keys are moved alike.
    let d = 8;
    let moved = |columns: usize, data: &mut Vec<f32>| {
        let old = data.clone();
        for (row, to) in data.chunks_exact_mut(columns).enumerate() {
            let (head, i) = (row / d, row % d);
            let from = head * d + if i < d / 2 { 2 * i } else { 2 * (i - d / 2) + 1 };
            to.copy_from_slice(&old[from * columns..(from + 1) * columns]);
        }
    };
    for name in ["tiny-llama", "tiny-mistral"] {
        let found = with_mistake(
            name,
            1,
            |_| (),
            |held| {
                assert!(held.edit("attn_q.weight", moved) && held.edit("attn_k.weight", moved));
            },
        );
        caught("rope pairing", name, found);
    }
}

#[test]
fn wrong_frequencies_are_caught() {
    for name in ["tiny-llama", "tiny-gemma3", "tiny-gemma4-dense"] {
        let found = with_mistake(
            name,
            1,
            |programs| {
                ops(programs, |op| match op {
                    Op::Rope { rope } if rope.scaling != RopeScaling::Default => {
                        rope.scaling = RopeScaling::Default;
                        rope.rotary_dims = 1 << 20;
                        true
                    }
                    _ => false,
                });
            },
            nothing,
        );
        caught("rope scaling", name, found);
    }
}

#[test]
fn norms_with_and_without_one_plus_are_told_apart() {
    for name in ["tiny-gemma3", "tiny-llama", "tiny-gemma4-dense", "tiny-qwen3"] {
        let found = with_mistake(
            name,
            1,
            |programs| {
                ops(programs, |op| match op {
                    Op::RmsNorm { weight: Some(_), one_plus, .. } => {
                        *one_plus = !*one_plus;
                        true
                    }
                    _ => false,
                });
            },
            nothing,
        );
        caught("1 + w", name, found);
    }
}

#[test]
fn a_missing_layer_scalar_is_caught() {
    for name in ["tiny-gemma4-dense", "tiny-gemma4-e", "tiny-gemma4-moe", "tiny-gemma4-unified"] {
        let found = with_mistake(
            name,
            1,
            |_| (),
            |held| {
                assert!(held.edit("layer_output_scale.weight", |_, data| data.fill(1.0)));
            },
        );
        caught("layer scalar", name, found);
    }
}

#[test]
fn windows_off_by_one_are_caught() {
    for name in ["tiny-gemma3", "tiny-gemma4-dense", "tiny-gemma4-e", "tiny-mistral"] {
        for wider in [false, true] {
            let found = with_mistake(
                name,
                1,
                |programs| {
                    ops(programs, |op| match op {
                        Op::WindowAttention { window, .. } => {
                            *window = if wider { *window + 1 } else { *window - 1 };
                            true
                        }
                        _ => false,
                    });
                },
                nothing,
            );
            caught(if wider { "window + 1" } else { "window - 1" }, name, found);
        }
    }
}

#[test]
fn swapped_gate_and_up_are_caught() {
    for name in ["tiny-llama", "tiny-gemma3", "tiny-gemma4-e"] {
        let found = with_mistake(
            name,
            4,
            |programs| {
                let all = programs.programs.iter_mut().flat_map(|p| &mut p.nodes);
                for node in all.filter(|n| matches!(n.op, Op::Gated { .. })) {
                    node.inputs.reverse();
                }
            },
            nothing,
        );
        caught("gate and up", name, found);
    }
    for name in ["tiny-qwen3-moe", "tiny-gemma4-moe"] {
        let found = with_mistake(
            name,
            4,
            |_| (),
            |held| {
                let mut changed = 0;
                for (name, (_, data)) in &mut held.0 {
                    if name.contains("ffn_gate_up_exps") {
                        let half = data.len() / 2;
                        data.rotate_left(half);
                        changed += 1;
                    }
                }
                assert!(changed > 0);
            },
        );
        caught("gate and up of experts", name, found);
    }
}

#[test]
fn missing_softcaps_are_caught() {
    for name in ["tiny-gemma4-dense", "tiny-gemma4-e", "tiny-gemma4-moe", "tiny-gemma4-unified"] {
        let found = with_mistake(
            name,
            1,
            |programs| {
                ops(programs, |op| match op {
                    Op::Softcap { .. } => {
                        *op = Op::Affine { scale: 1.0, shift: 0.0 };
                        true
                    }
                    _ => false,
                });
            },
            nothing,
        );
        caught("softcap", name, found);
    }
}

#[test]
fn wrong_key_heads_are_caught() {
    for (name, d) in [("tiny-llama", 8), ("tiny-qwen3", 16), ("tiny-mistral", 8)] {
        for devices in [1, 16] {
            let found = with_mistake(
                name,
                devices,
                |_| (),
                |held| {
                    let next = |columns: usize, data: &mut Vec<f32>| data.rotate_left(d * columns);
                    assert!(held.edit("attn_k.weight", next) && held.edit("attn_v.weight", next));
                },
            );
            caught("key head", name, found);
        }
    }
}

#[test]
fn wrong_expert_owners_weights_and_scales_are_caught() {
    let found = with_mistake(
        "tiny-qwen3-moe",
        4,
        |_| (),
        |held| {
            // Every device reads the expert before its own.
            let names: Vec<String> =
                held.0.keys().filter(|n| n.contains("ffn_down_exps")).cloned().collect();
            let last = held.0[&names[names.len() - 1]].clone();
            for pair in names.windows(2).rev() {
                let before = held.0[&pair[0]].clone();
                held.0.insert(pair[1].clone(), before);
            }
            held.0.insert(names[0].clone(), last);
        },
    );
    caught("expert owner", "tiny-qwen3-moe", found);
    let found = with_mistake(
        "tiny-qwen3-moe",
        1,
        |programs| {
            ops(programs, |op| match op {
                Op::Route { normalize, .. } => {
                    *normalize = false;
                    true
                }
                _ => false,
            });
        },
        nothing,
    );
    caught("routing weights", "tiny-qwen3-moe", found);
    for name in ["tiny-gemma3", "tiny-gemma4-dense", "tiny-llama"] {
        let found = with_mistake(
            name,
            1,
            |programs| {
                ops(programs, |op| match op {
                    Op::PagedAttention { scale, .. } => {
                        *scale *= 0.9;
                        true
                    }
                    _ => false,
                });
            },
            nothing,
        );
        caught("attention scale", name, found);
    }
}

/// Largest difference of the logits of the prompt with images, with a mistake in programs or weights of the encoder.
fn seen_with_mistake(
    devices: u32,
    vision: &[u32],
    programs: impl FnOnce(&mut Programs),
    weights: impl FnOnce(&mut Held),
) -> f32 {
    let name = "tiny-gemma3-vision";
    let loaded = Loaded::new(name);
    let mut compiled = loaded.compile(KEEP, &loaded.sizes(), devices, vision).expect("it splits");
    programs(&mut compiled.programs);
    let mut held = Held::of(&loaded, &compiled.assignment);
    weights(&mut held);
    let reference = Reference::of(name);
    let placed = Placed::new(held, compiled.placement);
    let memory = Memory { blocks: 20, weights: 1 << 30 };
    let spec = &loaded.model.spec;
    let mut engine = Engine::new(compiled.programs, &compiled.sizes, spec, placed, memory)
        .unwrap_or_else(|f| panic!("{f}"));
    let tokens = reference.tokens("image.input_ids");
    let rows =
        engine.prefill_all(0, &tokens, &reference.images()).unwrap_or_else(|f| panic!("{f}"));
    difference(&rows.logits, reference.floats("image.logits"))
}

/// Applies `f` to the operations of one kind of program; it has to change some.
fn ops_of(programs: &mut Programs, kind: &str, f: impl Fn(&mut Op) -> bool) {
    let all = programs.programs.iter_mut().filter(|p| p.name.starts_with(kind));
    assert!(all.flat_map(|p| &mut p.nodes).filter_map(|n| f(&mut n.op).then_some(())).count() > 0);
}

#[test]
fn mistakes_in_gemma3s_encoder_are_caught() {
    let name = "tiny-gemma3-vision";
    for (devices, vision) in [(1, &[0][..]), (4, &[0, 1, 2, 3])] {
        let found = seen_with_mistake(devices, vision, |_| (), nothing);
        assert!(found < TOLERANCE, "{vision:?}: {found}");
        type Change<'a> = (&'a str, &'a str, &'a dyn Fn(&mut Op) -> bool);
        let changes: [Change<'_>; 7] = [
            ("eps of the layer norms", "vision", &|op| match op {
                Op::LayerNorm { eps, .. } => {
                    *eps = 1e-6;
                    true
                }
                _ => false,
            }),
            ("eps of the projector", "project", &|op| match op {
                Op::RmsNorm { eps, .. } => {
                    *eps = 1e-6;
                    true
                }
                _ => false,
            }),
            ("w for 1 + w", "project", &|op| match op {
                Op::RmsNorm { one_plus, .. } => {
                    *one_plus = false;
                    true
                }
                _ => false,
            }),
            ("scale of scores", "vision", &|op| match op {
                Op::DenseAttention { scale } => {
                    *scale = 1.0;
                    true
                }
                _ => false,
            }),
            ("activation", "vision", &|op| match op {
                Op::Activate { activation } => {
                    *activation = Activation::Silu;
                    true
                }
                _ => false,
            }),
            ("images causal in full layers", "image_prefill", &|op| match op {
                Op::PagedAttention { own, .. } => {
                    *own = OwnRows::Causal;
                    true
                }
                _ => false,
            }),
            ("images beyond the window", "image_prefill", &|op| match op {
                Op::WindowAttention { own, .. } => {
                    *own = OwnRows::Image;
                    true
                }
                _ => false,
            }),
        ];
        for (mistake, kind, change) in changes {
            let found = seen_with_mistake(devices, vision, |p| ops_of(p, kind, change), nothing);
            caught(mistake, name, found);
        }
        for bias in [
            "patch_embd",
            "post_norm",
            "blk.0.attn_norm",
            "blk.0.attn_q",
            "blk.0.attn_v",
            "blk.0.attn_output",
            "blk.1.ffn_norm",
            "blk.1.ffn_up",
            "blk.1.ffn_down",
        ] {
            let without = |held: &mut Held| {
                let bias = held.0.get_mut(&format!("vision.{bias}.bias")).expect(bias);
                bias.1.fill(0.0);
            };
            caught(bias, name, seen_with_mistake(devices, vision, |_| (), without));
        }
    }
    // Across for down.
    let grid = |held: &mut Held, name: &str, cell: usize| {
        let (_, data) = held.0.get_mut(name).expect(name);
        let (old, side) = (data.clone(), (data.len() / cell).isqrt());
        for (n, to) in data.chunks_exact_mut(cell).enumerate() {
            let from = (n % side) * side + n / side;
            to.copy_from_slice(&old[from * cell..(from + 1) * cell]);
        }
    };
    let positions = |held: &mut Held| grid(held, "vision.position_embd.weight", 64);
    caught("positions transposed", name, seen_with_mistake(1, &[0], |_| (), positions));
    let projection = |held: &mut Held| grid(held, "mm.vision.weight", 1);
    caught("projection transposed", name, seen_with_mistake(1, &[0], |_| (), projection));
    let pooled = |programs: &mut Programs| {
        let project = programs.programs.iter_mut().find(|p| p.name == "project_t16").expect("one");
        let pool = project.nodes.iter().position(|n| matches!(n.op, Op::PoolGrid { .. }));
        let pool = pool.expect("a pool");
        // Runs of four patches in a row instead of squares of 2 × 2: the first of each stands for all.
        let (from, to) = (project.nodes[pool].inputs[0], project.nodes[pool].outputs[0]);
        let wide = ValueId(project.values.len() as u32);
        let dtype = project.values[from.0 as usize].dtype;
        project.values.push(ValueType { dtype, shape: Shape::from([1, 16, 256]) });
        let first = Op::Columns { start: 0 };
        project.nodes[pool] = Node { op: first, inputs: vec![wide], outputs: vec![to] };
        let reshape = Node { op: Op::Reshape, inputs: vec![from], outputs: vec![wide] };
        project.nodes.insert(pool, reshape);
    };
    caught("pooling", name, seen_with_mistake(1, &[0], pooled, nothing));
}
