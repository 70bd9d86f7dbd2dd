//! Radiance's text recipes as TOML.

mod cli_support;

use std::fs;
use std::sync::Arc;

use cli_support::{radpack, succeeds};
use radpack::diag::{Failure, FailureKind, SourceText};
use radpack::recipe::{self, Method, Recipe};
use tempfile::tempdir;

fn import(text: &str) -> Result<String, Failure> {
    let source = Arc::new(SourceText { name: "i8g.rec".into(), text: text.into() });
    recipe::import(&source, &|name| (name == "GROUP").then(|| "128".to_owned()))
}

fn imported(text: &str) -> Recipe {
    let toml = import(text).unwrap_or_else(|failure| panic!("{failure}"));
    let source = SourceText { name: "imported".into(), text: toml.clone() };
    Recipe::parse(source.into()).unwrap_or_else(|failure| panic!("{failure}\n{toml}"))
}

fn refused(text: &str) -> String {
    let failure = import(text).expect_err("cannot be said here");
    assert_eq!(failure.kind, FailureKind::Usage);
    failure.to_string()
}

#[test]
fn a_recipe_reads_as_toml_with_every_line_above_its_rule() {
    let text = concat!(
        "# int8 throughout\n",
        "\n",
        "output.weight  rtn codes=i8 group=$GROUP   # the head\n",
        "token_embd.weight cast dtype=bf16\n",
        "blk.*.attn_?.weight\trtn codes=fp4_e2m1 group=16 scale=fp8_e4m3 scale2=f32\n",
        "* rtn table=nf4 block=1x64 scale=f16#tight\n",
    );
    insta::assert_snapshot!(import(text).expect("imports"), @r#"
    # Imported from radiance's text recipe; above every rule stands its line.

    schema = 1
    name = "i8g"

    # 3: output.weight  rtn codes=i8 group=$GROUP
    [[quantize]]
    weight = "output.weight"
    encoding = { codes = "i8", block = [1, 128], scale = "bf16" }
    optional = true
    keep_vectors = true

    # 4: token_embd.weight cast dtype=bf16
    [[quantize]]
    weight = "token_embd.weight"
    encoding = "bf16"
    optional = true

    # 5: blk.*.attn_?.weight	rtn codes=fp4_e2m1 group=16 scale=fp8_e4m3 scale2=f32
    [[quantize]]
    weight = "blk.*.attn_?.weight"
    encoding = { codes = "fp4_e2m1", block = [1, 16], scale = "fp8_e4m3", scale2 = { dtype = "f32", block = [0, 0] } }
    share_scale = false
    optional = true
    keep_vectors = true

    # 6: * rtn table=nf4 block=1x64 scale=f16
    [[quantize]]
    weight = "*"
    encoding = { table = "nf4", block = [1, 64], scale = "f16" }
    optional = true
    keep_vectors = true
    "#);
}

/// Options as rad-convert writes them into the container come out of the imported rule unchanged (up to order): what is
/// asked for is what is stored.
#[test]
fn imported_options_are_the_options_that_the_container_records() {
    for options in [
        "codes=i8,group=128,scale=bf16",
        "block=1x*,codes=i4,scale=f32",
        "block=128x128,codes=fp8_e4m3,scale=bf16",
        "block=*x*,codes=fp8_e5m2,scale=f32",
        "codes=fp4_e2m1,group=16,scale=fp8_e4m3,scale2=f32",
        "codes=fp4_e2m1,group=16,group2=64,scale=fp8_e4m3,scale2=bf16",
        "block2=4x64,codes=i4,group=16,scale=i8,scale2=f32",
        "codes=u4,group=32,scale=f16,zero=u8",
        "codes=fp4_e2m1,group=32,scale=e8m0",
        "codes=i8,group=64,scale=bf16,transform=fwht64",
        "clamp=sym,codes=i6,group=64,scale=bf16",
        "group=64,scale=bf16,table=nf4",
        "group=64,scale=f16,table=-3;-1;0.5;2",
        "group=256,scale=f16,table=ternary",
        "codes=fp6_e2m3,group=32,scale=f32",
        "codes=i16,group=32,scale=f32",
    ] {
        let recipe = imported(&format!("w rtn {}\n", options.replace(',', " ")));
        let rule = &recipe.rules[0];
        assert!(matches!(rule.encoding.method, Method::Grid(_)));
        assert_eq!(rule.encoding.method.options(), options);
        assert!(rule.optional && rule.keep_vectors);
        assert_eq!(rule.share_scale, !options.contains("scale2"), "{options}");
    }
    // Defaults: one bf16 scale a row; e8m0 means the mx rule; numbers as C reads them.
    let options = |text: &str| imported(text).rules[0].encoding.method.options();
    assert_eq!(options("w rtn codes=i8"), "block=1x*,codes=i8,scale=bf16");
    assert_eq!(options("w rtn codes=i8 group=0x80"), "codes=i8,group=128,scale=bf16");
    assert_eq!(options("w rtn codes=i8 group=0200 rule=absmax"), "codes=i8,group=128,scale=bf16");
    assert_eq!(
        options("w rtn codes=fp8_e4m3 scale=e8m0 rule=mx group=32"),
        "codes=fp8_e4m3,group=32,scale=e8m0"
    );
    assert_eq!(options("w rtn codes=i8 clamp=full"), "block=1x*,codes=i8,scale=bf16");
    // llama.cpp's values, in order.
    let iq4nl = options("w rtn table=iq4nl group=32");
    assert!(iq4nl.contains("table=-127;-104;-83;-65;-49;-35;-22;-10;1;13;25;38;53;69;89;113"));
}

#[test]
fn patterns_mean_what_they_meant() {
    let text =
        |glob: &str| imported(&format!("{glob} rtn codes=i8")).rules[0].weights[0].text.clone();
    assert_eq!(text("blk.*.ffn_?p.weight"), "blk.*.ffn_?p.weight");
    assert_eq!(text("a{b,c}[d]\\e"), r"a\{b,c\}\[d\]\\e");
    assert_eq!(text("re:x"), r"\re:x");
    assert_eq!(text("$GROUP"), "$GROUP", "variables are expanded in values only");
}

#[test]
fn what_is_malformed_or_cannot_be_said_is_told_with_its_line() {
    let text = concat!(
        "lonely\n",
        "a rtnn codes=i8\n",
        "a gptq codes=i4 group=128\n",
        "a ggml type=q4_0\n",
        "a rtn codes=i8 grup=128\n",
        "a rtn codes=i8 group=128 group=64\n",
        "a rtn codes=i8 group=$NOPE\n",
        "a rtn codes=i8 group=$\n",
        "a rtn codes=i8 group=${GROUP\n",
        "a rtn codes=i8 group=12k\n",
        "a rtn codes=i8 block=128\n",
        "a rtn codes=i8 group=128 block=1x128\n",
        "a rtn codes=i8 loose\n",
        "a rtn codes=i8 rule=fixed scale_value=0.5\n",
        "a rtn codes=i8 rule=mx\n",
        "a rtn codes=i8 rule=best\n",
        "a rtn codes=i8 group2=64\n",
        "a rtn group=128\n",
        "a rtn codes=i32\n",
        "a rtn table=w4nl\n",
        "a rtn table=2;1\n",
        "a rtn codes=i8 transform=perm\n",
        "a rtn codes=u8 clamp=sym zero=u8\n",
        "a cast dtype=fp8_e4m3\n",
        "a cast\n",
        "fine rtn codes=i8\n",
    );
    insta::assert_snapshot!(refused(text), @r#"
    error: i8g.rec cannot be imported  [exit 2]

      recipe: a rule without a quantiser
         --> i8g.rec:1:1
          |
        1 | lonely
          | ^^^^^^
        = a rule is PATTERN QUANTISER KEY=VALUE…
      recipe: `rtnn` is no quantiser
         --> i8g.rec:2:3
          |
        2 | a rtnn codes=i8
          |   ^^^^
        = did you mean `rtn`?
        = quantisers: rtn, cast, gptq, awq, autoround, paroquant and ggml
      recipe: `gptq` cannot be imported: it fits codes to the inputs of a calibration run, and this
        program has none
         --> i8g.rec:3:3
          |
        3 | a gptq codes=i4 group=128
          |   ^^^^
        = rtn on the same grid stores the same planes, rounded to nearest
      recipe: `ggml` cannot be imported: llama.cpp's block types are found by its own searches, which
        are not here
         --> i8g.rec:4:3
          |
        4 | a ggml type=q4_0
          |   ^^^^
      recipe: `grup` is no option here
         --> i8g.rec:5:16
          |
        5 | a rtn codes=i8 grup=128
          |                ^^^^^^^^
        = did you mean `group`?
        = options here: codes, table, group, block, scale, scale2, group2, block2, scale2_value, zero,
          transform, rule, scale_value and clamp
      recipe: `group` is set twice
         --> i8g.rec:6:26
          |
        6 | a rtn codes=i8 group=128 group=64
          |                          ^^^^^^^^
        = each option stands once in a rule
      recipe: `group`: the variable NOPE is not set
         --> i8g.rec:7:16
          |
        7 | a rtn codes=i8 group=$NOPE
          |                ^^^^^^^^^^^
      recipe: `group`: `$` names no variable
         --> i8g.rec:8:16
          |
        8 | a rtn codes=i8 group=$
          |                ^^^^^^^
      recipe: `group`: `${GROUP` has no closing brace
         --> i8g.rec:9:16
          |
        9 | a rtn codes=i8 group=${GROUP
          |                ^^^^^^^^^^^^^
      recipe: `group` is 12k, no count of columns
          --> i8g.rec:10:16
           |
        10 | a rtn codes=i8 group=12k
           |                ^^^^^^^^^
      recipe: `block` is 128, not ROWSxCOLUMNS
          --> i8g.rec:11:16
           |
        11 | a rtn codes=i8 block=128
           |                ^^^^^^^^^
        = e.g. 128x128; * is the whole extent
      recipe: `block` beside a group: both set the same extent
          --> i8g.rec:12:26
           |
        12 | a rtn codes=i8 group=128 block=1x128
           |                          ^^^^^^^^^^^
        = keep one of them
      recipe: `loose` is no option
          --> i8g.rec:13:16
           |
        13 | a rtn codes=i8 loose
           |                ^^^^^
        = options are KEY=VALUE
      recipe: `scale_value` gives a scale, and scales here are always found
          --> i8g.rec:14:27
           |
        14 | a rtn codes=i8 rule=fixed scale_value=0.5
           |                           ^^^^^^^^^^^^^^^
      recipe: rule=fixed gives a scale, and scales here are always found
          --> i8g.rec:14:16
           |
        14 | a rtn codes=i8 rule=fixed scale_value=0.5
           |                ^^^^^^^^^^
      recipe: rule=mx with a scale of bf16 cannot be imported
          --> i8g.rec:15:16
           |
        15 | a rtn codes=i8 rule=mx
           |                ^^^^^^^
        = here powers of two (e8m0) follow the mx rule, other scales do not
      recipe: `best` is no rule for scales
          --> i8g.rec:16:16
           |
        16 | a rtn codes=i8 rule=best
           |                ^^^^^^^^^
        = rules: absmax, mx, fixed and search
      recipe: blocks of a second scale that is not there
          --> i8g.rec:17:16
           |
        17 | a rtn codes=i8 group2=64
           |                ^^^^^^^^^
        = add scale2, e.g. scale2=f32
      recipe: an encoding with neither `codes` nor `table`
          --> i8g.rec:18:1
           |
        18 | a rtn group=128
           | ^^^^^^^^^^^^^^^
        = `codes` is a number type, e.g. codes = "i8"; `table` is a codebook, e.g. table = "nf4"
      recipe: `codes` cannot be "i32"
          --> i8g.rec:19:1
           |
        19 | a rtn codes=i32
           | ^^^^^^^^^^^^^^^
        = did you mean "i2"?
        = values of `codes`: i2, i3, i4, i5, i6, i7, i8, i16, fp8_e4m3, fp8_e5m2, fp6_e2m3, fp6_e3m2,
          fp4_e2m1, u1, u2, u3, u4, u5, u6, u7, u8 and u16
      recipe: the codebook `w4nl` is not known here
          --> i8g.rec:20:7
           |
        20 | a rtn table=w4nl
           |       ^^^^^^^^^^
        = codebooks: nf4, binary, ternary, iq4nl, or the values joined by `;`
      recipe: the values of a codebook do not rise from one to the next
          --> i8g.rec:21:1
           |
        21 | a rtn table=2;1
           | ^^^^^^^^^^^^^^^
        = list them in ascending order, each once
      recipe: `transform` cannot be "perm"
          --> i8g.rec:22:1
           |
        22 | a rtn codes=i8 transform=perm
           | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        = "fwhtN" with N a power of two from 2 to 1048576, e.g. "fwht128"
      recipe: `clamp` over codes that have no most negative one to leave out
          --> i8g.rec:23:1
           |
        23 | a rtn codes=u8 clamp=sym zero=u8
           | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        = it is for signed integers, e.g. codes = "i8"
      recipe: a cast to fp8_e4m3 cannot be imported
          --> i8g.rec:24:8
           |
        24 | a cast dtype=fp8_e4m3
           |        ^^^^^^^^^^^^^^
        = casts here go to bf16, f16 and f32
        = bare fp8 clips what it cannot hold; `rtn codes=fp8_e4m3` scales it
      recipe: `cast` without `dtype`
          --> i8g.rec:25:3
           |
        25 | a cast
           |   ^^^^
        = e.g. cast dtype=bf16

    26 problems
    "#);
}

#[test]
fn more_rules_than_a_recipe_may_have_are_refused() {
    let text = refused(&"a rtn codes=i8\n".repeat(4097));
    assert!(text.contains("4097 rules; 4096 are allowed"), "{text}");
    assert_eq!(imported("# nothing\n \n").rules.len(), 0);
}

#[test]
fn a_search_is_a_quantizer_here() {
    // Whether this version has it is the language's to say; the line is named either way.
    match import("w rtn codes=i4 group=32 rule=search") {
        Ok(toml) => assert!(toml.contains("quantizer = \"search\""), "{toml}"),
        Err(failure) => {
            let text = failure.to_string();
            assert!(text.contains("i8g.rec:1:1"), "{text}");
            assert!(text.contains("quantizer `search`"), "{text}");
        }
    }
}

#[test]
fn an_imported_recipe_converts_a_model() {
    let tmp = tempdir().expect("a folder");
    let text = concat!(
        "output.weight rtn codes=i8 group=$WIDTH\n",
        "token_embd.weight cast dtype=bf16\n",
        "vision.* cast dtype=bf16\n",
        "mm.* cast dtype=bf16\n",
        "nothing.here rtn codes=i8\n",
        "* rtn codes=i8 group=32\n",
    );
    fs::write(tmp.path().join("mine.rec"), text).expect("writes");
    let output = assert_cmd::Command::cargo_bin("radpack")
        .expect("the binary is built")
        .current_dir(tmp.path())
        .env("WIDTH", "64")
        .args(["recipes", "import", "mine.rec"])
        .output()
        .expect("runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::write(tmp.path().join("mine.toml"), &output.stdout).expect("writes");
    let source = testkit::tiny_model("tiny-gemma4-dense");
    let source = source.to_str().expect("UTF-8");
    succeeds(tmp.path(), &["convert", source, "--recipe", "mine.toml", "-o", "t.rad"]);
    succeeds(tmp.path(), &["validate", "t.rad", "--against", source]);
    let shown = succeeds(tmp.path(), &["inspect", "t.rad", "--json"]).stdout;
    let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
    let entries = shown["entries"].as_array().expect("a list");
    let layout = |name: &str| {
        let entry = entries.iter().find(|e| e["name"] == name);
        entry.map(|e| e["layout"].as_str().unwrap_or_default().to_owned())
    };
    assert_eq!(layout("output.weight").as_deref(), Some("i8*bf16[1x64]"));
    assert_eq!(layout("token_embd.weight").as_deref(), Some("bf16"));
    assert_eq!(layout("blk.0.attn_q.weight").as_deref(), Some("i8*bf16[1x32]"));
    assert_eq!(layout("blk.0.attn_norm.weight").as_deref(), Some("bf16"), "vectors are kept");

    let ran = radpack(tmp.path(), &["recipes", "import", "mine.rec"]);
    assert_eq!(ran.code, 2, "WIDTH is not set");
    assert!(ran.stderr.contains("mine.rec:1:28"), "{}", ran.stderr);
    assert!(ran.stdout.is_empty());
    let ran = radpack(tmp.path(), &["recipes", "import", "none.rec"]);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    fs::write(tmp.path().join("bad.rec"), [0xff, 0xfe]).expect("writes");
    let ran = radpack(tmp.path(), &["recipes", "import", "bad.rec", "--json"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    fs::write(tmp.path().join("crlf.rec"), "a rtn codes=i8\r\n").expect("writes");
    let text = succeeds(tmp.path(), &["recipes", "import", "crlf.rec", "--json"]).stdout;
    let document: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(document["recipes"][0]["rules"], 1);
}

proptest::proptest! {
    #[test]
    fn no_text_makes_the_importer_panic(text in "([a-z*?{}\\[\\]\\\\]{1,5} (rtn|cast|x)( [a-z0-9$={}#;é*\u{1}-]{0,12}){0,4}\n){0,4}") {
        match import(&text) {
            Ok(toml) => {
                let source = SourceText { name: "imported".into(), text: toml };
                proptest::prop_assert!(Recipe::parse(source.into()).is_ok());
            }
            Err(failure) => proptest::prop_assert!(!failure.to_string().is_empty()),
        }
    }
}
