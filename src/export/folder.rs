//! Writing the folder: shards, index, configuration, side files.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::artifact::manifest::Manifest;
use crate::artifact::{Artifact, layout as names};
use crate::checkpoint::{FACTOR_KEY, safetensors_dtype};
use crate::diag::{Diagnostic, Failure, FailureKind, Result};

use super::tensors::Tensor;
use super::{Options, Plan};

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// The folder.
    pub folder: PathBuf,
    /// Tensors in it.
    pub tensors: usize,
    /// Files with weights.
    pub shards: usize,
    /// Bytes of the tensors.
    pub bytes: u64,
    /// Side files.
    pub side_files: usize,
    /// Weights of a merged draft model that were left out: it is a checkpoint of its own.
    pub draft_weights: usize,
    /// Weights without their recipe's activations: those are in groups that do not divide the weights' columns, which
    /// compressed-tensors cannot compute.
    pub unstated_activations: usize,
}

/// A folder in the making, beside its final place and private until it is complete; removed on every failure.
pub(super) struct Partial<'a> {
    folder: tempfile::TempDir,
    out: &'a Path,
}

impl<'a> Partial<'a> {
    /// Begins the folder `out`, which must not exist yet.
    pub fn begin(out: &'a Path) -> Result<Partial<'a>> {
        if out.symlink_metadata().is_ok() {
            let problem = Diagnostic::new("output", format!("{} exists already", out.display()))
                .help("name a folder that does not exist yet");
            return Err(Failure::one(FailureKind::Usage, "the output is in the way", problem));
        }
        let parent = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // Beside the output, so that the last step is a rename.
        let folder = tempfile::Builder::new()
            .prefix(".radpack-export-")
            .tempdir_in(parent)
            .map_err(|e| Failure::io("create a folder beside", out, &e))?;
        Ok(Partial { folder, out })
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Gives the folder its final name.
    pub fn publish(self) -> Result<()> {
        // A temporary folder is private; an exported one is an ordinary folder.
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(self.path(), fs::Permissions::from_mode(0o755))
            .map_err(|e| Failure::io("write", self.out, &e))?;
        fs::rename(self.path(), self.out).map_err(|e| Failure::io("rename", self.out, &e))?;
        // The folder has its final name: there is nothing left to remove.
        let _ = self.folder.keep();
        Ok(())
    }
}

pub(super) fn write(
    artifact: &Artifact,
    manifest: &Manifest,
    plan: &Plan<'_>,
    out: &Path,
    options: Options,
) -> Result<Exported> {
    let partial = Partial::begin(out)?;
    let io = |doing: &'static str| move |e: io::Error| Failure::io(doing, out, &e);
    let shards = shards(&plan.tensors, options.shard_bytes);
    let mut index = Map::new();
    for (i, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => "model.safetensors".to_owned(),
            n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
        };
        index.extend(shard.iter().map(|t| (t.name.clone(), json!(name))));
        write_shard(&partial.path().join(&name), shard).map_err(io("write"))?;
    }
    let bytes: u64 = plan.tensors.iter().map(Tensor::len).sum();
    if shards.len() > 1 {
        let document = json!({"metadata": {"total_size": bytes}, "weight_map": index});
        let path = partial.path().join("model.safetensors.index.json");
        write_file(&path, format!("{document:#}\n").as_bytes()).map_err(io("write"))?;
    }
    let config = |stored: &[u8]| configuration(stored, plan);
    let side_files = write_side_files(artifact, manifest, &config, partial.path())?;
    partial.publish()?;
    Ok(Exported {
        folder: out.to_owned(),
        tensors: plan.tensors.len(),
        shards: shards.len(),
        bytes,
        side_files,
        draft_weights: plan.draft_weights,
        unstated_activations: plan.unstated,
    })
}

/// Tensors in name order, cut into files.
fn shards<'t, 'a>(tensors: &'t [Tensor<'a>], limit: u64) -> Vec<Vec<&'t Tensor<'a>>> {
    let mut shards: Vec<Vec<&Tensor<'a>>> = vec![Vec::new()];
    let mut used = 0u64;
    for tensor in tensors {
        if used > 0 && used.saturating_add(tensor.len()) > limit {
            shards.push(Vec::new());
            used = 0;
        }
        used = used.saturating_add(tensor.len());
        if let Some(last) = shards.last_mut() {
            last.push(tensor);
        }
    }
    shards
}

/// Writes a safetensors file.
pub(super) fn write_shard(path: &Path, tensors: &[&Tensor<'_>]) -> io::Result<()> {
    // Wide elements first keep every tensor aligned in the file.
    let mut order: Vec<&&Tensor<'_>> = tensors.iter().collect();
    order.sort_by(|a, b| b.dtype.bits().cmp(&a.dtype.bits()).then_with(|| a.name.cmp(&b.name)));
    let mut header = Map::new();
    let mut metadata = Map::new();
    metadata.insert("format".to_owned(), json!("pt"));
    for tensor in tensors {
        if let Some(factor) = tensor.factor {
            // The shortest digits that read back as this f32.
            metadata.insert(format!("{FACTOR_KEY}{}", tensor.name), json!(format!("{factor:e}")));
        }
    }
    header.insert("__metadata__".to_owned(), Value::Object(metadata));
    let mut at = 0u64;
    for tensor in &order {
        let dtype = safetensors_dtype(tensor.dtype).ok_or_else(|| {
            let why = format!("{}: safetensors has no {}", tensor.name, tensor.dtype);
            io::Error::new(io::ErrorKind::InvalidData, why)
        })?;
        let end = at + tensor.len();
        let row = json!({"dtype": dtype, "shape": tensor.shape, "data_offsets": [at, end]});
        header.insert(tensor.name.clone(), row);
        at = end;
    }
    let mut text = Value::Object(header).to_string();
    while !text.len().is_multiple_of(8) {
        text.push(' ');
    }
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    out.write_all(&(text.len() as u64).to_le_bytes())?;
    out.write_all(text.as_bytes())?;
    let mut counted = Counted { out: &mut out, bytes: 0 };
    for tensor in &order {
        let before = counted.bytes;
        tensor.write(&mut counted)?;
        if counted.bytes - before != tensor.len() {
            let why = format!("{} is not as long as its shape says", tensor.name);
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
    }
    out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}

/// Counts what passes.
struct Counted<W> {
    out: W,
    bytes: u64,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

pub(super) fn write_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Writes the artifact's side files, `config.json` as `config` makes it; returns their number.
pub(super) fn write_side_files(
    artifact: &Artifact,
    manifest: &Manifest,
    config: &dyn Fn(&[u8]) -> Result<Vec<u8>>,
    folder: &Path,
) -> Result<usize> {
    let stored: BTreeMap<&str, &[u8]> = manifest
        .files
        .iter()
        .map(|f| {
            let name = format!("{}{}", names::FILE_PREFIX, f.path);
            (f.path.as_str(), artifact.find(&name).map(|e| e.plane(0)).unwrap_or_default())
        })
        .collect();
    for (path, bytes) in &stored {
        let relative = Path::new(path);
        // A manifest is not trusted with places outside the folder.
        let inside = relative.components().all(|c| matches!(c, std::path::Component::Normal(_)));
        if !inside {
            let problem =
                Diagnostic::new("export", format!("side file {path} leads out of the folder"));
            return Err(Failure::one(FailureKind::Invalid, "this file is not valid", problem));
        }
        let to = folder.join(relative);
        let io = |e: io::Error| Failure::io("write", &to, &e);
        if *path == "config.json" {
            write_file(&to, &config(bytes)?).map_err(io)?;
        } else {
            write_file(&to, bytes).map_err(io)?;
        }
    }
    Ok(stored.len())
}

/// The configuration, changed only where the weights are.
fn configuration(stored: &[u8], plan: &Plan<'_>) -> Result<Vec<u8>> {
    let tied = !plan.untied_head;
    let section = plan.groups.section(tied);
    if section.is_none() && tied && !plan.widened {
        return Ok(stored.to_vec());
    }
    let mut config: Map<String, Value> = serde_json::from_slice(stored).map_err(|e| {
        let problem = Diagnostic::new("export", format!("config.json: {e}"));
        Failure::one(
            FailureKind::Refused,
            "this artifact's configuration cannot be changed",
            problem,
        )
    })?;
    config.extend(section.map(|s| ("quantization_config".to_owned(), s)));
    if !tied {
        config.insert("tie_word_embeddings".to_owned(), json!(false));
        if let Some(Value::Object(text)) = config.get_mut("text_config") {
            text.insert("tie_word_embeddings".to_owned(), json!(false));
        }
    }
    if plan.widened {
        widen(&mut config);
        config.values_mut().filter_map(Value::as_object_mut).for_each(widen);
    }
    Ok(format!("{:#}\n", Value::Object(config)).into_bytes())
}

/// Says f32 wherever a model's or a tower's element type is named, under either of the names transformers has used.
fn widen(config: &mut Map<String, Value>) {
    for key in ["dtype", "torch_dtype"] {
        if let Some(value) = config.get_mut(key).filter(|v| v.is_string()) {
            *value = json!("float32");
        }
    }
}
