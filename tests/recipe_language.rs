//! The language: canonical text, settings from the command line, built-in recipes and the JSON schema.

use std::sync::Arc;

use proptest::prelude::*;
use radpack::diag::{FailureKind, SourceText};
use radpack::recipe::{
    self, Activations, Attention, KvDtype, MemoryBudget, Method, NAMED, Recipe, ScaleRule, Towers,
};
use radpack::tensor::DType;

fn parse(text: &str) -> Recipe {
    let source = Arc::new(SourceText { name: "test.toml".into(), text: text.into() });
    Recipe::parse(source).unwrap_or_else(|failure| panic!("{failure}\n{text}"))
}

/// The example of the language's description, with every section.
const FULL: &str = r#"
schema = 1
name = "gemma-4-31b-it-w8a16-rbln16"
description = "16 devices"
[target]
profile = "rbln-ca25"
devices = 16
memory_budget = 0.9
[[quantize]]
match = "*.{q,k,v,o,gate,up,down}_proj.weight"
tower = "text"
class = "linear"
encoding = "int8-channel"
activations = "f16"
[[quantize]]
match = ['re:.*\.lm_head\.weight', "lm_head.weight"]
encoding = { codes = "u4", group = 96, scale = "f16", zero = "u8" }
optional = true
whole_groups = true
[graphs]
max_seq_len = 262_144
batch_size = 8
decoder_batch_sizes = [1, 2, 4, 8]
prefill_chunk_size = 128
image_prefill_chunk_size = 384
attention = "flash"
kv_partition_len = 16384
kv_dtype = "f16"
[vision]
max_soft_tokens = [280]
devices = 0
[towers]
audio = false
"#;

#[test]
fn every_key_is_read() {
    let recipe = parse(FULL);
    assert_eq!(recipe.name, "gemma-4-31b-it-w8a16-rbln16");
    assert_eq!(recipe.description, "16 devices");
    assert_eq!(recipe.target.profile.as_deref(), Some("rbln-ca25"));
    assert_eq!(recipe.target.devices, 16);
    assert_eq!(recipe.target.memory_budget, Some(MemoryBudget::Fraction(0.9)));
    assert_eq!(recipe.rules.len(), 2);
    assert_eq!(recipe.rules[0].activations, Some(Activations::F16));
    assert_eq!(recipe.rules[0].encoding.to_string(), "int8-channel");
    assert_eq!(recipe.rules[1].patterns[0].text, r"re:.*\.lm_head\.weight");
    assert_eq!(recipe.rules[1].encoding.to_string(), "u4*f16[1x96]-u8[1x96]");
    assert!(recipe.rules[1].optional && !recipe.rules[0].optional);
    assert_eq!(recipe.rules[1].whole_groups, Some(true));
    assert_eq!(recipe.graphs.max_seq_len, Some(262_144));
    assert_eq!(recipe.graphs.decoder_batch_sizes, Some(vec![1, 2, 4, 8]));
    assert_eq!(recipe.graphs.image_prefill_chunk_size, Some(vec![384]));
    assert_eq!(recipe.graphs.attention, Some(Attention::Flash));
    assert_eq!(recipe.graphs.kv_dtype, Some(KvDtype::F16));
    assert_eq!(recipe.vision.devices, Some(vec![0]));
    assert_eq!(recipe.towers, Towers { audio: false, ..Towers::default() });
}

#[test]
fn the_canonical_text_spells_defaults_and_has_one_order() {
    let recipe = parse(FULL);
    insta::assert_snapshot!(recipe.to_toml(), @r#"
    schema = 1
    name = "gemma-4-31b-it-w8a16-rbln16"
    description = "16 devices"
    whole_groups = false

    [target]
    profile = "rbln-ca25"
    devices = 16
    memory_budget = 0.9

    [[quantize]]
    match = ["*.{q,k,v,o,gate,up,down}_proj.weight"]
    tower = ["text"]
    class = ["linear"]
    encoding = "int8-channel"
    activations = "f16"
    quantizer = "rtn"
    rounding = "rad"
    share_scale = true
    optional = false

    [[quantize]]
    match = ["re:.*\\.lm_head\\.weight", "lm_head.weight"]
    encoding = { codes = "u4", block = [1, 96], scale = "f16", zero = "u8" }
    quantizer = "rtn"
    rounding = "rad"
    share_scale = true
    optional = true
    whole_groups = true

    [graphs]
    max_seq_len = 262144
    batch_size = 8
    decoder_batch_sizes = [1, 2, 4, 8]
    prefill_chunk_size = 128
    image_prefill_chunk_size = [384]
    attention = "flash"
    kv_partition_len = 16384
    kv_dtype = "f16"

    [vision]
    max_soft_tokens = [280]
    devices = [0]

    [towers]
    vision = true
    audio = false
    projector = true
    draft = true
    "#);
    assert_eq!(parse(&recipe.to_toml()), recipe);
    insta::assert_snapshot!(parse("schema = 1").to_toml(), @r#"
    schema = 1
    name = ""
    whole_groups = false

    [target]
    devices = 1

    [towers]
    vision = true
    audio = true
    projector = true
    draft = true
    "#);
}

#[test]
fn the_digest_depends_on_what_a_recipe_says_and_on_nothing_else() {
    let a = parse(
        "schema = 1\nname = \"x\"\n[[quantize]]\nclass = \"linear\"\nencoding = \"int8-g128\"\n",
    );
    let b = parse(
        "# words\nname = 'x'\nschema = 0x1\nquantize = [{ encoding = { group = 128, codes = \"i8\" }, class = [\"linear\"] }]\n",
    );
    let c = parse(
        "schema = 1\nname = \"x\"\n[[quantize]]\nclass = \"linear\"\nencoding = \"int8-g64\"\n",
    );
    assert_eq!(a, b);
    assert_eq!(a.digest(), b.digest());
    assert_ne!(a.digest(), c.digest());
    assert_eq!(a.digest().len(), 64);
}

#[test]
fn named_encodings_are_these_planes() {
    let planes = |name: &str| {
        recipe::find(name)
            .unwrap_or_else(|| panic!("{name}"))
            .method
            .encoding(DType::F32)
            .to_string()
    };
    for (name, expected) in [
        ("keep", "f32"),
        ("bf16", "bf16"),
        ("f16", "f16"),
        ("f32", "f32"),
        ("int8-g128", "i8*bf16[1x128]"),
        ("int8-g64", "i8*bf16[1x64]"),
        ("int8-g32", "i8*bf16[1x32]"),
        ("int8-channel", "i8*bf16[1x*]"),
        ("int4-g128", "i4*bf16[1x128]"),
        ("int4-g32", "i4*bf16[1x32]"),
        ("fp8-channel", "fp8_e4m3*bf16[1x*]"),
        ("fp8-block128", "fp8_e4m3*bf16[128x128]"),
        ("fp8-tensor", "fp8_e4m3*f32[*x*]"),
        ("nvfp4", "fp4_e2m1*fp8_e4m3[1x16]*f32[*x*]"),
        ("mxfp4", "fp4_e2m1*e8m0[1x32]"),
        ("mxfp8", "fp8_e4m3*e8m0[1x32]"),
    ] {
        assert_eq!(planes(name), expected, "{name}");
    }
    assert_eq!(NAMED.len(), 16);
    for named in NAMED {
        assert_eq!(named.method().encoding(DType::F32).check(), Ok(()), "{}", named.name);
        if let Method::Grid(grid) = named.method() {
            assert_eq!(grid.rule == ScaleRule::Mx, grid.scale == DType::E8M0, "{}", named.name);
        }
    }
}

#[test]
fn spelled_out_encodings_become_grids_that_a_container_can_hold() {
    let encoding = |table: &str| {
        let recipe =
            parse(&format!("schema = 1\n[[quantize]]\nmatch = \"*\"\nencoding = {table}\n"));
        assert_eq!(parse(&recipe.to_toml()), recipe, "{table}");
        let encoding = recipe.rules[0].encoding.clone();
        assert_eq!(encoding.method.encoding(DType::BF16).check(), Ok(()), "{table}");
        encoding
    };
    for (table, expected) in [
        (r#"{ codes = "i8", group = 96 }"#, "i8*bf16[1x96]"),
        (r#"{ codes = "i8" }"#, "int8-channel"),
        (r#"{ codes = "i8", group = 128, scale = "bf16" }"#, "int8-g128"),
        (r#"{ codes = "fp8_e4m3", block = [128, 128] }"#, "fp8-block128"),
        (r#"{ codes = "fp8_e4m3", block = [0, 0], scale = "f32" }"#, "fp8-tensor"),
        (r#"{ codes = "fp4_e2m1", group = 32, scale = "e8m0" }"#, "mxfp4"),
        (r#"{ codes = "fp4_e2m1", group = 16, scale = "fp8_e4m3", scale2 = "f32" }"#, "nvfp4"),
        (
            r#"{ codes = "i4", group = 32, scale = "u8", scale2 = { dtype = "f16", block = [1, 256] } }"#,
            "i4*u8[1x32]*f16[1x256]",
        ),
        (r#"{ codes = "u3", group = 20, scale = "f16", zero = "u8" }"#, "u3*f16[1x20]-u8[1x20]"),
        (
            r#"{ table = "nf4", group = 64 }"#,
            "affine:codes=u4[1x1],scale=bf16[1x64],table=f32{1x16}",
        ),
        (r#"{ table = [-1, 0, 1] }"#, "affine:codes=u2[1x1],scale=bf16[1x*],table=i8{1x3}"),
        (r#"{ table = [0.1, 0.7] }"#, "affine:codes=u1[1x1],scale=bf16[1x*],table=f32{1x2}"),
    ] {
        assert_eq!(encoding(table).to_string(), expected, "{table}");
    }
    let Method::Grid(grid) = encoding(r#"{ table = [-1, 0, 1] }"#).method else { panic!("a grid") };
    assert_eq!(grid.table.map(|t| t.name), Some("ternary".into()));
}

#[test]
fn settings_change_from_the_command_line() {
    let mut recipe = parse(FULL);
    recipe
        .set_all(&[
            "graphs.batch_size=4",
            "graphs.decoder_batch_sizes=[1, 4]",
            "graphs.attention=eager",
            "target.profile = other-npu",
            "target.memory_budget=12GiB",
            "name=mine",
            "description=\"in quotes\"",
            "whole_groups=true",
            "towers.vision=false",
        ])
        .expect("all fit");
    assert_eq!(recipe.graphs.batch_size, Some(4));
    assert_eq!(recipe.graphs.decoder_batch_sizes, Some(vec![1, 4]));
    assert_eq!(recipe.graphs.attention, Some(Attention::Eager));
    assert_eq!(recipe.graphs.max_seq_len, Some(262_144), "others stay");
    assert_eq!(recipe.target.profile.as_deref(), Some("other-npu"));
    assert_eq!(recipe.target.memory_budget, Some(MemoryBudget::Bytes(12 << 30)));
    assert_eq!((recipe.name.as_str(), recipe.description.as_str()), ("mine", "in quotes"));
    assert!(recipe.whole_groups && !recipe.towers.vision);
    assert_eq!(parse(&recipe.to_toml()), recipe);
}

#[test]
fn a_wrong_setting_changes_nothing() {
    let mut recipe = parse(FULL);
    let before = recipe.clone();
    for wrong in [
        "graphs.batch_size=0",
        "graphs=4",
        "=4",
        "graphs.batch_size=",
        "a.b.c=1",
        "schema=2",
        "quantize=[]",
        "graphs.batch_size=4\nname=\"x\"\nbatch = 1",
        "",
    ] {
        let failure = recipe.set(wrong).expect_err(wrong);
        assert_eq!(failure.kind, FailureKind::Usage, "{wrong}");
        assert!(!failure.problems.is_empty(), "{wrong}");
        assert_eq!(recipe, before, "{wrong}");
    }
    assert!(recipe.set_all(&["graphs.batch_size=2", "graphs.batch_sise=2"]).is_err());
    assert_eq!(recipe, before);
}

#[test]
fn sizes_are_whole_numbers_of_a_unit() {
    for (text, bytes) in [
        ("12GiB", Some(12 << 30)),
        (" 1536 MiB ", Some(1536 << 20)),
        ("100B", Some(100)),
        ("1TiB", Some(1 << 40)),
        ("0GiB", None),
        ("1.5GiB", None),
        ("GiB", None),
        ("12", None),
        ("99999999999TiB", None),
        ("+1B", None),
    ] {
        assert_eq!(recipe::parse_size(text), bytes, "{text}");
    }
}

#[test]
fn every_built_in_recipe_reads_and_is_explained() {
    let names: Vec<&str> = recipe::list().iter().map(|b| b.name).collect();
    assert_eq!(
        names,
        [
            "bf16",
            "int8-g128",
            "w8a16",
            "fp8-dynamic",
            "fp8-block",
            "nvfp4",
            "w4a16-g32",
            "mxfp4",
            "gemma-4/bf16",
            "gemma-4/rbln-w8a16-x16",
            "gemma-4/rbln-bucketing",
            "gemma-4/radiance-i8g",
            "gemma-4/nvfp4",
            "gemma-4/fp8-dynamic",
            "gemma-4/fp8-block",
            "gemma-4/w4a16-g32",
        ]
    );
    for builtin in recipe::list() {
        let recipe = builtin.recipe().unwrap_or_else(|failure| panic!("{failure}"));
        assert_eq!(recipe.name, builtin.name);
        assert!(builtin.about().len() > 40, "{}", builtin.name);
        let rules = if builtin.name == "gemma-4/radiance-i8g" { 3 } else { 1 };
        assert_eq!(recipe.rules.len(), rules, "{}", builtin.name);
        assert_eq!(parse(&recipe.to_toml()), recipe);
    }
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/recipes");
    let texts = |folder: &str| {
        let files = std::fs::read_dir(format!("{root}/{folder}")).expect("recipes/");
        let toml = |f: &std::io::Result<std::fs::DirEntry>| {
            f.as_ref().is_ok_and(|f| f.path().extension().is_some_and(|e| e == "toml"))
        };
        files.filter(toml).count()
    };
    assert_eq!(texts("") + texts("gemma-4"), names.len(), "every file is compiled in");
}

#[test]
fn recipes_load_by_name_or_from_a_file() {
    assert_eq!(recipe::load(None).expect("default").name, "int8-g128");
    assert_eq!(recipe::load(Some("w8a16")).expect("built in").name, "w8a16");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("mine.toml");
    let name = file.to_str().expect("UTF-8");
    std::fs::write(&file, "schema = 1\nname = \"from a file\"\n").expect("written");
    assert_eq!(recipe::load(Some(name)).expect("file").name, "from a file");

    std::fs::write(&file, b"schema = 1 # \xff\n").expect("written");
    let failure = recipe::load(Some(name)).expect_err("no UTF-8");
    assert_eq!(failure.problems[0].message, "byte 13 is not UTF-8");
    std::fs::write(&file, vec![b'#'; (1 << 20) + 1]).expect("written");
    assert!(recipe::load(Some(name)).expect_err("large").problems[0].message.contains("1.00 MiB"));
    let failure = recipe::load(folder.path().to_str()).expect_err("a folder");
    assert_eq!(failure.kind, FailureKind::Usage);

    let failure = recipe::load(Some("int8g128")).expect_err("no such recipe");
    insta::assert_snapshot!(failure.to_string(), @r#"
    error: no such recipe  [exit 2]

      recipe: "int8g128" is neither a built-in recipe nor a file
        = did you mean int8-g128?
        = built-in recipes: bf16, int8-g128, w8a16, fp8-dynamic, fp8-block, nvfp4, w4a16-g32, mxfp4,
          gemma-4/bf16, gemma-4/rbln-w8a16-x16, gemma-4/rbln-bucketing, gemma-4/radiance-i8g,
          gemma-4/nvfp4, gemma-4/fp8-dynamic, gemma-4/fp8-block and gemma-4/w4a16-g32

    1 problem
    "#);
    let failure = recipe::load(Some("int8-g64")).expect_err("an encoding");
    assert!(failure.problems[0].help.iter().any(|h| h.starts_with("int8-g64 is an encoding")));
}

/// The committed schema; `RADPACK_BLESS=1` rewrites it.
#[test]
fn the_committed_schema_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/schemas/recipe.schema.json");
    if std::env::var_os("RADPACK_BLESS").is_some() {
        std::fs::write(path, recipe::schema()).expect("written");
    }
    let committed = std::fs::read_to_string(path).expect("schemas/recipe.schema.json");
    assert!(
        committed == recipe::schema(),
        "run this test with RADPACK_BLESS=1 and commit the file"
    );
}

fn validator() -> jsonschema::Validator {
    let schema: serde_json::Value = serde_json::from_str(&recipe::schema()).expect("JSON");
    jsonschema::draft202012::new(&schema).expect("a schema")
}

fn json(text: &str) -> serde_json::Value {
    let table: toml::Table = toml::from_str(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    serde_json::to_value(table).expect("no dates in it")
}

#[test]
fn good_recipes_pass_the_schema() {
    let validator = validator();
    let mut texts: Vec<String> = recipe::list().iter().map(|b| b.text.to_owned()).collect();
    texts.push(FULL.to_owned());
    texts.extend(texts.clone().iter().map(|text| parse(text).to_toml()));
    texts.push("schema = 1\n[target]\nmemory_budget = \"12GiB\"\n".into());
    for text in texts {
        let json = json(&text);
        let errors: Vec<String> = validator.iter_errors(&json).map(|e| e.to_string()).collect();
        assert!(errors.is_empty(), "{errors:?}\n{text}");
    }
}

#[test]
fn bad_recipes_fail_the_schema_where_it_can_tell() {
    let validator = validator();
    let rule = "schema = 1\n[[quantize]]\nclass = \"linear\"\nencoding = ";
    let mut texts: Vec<String> = [
        "name = \"no schema\"",
        "schema = 2",
        "schema = 1\nnam = \"x\"",
        "schema = 1\nname = 1",
        "schema = 1\n[target]\ndevices = 0",
        "schema = 1\n[target]\nmemory_budget = 1.5",
        "schema = 1\n[target]\nmemory_budget = \"lots\"",
        "schema = 1\n[graphs]\nbatch_siz = 1",
        "schema = 1\n[graphs]\nbatch_size = 0",
        "schema = 1\n[graphs]\ndecoder_batch_sizes = []",
        "schema = 1\n[graphs]\nkv_dtype = \"half\"",
        "schema = 1\n[vision]\ndevices = [-1]",
        "schema = 1\n[towers]\ntext = false",
        "schema = 1\n[quantize]\nclass = \"linear\"\nencoding = \"bf16\"",
        "schema = 1\n[[quantize]]\nencoding = \"bf16\"",
        "schema = 1\n[[quantize]]\nclass = \"linear\"",
        "schema = 1\n[[quantize]]\nclass = \"lineal\"\nencoding = \"bf16\"",
        "schema = 1\n[[quantize]]\nmatch = []\nencoding = \"bf16\"",
        "schema = 1\n[[quantize]]\nmatch = \"*\"\nencoding = \"bf16\"\nquantizer = \"gptq\"",
    ]
    .map(String::from)
    .to_vec();
    texts.extend(
        [
            "\"int7\"",
            "{ codes = \"i8\", table = \"nf4\" }",
            "{ scale = \"bf16\" }",
            "{ codes = \"i8\", group = 0 }",
            "{ codes = \"i8\", block = [1] }",
            "{ codes = \"i8\", scale2 = { block = [0, 0] } }",
            "{ codes = \"i8\", cols = 128 }",
        ]
        .map(|encoding| format!("{rule}{encoding}")),
    );
    for text in texts {
        assert!(!validator.is_valid(&json(&text)), "the schema takes\n{text}");
        let source = Arc::new(SourceText { name: "bad".into(), text: text.clone() });
        assert!(Recipe::parse(source).is_err(), "the parser takes\n{text}");
    }
}

#[test]
fn hostile_texts_give_errors() {
    let deep = format!("schema = 1\nname = {}1{}", "[".repeat(10_000), "]".repeat(10_000));
    let many = format!("schema = 1\n{}", "[[quantize]]\n".repeat(5_000));
    let long = format!(
        "schema = 1\n[[quantize]]\nmatch = \"{}\"\nencoding = \"bf16\"",
        "{a,".repeat(1_000)
    );
    let digits = format!("schema = {}", "9".repeat(10_000));
    for text in [deep, many, long, digits, "\u{0}".into(), "[".into(), "schema = 1\n[[".into()] {
        let source = Arc::new(SourceText { name: "hostile".into(), text });
        let failure = Recipe::parse(source).expect_err("refused");
        assert!(!failure.to_string().is_empty());
    }
}

fn names<T: Copy>(of: &[(&'static str, T)]) -> Vec<&'static str> {
    of.iter().map(|(name, _)| *name).collect()
}

/// Text of a random but valid rule.
fn rules() -> impl Strategy<Value = String> {
    let tower = names(&radpack::model::Tower::NAMES);
    let class = names(&radpack::model::Class::NAMES);
    let encodings: Vec<String> = NAMED
        .iter()
        .map(|n| format!("\"{}\"", n.name))
        .chain([
            r#"{ codes = "i5", group = 77 }"#.to_owned(),
            r#"{ codes = "fp6_e2m3", block = [2, 8], scale = "f32", scale2 = "bf16" }"#.to_owned(),
            r#"{ codes = "u16", zero = "u16", scale = "f16" }"#.to_owned(),
            r#"{ table = [-1.5, 3e-20, 0.1, 7] }"#.to_owned(),
            r#"{ codes = "i4", group = 64, transform = "fwht64", clamp = "sym" }"#.to_owned(),
        ])
        .collect();
    (
        prop::option::of(prop::collection::vec("[a-z.*?é\"\\\\ ]{1,8}[a-z]", 1..4)),
        prop::sample::subsequence(tower.clone(), 0..=tower.len()),
        prop::sample::subsequence(class.clone(), 1..=class.len()),
        prop::sample::select(encodings),
        prop::option::of(prop::sample::select(names(&Activations::NAMES))),
        any::<(bool, bool, Option<bool>)>(),
    )
        .prop_map(
            |(patterns, towers, classes, encoding, activations, (share, optional, whole))| {
                let list = |items: &[&str]| {
                    let quoted: Vec<String> = items
                        .iter()
                        .map(|i| toml::Value::String((*i).to_owned()).to_string())
                        .collect();
                    format!("[{}]", quoted.join(", "))
                };
                let mut text =
                    format!("\n[[quantize]]\nencoding = {encoding}\nclass = {}\n", list(&classes));
                if let Some(patterns) = patterns {
                    let patterns: Vec<&str> = patterns.iter().map(String::as_str).collect();
                    text += &format!("match = {}\n", list(&patterns));
                }
                if !towers.is_empty() {
                    text += &format!("tower = {}\n", list(&towers));
                }
                if let Some(activations) = activations {
                    text += &format!("activations = \"{activations}\"\n");
                }
                text += &format!("share_scale = {share}\noptional = {optional}\n");
                if let Some(whole) = whole {
                    text += &format!("whole_groups = {whole}\n");
                }
                text
            },
        )
}

proptest! {
    #[test]
    fn canonical_text_reads_back_as_an_equal_recipe(
        name in "\\PC{0,12}|[\\x00-\\x1f\"\\\\\u{7f}\u{85}]{0,6}",
        whole in any::<bool>(),
        devices in 1u64..=65_536,
        budget in prop::option::of(1u32..=1_000_000),
        bytes in prop::option::of(1u64..=u64::MAX / 2),
        rules in prop::collection::vec(rules(), 0..5),
        graphs in prop::option::of((1u64..=1 << 31, prop::collection::vec(1u64..=512, 1..4))),
        towers in any::<[bool; 4]>(),
    ) {
        let mut recipe = parse(&format!("schema = 1\n{}", rules.concat()));
        recipe.name = name;
        recipe.whole_groups = whole;
        recipe.target.devices = devices;
        recipe.target.memory_budget = match (budget, bytes) {
            (Some(n), _) => Some(MemoryBudget::Fraction(f64::from(n) / 1e6)),
            (None, Some(n)) => Some(MemoryBudget::Bytes(n)),
            _ => None,
        };
        if let Some((length, sizes)) = graphs {
            recipe.graphs.max_seq_len = Some(length);
            recipe.graphs.decoder_batch_sizes = Some(sizes.clone());
            recipe.vision.max_soft_tokens = Some(sizes);
            recipe.graphs.kv_dtype = Some(KvDtype::Fp8);
        }
        let [vision, audio, projector, draft] = towers;
        recipe.towers = Towers { vision, audio, projector, draft };
        let text = recipe.to_toml();
        let again = parse(&text);
        prop_assert_eq!(&again, &recipe);
        prop_assert_eq!(again.to_toml(), text);
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "(schema = 1\n)?[a-z=\\[\\]\"'{}.,#\n 0-9“*]{0,60}") {
        let source = Arc::new(SourceText { name: "random".into(), text });
        if let Err(failure) = Recipe::parse(source) {
            prop_assert!(!failure.to_string().is_empty());
        }
    }

    #[test]
    fn no_setting_makes_the_reader_panic(text in "(graphs|target|name|a.b)?[a-z=\\[\\]\"{}.,\n 0-9“é]{0,30}") {
        let mut recipe = recipe::load(None).expect("default");
        if let Err(failure) = recipe.set(&text) {
            prop_assert!(!failure.to_string().is_empty());
        }
    }
}
