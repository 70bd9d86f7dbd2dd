//! The ten published Gemma 4 variants: every tensor of each maps to a weight, none is left over, and the totals are
//! those of the published files.

mod published_support;

use std::collections::BTreeMap;

use radpack::model::{
    AttentionKind, AudioSpec, Class, ImageAttention, KvSource, RopeScaling, Tower, ValueSource,
    VisionSpec, draft_mismatches,
};
use radpack::tensor::{DType, Shape, TensorInfo};

use published_support::{published as model, tensors};

/// Elements and bytes of a checkpoint.
fn totals(tensors: &BTreeMap<String, TensorInfo>) -> (u64, u64) {
    tensors.values().fold((0, 0), |(n, b), t| {
        let e = t.shape.elements().expect("small");
        (n + e, b + e * u64::from(t.dtype.bits()) / 8)
    })
}

struct Row {
    name: &'static str,
    tensors: usize,
    unused: usize,
    /// Logical weights: tied heads and split experts count beyond the tensors.
    weights: usize,
    parameters: u64,
    bytes: u64,
}

#[rustfmt::skip]
const ROWS: [Row; 10] = [
    Row { name: "gemma-4-31B", tensors: 1188, unused: 0, weights: 1189, parameters: 31_273_088_876, bytes: 62_546_177_752 },
    Row { name: "gemma-4-26B-A4B", tensors: 1013, unused: 0, weights: 8_634, parameters: 25_805_936_206, bytes: 51_611_872_412 },
    Row { name: "gemma-4-12B", tensors: 677, unused: 0, weights: 678, parameters: 11_959_730_224, bytes: 23_919_460_448 },
    Row { name: "gemma-4-E4B", tensors: 2130, unused: 54, weights: 2077, parameters: 7_996_157_418, bytes: 15_992_314_836 },
    Row { name: "gemma-4-E2B", tensors: 2011, unused: 60, weights: 1952, parameters: 5_123_178_979, bytes: 10_246_357_958 },
    Row { name: "gemma-4-31B-it-assistant", tensors: 48, unused: 0, weights: 49, parameters: 469_518_596, bytes: 939_037_192 },
    Row { name: "gemma-4-26B-A4B-it-assistant", tensors: 48, unused: 0, weights: 49, parameters: 419_711_236, bytes: 839_422_472 },
    Row { name: "gemma-4-12B-it-assistant", tensors: 48, unused: 0, weights: 49, parameters: 422_856_964, bytes: 845_713_928 },
    Row { name: "gemma-4-E4B-it-assistant", tensors: 50, unused: 0, weights: 51, parameters: 78_779_908, bytes: 159_132_680 },
    Row { name: "gemma-4-E2B-it-assistant", tensors: 50, unused: 0, weights: 51, parameters: 77_993_476, bytes: 157_559_816 },
];

#[test]
fn every_tensor_of_the_published_variants_is_claimed_once() {
    for row in &ROWS {
        let tensors = tensors(row.name);
        let model = model(row.name);
        let table = &model.table;
        assert_eq!(tensors.len(), row.tensors, "{}", row.name);
        assert_eq!(table.unused.len(), row.unused, "{}", row.name);
        assert_eq!(table.weights.len(), row.weights, "{}", row.name);
        assert_eq!(totals(&tensors), (row.parameters, row.bytes), "{}", row.name);

        // Elements of the weights, tied copies apart, are those of the tensors that are used.
        let mut stored = 0;
        let mut parts: BTreeMap<(&str, Option<u64>), u32> = BTreeMap::new();
        for w in table.weights.iter().filter(|w| w.tied_to.is_none()) {
            stored += w.shape.elements().expect("small");
            for p in &w.parts {
                *parts.entry((&p.tensor, p.index)).or_default() += 1;
            }
        }
        assert!(parts.values().all(|&n| n == 1), "{}", row.name);
        let unused: u64 = table
            .unused
            .iter()
            .map(|(name, _)| tensors[name].shape.elements().expect("small"))
            .sum();
        assert_eq!(stored + unused, row.parameters, "{}", row.name);

        let names: Vec<&str> = table.weights.iter().map(|w| w.name.as_str()).collect();
        let mut unique = names.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), names.len(), "{}: names are unique", row.name);
        let mut sorted = table.clone();
        sorted.sort();
        assert_eq!(&sorted, table, "{}: container order", row.name);
    }
}

#[test]
fn the_published_sizes_are_met() {
    // Billions of parameters and GB as published, two decimals.
    let published = [
        ("gemma-4-31B", "31.27", "62.55"),
        ("gemma-4-26B-A4B", "25.81", "51.61"),
        ("gemma-4-12B", "11.96", "23.92"),
        ("gemma-4-E4B", "8.00", "15.99"),
        ("gemma-4-E2B", "5.12", "10.25"),
    ];
    for (name, parameters, bytes) in published {
        let (n, b) = totals(&tensors(name));
        assert_eq!(format!("{:.2}", n as f64 / 1e9), parameters, "{name}");
        assert_eq!(format!("{:.2}", b as f64 / 1e9), bytes, "{name}");
    }
}

#[test]
fn the_31b_has_ten_full_layers_that_take_values_from_keys() {
    let spec = model("gemma-4-31B").spec;
    assert_eq!((spec.family, spec.text.layers.len()), ("gemma4", 60));
    let full: Vec<usize> =
        (0..60).filter(|&n| spec.text.layers[n].attention.kind == AttentionKind::Full).collect();
    assert_eq!(full, [5, 11, 17, 23, 29, 35, 41, 47, 53, 59]);
    let (s, f) = (&spec.text.layers[0].attention, &spec.text.layers[5].attention);
    assert_eq!((s.window(), f.window()), (Some(1024), None));
    assert_eq!((s.q_heads, s.kv_heads, s.head_dim), (32, 16, 256));
    assert_eq!((f.q_heads, f.kv_heads, f.head_dim), (32, 4, 512));
    assert_eq!((s.values, f.values), (ValueSource::Projection, ValueSource::Keys));
    assert_eq!((s.scale, f.scale, s.qk_norm, s.v_norm), (1.0, 1.0, true, true));
    assert_eq!((s.rope.theta, s.rope.rotary_dims), (1e4, 256));
    assert_eq!(s.rope.scaling, RopeScaling::Default);
    // 64 of 256 angles turn: 0.25 of the head.
    assert_eq!((f.rope.theta, f.rope.rotary_dims), (1e6, 128));
    assert_eq!(f.rope.scaling, RopeScaling::Proportional { factor: 1.0 });
    let t = &spec.text;
    assert_eq!((t.logit_softcap, t.attention_softcap), (Some(30.0), None));
    assert_eq!((t.tied_head, t.norm.one_plus, t.norm.eps), (true, false, 1e-6));
    assert_eq!(t.embedding_scale, 5376f64.sqrt());
    assert_eq!(t.image_attention, ImageAttention::SlidingWindowed);
    assert_eq!((spec.tokens.eos.as_slice(), spec.tokens.image), (&[1, 106][..], Some(258_880)));
    assert_eq!(spec.tokens.end_audio, Some(258_883));
    assert!(spec.audio.is_none());
    let Some(VisionSpec::Tower(v)) = &spec.vision else { panic!("a tower") };
    assert_eq!((v.layers, v.hidden_size, v.q_heads, v.head_dim), (27, 1152, 16, 72));
    assert_eq!((v.standardize, v.clipped_linears, v.soft_tokens), (true, false, 280));
}

#[test]
fn experts_of_the_26b_are_sliced_out_of_stacks_gate_and_up_together() {
    let model = model("gemma-4-26B-A4B");
    let moe = model.spec.text.layers[29].moe.expect("experts");
    assert_eq!((moe.experts, moe.top_k, moe.width), (128, 8, 704));
    assert_eq!(model.spec.text.layers[29].mlp.expect("beside").width, 2112);
    let w = model.table.get("blk.7.ffn_gate_up_exps.127.weight").expect("expert");
    assert_eq!(w.shape, Shape::from([1408, 2816]));
    assert_eq!((w.class, w.layer, w.expert, w.slot), (Class::Expert, 7, 127, 0));
    assert_eq!(w.parts.len(), 1);
    assert_eq!(w.parts[0].tensor, "model.language_model.layers.7.experts.gate_up_proj");
    assert_eq!(w.parts[0].index, Some(127));
    let down = model.table.get("blk.7.ffn_down_exps.127.weight").expect("expert");
    assert_eq!((down.slot, down.shape.clone()), (1, Shape::from([2816, 704])));
    let router = model.table.get("blk.7.ffn_gate_inp.scale").expect("router scale");
    assert_eq!((router.class, router.shape.clone()), (Class::Router, Shape::from([2816])));
    let scale = model.table.get("blk.7.ffn_down_exps.scale").expect("expert scale");
    assert_eq!((scale.class, scale.expert), (Class::Router, -1));
}

#[test]
fn e_models_share_keys_and_leave_the_redundant_tensors_out() {
    let e2b = model("gemma-4-E2B");
    let layers = &e2b.spec.text.layers;
    assert!((0..15).all(|n| layers[n].attention.kv == KvSource::Own && layers[n].caches()));
    for (n, layer) in layers.iter().enumerate().skip(15) {
        let source = if layer.attention.window().is_none() { 14 } else { 13 };
        assert_eq!(layer.attention.kv, KvSource::Layer(source), "layer {n}");
        assert_eq!(layer.mlp.expect("dense").width, 12288);
    }
    assert_eq!(layers[14].mlp.expect("dense").width, 6144);
    let unused = &e2b.table.unused;
    assert_eq!(unused.len(), 3 * 20);
    assert_eq!(unused[0].0, "model.language_model.layers.15.self_attn.k_norm.weight");
    assert_eq!(unused[0].1, "layer 15 reads the keys and values of layer 13");
    assert!(e2b.table.get("blk.15.attn_k.weight").is_none());
    let ple = e2b.spec.text.per_layer_input.expect("per-layer inputs");
    assert_eq!((ple.width, ple.vocab_size), (256, 262_144));
    let table = e2b.table.get("per_layer_token_embd.weight").expect("table");
    assert_eq!(table.shape, Shape::from([262_144, 35 * 256]));
    assert_eq!(table.class, Class::Embedding);
    assert_eq!(e2b.spec.text.image_attention, ImageAttention::Causal);

    let e4b = model("gemma-4-E4B").spec;
    assert_eq!(e4b.text.layers[24].attention.kv, KvSource::Layer(22));
    assert_eq!(e4b.text.layers[41].attention.kv, KvSource::Layer(23));
    assert_eq!(e4b.text.layers[41].mlp.expect("dense").width, 10240);
    let Some(AudioSpec::Tower(a)) = &e4b.audio else { panic!("a conformer") };
    assert_eq!(
        (a.layers, a.hidden_size, a.conv_channels, a.context_left),
        (12, 1024, [128, 32], 13)
    );
}

#[test]
fn clipping_bounds_may_be_infinite_and_read_as_one_element() {
    let table = model("gemma-4-E2B").table;
    let bounds: Vec<_> = table.weights.iter().filter(|w| w.may_be_infinite).collect();
    // 7 linears in 16 vision layers, 10 in 12 audio layers, 4 bounds each.
    assert_eq!(bounds.len(), 4 * (7 * 16 + 10 * 12));
    assert!(bounds.iter().all(|w| w.shape == Shape::from([1]) && w.class == Class::Other));
    assert!(bounds.iter().all(|w| w.name.ends_with("_min") || w.name.ends_with("_max")));
    assert!(table.get("vision.blk.0.attn_q.input_min").is_some());
    let clipped = table.get("vision.blk.0.attn_q.weight").expect("weight");
    assert_eq!((clipped.fused_set.clone(), clipped.class), (None, Class::Linear));
}

#[test]
fn the_unified_12b_embeds_patches_and_samples() {
    let model = model("gemma-4-12B");
    let Some(VisionSpec::Embedder(v)) = &model.spec.vision else { panic!("an embedder") };
    assert_eq!((v.patch_size * v.pooling, v.width, v.position_table), (48, 3840, 1120));
    let Some(AudioSpec::Embedder { samples, projector }) = &model.spec.audio else {
        panic!("an embedder")
    };
    assert_eq!((*samples, projector.inputs, projector.outputs), (640, 640, 3840));
    assert_eq!(model.spec.text.image_attention, ImageAttention::Everywhere);
    let patch = model.table.get("vision.patch_embd.weight").expect("patches");
    assert_eq!((patch.tower, patch.layer), (Tower::Vision, -1));
    assert_eq!(patch.shape, Shape::from([3840, 6912]));
    let mm = model.table.get("mm.audio.weight").expect("projector");
    assert_eq!((mm.tower, mm.class), (Tower::Projector, Class::Linear));
}

#[test]
fn fused_sets_hold_what_an_engine_reads_together() {
    let table = model("gemma-4-31B").table;
    let members = |set: &str| -> Vec<&str> {
        table
            .weights
            .iter()
            .filter(|w| w.fused_set.as_deref() == Some(set))
            .map(|w| w.name.as_str())
            .collect()
    };
    assert_eq!(
        members("blk.0.attn_qkv"),
        ["blk.0.attn_k.weight", "blk.0.attn_q.weight", "blk.0.attn_v.weight"]
    );
    assert_eq!(members("blk.5.attn_qkv"), ["blk.5.attn_k.weight", "blk.5.attn_q.weight"]);
    assert_eq!(members("blk.5.ffn_gate_up"), ["blk.5.ffn_gate.weight", "blk.5.ffn_up.weight"]);
    assert_eq!(
        members("vision.blk.3.ffn_gate_up"),
        ["vision.blk.3.ffn_gate.weight", "vision.blk.3.ffn_up.weight"]
    );
}

#[test]
fn a_draft_head_is_named_draft_and_fits_its_own_target_only() {
    let sizes = ["31B", "26B-A4B", "12B", "E4B", "E2B"];
    let drafts = sizes.map(|s| model(&format!("gemma-4-{s}-it-assistant")));
    for (size, draft) in sizes.iter().zip(&drafts) {
        assert!(
            draft.table.weights.iter().all(|w| {
                w.name.starts_with("draft.") && w.tower == Tower::Draft && w.layer == -1
            })
        );
        let head = draft.table.get("draft.output.weight").expect("head");
        assert_eq!((head.class, head.tied_to.as_deref()), (Class::LmHead, None));
        let embedding = draft.table.get("draft.token_embd.weight").expect("embedding");
        assert_eq!(embedding.tied_to.as_deref(), Some("draft.output.weight"));
        assert!(embedding.is_alias(), "nothing reads it by row");
        assert!(draft.spec.text.layers.iter().all(|l| l.attention.kv == KvSource::Target));
        let ordered = draft.spec.draft.expect("draft").ordered;
        assert_eq!(ordered.is_some(), size.starts_with('E'), "{size}");
        if ordered.is_some() {
            let order = draft.table.get("draft.masked_embd_ordering").expect("ordering");
            assert_eq!((order.dtype, order.class), (DType::I64, Class::Other));
            let c = draft.table.get("draft.masked_embd_centroids.weight").expect("centroids");
            assert_eq!((c.class, c.shape.clone()), (Class::Linear, Shape::from([2048, 256])));
        }
    }
    for (i, size) in sizes.iter().enumerate() {
        let target = model(&format!("gemma-4-{size}")).spec;
        for (j, draft) in drafts.iter().enumerate() {
            let fits = draft_mismatches(&target, &draft.spec).is_empty();
            assert_eq!(fits, i == j, "{size} with the draft of {}", sizes[j]);
        }
    }
    let target = model("gemma-4-E4B").spec;
    let problems: Vec<String> = draft_mismatches(&target, &drafts[4].spec)
        .into_vec()
        .into_iter()
        .map(|p| p.message)
        .collect();
    assert_eq!(
        problems,
        [
            "the draft head expects hidden size 1536, the model has 2560",
            "the draft head expects key heads of sliding layers 1, the model has 2",
            "the draft head expects key heads of full layers 1, the model has 2",
        ]
    );
    assert_eq!(draft_mismatches(&target, &target).into_vec().len(), 1);
}
