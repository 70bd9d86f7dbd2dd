//! What people see when a recipe is wrong.

use std::sync::Arc;

use radpack::diag::{FailureKind, SourceText};
use radpack::recipe::Recipe;

/// The picture of a recipe that must be refused.
fn picture(text: &str) -> String {
    let source = Arc::new(SourceText { name: "mine.toml".into(), text: text.into() });
    let failure = Recipe::parse(source).expect_err("a wrong recipe");
    assert_eq!(failure.kind, FailureKind::Usage);
    failure.to_string()
}

#[test]
fn a_misspelt_key_is_shown_with_the_nearest_one() {
    insta::assert_snapshot!(picture("schema = 1\n[[quantize]]\nmach = \"*.weight\"\nencodng = \"int8-g128\"\n"), @r#"
    error: the recipe mine.toml is not usable  [exit 2]

      recipe: [[quantize]] has no key `mach`
         --> mine.toml:3:1
          |
        3 | mach = "*.weight"
          | ^^^^ unknown key
        = did you mean `match`?
        = keys of [[quantize]]: match, weight, tower, class, encoding, activations, quantizer, rounding,
          share_scale, optional, whole_groups, keep_vectors and imatrix
      recipe: [[quantize]] has no key `encodng`
         --> mine.toml:4:1
          |
        4 | encodng = "int8-g128"
          | ^^^^^^^ unknown key
        = did you mean `encoding`?
        = keys of [[quantize]]: match, weight, tower, class, encoding, activations, quantizer, rounding,
          share_scale, optional, whole_groups, keep_vectors and imatrix

    2 problems
    "#);
}

#[test]
fn a_key_of_another_section_is_told_its_home() {
    insta::assert_snapshot!(picture("schema = 1\nbatch_size = 4\n[graphs]\nprofile = \"x\"\n[vision]\nbatch = 1\n"), @r#"
    error: the recipe mine.toml is not usable  [exit 2]

      recipe: the top level has no key `batch_size`
         --> mine.toml:2:1
          |
        2 | batch_size = 4
          | ^^^^^^^^^^ unknown key
        = `batch_size` belongs to [graphs]
        = keys of the top level: schema, name, description, whole_groups, target, quantize, graphs,
          vision and towers
      recipe: [graphs] has no key `profile`
         --> mine.toml:4:1
          |
        4 | profile = "x"
          | ^^^^^^^ unknown key
        = `profile` belongs to [target]
        = keys of [graphs]: max_seq_len, batch_size, decoder_batch_sizes, prefill_chunk_size,
          image_prefill_chunk_size, attention, kv_partition_len and kv_dtype
      recipe: [vision] has no key `batch`
         --> mine.toml:6:1
          |
        6 | batch = 1
          | ^^^^^ unknown key
        = keys of [vision]: max_soft_tokens and devices

    3 problems
    "#);
}

#[test]
fn keys_of_other_tools_are_translated() {
    insta::assert_snapshot!(picture("schema = 1\n[[quantize]]\ntargets = [\"Linear\"]\nscheme = \"W8A16\"\nignore = [\"lm_head\"]\n[graphs]\nattn_impl = \"flash\"\n"), @r#"
    error: the recipe mine.toml is not usable  [exit 2]

      recipe: [[quantize]] has no key `targets`
         --> mine.toml:3:1
          |
        3 | targets = ["Linear"]
          | ^^^^^^^ unknown key
        = here it is `match`
        = keys of [[quantize]]: match, weight, tower, class, encoding, activations, quantizer, rounding,
          share_scale, optional, whole_groups, keep_vectors and imatrix
      recipe: [[quantize]] has no key `scheme`
         --> mine.toml:4:1
          |
        4 | scheme = "W8A16"
          | ^^^^^^ unknown key
        = here it is `encoding`
        = keys of [[quantize]]: match, weight, tower, class, encoding, activations, quantizer, rounding,
          share_scale, optional, whole_groups, keep_vectors and imatrix
      recipe: [[quantize]] has no key `ignore`
         --> mine.toml:5:1
          |
        5 | ignore = ["lm_head"]
          | ^^^^^^ unknown key
        = here it is a rule with encoding = "keep" before the others; weights that no rule selects are
          kept anyway
        = keys of [[quantize]]: match, weight, tower, class, encoding, activations, quantizer, rounding,
          share_scale, optional, whole_groups, keep_vectors and imatrix
      recipe: [graphs] has no key `attn_impl`
         --> mine.toml:7:1
          |
        7 | attn_impl = "flash"
          | ^^^^^^^^^ unknown key
        = here it is `attention`
        = keys of [graphs]: max_seq_len, batch_size, decoder_batch_sizes, prefill_chunk_size,
          image_prefill_chunk_size, attention, kv_partition_len and kv_dtype

    4 problems
    "#);
}

#[test]
fn an_unknown_encoding_lists_all() {
    insta::assert_snapshot!(picture("schema = 1\n[[quantize]]\nclass = \"linear\"\nencoding = \"int8_g128\"\n"), @r#"
    error: the recipe mine.toml is not usable  [exit 2]

      recipe: `encoding` cannot be "int8_g128"
         --> mine.toml:4:12
          |
        4 | encoding = "int8_g128"
          |            ^^^^^^^^^^^ unknown value
        = did you mean "int8-g128"?
        = values of `encoding`: keep, bf16, f16, f32, int8-g128, int8-g64, int8-g32, int8-channel,
          int4-g128, int4-g32, fp8-channel, fp8-block128, fp8-tensor, nvfp4, mxfp4 and mxfp8

    1 problem
    "#);
}

#[test]
fn wrong_types_and_ranges_are_all_reported() {
    insta::assert_snapshot!(picture("schema = 1\nname = 3\nwhole_groups = \"true\"\n[target]\ndevices = 0\nmemory_budget = \"lots\"\n[graphs]\nbatch_size = \"4\"\ndecoder_batch_sizes = [1, 2.5]\nprefill_chunk_size = []\nkv_dtype = \"half\"\n"), @r#"
    error: the recipe mine.toml is not usable  [exit 2]

      recipe: `name` is a whole number, not a string
         --> mine.toml:2:8
          |
        2 | name = 3
          |        ^ a whole number
      recipe: `whole_groups` is a string, not true or false
         --> mine.toml:3:16
          |
        3 | whole_groups = "true"
          |                ^^^^^^ a string
        = write whole_groups = true without quotes
      recipe: `devices` is 0, not 1 to 65536
         --> mine.toml:5:11
          |
        5 | devices = 0
          |           ^ out of range
      recipe: `memory_budget` is no size
         --> mine.toml:6:17
          |
        6 | memory_budget = "lots"
          |                 ^^^^^^
        = a fraction above 0 and at most 1, e.g. 0.9, or a size, e.g. "12GiB"
      recipe: `batch_size` is a string, not a whole number
         --> mine.toml:8:14
          |
        8 | batch_size = "4"
          |              ^^^ a string
        = write batch_size = 4 without quotes
      recipe: `decoder_batch_sizes` is a decimal number, not a whole number
         --> mine.toml:9:27
          |
        9 | decoder_batch_sizes = [1, 2.5]
          |                           ^^^ a decimal number
      recipe: `prefill_chunk_size` is a list, not a whole number
          --> mine.toml:10:22
           |
        10 | prefill_chunk_size = []
           |                      ^^ a list
      recipe: `kv_dtype` cannot be "half"
          --> mine.toml:11:12
           |
        11 | kv_dtype = "half"
           |            ^^^^^^ unknown value
        = values of `kv_dtype`: f32, f16, bf16 and fp8

    8 problems
    "#);
}

#[test]
fn a_missing_schema_and_a_rule_that_says_nothing() {
    insta::assert_snapshot!(picture("name = \"x\"\n\n[[quantize]]\noptional = true\n"), @r#"
    error: the recipe mine.toml is not usable  [exit 2]

      recipe: `schema` is missing
         --> mine.toml:1:1
          |
        1 | name = "x"
          | ^ add it as the first line
        = schema = 1 is the version of the recipe language that this program reads
      recipe: a rule without a selector
         --> mine.toml:3:1
          |
        3 | [[quantize]]
          | ^^^^^^^^^^^^ selects nothing by name, tower or class
        = add `match`, `weight`, `tower` or `class`; match = "*" selects every weight
      recipe: a rule without `encoding`
         --> mine.toml:3:1
          |
        3 | [[quantize]]
          | ^^^^^^^^^^^^ does not say what its weights become
        = e.g. encoding = "int8-g128"; encoding = "keep" leaves them as they are

    3 problems
    "#);
}

#[test]
fn one_bracket_too_few() {
    insta::assert_snapshot!(picture("schema = 1\n[quantize]\nclass = \"linear\"\nencoding = \"bf16\"\n"), @r#"
    error: the recipe mine.toml is not usable  [exit 2]

      recipe: rules are a list
         --> mine.toml:2:1
          |
        2 | [quantize]
          | ^^^^^^^^^^ one table
        = write [[quantize]] with two brackets; rules are tried in order

    1 problem
    "#);
}

#[test]
fn typographic_quotes_are_named() {
    insta::assert_snapshot!(picture("schema = 1\n[[quantize]]\nmatch = “*.weight”\nencoding = \"bf16\"\n"), @r#"
    error: the recipe mine.toml is not usable  [exit 2]

      recipe: not TOML: this is no number, true or false, and text stands in quotes
         --> mine.toml:3:9
          |
        3 | match = “*.weight”
          |         ^^^^^^^^^^
        = this line has typographic quotes; TOML knows only " and '

    1 problem
    "#);
    insta::assert_snapshot!(picture("schema = 1\n[[quantize]]\nmatch = \"“re:.*gate”\"\nencoding = \"bf16\"\n"), @r#"
    error: the recipe mine.toml is not usable  [exit 2]

      recipe: the pattern holds a typographic quote, “, which no tensor name has
         --> mine.toml:3:9
          |
        3 | match = "“re:.*gate”"
          |         ^^^^^^^^^^^^^
        = quotes pasted from a web page? write "re:.*gate"

    1 problem
    "#);
}

#[test]
fn patterns_that_do_not_compile() {
    insta::assert_snapshot!(picture("schema = 1\n[[quantize]]\nmatch = [\"re:*.weight\", \"*.{q,k_proj.weight\", \"re:(a|b\", \"\"]\nencoding = \"bf16\"\n"), @r#"
    error: the recipe mine.toml is not usable  [exit 2]

      recipe: not a regular expression: repetition operator missing expression
         --> mine.toml:3:10
          |
        3 | match = ["re:*.weight", "*.{q,k_proj.weight", "re:(a|b", ""]
          |          ^^^^^^^^^^^^^
        = a glob is written without `re:`
      recipe: not a glob: unclosed alternate group; missing '}' (maybe escape '{' with '[{]'?)
         --> mine.toml:3:25
          |
        3 | match = ["re:*.weight", "*.{q,k_proj.weight", "re:(a|b", ""]
          |                         ^^^^^^^^^^^^^^^^^^^^
      recipe: not a regular expression: unclosed group
         --> mine.toml:3:47
          |
        3 | match = ["re:*.weight", "*.{q,k_proj.weight", "re:(a|b", ""]
          |                                               ^^^^^^^^^
      recipe: an empty pattern matches no name
         --> mine.toml:3:58
          |
        3 | match = ["re:*.weight", "*.{q,k_proj.weight", "re:(a|b", ""]
          |                                                          ^^
        = `*` matches every name

    4 problems
    "#);
}

#[test]
fn selectors_with_unknown_names() {
    insta::assert_snapshot!(picture("schema = 1\n[[quantize]]\ntower = \"txt\"\nclass = [\"linears\", \"head\"]\nencoding = \"bf16\"\n"), @r#"
    error: the recipe mine.toml is not usable  [exit 2]

      recipe: `tower` cannot be "txt"
         --> mine.toml:3:9
          |
        3 | tower = "txt"
          |         ^^^^^ unknown value
        = did you mean "text"?
        = values of `tower`: text, vision, audio, projector and draft
      recipe: `class` cannot be "linears"
         --> mine.toml:4:10
          |
        4 | class = ["linears", "head"]
          |          ^^^^^^^^^ unknown value
        = did you mean "linear"?
        = values of `class`: linear, embedding, lm_head, norm, router, expert and other
      recipe: `class` cannot be "head"
         --> mine.toml:4:21
          |
        4 | class = ["linears", "head"]
          |                     ^^^^^^ unknown value
        = did you mean "lm_head"?
        = values of `class`: linear, embedding, lm_head, norm, router, expert and other

    3 problems
    "#);
}

#[test]
fn quantizers_and_roundings_without_meaning_are_refused_with_the_reason() {
    let rules = [
        "encoding = \"int8-g128\"\nquantizer = \"search\"\nrounding = \"modelopt\"",
        "encoding = \"mxfp4\"\nquantizer = \"search\"",
        "encoding = \"keep\"\nquantizer = \"search\"",
        "encoding = \"int8-channel\"\nrounding = \"modelopt\"",
        "encoding = \"nvfp4\"\nrounding = \"transformers\"",
    ];
    let rules = rules.map(|rule| format!("[[quantize]]\nclass = \"linear\"\n{rule}\n"));
    insta::assert_snapshot!(picture(&format!("schema = 1\n{}", rules.concat())), @r#"
    error: the recipe mine.toml is not usable  [exit 2]

      recipe: quantizer "search" chooses scales its own way, which modelopt does not
         --> mine.toml:6:12
          |
        6 | rounding = "modelopt"
          |            ^^^^^^^^^^
        = rounding = "rad" goes with quantizer = "search"
      recipe: a power-of-two scale (e8m0) follows from the largest value of its block; there is nothing
        to search
          --> mine.toml:10:13
           |
        10 | quantizer = "search"
           |             ^^^^^^^^
        = quantizer = "rtn" (the default) goes with it
      recipe: encoding keep has no scales, and quantizer "search" searches for scales
          --> mine.toml:14:13
           |
        14 | quantizer = "search"
           |             ^^^^^^^^
        = leave `quantizer` out, or take an encoding with scales, e.g. "int8-g128"
      recipe: modelopt has no encoding i8*bf16[1x*]
          --> mine.toml:18:12
           |
        18 | rounding = "modelopt"
           |            ^^^^^^^^^^
        = it has fp8_e4m3 under f32 scales for a row, the weight or a block, i8 under f32 scales for a
          row, i8 for a group, i4 under f32 scales for a group, nvfp4, mxfp4 and mxfp8
      recipe: transformers has no encoding fp4_e2m1*fp8_e4m3[1x16]*f32[*x*]
          --> mine.toml:22:12
           |
        22 | rounding = "transformers"
           |            ^^^^^^^^^^^^^^
        = it has fp8_e4m3 under f32 or e8m0 scales for blocks, e.g. { codes = "fp8_e4m3", block = [128,
          128], scale = "f32" }

    5 problems
    "#);
}

#[test]
fn grids_without_meaning() {
    insta::assert_snapshot!(picture(r#"schema = 1
[[quantize]]
class = "linear"
encoding = { codes = "u4", group = 32 }
[[quantize]]
class = "expert"
encoding = { codes = "i8", block = [1, 32], group = 32, scale = "e8m0" }
[[quantize]]
class = "lm_head"
encoding = { codes = "fp4_e2m1", group = 16, scale = "fp8_e4m3" }
[[quantize]]
class = "embedding"
encoding = { codes = "i8", group = 32, scale2 = { dtype = "f32", block = [1, 48] }, zero = "u8" }
[[quantize]]
class = "router"
encoding = { scale = "bf17", block = [1], table = [1, 0] }
"#), @r#"
    error: the recipe mine.toml is not usable  [exit 2]

      recipe: unsigned codes u4 without `zero`
         --> mine.toml:4:22
          |
        4 | encoding = { codes = "u4", group = 32 }
          |                      ^^^^
        = add zero = "u4", or take signed codes such as "i8"
      recipe: `group` and `block` both set the extent of a scale
         --> mine.toml:7:12
          |
        7 | encoding = { codes = "i8", block = [1, 32], group = 32, scale = "e8m0" }
          |            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        = `group = 128` is `block = [1, 128]`; keep one of them
      recipe: a scale of type fp8_e4m3 cannot stand alone: most weights are smaller than its steps
          --> mine.toml:10:54
           |
        10 | encoding = { codes = "fp4_e2m1", group = 16, scale = "fp8_e4m3" }
           |                                                      ^^^^^^^^^^
        = add scale2 = "f32", or take a scale of bf16, f16 or f32
      recipe: second-level blocks [1, 48] do not hold whole blocks [1, 32]
          --> mine.toml:13:49
           |
        13 | encoding = { codes = "i8", group = 32, scale2 = { dtype = "f32", block = [1, 48] }, zero...
           |                                                 ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        = each extent is 0 (whole) or a multiple of the first level's
      recipe: `scale2` together with `zero`
          --> mine.toml:13:49
           |
        13 | encoding = { codes = "i8", group = 32, scale2 = { dtype = "f32", block = [1, 48] }, zero...
           |                                                 ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        = drop `scale2` or `zero`
      recipe: `zero` with codes that are not unsigned integers
          --> mine.toml:13:92
           |
        13 | ...type = "f32", block = [1, 48] }, zero = "u8" }
           |                                            ^^^^
        = an asymmetric grid has codes "u4" or "u8"
      recipe: `scale` cannot be "bf17"
          --> mine.toml:16:22
           |
        16 | encoding = { scale = "bf17", block = [1], table = [1, 0] }
           |                      ^^^^^^ unknown value
        = did you mean "bf16"?
        = values of `scale`: bf16, f16, f32, e8m0, fp8_e4m3, i8 and u8
      recipe: `block` is not a list of two whole numbers
          --> mine.toml:16:38
           |
        16 | encoding = { scale = "bf17", block = [1], table = [1, 0] }
           |                                      ^^^
        = block = [128, 128]: rows, then columns; 0 spans the whole extent
      recipe: the values of a codebook do not rise from one to the next
          --> mine.toml:16:51
           |
        16 | encoding = { scale = "bf17", block = [1], table = [1, 0] }
           |                                                   ^^^^^^
        = list them in ascending order, each once

    9 problems
    "#);
}

#[test]
fn a_syntax_error_keeps_its_place() {
    insta::assert_snapshot!(picture("schema = 1\nname = \nwhole_groups = maybe\n"), @r#"
    error: the recipe mine.toml is not usable  [exit 2]

      recipe: not TOML: a value is missing
         --> mine.toml:2:8
          |
        2 | name =
          |        ^
      recipe: not TOML: this is no number, true or false, and text stands in quotes
         --> mine.toml:3:16
          |
        3 | whole_groups = maybe
          |                ^^^^^

    2 problems
    "#);
}

#[test]
fn a_key_given_twice() {
    insta::assert_snapshot!(picture("schema = 1\nname = \"a\"\nname = \"b\"\n"), @r#"
    error: the recipe mine.toml is not usable  [exit 2]

      recipe: not TOML: duplicate key
         --> mine.toml:3:1
          |
        3 | name = "b"
          | ^^^^

    1 problem
    "#);
}

#[test]
fn settings_from_the_command_line_are_shown_as_typed() {
    let mut recipe = radpack::recipe::load(None).expect("the default recipe");
    let failure = recipe
        .set_all(&[
            "graphs.batch_siz=4",
            "target.devices=many",
            "quantize.0.encoding=bf16",
            "batch",
        ])
        .expect_err("four mistakes");
    insta::assert_snapshot!(failure.to_string(), @r#"
    error: --set cannot be applied  [exit 2]

      recipe: [graphs] has no key `batch_siz`
         --> --set:1:8
          |
        1 | graphs.batch_siz=4
          |        ^^^^^^^^^ unknown key
        = did you mean `batch_size`?
        = keys of [graphs]: max_seq_len, batch_size, decoder_batch_sizes, prefill_chunk_size,
          image_prefill_chunk_size, attention, kv_partition_len and kv_dtype
      recipe: `devices` is a string, not a whole number
         --> --set:1:16
          |
        1 | target.devices=many
          |                ^^^^ a string
      recipe: `quantize.0.encoding` cannot be set from the command line
         --> --set:1:1
          |
        1 | quantize.0.encoding=bf16
          | ^^^^^^^^^^^^^^^^^^^
        = rules are ordered; write them into a recipe file
      recipe: --set takes KEY=VALUE
         --> --set:1:1
          |
        1 | batch
          | ^^^^^ no `=`
        = e.g. --set graphs.batch_size=4

    4 problems
    "#);
}
