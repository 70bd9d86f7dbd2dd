//! Resolution: which rule decides which weight, and what is refused.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;
use radpack::diag::{Failure, FailureKind, SourceText, Style, render_warning};
use radpack::model::{Class, Part, Tower, Weight, WeightTable};
use radpack::recipe::{self, Assignment, Fate, Method, Recipe, Tail};
use radpack::tensor::{DType, Shape};

fn parse(text: &str) -> Recipe {
    let source = Arc::new(SourceText { name: "mine.toml".into(), text: text.into() });
    Recipe::parse(source).unwrap_or_else(|failure| panic!("{failure}"))
}

/// A recipe of these rules, each the body of a `[[quantize]]`.
fn rules(bodies: &[&str]) -> Recipe {
    let rules: Vec<String> = bodies.iter().map(|body| format!("[[quantize]]\n{body}\n")).collect();
    parse(&format!("schema = 1\nname = \"mine\"\n{}", rules.concat()))
}

fn weight(name: &str, tensor: &str, class: Class, shape: &[u64]) -> Weight {
    Weight {
        name: name.into(),
        tower: Tower::Text,
        class,
        layer: -1,
        expert: -1,
        slot: 0,
        dtype: DType::BF16,
        shape: Shape::from(shape),
        parts: vec![Part { tensor: tensor.into(), index: None }],
        tied_to: None,
        fused_set: None,
        may_be_infinite: false,
    }
}

/// A model of two layers with a tied head, a router, stacked experts and an image encoder; 576 columns.
fn model() -> WeightTable {
    let mut weights = Vec::new();
    let embedding = "model.language_model.embed_tokens.weight";
    weights.push(weight("token_embd.weight", embedding, Class::Embedding, &[1000, 576]));
    weights.push(Weight {
        tied_to: Some("token_embd.weight".into()),
        ..weight("output.weight", embedding, Class::LmHead, &[1000, 576])
    });
    weights.push(weight(
        "output_norm.weight",
        "model.language_model.norm.weight",
        Class::Norm,
        &[576],
    ));
    for layer in 0..2 {
        let at = |class, name: String, tensor: String, shape: &[u64]| Weight {
            layer,
            ..weight(
                &format!("blk.{layer}.{name}"),
                &format!("model.language_model.layers.{layer}.{tensor}"),
                class,
                shape,
            )
        };
        for (short, rows) in [("q", 576), ("k", 192), ("v", 192)] {
            weights.push(Weight {
                fused_set: Some(format!("blk.{layer}.attn_qkv")),
                ..at(
                    Class::Linear,
                    format!("attn_{short}.weight"),
                    format!("self_attn.{short}_proj.weight"),
                    &[rows, 576],
                )
            });
        }
        weights.push(at(
            Class::Linear,
            "attn_output.weight".into(),
            "self_attn.o_proj.weight".into(),
            &[576, 576],
        ));
        weights.push(at(
            Class::Norm,
            "attn_norm.weight".into(),
            "input_layernorm.weight".into(),
            &[576],
        ));
        weights.push(at(
            Class::Router,
            "ffn_gate_inp.weight".into(),
            "mlp.gate.weight".into(),
            &[4, 576],
        ));
        for expert in 0..4i32 {
            weights.push(Weight {
                expert,
                parts: vec![Part {
                    tensor: format!("model.language_model.layers.{layer}.mlp.experts.down_proj"),
                    index: Some(expert as u64),
                }],
                ..at(
                    Class::Expert,
                    format!("ffn_down_exps.{expert}.weight"),
                    String::new(),
                    &[576, 1536],
                )
            });
            let part = |which: &str| Part {
                tensor: format!(
                    "model.language_model.layers.{layer}.mlp.experts.{expert}.{which}_proj.weight"
                ),
                index: None,
            };
            weights.push(Weight {
                expert,
                slot: 1,
                parts: vec![part("gate"), part("up")],
                ..at(
                    Class::Expert,
                    format!("ffn_gate_up_exps.{expert}.weight"),
                    String::new(),
                    &[3072, 576],
                )
            });
        }
    }
    weights.push(Weight {
        tower: Tower::Vision,
        ..weight(
            "vision.blk.0.attn_q.weight",
            "model.vision_tower.layers.0.q_proj.weight",
            Class::Linear,
            &[1152, 1152],
        )
    });
    weights.push(Weight {
        tower: Tower::Vision,
        dtype: DType::I64,
        ..weight("vision.position_ids", "model.vision_tower.position_ids", Class::Other, &[1, 64])
    });
    let mut table = WeightTable { weights, unused: Vec::new() };
    table.sort();
    table
}

fn resolve(recipe: &Recipe, table: &WeightTable) -> Assignment {
    recipe.resolve(table, "tiny").unwrap_or_else(|failure| panic!("{failure}"))
}

fn refused(recipe: &Recipe, table: &WeightTable) -> Failure {
    let failure = recipe.resolve(table, "tiny").expect_err("does not fit");
    assert_eq!(failure.kind, FailureKind::Refused);
    failure
}

/// Rule and encoding of a weight.
fn decision(
    table: &WeightTable,
    assignment: &Assignment,
    name: &str,
) -> (Option<usize>, String, Fate) {
    let index =
        table.weights.iter().position(|w| w.name == name).unwrap_or_else(|| panic!("{name}"));
    let assigned = &assignment.weights[index];
    assert_eq!(assigned.weight, index);
    (assigned.rule, assigned.encoding_name.to_string(), assigned.fate)
}

#[test]
fn the_first_rule_whose_selectors_all_match_decides() {
    let table = model();
    let recipe = rules(&[
        "match = \"*.language_model.layers.0.*\"\nclass = \"linear\"\nencoding = \"f32\"",
        "match = '*_proj.weight'\ntower = \"text\"\nclass = [\"linear\", \"expert\"]\nencoding = \"int8-g64\"",
        "tower = \"text\"\nclass = \"expert\"\nencoding = \"int8-channel\"",
    ]);
    let a = resolve(&recipe, &table);
    let of = |name: &str| decision(&table, &a, name);
    assert_eq!(of("blk.0.attn_q.weight"), (Some(0), "f32".into(), Fate::Stored));
    assert_eq!(of("blk.1.attn_q.weight"), (Some(1), "int8-g64".into(), Fate::Stored));
    assert_eq!(of("blk.0.ffn_gate_up_exps.3.weight"), (Some(1), "int8-g64".into(), Fate::Stored));
    assert_eq!(of("blk.0.ffn_down_exps.3.weight"), (Some(2), "int8-channel".into(), Fate::Stored));
    assert_eq!(of("vision.blk.0.attn_q.weight"), (None, "bf16".into(), Fate::Stored));
    assert_eq!(of("vision.position_ids"), (None, "i64".into(), Fate::Stored));
    assert_eq!(of("blk.0.attn_norm.weight"), (None, "bf16".into(), Fate::Stored));
    assert_eq!(a.rules.iter().map(|r| r.hits).collect::<Vec<_>>(), [4, 12, 8]);
    assert_eq!(a.kept_dtypes, [DType::BF16, DType::I64]);
    assert_eq!(a.rules[1].pattern_names, [4 * 2 + 8 * 2 + 1]);
}

#[test]
fn sums_count_what_is_stored() {
    let table = model();
    let a = resolve(
        &rules(&["class = \"linear\"\ntower = \"text\"\nencoding = \"int8-g128\""]),
        &table,
    );
    // Rows of q, k, v and o over two layers; 576 columns are 4.5 groups, five scales.
    let rows: u64 = 2 * (576 + 192 + 192 + 576);
    assert_eq!(a.rules[0].stored.weights, 8);
    assert_eq!(a.rules[0].stored.elements, rows * 576);
    assert_eq!(a.rules[0].stored.source_bytes, rows * 576 * 2);
    assert_eq!(a.rules[0].stored.stored_bytes, rows * (576 + 5 * 2));
    let bits = a.rules[0].stored.bits_per_weight();
    assert!((bits - 8.0 * 586.0 / 576.0).abs() < 1e-12, "{bits}");
    assert_eq!(a.total.weights, table.weights.len() as u64 - 1, "the head repeats the embedding");
    assert_eq!(a.total.weights, a.kept.weights + 8);
    assert_eq!(a.total.stored_bytes, a.kept.stored_bytes + a.rules[0].stored.stored_bytes);
    assert_eq!(a.tails, [Tail { cols: 576, group: 128, tail: 64, weights: 8 }]);
    assert_eq!(a.stored(&table).count() as u64, a.total.weights);
}

#[test]
fn a_tied_head_is_stored_only_in_an_encoding_of_its_own() {
    let table = model();
    let head = |bodies: &[&str]| {
        let a = resolve(&rules(bodies), &table);
        let base = table.weights.iter().position(|w| w.name == "token_embd.weight").expect("there");
        let (rule, encoding, fate) = decision(&table, &a, "output.weight");
        assert!(matches!(fate, Fate::Stored) || fate == Fate::Repeats(base));
        (rule, encoding, fate == Fate::Stored, a.total.source_bytes)
    };
    let (.., whole) = head(&[]);
    assert_eq!(head(&[]), (None, "bf16".into(), false, whole));
    // Under its own name, any leading part of the embedding's name, its class, and the embedding's name.
    for selector in [
        "match = \"lm_head.weight\"",
        "match = \"model.language_model.lm_head.weight\"",
        "match = 're:.*lm_head\\.weight'",
        "class = \"lm_head\"",
    ] {
        let body = format!("{selector}\nencoding = \"int8-g64\"");
        assert_eq!(head(&[&body]), (Some(0), "int8-g64".into(), true, whole), "{selector}");
    }
    let both = "match = \"*.embed_tokens.weight\"\nencoding = \"int8-g64\"";
    assert_eq!(head(&[both]), (Some(0), "int8-g64".into(), false, whole));
    let apart = ["class = \"lm_head\"\nencoding = \"keep\"", both];
    assert_eq!(head(&apart), (Some(0), "bf16".into(), true, whole));
    let same = [
        "class = \"lm_head\"\nencoding = \"int8-g64\"",
        "class = \"embedding\"\nencoding = { codes = \"i8\", group = 64 }",
    ];
    assert_eq!(head(&same), (Some(0), "int8-g64".into(), false, whole));
    // A cast to the type it has is no other encoding.
    assert_eq!(
        head(&["class = \"lm_head\"\nencoding = \"bf16\""]),
        (Some(0), "bf16".into(), false, whole)
    );
}

#[test]
fn fused_sets_share_the_upper_scale_unless_told_otherwise() {
    let table = model();
    let linear = "tower = \"text\"\nclass = \"linear\"\nencoding = \"nvfp4\"";
    let a = resolve(&rules(&[linear]), &table);
    let sets: Vec<(&str, usize)> =
        a.shares.iter().map(|s| (s.set.as_str(), s.members.len())).collect();
    assert_eq!(sets, [("blk.0.attn_qkv", 3), ("blk.1.attn_qkv", 3)]);
    for (id, share) in a.shares.iter().enumerate() {
        for &member in &share.members {
            assert_eq!(a.weights[member].share, Some(id));
            assert_eq!(table.weights[member].fused_set.as_deref(), Some(share.set.as_str()));
        }
    }
    assert_eq!(a.weights.iter().filter(|w| w.share.is_some()).count(), 6);
    assert!(a.warnings.is_empty());

    assert!(
        resolve(&rules(&[&format!("{linear}\nshare_scale = false")]), &table).shares.is_empty()
    );
    for one_level in ["int8-g64", "fp8-tensor", "mxfp4"] {
        let body = format!("tower = \"text\"\nclass = \"linear\"\nencoding = \"{one_level}\"");
        assert!(resolve(&rules(&[&body]), &table).shares.is_empty(), "{one_level}");
    }
    // q stays out; k and v go on sharing, with a warning.
    let a = resolve(&rules(&["match = \"*.q_proj.weight\"\nencoding = \"bf16\"", linear]), &table);
    assert_eq!(a.shares.iter().map(|s| s.members.len()).collect::<Vec<_>>(), [2, 2]);
    insta::assert_snapshot!(render_warning(&a.warnings[0], Style::plain()), @r#"
    warning: recipe: 2 sets that engines read fused have members of different encodings: blk.0.attn_qkv
        and blk.1.attn_qkv
        = give q, k and v, and gate and up, one encoding, unless the engine reads them apart
    "#);
}

#[test]
fn towers_left_out_are_not_stored_and_need_no_rule() {
    let mut table = model();
    for weight in &mut table.weights {
        if weight.name == "vision.position_ids" {
            weight.dtype = DType::U64;
        }
    }
    let mut recipe = rules(&["class = \"linear\"\nencoding = \"int8-g64\""]);
    assert_eq!(refused(&recipe, &table).problems.len(), 1, "u64 cannot be kept");
    recipe.set("towers.vision=false").expect("a setting");
    let a = resolve(&recipe, &table);
    assert_eq!(a.left_out, 2);
    assert_eq!(decision(&table, &a, "vision.blk.0.attn_q.weight").2, Fate::LeftOut);
    assert_eq!(a.rules[0].hits, 8);
    let recipe = parse(
        "schema = 1\n[[quantize]]\ntower = \"vision\"\nencoding = \"f32\"\n[towers]\nvision = false\n",
    );
    insta::assert_snapshot!(refused(&recipe, &table), @r#"
    error: tiny does not fit this recipe  [exit 3]

      recipe: rule 1 decides no weight: it selects 2 weights, none of which is stored
         --> mine.toml:2:1
          |
        2 | [[quantize]]
          | ^^^^^^^^^^^^
        = [towers] leaves out 2
        = optional = true lets a rule decide nothing

    1 problem
    "#);
}

#[test]
fn rules_that_decide_nothing_say_what_each_selector_hits_and_what_was_meant() {
    let table = model();
    let recipe = rules(&[
        "match = \"*.{q,k,v}_prj.weight\"\nencoding = \"int8-g64\"",
        "match = \"lm_head\"\nencoding = \"int8-g64\"",
        "match = \"model.language_model.layers.1.self_atn.q_proj.weight\"\nencoding = \"int8-g64\"",
        "match = 're:mlp\\.gate\\.weight'\nencoding = \"int8-g64\"",
        "match = \"*_proj.weight\"\ntower = \"audio\"\nencoding = \"int8-g64\"",
        "match = \"*.q_proj.weight\"\nclass = \"embedding\"\nencoding = \"int8-g64\"",
        "match = \"transformer.h.*\"\nencoding = \"int8-g64\"",
        "match = \"nothing\"\nencoding = \"int8-g64\"\noptional = true",
    ]);
    insta::assert_snapshot!(refused(&recipe, &table), @r#"
    error: tiny does not fit the recipe mine  [exit 3]

      recipe: rule 1 decides no weight: none meets all its selectors
         --> mine.toml:4:9
          |
        4 | match = "*.{q,k,v}_prj.weight"
          |         ^^^^^^^^^^^^^^^^^^^^^^
        = `match` alone selects 0 of 33 weights
        = nearest names: model.language_model.layers.0.self_attn.k_proj.weight,
          model.language_model.layers.0.self_attn.q_proj.weight and
          model.language_model.layers.0.self_attn.v_proj.weight
        = optional = true lets a rule decide nothing
      recipe: rule 2 decides no weight: none meets all its selectors
         --> mine.toml:7:9
          |
        7 | match = "lm_head"
          |         ^^^^^^^^^
        = `match` alone selects 0 of 33 weights
        = a pattern covers the whole name: `lm_head.weight` would match 1 name
        = optional = true lets a rule decide nothing
      recipe: rule 3 decides no weight: none meets all its selectors
          --> mine.toml:10:9
           |
        10 | match = "model.language_model.layers.1.self_atn.q_proj.weight"
           |         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        = `match` alone selects 0 of 33 weights
        = nearest names: model.language_model.layers.1.self_attn.q_proj.weight,
          model.language_model.layers.1.self_attn.k_proj.weight and
          model.language_model.layers.1.self_attn.o_proj.weight
        = optional = true lets a rule decide nothing
      recipe: rule 4 decides no weight: none meets all its selectors
          --> mine.toml:13:9
           |
        13 | match = 're:mlp\.gate\.weight'
           |         ^^^^^^^^^^^^^^^^^^^^^^
        = `match` alone selects 0 of 33 weights
        = a pattern covers the whole name: `re:.*mlp\.gate\.weight` would match 2 names
        = optional = true lets a rule decide nothing
      recipe: rule 5 decides no weight: none meets all its selectors
          --> mine.toml:16:9
           |
        16 | match = "*_proj.weight"
           |         ^^^^^^^^^^^^^^^
        = `match` alone selects 17 of 33 weights
        = tower audio alone selects 0 of 33 weights
        = towers of this model: text and vision
        = optional = true lets a rule decide nothing
      recipe: rule 6 decides no weight: none meets all its selectors
          --> mine.toml:20:9
           |
        20 | match = "*.q_proj.weight"
           |         ^^^^^^^^^^^^^^^^^
        = `match` alone selects 3 of 33 weights
        = class embedding alone selects 1 of 33 weights
        = model.vision_tower.layers.0.q_proj.weight is class linear of tower vision
        = optional = true lets a rule decide nothing
      recipe: rule 7 decides no weight: none meets all its selectors
          --> mine.toml:24:9
           |
        24 | match = "transformer.h.*"
           |         ^^^^^^^^^^^^^^^^^
        = `match` alone selects 0 of 33 weights
        = names here look like lm_head.weight, model.language_model.embed_tokens.weight and
          model.language_model.layers.0.input_layernorm.weight
        = optional = true lets a rule decide nothing

    7 problems
    "#);
}

#[test]
fn a_rule_behind_an_earlier_one_is_told_which() {
    let table = model();
    let recipe = rules(&[
        "match = \"*.layers.0.*\"\nclass = \"linear\"\nencoding = \"int8-g64\"",
        "tower = \"text\"\nclass = \"linear\"\nencoding = \"int8-g64\"",
        "match = \"*.k_proj.weight\"\nencoding = \"bf16\"",
    ]);
    insta::assert_snapshot!(refused(&recipe, &table), @r#"
    error: tiny does not fit the recipe mine  [exit 3]

      recipe: rule 3 decides no weight: it selects 2 weights, all taken before
          --> mine.toml:12:9
           |
        12 | match = "*.k_proj.weight"
           |         ^^^^^^^^^^^^^^^^^
        = rule 1 (*.layers.0.*, linear) takes 1
        = rule 2 (linear of text) takes 1
        = the first rule that selects a weight decides: put rule 3 before rule 1
        = optional = true lets a rule decide nothing

    1 problem
    "#);
}

#[test]
fn weights_that_cannot_take_their_encoding_are_refused_together() {
    let mut table = model();
    table.weights.push(Weight {
        dtype: DType::F64,
        ..weight("a.weight", "model.a.weight", Class::Other, &[4, 4])
    });
    table.weights.push(Weight {
        dtype: DType::U64,
        ..weight("b.weight", "model.b.weight", Class::Other, &[4, 4])
    });
    table.weights.push(Weight {
        dtype: DType::F4E2M1,
        ..weight("c.weight", "model.c.weight", Class::Other, &[4, 3])
    });
    table.weights.push(weight("d.weight", "model.d.weight", Class::Other, &[1, 1, 1, 1, 1, 1, 4]));
    table.weights.push(weight("e.weight", "model.e.weight", Class::Other, &[u64::MAX, 2]));
    table.weights.push(weight("f.weight", "model.layers.0.f_proj.weight", Class::Linear, &[0, 4]));
    let recipe = rules(&[
        "match = [\"*proj*\", \"*norm*\", \"*.gate.weight\"]\nencoding = \"int8-g64\"",
        "match = \"*position_ids\"\nencoding = \"f32\"",
    ]);
    insta::assert_snapshot!(refused(&recipe, &table), @r#"
    error: tiny does not fit the recipe mine  [exit 3]

      recipe: weights model.language_model.norm.weight,
        model.language_model.layers.0.input_layernorm.weight and
        model.language_model.layers.1.input_layernorm.weight are of rank 1, and int8-g64 needs rows and
        columns (rank 2 or more)
         --> mine.toml:5:12
          |
        5 | encoding = "int8-g64"
          |            ^^^^^^^^^^ given by rule 1
        = narrow rule 1, e.g. with class = "linear"
        = a rule before rule 1 that selects them with encoding = "keep" leaves them as they are
      recipe: weights model.language_model.layers.0.mlp.gate.weight and
        model.language_model.layers.1.mlp.gate.weight choose between experts, and rule 1 would store
        them as int8-g64 along with other classes
         --> mine.toml:5:12
          |
        5 | encoding = "int8-g64"
          |            ^^^^^^^^^^ given by rule 1
        = routers are kept by every published recipe: class = "expert" or "linear" leaves them out
        = a rule of their own, class = "router", quantizes them if you mean it
      recipe: weight model.layers.0.f_proj.weight has no elements to quantize
         --> mine.toml:5:12
          |
        5 | encoding = "int8-g64"
          |            ^^^^^^^^^^ given by rule 1
        = a rule before rule 1 that selects them with encoding = "keep" leaves them as they are
      recipe: weight model.vision_tower.position_ids holds values of type i64, and f32 rounds
        floating-point values of whole bytes
         --> mine.toml:8:12
          |
        8 | encoding = "f32"
          |            ^^^^^ given by rule 2
        = narrow rule 2 by name or class
        = a rule before rule 2 that selects them with encoding = "keep" leaves them as they are
      recipe: weight model.a.weight: a .rad file has no type f64 to keep it in
        = a rule with encoding = "f32" stores it rounded to single precision
      recipe: weight model.b.weight: a .rad file has no type u64 to keep it in
        = no encoding stores it; convert or drop the tensor in the checkpoint
      recipe: weight model.c.weight: rows of fp4_e2m1 end inside a byte, and rows of a .rad file start
        on bytes
        = convert the tensor in the checkpoint to a type of whole bytes
      recipe: weight model.d.weight: 7 dimensions; a .rad entry has at most 6
        = reshape the tensor in the checkpoint
      recipe: weight model.e.weight: its size does not fit in 64 bits
        = the shape in the checkpoint's header is damaged

    9 problems
    "#);
}

#[test]
fn a_router_is_quantized_only_by_a_rule_of_its_own() {
    let table = model();
    let mixed = rules(&["class = [\"expert\", \"router\"]\nencoding = \"int8-g64\""]);
    assert!(
        refused(&mixed, &table).problems[0].message.contains("rule 1 would store them as int8-g64")
    );
    let own = rules(&["class = \"router\"\nencoding = \"int8-g64\""]);
    assert_eq!(resolve(&own, &table).rules[0].hits, 2);
    let cast = rules(&["match = \"*\"\nclass = [\"router\", \"expert\"]\nencoding = \"f32\""]);
    assert_eq!(resolve(&cast, &table).rules[0].hits, 18);
}

#[test]
fn a_type_the_container_lacks_is_stored_through_f32() {
    let table = WeightTable {
        weights: vec![Weight {
            dtype: DType::F64,
            ..weight("a.weight", "a.weight", Class::Linear, &[4, 4])
        }],
        unused: Vec::new(),
    };
    assert_eq!(refused(&rules(&[]), &table).problems.len(), 1);
    let a = resolve(&rules(&["match = \"*\"\nencoding = \"f32\""]), &table);
    assert_eq!(*a.weights[0].method, Method::Cast(DType::F32));
    assert_eq!(a.total.source_bytes, 128);
    assert_eq!(a.total.stored_bytes, 64);
}

#[test]
fn short_groups_are_refused_where_whole_ones_are_asked_for() {
    let table = model();
    let body = "tower = \"text\"\nclass = [\"linear\", \"expert\"]\nencoding = \"int8-g128\"";
    assert_eq!(
        resolve(&rules(&[body]), &table).tails,
        [Tail { cols: 576, group: 128, tail: 64, weights: 16 }]
    );
    let mut recipe = rules(&[body]);
    recipe.set("whole_groups=true").expect("a setting");
    insta::assert_snapshot!(refused(&recipe, &table), @r#"
    error: tiny does not fit the recipe mine  [exit 3]

      recipe: 16 weights (model.language_model.layers.0.self_attn.k_proj.weight,
        model.language_model.layers.0.self_attn.o_proj.weight,
        model.language_model.layers.0.self_attn.q_proj.weight, …): 576 columns are no whole number of
        groups of 128 (the last group has 64)
         --> mine.toml:6:12
          |
        6 | encoding = "int8-g128"
          |            ^^^^^^^^^^^ groups of this encoding
        = group sizes that fit 576 columns: 32 and 64 (int8-g64 and int8-g32)
        = spelled out, groups of 8, 9, 12, 16, 18, 24, 36, 48, 72, 96, 144, 192 and 1 more fit as well
        = one scale a row takes any length, and so does whole_groups = false in rule 1

    1 problem
    "#);
    // A rule has the last word.
    let mut recipe = rules(&[&format!("{body}\nwhole_groups = false")]);
    recipe.set("whole_groups=true").expect("a setting");
    assert_eq!(resolve(&recipe, &table).tails.len(), 1);
    let recipe = rules(&[&format!("{}\nwhole_groups = true", body.replace("g128", "g64"))]);
    assert!(resolve(&recipe, &table).tails.is_empty());
}

#[test]
fn a_weight_of_several_tensors_is_matched_whole_or_not_at_all() {
    let table = model();
    let recipe = rules(&["match = \"*.experts.*.up_proj.weight\"\nencoding = \"int8-g64\""]);
    insta::assert_snapshot!(refused(&recipe, &table), @r#"
    error: tiny does not fit the recipe mine  [exit 3]

      recipe: rule 1 matches only a part of 8 weights (blk.0.ffn_gate_up_exps.0.weight (2 tensors),
        blk.0.ffn_gate_up_exps.1.weight (2 tensors), blk.0.ffn_gate_up_exps.2.weight (2 tensors), …)
         --> mine.toml:4:9
          |
        4 | match = "*.experts.*.up_proj.weight"
          |         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^ matches some of its tensors
        = matched: model.language_model.layers.0.mlp.experts.0.up_proj.weight; not matched:
          model.language_model.layers.0.mlp.experts.0.gate_proj.weight
        = the tensors are stored as one weight: match all of them or none

    1 problem
    "#);
    let both = rules(&[
        "match = [\"*.experts.*.up_proj.weight\", \"*.experts.*.gate_proj.weight\"]\nencoding = \"int8-g64\"",
    ]);
    assert_eq!(resolve(&both, &table).rules[0].hits, 8);
}

#[test]
fn loose_dots_and_idle_patterns_are_warned_about() {
    let mut table = model();
    table.weights.push(weight(
        "x.weight",
        "model.language_model.layers.0.mlp_gate.weight",
        Class::Linear,
        &[4, 576],
    ));
    let recipe = rules(&[
        "match = ['re:.*mlp.gate.weight', \"*.v_porj.weight\"]\nclass = [\"linear\", \"router\"]\nencoding = \"f32\"",
    ]);
    let a = resolve(&recipe, &table);
    let text: String = a.warnings.iter().map(|w| render_warning(w, Style::plain())).collect();
    insta::assert_snapshot!(text, @r#"
    warning: recipe: `*.v_porj.weight` of rule 1 matches no name
         --> mine.toml:4:34
          |
        4 | match = ['re:.*mlp.gate.weight', "*.v_porj.weight"]
          |                                  ^^^^^^^^^^^^^^^^^
        = nearest names: model.language_model.layers.0.self_attn.v_proj.weight,
          model.language_model.layers.0.self_attn.k_proj.weight and
          model.language_model.layers.0.self_attn.o_proj.weight
    warning: recipe: an unescaped `.` of rule 1 stands for any character and so also matches
        model.language_model.layers.0.mlp_gate.weight
         --> mine.toml:4:10
          |
        4 | match = ['re:.*mlp.gate.weight', "*.v_porj.weight"]
          |          ^^^^^^^^^^^^^^^^^^^^^^
        = 're:.*mlp\.gate\.weight' matches a dot only
    "#);
    let careful = rules(&["match = 're:.*mlp\\.gate\\.weight'\nencoding = \"f32\""]);
    assert!(resolve(&careful, &table).warnings.is_empty());
}

#[test]
fn every_built_in_recipe_fits_a_language_model_and_a_bare_encoder() {
    let table = model();
    let encoder = WeightTable {
        weights: vec![
            Weight {
                dtype: DType::F32,
                ..weight(
                    "e",
                    "encoder.layer.0.attention.self.query.weight",
                    Class::Linear,
                    &[384, 384],
                )
            },
            Weight {
                dtype: DType::F32,
                ..weight("b", "encoder.layer.0.attention.self.query.bias", Class::Other, &[384])
            },
            Weight {
                dtype: DType::F32,
                ..weight("t", "embeddings.word_embeddings.weight", Class::Embedding, &[100, 384])
            },
            Weight {
                dtype: DType::I64,
                ..weight("p", "embeddings.position_ids", Class::Other, &[1, 512])
            },
        ],
        unused: Vec::new(),
    };
    for builtin in recipe::list() {
        let recipe = builtin.recipe().expect("reads");
        let a = resolve(&recipe, &table);
        assert!(a.warnings.is_empty(), "{}", builtin.name);
        assert_eq!(decision(&table, &a, "vision.position_ids").0, None);
        let a = resolve(&recipe, &encoder);
        assert_eq!(a.rules[0].hits, if builtin.name == "bf16" { 2 } else { 1 }, "{}", builtin.name);
    }
}

#[test]
fn hundreds_of_rules_over_ten_thousands_of_names_decide_as_one_by_one() {
    let (recipe, table) = large(40, 4_000);
    let a = resolve(&recipe, &table);
    for (assigned, weight) in a.weights.iter().zip(&table.weights) {
        // Rule i takes layer i, in one of the ways a pattern can be written.
        let layer = weight.layer as usize;
        assert_eq!(assigned.rule, (layer < 40).then_some(layer), "{}", weight.name);
    }
}

/// Rules that each take one layer, written in turn as globs and regular expressions.
fn large(rule_count: usize, names: usize) -> (Recipe, WeightTable) {
    let bodies: Vec<String> = (0..rule_count)
        .map(|i| {
            let pattern = match i % 4 {
                0 => format!("*.layers.{i}.*"),
                1 => format!(r"re:.*\.layers\.{i}\..*"),
                2 => format!("model.layers.{i}.{{mlp,self_attn}}.experts.*.weight"),
                _ => format!("*.layers.{i}.*.[a-z]*_proj.weight"),
            };
            format!("match = '{pattern}'\nencoding = \"int8-g128\"")
        })
        .collect();
    let bodies: Vec<&str> = bodies.iter().map(String::as_str).collect();
    let weights = (0..names)
        .map(|i| {
            let (layer, expert) = (i % (rule_count + 10), i / (rule_count + 10));
            let tensor = format!("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight");
            Weight {
                layer: layer as i32,
                ..weight(&format!("w{i}"), &tensor, Class::Expert, &[256, 256])
            }
        })
        .collect();
    (rules(&bodies), WeightTable { weights, unused: Vec::new() })
}

proptest! {
    #[test]
    fn resolution_decides_every_weight_exactly_once(
        picks in prop::collection::vec(
            (
                prop::option::of(prop::sample::select(vec![
                    "*", "*.weight", "*.layers.0.*", "*_proj*", "re:.*[qk]_proj.*", "lm_head.weight", "*.experts.*",
                ])),
                prop::sample::subsequence(vec!["text", "vision", "audio"], 0..=3),
                prop::sample::subsequence(vec!["linear", "expert", "embedding", "lm_head"], 1..=4),
                prop::sample::select(vec!["keep", "f32", "bf16", "int8-g64", "nvfp4", "fp8-block128"]),
            ),
            0..6,
        ),
    ) {
        let bodies: Vec<String> = picks
            .iter()
            .map(|(pattern, towers, classes, encoding)| {
                let pattern = pattern.map_or(String::new(), |p| format!("match = \"{p}\"\n"));
                let towers = if towers.is_empty() { String::new() } else { format!("tower = {towers:?}\n") };
                format!("{pattern}{towers}class = {classes:?}\nencoding = \"{encoding}\"\noptional = true")
            })
            .collect();
        let bodies: Vec<&str> = bodies.iter().map(String::as_str).collect();
        let (table, recipe) = (model(), rules(&bodies));
        let a = resolve(&recipe, &table);
        prop_assert_eq!(a.weights.len(), table.weights.len());
        let order: Vec<usize> = a.weights.iter().map(|w| w.weight).collect();
        prop_assert_eq!(order, (0..table.weights.len()).collect::<Vec<_>>());
        for (assigned, weight) in a.weights.iter().zip(&table.weights) {
            // No earlier rule selects the weight, and the rule that decided does: by tower and class, and by the
            // patterns, which are checked against the rule alone.
            for (number, rule) in recipe.rules.iter().enumerate() {
                let mut alone = recipe.clone();
                alone.rules = vec![rule.clone()];
                if Some(number) <= assigned.rule || assigned.rule.is_none() {
                    let one = WeightTable { weights: vec![weight.clone()], unused: Vec::new() };
                    let selects = resolve(&alone, &one).weights[0].rule.is_some();
                    prop_assert_eq!(selects, assigned.rule == Some(number), "{} {}", number, weight.name);
                }
            }
        }
        let hits: u64 = a.rules.iter().map(|r| r.hits).sum();
        let undecided = a.weights.iter().filter(|w| w.rule.is_none()).count() as u64;
        prop_assert_eq!(hits + undecided, table.weights.len() as u64);
        let stored: u64 = a.rules.iter().map(|r| r.stored.stored_bytes).sum();
        prop_assert_eq!(stored + a.kept.stored_bytes, a.total.stored_bytes);
        let shared: Vec<usize> = a.shares.iter().flat_map(|s| s.members.clone()).collect();
        prop_assert_eq!(shared.len(), shared.iter().collect::<BTreeSet<_>>().len());
    }
}

#[test]
fn a_rounding_that_does_not_fit_a_weight_is_refused_with_what_would() {
    let mut table = model();
    for weight in &mut table.weights {
        if weight.name == "blk.0.attn_output.weight" {
            weight.dtype = DType::F32;
        }
    }
    let recipe = rules(&[
        "match = \"*.o_proj.weight\"\nencoding = \"int8-channel\"\nrounding = \"compressed-tensors\"",
        "tower = \"text\"\nclass = \"linear\"\nencoding = \"int8-g128\"\nrounding = \"compressed-tensors\"",
    ]);
    let text = refused(&recipe, &table).to_string();
    for line in [
        "weight model.language_model.layers.0.self_attn.o_proj.weight: compressed-tensors gives scales the type",
        "of the weight, which is f32, and the encoding has bf16 scales",
        "spell the encoding out with scale = \"f32\", or take rounding = \"rad\"",
        "576 columns are no whole number of groups of 128",
        "rounding \"compressed-tensors\" has no short groups; rounding \"rad\" has",
    ] {
        let flat = |s: &str| s.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat(&text).contains(&flat(line)), "{line}\n{text}");
    }
}

#[test]
fn weights_that_engines_fuse_share_a_scale_under_every_rounding_and_quantizer() {
    let table = model();
    for how in
        ["rounding = \"compressed-tensors\"", "rounding = \"modelopt\"", "quantizer = \"search\""]
    {
        let recipe =
            rules(&[&format!("tower = \"text\"\nclass = \"linear\"\nencoding = \"nvfp4\"\n{how}")]);
        let a = resolve(&recipe, &table);
        let sets: Vec<(&str, usize)> =
            a.shares.iter().map(|s| (s.set.as_str(), s.members.len())).collect();
        assert_eq!(sets, [("blk.0.attn_qkv", 3), ("blk.1.attn_qkv", 3)], "{how}");
    }
}
