//! `check-stablehlo`: compiled programs, run by XLA over virtual devices and compared with transformers' own runs.
//!
//! This side makes the Python environment, the artifacts and their exports; what is compared, and with what tolerance, is
//! told at the top of `xtask/check_stablehlo/check.py`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use crate::{Result, build, check_exports, python};

/// Models, the devices that their quantized artifacts split over beside one, and whether they have images. One head of
/// tiny-llama has 8 columns, half a group, so its quantized artifacts do not split over 16 devices.
const MODELS: [(&str, [u32; 2], bool); 6] = [
    (GEMMA3, [4, 16], true),
    ("tiny-gemma4-moe", [4, 16], true),
    ("tiny-gemma4-e", [4, 16], true),
    ("tiny-gemma4-dense", [4, 16], true),
    ("tiny-qwen3", [4, 16], false),
    ("tiny-llama", [4, 8], false),
];

/// Four of its encoder's heads fill a group, so that of its quantized artifacts splits over four devices.
const GEMMA3: &str = "tiny-gemma3-vision";

/// Draft heads of unquantized artifacts.
const DRAFTS: [(&str, &str); 2] =
    [("tiny-gemma4-e", "tiny-gemma4-e-assistant"), ("tiny-gemma4-dense", "tiny-gemma4-assistant")];

/// Recipes by what becomes of linear layers and experts. `check.py` knows that `keep` (and `aligned`) quantizes nothing.
const RECIPES: [(&str, &str); 3] = [
    ("keep", "\"keep\""),
    ("int8-g16", "{ codes = \"i8\", scale = \"bf16\", group = 16 }"),
    ("nvfp4", "\"nvfp4\""),
];

/// A model whose sequences leave slots unused in one more case, on that many devices.
const ALIGNED: (&str, u32) = ("tiny-gemma4-dense", 4);

/// A mistake that `check.py` can seed.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Mistake {
    /// Two devices' shards of one weight are swapped
    Swap,
    /// One scale is halved
    Scale,
    /// Keys and values of one device are another head's
    Head,
}

/// How to check.
#[derive(Debug, Args)]
pub struct CheckStablehloArgs {
    /// The radpack binary [default: build target/release/radpack]
    #[arg(long)]
    bin: Option<PathBuf>,
    /// A Python that has the packages of xtask/check_stablehlo/requirements.txt [default: install them into
    /// target/check-stablehlo/venv]
    #[arg(long)]
    python: Option<PathBuf>,
    /// Only this model
    #[arg(long)]
    model: Option<String>,
    /// Seed a mistake into every case that can have it: the check must then fail
    #[arg(long)]
    sabotage: Option<Mistake>,
}

/// Exports every model in every recipe for every number of devices and has `check.py` run and compare them. A difference,
/// or an export that fails, is an error.
pub fn run(args: &CheckStablehloArgs) -> Result<()> {
    let scripts = testkit::root().join("xtask/check_stablehlo");
    let scratch = testkit::target().join("check-stablehlo");
    let python = match &args.python {
        Some(python) => python.clone(),
        None => python::environment(&scripts.join("requirements.txt"), &scratch, "170 MB")?,
    };
    let bin = build::radpack(args.bin.clone())?;
    let folders = scratch.join("folders");
    build::remove_folder(&folders)?;
    let mut cases = Vec::new();
    for (model, quantized, images) in MODELS {
        if args.model.as_deref().is_some_and(|only| only != model) {
            continue;
        }
        let source = check_exports::source(model, &scratch)?;
        let draft = DRAFTS.iter().find(|(target, _)| *target == model).map(|(_, head)| *head);
        let head = draft.map(|draft| check_exports::source(draft, &scratch)).transpose()?;
        for (recipe, encoding) in RECIPES {
            let plain = recipe == "keep";
            let many = if plain { [4, 16] } else { quantized };
            for devices in [&[1], &many[..]].concat() {
                let vision = images.then(|| vision_devices(recipe, devices));
                let folder = folders.join(model).join(recipe).join(devices.to_string());
                let text = recipe_text(recipe, encoding, vision.as_deref());
                let head = head.as_deref().filter(|_| plain);
                export(&bin, [Some(&source), head], &text, devices, &folder)?;
                cases.push(case([Some(model), draft.filter(|_| plain)], recipe, devices, &folder));
            }
        }
    }
    let (model, devices) = ALIGNED;
    if args.model.as_deref().is_none_or(|only| only == model) {
        let source = check_exports::source(model, &scratch)?;
        let folder = folders.join(model).join("aligned");
        export(&bin, [Some(&source), None], &aligned(), devices, &folder)?;
        cases.push(case([Some(model), None], "aligned", devices, &folder));
    }
    if cases.is_empty() {
        let names = MODELS.map(|m| m.0).join(", ");
        return Err(format!("no such model; there are {names}"));
    }
    let list = folders.join("cases.json");
    fs::write(&list, Value::Array(cases).to_string()).map_err(testkit::at(&list))?;
    let log = scratch.join("check.log");
    let mut check = Command::new(python);
    // Compiled scripts stay out of the tree.
    check.arg("-B").arg(scripts.join("check.py")).arg(&list);
    if let Some(mistake) = args.sabotage.and_then(|m| m.to_possible_value()) {
        check.args(["--sabotage", mistake.get_name()]);
    }
    // XLA's notices.
    check.stderr(File::create(&log).map_err(testkit::at(&log))?);
    build::run(&mut check).map_err(|e| match python::traceback(&log) {
        Some(lines) => {
            format!("{e}\n{lines}\n(folders in {}, log in {})", folders.display(), log.display())
        }
        None => format!("{e} (folders in {})", folders.display()),
    })?;
    // Kept after a difference, to be compared.
    build::remove_folder(&folders)
}

/// The devices that run the image encoder: all, or where a group of its columns would be cut, four that are not the
/// first.
fn vision_devices(recipe: &str, devices: u32) -> Vec<u32> {
    if recipe != "keep" && devices == 16 { vec![3, 5, 7, 11] } else { (0..devices).collect() }
}

/// Sizes that force every path: several cache blocks, calls that wrap windows, padding.
fn recipe_text(name: &str, encoding: &str, vision: Option<&[u32]>) -> String {
    let vision = vision.map_or(String::new(), |d| format!("[vision]\ndevices = {d:?}\n\n"));
    format!(
        "schema = 1\nname = \"{name}\"\n\n[target]\nprofile = \"cpu\"\n\n{vision}[graphs]\nmax_seq_len = 128\n\
         batch_size = 2\ndecoder_batch_sizes = 2\nprefill_chunk_size = 16\nkv_partition_len = 32\n\
         kv_dtype = \"f32\"\n\n[[quantize]]\nclass = [\"linear\", \"expert\"]\nencoding = {encoding}\n\
         activations = \"f32\"\n"
    )
}

/// Sizes of a target on which a call's rows lie in one block, so that slots and positions differ; its cache is f16.
fn aligned() -> String {
    "schema = 1\nname = \"aligned\"\n\n[target]\nprofile = \"rbln-ca25\"\n\n[vision]\ndevices = [0, 1, 2, 3]\n\n\
     [graphs]\nmax_seq_len = 2048\nbatch_size = 2\ndecoder_batch_sizes = 2\nprefill_chunk_size = 64\n\
     kv_partition_len = 1024\nkv_dtype = \"f16\"\n\n[[quantize]]\nclass = \"linear\"\nencoding = \"keep\"\n\
     activations = \"f32\"\n"
        .to_owned()
}

/// Converts a model, with its draft head if it has one, and exports its programs.
fn export(
    bin: &Path,
    [source, draft]: [Option<&Path>; 2],
    recipe: &str,
    devices: u32,
    folder: &Path,
) -> Result<()> {
    let parent = folder.parent().unwrap_or(folder);
    fs::create_dir_all(parent).map_err(testkit::at(parent))?;
    let text = folder.with_extension("toml");
    fs::write(&text, recipe).map_err(testkit::at(&text))?;
    let artifact = folder.with_extension("rad");
    let mut convert = Command::new(bin);
    convert.arg("convert").args(source).arg("--recipe").arg(&text);
    if let Some(draft) = draft {
        convert.arg("--draft-model").arg(draft);
    }
    convert.arg("--devices").arg(devices.to_string()).arg("-o").arg(&artifact);
    build::output(&mut convert)?;
    let mut export = Command::new(bin);
    export.arg("export").arg(&artifact).args(["--format", "stablehlo"]).arg("-o").arg(folder);
    build::output(&mut export).map(|_| ())
}

fn case([model, draft]: [Option<&str>; 2], recipe: &str, devices: u32, folder: &Path) -> Value {
    let of =
        |name: &str| testkit::fixtures().join("models/ref").join(format!("{name}.safetensors"));
    json!({
        "model": model,
        "recipe": recipe,
        "devices": devices,
        "folder": folder,
        "reference": model.map(of),
        "draft": draft.map(of),
    })
}
