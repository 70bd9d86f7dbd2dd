//! Selectors over logical names and over drafts, vectors kept by rule, and rotations.

use std::sync::Arc;

use radpack::diag::{Failure, FailureKind, SourceText};
use radpack::model::{Class, Origin, Part, Tower, Weight, WeightTable};
use radpack::recipe::{Assignment, Recipe};
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
        origin: Origin::Main,
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
        stored: None,
    }
}

/// Two layers of attention.
fn model() -> WeightTable {
    let mut table = WeightTable::default();
    for layer in 0..2 {
        for (logical, name) in [("q", "q"), ("k", "k"), ("v", "v"), ("output", "o")] {
            table.weights.push(weight(
                &format!("blk.{layer}.attn_{logical}.weight"),
                &format!("model.layers.{layer}.self_attn.{name}_proj.weight"),
                Class::Linear,
                &[64, 64],
            ));
        }
    }
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
fn decision(table: &WeightTable, assignment: &Assignment, name: &str) -> (Option<usize>, String) {
    let index =
        table.weights.iter().position(|w| w.name == name).unwrap_or_else(|| panic!("{name}"));
    let assigned = &assignment.weights[index];
    (assigned.rule, assigned.encoding_name.to_string())
}

#[test]
fn logical_names_select_alone_and_together_with_the_checkpoint_s() {
    let table = model();
    let recipe = rules(&[
        "weight = \"blk.0.attn_{q,k}.weight\"\nmatch = \"*.q_proj.weight\"\nencoding = \"f32\"",
        "weight = [\"blk.0.attn_k.weight\", 're:blk\\.\\d+\\.attn_v\\.weight']\nencoding = \"f16\"",
    ]);
    let a = resolve(&recipe, &table);
    assert_eq!(decision(&table, &a, "blk.0.attn_q.weight").0, Some(0));
    assert_eq!(decision(&table, &a, "blk.0.attn_k.weight").0, Some(1));
    assert_eq!(decision(&table, &a, "blk.0.attn_v.weight").0, Some(1));
    assert_eq!(decision(&table, &a, "blk.0.attn_output.weight").0, None);
    assert_eq!(recipe.rules[0].selects(), "*.q_proj.weight, blk.0.attn_{q,k}.weight");
    assert_eq!(parse(&recipe.to_toml()), recipe);
}

#[test]
fn names_of_the_wrong_kind_are_told_apart() {
    let table = model();
    let failure = refused(&rules(&["match = \"blk.*.attn_q.weight\"\nencoding = \"f32\""]), &table);
    let text = failure.to_string();
    assert!(text.contains("it matches logical names: those are selected by `weight`"), "{text}");
    let failure = refused(&rules(&["weight = \"*.q_proj.weight\"\nencoding = \"f32\""]), &table);
    let text = failure.to_string();
    assert!(
        text.contains("it matches names in the checkpoint: those are selected by `match`"),
        "{text}"
    );
    assert!(text.contains("`weight` alone selects 0 of"), "{text}");
    let failure =
        refused(&rules(&["weight = \"blk.0.attn_p.weight\"\nencoding = \"f32\""]), &table);
    assert!(failure.to_string().contains("nearest names: blk.0.attn_"), "{failure}");
}

#[test]
fn near_misses_are_looked_for_behind_a_number_of_rules() {
    let table = model();
    let told = |n: usize| {
        let bodies: Vec<String> = (0..n)
            .map(|n| format!("weight = \"blk.{n}.attn_p.weight\"\nencoding = \"f32\""))
            .collect();
        let bodies: Vec<&str> = bodies.iter().map(String::as_str).collect();
        refused(&rules(&bodies), &table).to_string().matches("nearest names: ").count()
    };
    assert_eq!([11, 12, 13, 20].map(told), [11, 12, 12, 12]);
}

#[test]
fn vectors_are_kept_where_a_rule_says_so_and_refused_elsewhere() {
    let mut table = model();
    table.weights.push(weight("v.weight", "v.weight", Class::Linear, &[64]));
    table.weights.push(weight("m.weight", "m.weight", Class::Linear, &[2, 64]));
    table.sort();
    let kept = rules(&["weight = \"?.weight\"\nencoding = \"int8-g32\"\nkeep_vectors = true"]);
    let a = resolve(&kept, &table);
    let at = |name: &str| {
        let found = a.weights.iter().find(|a| table.weights[a.weight].name == name);
        let found = found.expect("decided");
        (found.rule, found.encoding_name.to_string())
    };
    assert_eq!(at("v.weight"), (Some(0), "bf16".to_owned()), "the rule has decided it");
    assert_eq!(at("m.weight"), (Some(0), "int8-g32".to_owned()));
    assert_eq!(parse(&kept.to_toml()), kept);
    let failure = refused(&rules(&["weight = \"?.weight\"\nencoding = \"int8-g32\""]), &table);
    assert!(failure.to_string().contains("of rank 1"), "{failure}");
}

#[test]
fn a_rotation_needs_whole_blocks_of_columns() {
    let mut table = model();
    table.weights.push(weight("m.weight", "m.weight", Class::Linear, &[2, 96]));
    table.sort();
    let rotated = |n: u32| {
        let encoding = format!("{{ codes = \"i8\", transform = \"fwht{n}\", clamp = \"sym\" }}");
        rules(&[&format!("weight = \"m.weight\"\nencoding = {encoding}")])
    };
    let a = resolve(&rotated(32), &table);
    let found = a.weights.iter().find(|a| table.weights[a.weight].name == "m.weight");
    let found = found.expect("decided");
    assert_eq!(found.encoding.to_string(), "i8*bf16[1x*]/fwht32");
    assert_eq!(found.method.options(), "block=1x*,clamp=sym,codes=i8,scale=bf16,transform=fwht32");
    assert_eq!(parse(&rotated(32).to_toml()), rotated(32));
    let failure = refused(&rotated(64), &table);
    let text = failure.to_string();
    assert!(text.contains("96 columns are no whole blocks of a rotation over 64"), "{text}");
    assert!(text.contains("fwht32 and narrower powers of two"), "{text}");
}

#[test]
fn tensors_of_one_name_in_model_and_draft_are_decided_apart() {
    let mut table = WeightTable {
        weights: vec![weight("blk.0.attn_q.weight", "model.q.weight", Class::Linear, &[64, 64])],
        unused: Vec::new(),
    };
    let draft = |name: &str, tensor: &str, class| Weight {
        tower: Tower::Draft,
        ..weight(name, tensor, class, &[64, 64])
    };
    let mut of_draft = WeightTable {
        weights: vec![
            draft("draft.blk.0.attn_q.weight", "model.q.weight", Class::Linear),
            draft("draft.output.weight", "model.embed_tokens.weight", Class::LmHead),
            Weight {
                tied_to: Some("draft.output.weight".into()),
                ..draft("draft.token_embd.weight", "model.embed_tokens.weight", Class::Embedding)
            },
        ],
        unused: vec![("model.inv_freq".into(), "follows".into())],
    };
    // Two parts, of which a pattern may match one under either of its names.
    of_draft.weights[0].parts.push(Part { tensor: "model.q2.weight".into(), index: None });
    of_draft.weights[0].shape = Shape::from([128, 64]);
    table.merge_draft(of_draft);
    assert_eq!(table.unused, [("draft.model.inv_freq".to_owned(), "follows".to_owned())]);

    let rule_of = |bodies: &[&str], name: &str| {
        let a = resolve(&rules(bodies), &table);
        let found = a.weights.iter().find(|a| table.weights[a.weight].name == name);
        found.expect("decided").rule
    };
    let (target, q) = ("blk.0.attn_q.weight", "draft.blk.0.attn_q.weight");
    let both = ["match = \"model.q*.weight\"\nencoding = \"f32\""];
    assert_eq!((rule_of(&both, target), rule_of(&both, q)), (Some(0), Some(0)));
    let tower = ["match = \"model.q*.weight\"\ntower = \"draft\"\nencoding = \"f32\""];
    assert_eq!((rule_of(&tower, target), rule_of(&tower, q)), (None, Some(0)));
    let prefix = ["match = \"draft.model.q*.weight\"\nencoding = \"f32\""];
    assert_eq!((rule_of(&prefix, target), rule_of(&prefix, q)), (None, Some(0)));
    let mixed = ["match = [\"draft.model.q.weight\", \"model.q2.weight\"]\nencoding = \"f32\""];
    assert_eq!((rule_of(&mixed, target), rule_of(&mixed, q)), (None, Some(0)));
    let part = rules(&["match = \"draft.model.q.weight\"\nencoding = \"f32\""]);
    let failure = refused(&part, &table);
    assert!(failure.to_string().contains("matches only a part of"), "{failure}");

    for name in ["draft.output.weight", "draft.token_embd.weight"] {
        for selector in [
            "match = \"model.embed_tokens.weight\"",
            "match = \"draft.lm_head.weight\"",
            "class = \"lm_head\"",
            "weight = \"draft.token_embd.weight\"",
            "weight = \"draft.output.weight\"",
        ] {
            let body = format!("{selector}\nencoding = \"int8-g32\"");
            assert_eq!(rule_of(&[&body], name), Some(0), "{name} {selector}");
        }
    }
    let a = resolve(&rules(&["class = \"lm_head\"\nencoding = \"int8-g32\""]), &table);
    assert_eq!((a.total.weights, a.rules[0].hits, a.rules[0].stored.weights), (3, 1, 1));
    let failure = refused(&rules(&["class = \"embedding\"\nencoding = \"f32\""]), &table);
    assert!(failure.to_string().contains("serves only as its head"), "{failure}");
}
