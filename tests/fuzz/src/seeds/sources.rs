//! Inputs of what radpack reads to begin with: checkpoints, recipes, tokenizers, hubs.

use crate::drive::archive::pack;
use serde_json::{Map, Value, json};
use testkit::gguf::{File, Tensor, Value as Pair, kind};

use super::{Seeds, below, read};

/// Data of tensors that is kept: shapes of packed weights come first.
const DATA: usize = 64;
/// Largest fixture that is taken as it is.
const MOST: usize = 64 << 10;

/// Configurations of quantized checkpoints, by what stands in their tensors' names.
const QUANTIZED: [(&str, &str); 14] = [
    (
        "awq",
        r#"{"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": true, "version": "gemm"}"#,
    ),
    ("gptq_v1", r#"{"quant_method": "gptq", "bits": 4, "group_size": 32}"#),
    (
        "gptq_v2",
        r#"{"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": true, "checkpoint_format": "gptq_v2"}"#,
    ),
    ("mxfp4", r#"{"quant_method": "mxfp4"}"#),
    ("fp8", r#"{"quant_method": "fp8", "weight_block_size": [128, 128]}"#),
    ("fp8", r#"{"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*.q_*"]}"#),
    (
        "nvfp4",
        r#"{"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]}"#,
    ),
    ("modelopt", r#"{"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}"#),
    ("int8_wo", r#"{"quant_method": "modelopt", "quant_algo": "INT8_WO"}"#),
    (
        "pack",
        r#"{"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["re:.*lm_head"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": true, "actorder": null}}}}"#,
    ),
    (
        "int",
        r#"{"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": [], "config_groups": {"group_0": {"targets": ["re:.*w.*"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}}"#,
    ),
    (
        "fp8",
        r#"{"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["a"], "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}}}}"#,
    ),
    (
        "nvfp4",
        r#"{"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"g": {"targets": ["Linear"], "format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}}}"#,
    ),
    (
        "",
        r#"{"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {"a": {}}}"#,
    ),
];

/// Chat templates with what published ones use.
const TEMPLATES: [&str; 4] = [
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{% macro render(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}{% if p.type == 'text' %}{{ p.text }}{% else %}<image>{% endif %}{% endfor %}{% endif %}{% endmacro %}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ loop.index0 }}{{ render(m.content) }}{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ ns.n }}",
    "{% if messages[0]['role'] not in ['user', 'system'] %}{{ raise_exception('no') }}{% endif %}{{ messages | tojson(indent=2) }}{{ messages | length }}{{ 'a b'.split(' ')[1:] | join('-') }}{{ 'x'.upper().startswith('X') }}",
    "{%- set x = 'ab' ~ 'cd' -%}{%- for i in range(3) -%}{%- set x = x ~ x -%}{{ x | replace('a', 'bb') | reverse }}{{ dict(a=1).items() | list }}{%- endfor -%}{{ '%s' | format(1.5) }}{{ x[::-1] }}{{ undefined_name is defined }}",
];

/// Text recipes of radiance.
const IMPORTS: [&str; 4] = [
    "output.weight  rtn codes=i8 group=$BITS   # the head\n* keep\n",
    "blk.*.attn_?.weight\trtn codes=fp4_e2m1 group=16 scale=fp8_e4m3 scale2=f32\n",
    "* rtn table=nf4 block=1x64 scale=f16\n[ab]* cast f16\n",
    "a rtn codes=u4 group=0x20 scale=f16 zero=u4 rule=absmax clamp=full transform=fwht\nb gptq x=1\n",
];

/// Adds them.
pub fn add(seeds: &mut Seeds) {
    tensors(seeds);
    models(seeds);
    quantized(seeds);
    ggml(seeds);
    texts(seeds);
    hub(seeds);
}

fn header(tensors: &[(&str, &str, &[u64], u64)]) -> Vec<u8> {
    let mut at = 0;
    let entry = |(name, dtype, shape, bytes): &(&str, &str, &[u64], u64)| {
        let begin = at;
        at += bytes;
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, at]});
        ((*name).to_owned(), entry)
    };
    let map: Map<String, Value> = tensors.iter().map(entry).collect();
    Value::from(map).to_string().into_bytes()
}

fn framed(header: &[u8], data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header, &vec![1; data]].concat()
}

fn tensors(seeds: &mut Seeds) {
    let all = [
        "F64", "I64", "F32", "I32", "BF16", "F16", "I16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U8",
        "BOOL",
    ];
    for dtype in all {
        let width = testkit::safetensors::dtype_bytes(dtype).unwrap_or(1);
        let header = header(&[("a", dtype, &[2, 3], 6 * width), ("b", dtype, &[], width)]);
        seeds.add("safetensors", framed(&header, 7 * width as usize));
    }
    let four = header(&[("a", "F4", &[4, 8], 16), ("empty", "F32", &[0, 7], 0)]);
    seeds.add("safetensors", framed(&four, 16));
    let text = br#"{"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}    "#;
    seeds.add("safetensors", framed(text, 1));
    for path in below("fixtures", ".safetensors") {
        let bytes = read(path);
        if bytes.len() < MOST {
            seeds.add("safetensors", bytes);
        }
    }
}

/// The header of a file, and the first of its data.
fn head(file: &[u8]) -> Vec<u8> {
    let length = u64::from_le_bytes(*file.first_chunk().expect("a length")) as usize;
    let (header, data) = file[8..].split_at(length);
    [header, &[0], &data[..DATA.min(data.len())]].concat()
}

fn models(seeds: &mut Seeds) {
    for path in below("fixtures", "config.json") {
        let name = path.file_name().is_some_and(|n| n == "config.json");
        if name {
            seeds.add("config", read(path));
        }
    }
    for path in below("fixtures/gemma4/configs", ".json") {
        seeds.add("config", read(path));
    }
    for name in testkit::names() {
        let folder = testkit::tiny_model(name);
        let mut files: Vec<(String, Vec<u8>)> = Vec::new();
        for entry in std::fs::read_dir(&folder).expect("the model").flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.ends_with(".safetensors") {
                files.push((name, head(&read(entry.path()))));
            } else if ["config.json", "model.safetensors.index.json"].contains(&name.as_str()) {
                files.push((name, read(entry.path())));
            }
        }
        files.sort();
        seeds.add("checkpoint", pack(files.iter().map(|(n, b)| (n.as_str(), b.as_slice()))));
    }
    let two = header(&[("a", "F32", &[2, 8], 64), ("b", "BF16", &[16], 32)]);
    let one = header(&[("c", "I64", &[2], 16)]);
    let index = json!({"metadata": {"total_size": 112}, "weight_map": {"a": "x-1.safetensors", "b": "x-1.safetensors", "c": "x-2.safetensors"}});
    let index = index.to_string();
    seeds.pack(
        "checkpoint",
        &[
            ("model.safetensors.index.json", index.as_bytes()),
            ("x-1.safetensors", &two),
            ("x-2.safetensors", &one),
            ("tokenizer.json", br#"{"model": {"vocab": {"x": 0, "y": 300}}, "added_tokens": [{"id": 7, "content": "z"}]}"#),
            ("generation_config.json", br#"{"eos_token_id": [1, 2]}"#),
        ],
    );
    seeds.pack(
        "checkpoint",
        &[
            ("model.safetensors", &two),
            ("vocab.json", br#"{"a": 1}"#),
            ("vocab.txt", b"a\nb\nc"),
            ("added_tokens.json", br#"{"b": 2}"#),
            ("adapter_config.json", b"{}"),
            ("additional_chat_templates/rag.jinja", b"{{ x }}"),
            ("preprocessor_config.json", b"{}"),
        ],
    );
}

fn quantized(seeds: &mut Seeds) {
    for file in ["compressed-tensors", "modelopt", "other"] {
        let bytes = read(format!("fixtures/quant-sources/{file}.safetensors"));
        let length = u64::from_le_bytes(*bytes.first_chunk().expect("a length")) as usize;
        let (header, data) = bytes[8..].split_at(length);
        let header: Map<String, Value> = serde_json::from_slice(header).expect("a header");
        let mut groups: Vec<&str> =
            header.keys().filter_map(|name| Some(name.rsplit_once('/')?.0)).collect();
        groups.sort_unstable();
        groups.dedup();
        for group in groups {
            let mut kept: Vec<(&str, &Value)> = header
                .iter()
                .filter_map(|(name, v)| Some((name.strip_prefix(group)?.strip_prefix('/')?, v)))
                .filter(|(leaf, _)| *leaf != "dequant")
                .collect();
            kept.sort_by_key(|(_, v)| v["data_offsets"][0].as_u64());
            let (mut at, mut first, mut table) = (0, Vec::new(), Map::new());
            for (leaf, entry) in kept {
                let [from, to] = [0, 1].map(|i| entry["data_offsets"][i].as_u64().unwrap_or(0));
                if first.len() < DATA {
                    first.extend_from_slice(&data[from as usize..to as usize]);
                }
                let mut entry = entry.clone();
                entry["data_offsets"] = json!([at, at + to - from]);
                at += to - from;
                table.insert(format!("w.{leaf}"), entry);
            }
            first.truncate(4 * DATA);
            let shard = [Value::from(table).to_string().as_bytes(), &[0], &first].concat();
            seeds.pack("quantized", &[("model.safetensors", &shard)]);
            for (_, config) in QUANTIZED.iter().filter(|(part, _)| group.contains(part)) {
                let config = format!(r#"{{"quantization_config": {config}}}"#);
                seeds.pack(
                    "quantized",
                    &[("config.json", config.as_bytes()), ("model.safetensors", &shard)],
                );
            }
        }
    }
    let plain = header(&[("w.weight", "F16", &[8, 32], 512)]);
    for (_, config) in QUANTIZED {
        let bare = config.as_bytes();
        let nested = format!(r#"{{"quantization": {config}, "producer": {{"name": "modelopt"}}}}"#);
        seeds.pack("quantized", &[("quantize_config.json", bare), ("model.safetensors", &plain)]);
        seeds.pack(
            "quantized",
            &[("hf_quant_config.json", nested.as_bytes()), ("model.safetensors", &plain)],
        );
    }
}

fn ggml(seeds: &mut Seeds) {
    seeds.add("gguf", read("fixtures/gguf/tiny.gguf"));
    let mut file = File::default();
    file.pair("general.architecture", Pair::Text("llama".to_owned()));
    file.pair("general.alignment", Pair::U32s(vec![32]));
    file.pair("llama.block_count", Pair::U32s(vec![1, 2]));
    file.pair("flag", Pair::Bool(true));
    file.pair("flags", Pair::Bools(vec![true, false]));
    file.pair("tokenizer.ggml.tokens", Pair::Texts(vec!["a".to_owned(), "b".to_owned()]));
    for (n, (number, bytes)) in
        [(kind::F32, 128), (kind::F16, 64), (kind::BF16, 64), (kind::Q8_0, 34)]
            .into_iter()
            .enumerate()
    {
        let (name, shape) = (format!("t{n}.weight"), vec![1, 32]);
        file.tensors.push(Tensor { name, kind: number, shape, bytes: vec![n as u8; bytes] });
    }
    seeds.add("gguf", file.bytes());
    // Every block type, by number and bytes of 256 elements.
    for (number, bytes) in [
        (2, 144),
        (3, 160),
        (6, 176),
        (7, 192),
        (8, 272),
        (10, 84),
        (11, 110),
        (12, 144),
        (13, 176),
        (14, 210),
        (15, 292),
        (20, 144),
        (23, 136),
        (39, 136),
    ] {
        let mut file = File::default();
        let tensor = Tensor {
            name: "w".to_owned(),
            kind: number,
            shape: vec![2, 256],
            bytes: vec![7; 2 * bytes],
        };
        file.tensors.push(tensor);
        seeds.add("gguf", file.bytes());
    }
    let values = [1.0, 2.0, 0.5, 0.0];
    seeds.add(
        "imatrix",
        testkit::imatrix::legacy(&[("blk.0.attn_q.weight", 2, &values), ("w", 1, &values[..1])]),
    );
    let tensors: [(&str, &[u64], &[f32]); 4] = [
        ("blk.0.attn_q.weight.in_sum2", &[1, 4], &values),
        ("blk.0.attn_q.weight.counts", &[1, 1], &values[..1]),
        ("blk.0.ffn_down_exps.weight.in_sum2", &[2, 2], &values),
        ("blk.0.ffn_down_exps.weight.counts", &[2, 1], &values[..2]),
    ];
    seeds.add("imatrix", testkit::imatrix::gguf(&tensors));
}

fn texts(seeds: &mut Seeds) {
    for path in below("recipes", ".toml") {
        seeds.add("recipe", read(path));
    }
    seeds.add("recipe", crate::drive::SMALL);
    seeds.add("recipe", "schema = 1\nname = \"x\"\nwhole_groups = true\n[target]\ndevices = 4\nmemory_budget = 0.9\n[[quantize]]\nmatch = [\"re:^blk\\\\.\\\\d+\", \"*.{q,k}_proj.weight\"]\nlayers = [0, -1]\ntower = \"text\"\nencoding = { codes = \"i4\", scale = \"f8_e4m3\", group = 16, scale2 = \"f32\", transform = \"fwht\" }\nquantizer = \"search\"\nrounding = \"modelopt\"\nactivations = \"int8\"\n[vision]\ndevices = [0, 1]\n");
    for text in IMPORTS {
        seeds.add("recipe_import", text);
    }
    let mut tokenizers: Vec<Vec<u8>> =
        below("fixtures", "tokenizer.json").into_iter().map(read).collect();
    tokenizers.sort();
    tokenizers.dedup();
    for text in &tokenizers {
        seeds.pack("tokenizer", &[("tokenizer.json", text)]);
    }
    for text in small_tokenizers() {
        let settings = br#"{"bos_token": "a", "eos_token": {"content": "b"}, "add_bos_token": true, "unk_token": "<unk>"}"#;
        seeds.pack(
            "tokenizer",
            &[("tokenizer.json", text.as_bytes()), ("tokenizer_config.json", settings)],
        );
    }
    for template in TEMPLATES {
        seeds.add("chat", template);
        let settings = json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": [{"name": "default", "template": template}]});
        seeds.pack("chat", &[("tokenizer_config.json", settings.to_string().as_bytes())]);
    }
    let corpus = read("fixtures/corpus/small.jsonl");
    for line in corpus.split(|b| *b == b'\n').take(4) {
        seeds.add("corpus", line);
    }
    seeds.add("corpus", "{\"source\": \"a\", \"text\": \"b\"}\n\n{\"source\": \"c\", \"prompt\": \"d\", \"answer\": \"e\"}\n");
    for path in below("fixtures/images", "") {
        let bytes = read(&path);
        let json = path.extension().is_some_and(|e| {
            ["json", "md", "py", "safetensors"].contains(&e.to_string_lossy().as_ref())
        });
        if bytes.len() < MOST && !json {
            seeds.add("picture", bytes);
        }
    }
}

/// One tokenizer of every kind, with parts of every kind.
fn small_tokenizers() -> Vec<String> {
    let vocab = json!({"a": 0, "b": 1, "ab": 2, "<unk>": 3, "Ġ": 4, "<0x0A>": 5});
    let models = [
        json!({"type": "BPE", "vocab": vocab, "merges": [["a", "b"]], "byte_fallback": true, "unk_token": "<unk>"}),
        json!({"type": "BPE", "vocab": vocab, "merges": ["a b"], "dropout": null, "fuse_unk": true, "ignore_merges": true, "continuing_subword_prefix": "", "end_of_word_suffix": ""}),
        json!({"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.5], ["b", -2.0]], "unk_id": 0, "byte_fallback": false}),
        json!({"type": "WordPiece", "vocab": vocab, "unk_token": "<unk>", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}),
        json!({"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}),
    ];
    let parts = [
        (
            json!({"type": "NFC"}),
            json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
            json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        ),
        (
            json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}),
            Value::Null,
            json!({"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}),
        ),
        (
            json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true}),
            json!({"type": "BertPreTokenizer"}),
            json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        ),
        (
            json!({"type": "Lowercase"}),
            json!({"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|(?i:'s)"}, "behavior": "Isolated", "invert": false}, {"type": "Digits", "individual_digits": true}, {"type": "Punctuation", "behavior": "Isolated"}]}),
            json!({"type": "BPEDecoder", "suffix": "</w>"}),
        ),
        (
            json!({"type": "Precompiled", "precompiled_charsmap": "ALQCAACEAAAAAACAAQAAgMz8AgC4BQAA"}),
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
        ),
        (
            json!({"type": "StripAccents"}),
            json!({"type": "WhitespaceSplit"}),
            json!({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true}),
        ),
    ];
    let mut out = Vec::new();
    for (n, model) in models.iter().enumerate() {
        for (normalizer, pre, decoder) in parts.iter().skip(n % 2).step_by(2) {
            let post = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {"a": {"id": "a", "ids": [0], "tokens": ["a"]}}});
            out.push(json!({
                "version": "1.0", "truncation": null, "padding": null,
                "added_tokens": [{"id": 0, "content": "a", "single_word": false, "lstrip": false, "rstrip": true, "normalized": false, "special": true}],
                "normalizer": normalizer, "pre_tokenizer": pre, "post_processor": post, "decoder": decoder, "model": model,
            }).to_string());
        }
    }
    out
}

fn hub(seeds: &mut Seeds) {
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let info = json!({"id": "org/tiny", "sha": commit, "siblings": [{"rfilename": "config.json"}], "tags": []}).to_string();
    let shard = header(&[("a", "F32", &[2], 8)]);
    let whole = 8 + shard.len() + 8;
    let sha = "c".repeat(64);
    let tree = json!([
        {"type": "directory", "oid": "0", "size": 0, "path": "original"},
        {"type": "file", "oid": "230d5f4da0da586aad26ead694ea67cd15bd6df1", "size": 23, "path": "config.json"},
        {"type": "file", "oid": "1", "size": whole, "path": "model.safetensors", "lfs": {"oid": sha, "size": whole, "pointerSize": 130}},
    ]).to_string();
    let ok =
        |body: &[u8]| [b"200 OK\nContent-Type: application/json\n\n".as_slice(), body].concat();
    let file = |etag: &str, body: &[u8]| {
        [
            format!(
                "200 OK\nETag: \"{etag}\"\nX-Repo-Commit: {commit}\nX-Linked-Size: {whole}\n\n"
            )
            .as_bytes(),
            body,
        ]
        .concat()
    };
    let (info, tree) = (ok(info.as_bytes()), ok(tree.as_bytes()));
    let config = file("230d5f4da0da586aad26ead694ea67cd15bd6df1", br#"{"model_type": "llama"}"#);
    let weights = file(&sha, &shard);
    let all: [(&str, &[u8]); 4] = [
        ("info", &info),
        ("tree", &tree),
        ("config.json", &config),
        ("model.safetensors", &weights),
    ];
    seeds.pack("hub", &all);
    seeds.pack("hub", &[&all[..], &[("everything", b"")]].concat());
    let moved = b"302 Found\nLocation: HUB/org/tiny/resolve/main/other\n\n";
    seeds.pack("hub", &[("info", &info), ("tree", &tree), ("config.json", moved)]);
    for status in [
        "401 Unauthorized",
        "403 Forbidden",
        "404 Not Found",
        "429 Too Many Requests",
        "416 Range Not Satisfiable",
    ] {
        let error = format!(
            "{status}\nX-Error-Code: GatedRepo\nX-Error-Message: Access denied\n\n{{\"error\": \"no\"}}"
        );
        seeds.pack("hub", &[("info", error.as_bytes())]);
        seeds.pack("hub", &[("info", &info), ("tree", error.as_bytes())]);
    }
}
