//! Published cache sizes, reproduced from configurations and shapes alone.

use std::collections::BTreeMap;
use std::fs;

use radpack::estimate::{
    self, Estimate, Held, MemoryModel, Options, Part, TokenBytes, parse_budget, token_bytes,
};
use radpack::graph::{self, KvLayout, Shards};
use radpack::model::{self, DRAFT_PREFIX, Model, ModelSpec, WeightTable};
use radpack::partition::{self, Models};
use radpack::recipe::{self, MemoryBudget, Profile, Recipe};
use radpack::tensor::{DType, Shape, TensorInfo};

const MIB: u64 = 1 << 20;

fn published(name: &str) -> Model {
    let at = testkit::fixtures().join("gemma4");
    let config = fs::read_to_string(at.join(format!("configs/{name}.json"))).expect("config");
    let shapes = fs::read_to_string(at.join(format!("shapes/{name}.tsv"))).expect("shapes");
    let tensors: BTreeMap<String, TensorInfo> = shapes
        .lines()
        .map(|line| {
            let fields: Vec<&str> = line.split('\t').collect();
            let dtype = if fields[1] == "I64" { DType::I64 } else { DType::BF16 };
            let shape: Vec<u64> = serde_json::from_str(fields[2]).expect("extents");
            (fields[0].to_owned(), TensorInfo { dtype, shape: Shape::new(shape) })
        })
        .collect();
    let config = serde_json::from_str(&config).expect("JSON");
    model::read(&config, None, &tensors).unwrap_or_else(|f| panic!("{name}\n{f}"))
}

struct Planned {
    model: MemoryModel,
    profile: Profile,
    budget: Option<MemoryBudget>,
}

impl Planned {
    fn estimate(&self) -> Estimate {
        self.with(Options { budget: self.budget, ..Options::default() })
    }

    fn with(&self, options: Options) -> Estimate {
        estimate::estimate(&self.model, &self.profile, options).unwrap_or_else(|f| panic!("{f}"))
    }
}

fn recipe(name: &str, sets: &[&str]) -> Recipe {
    let mut recipe = recipe::load(Some(name)).unwrap_or_else(|f| panic!("{f}"));
    recipe.set_all(sets).unwrap_or_else(|f| panic!("{f}"));
    recipe
}

fn memory(
    spec: &ModelSpec,
    draft: Option<&ModelSpec>,
    table: &WeightTable,
    recipe: &Recipe,
) -> Result<Planned, radpack::diag::Failure> {
    let profile = Profile::find(recipe.target.profile.as_deref().expect("a target"))?;
    let mut held = spec.clone();
    held.audio = None;
    if !recipe.towers.vision {
        held.vision = None;
    }
    let assignment = recipe.resolve(table, "model")?;
    let devices = u32::try_from(recipe.target.devices).expect("devices");
    let models = Models { main: Some(spec), draft };
    let placement = partition::place(models, table, &assignment, devices, &[0])?;
    let sizes = graph::derive(&held, draft.is_some(), recipe, Some(&profile), DType::BF16)?.sizes;
    let shards = Shards::new(recipe, table, &assignment, &placement);
    let programs = graph::compile(&held, draft, &sizes, &shards)?;
    let model = MemoryModel::of_plan(&placement, &programs, &sizes);
    Ok(Planned { model, profile, budget: recipe.target.memory_budget })
}

fn seed(sets: &[&str]) -> Planned {
    let model = published("gemma-4-31B");
    let recipe = recipe("gemma-4/rbln-w8a16-x16", sets);
    memory(&model.spec, None, &model.table, &recipe).unwrap_or_else(|f| panic!("{f}"))
}

fn term(e: &Estimate, name: &str) -> u64 {
    let device = e.decisive().expect("a device");
    device.terms.iter().find(|t| t.name == name).unwrap_or_else(|| panic!("{name}")).bytes
}

#[test]
fn rebellions_gemma_4_31b_on_16_ca25_gets_36_blocks() {
    let planned = seed(&[]);
    let e = planned.estimate();
    for d in &e.devices[..2] {
        println!("{d:#?}");
    }
    println!("{:?} {:?}", e.allowance, e.with_encoder);
    let mut by: BTreeMap<String, u64> = BTreeMap::new();
    for w in planned.model.weights.iter().filter(|w| w.part == Part::Decoder) {
        let key = w.name.trim_start_matches(|c: char| c != '.' ).to_owned();
        let key = key.trim_start_matches(|c: char| c == '.' || c.is_ascii_digit()).to_owned();
        *by.entry(key).or_default() += w.on.iter().find(|(d, _)| *d == 0).map_or(0, |(_, b)| *b);
    }
    println!("{by:#?}");
    assert_eq!(e.capacity.budget, 15_190_091_366);
    assert_eq!(e.block_bytes, 320 * MIB);
    assert_eq!(term(&e, "window KV"), 400 * MIB);
    assert_eq!((e.full_blocks, e.min_blocks), (128, 17));
    assert_eq!((e.blocks, e.tokens, e.allocatable_tokens), (36, 589_824, 573_440));
}

#[test]
fn radiance_gemma_4_31b_i8g() {
    let main = published("gemma-4-31B");
    let draft = published("gemma-4-31B-it-assistant");
    let mut table = main.table.clone();
    table.merge_draft(draft.table.clone());
    for devices in [1u64, 2, 4] {
        for seqs in [2u64, 4, 8] {
            let sets = [
                format!("target.devices={devices}"),
                format!("graphs.batch_size={seqs}"),
                "graphs.kv_dtype=fp8".to_owned(),
            ];
            let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
            let r = recipe("gemma-4/radiance-i8g", &sets);
            let p = memory(&main.spec, Some(&draft.spec), &table, &r).unwrap_or_else(|f| panic!("{f}"));
            let e = p.estimate();
            println!("{devices} {seqs} tokens {} {:?} {:?}", e.tokens, e.decisive(), e.allowance);
            for part in [Part::Decoder, Part::Lookup, Part::Draft, Part::Encoder, Part::Host] {
                println!("  {part:?} {}", p.model.weight_bytes(part, 0) as f64 / MIB as f64);
            }
        }
    }
}
