//! Full-size checkpoints as sparse files: real config, names, dtypes and shapes; the data are file holes that read as
//! zeros and take no disk.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use crate::safetensors::{Entry, header};
use crate::values::{fnv1a64, word};
use crate::{Result, at};

/// How a sparse checkpoint is laid out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SparseOptions {
    /// Largest size of a shard's data in units of 10^9 bytes; a larger tensor gets a shard of its own.
    pub shard_gb: f64,
    /// How much of each shard's bf16 data, from its start, is noise instead of zeros, in MiB. Noise takes disk.
    pub noise_mib: u64,
}

impl Default for SparseOptions {
    fn default() -> Self {
        SparseOptions { shard_gb: 5.0, noise_mib: 0 }
    }
}

/// What [`sparse`] wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SparseSummary {
    /// Number of shards.
    pub shards: usize,
    /// Number of tensors.
    pub tensors: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
}

/// Writes a checkpoint folder `out` from a tensor list and a config.
///
/// `shapes` is a file with one tensor a line, `name TAB dtype TAB [d0, d1, …]`; the tensors go to the shards in that
/// order. `config` is copied byte for byte.
pub fn sparse(
    shapes: &Path,
    config: &Path,
    out: &Path,
    options: SparseOptions,
) -> Result<SparseSummary> {
    let entries = read_shapes(shapes)?;
    let shards = split(&entries, options.shard_gb * 1e9)?;
    fs::create_dir_all(out).map_err(at(out))?;
    let mut weight_map = BTreeMap::new();
    let mut total = 0;
    for (i, tensors) in shards.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        total += write_shard(&out.join(&file), i, tensors, options.noise_mib << 20)?;
        weight_map.extend(tensors.iter().map(|e| (e.name.as_str(), file.clone())));
    }
    let index = serde_json::json!({
        "metadata": { "total_size": total },
        "weight_map": weight_map,
    });
    let path = out.join("model.safetensors.index.json");
    fs::write(&path, format!("{index:#}\n")).map_err(at(&path))?;
    fs::copy(config, out.join("config.json")).map_err(at(config))?;
    Ok(SparseSummary { shards: shards.len(), tensors: entries.len(), bytes: total })
}

fn read_shapes(path: &Path) -> Result<Vec<Entry>> {
    let text = fs::read_to_string(path).map_err(at(path))?;
    let mut entries = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let bad = |why: String| format!("{}:{}: {why}", path.display(), i + 1);
        let [name, dtype, shape] = line.split('\t').collect::<Vec<_>>()[..] else {
            return Err(bad("expected name, dtype and shape, separated by tabs".into()));
        };
        let shape = serde_json::from_str(shape).map_err(|e| bad(e.to_string()))?;
        entries.push(Entry { name: name.into(), dtype: dtype.into(), shape });
    }
    Ok(entries)
}

/// Fills shards in order; a shard is closed before the tensor that would take it over the limit.
fn split(entries: &[Entry], limit: f64) -> Result<Vec<&[Entry]>> {
    let (mut shards, mut start, mut used) = (Vec::new(), 0, 0u64);
    for (i, e) in entries.iter().enumerate() {
        let bytes = e.bytes()?;
        if i > start && (used + bytes) as f64 > limit {
            shards.push(&entries[start..i]);
            (start, used) = (i, 0);
        }
        used += bytes;
    }
    shards.push(&entries[start..]);
    Ok(shards)
}

/// Writes one shard and returns the bytes of its data.
///
/// Noise, in 16-bit units of the shard's bf16 tensors in order: word `i` of the stream keyed `sparse/SHARD` (see
/// [`word`]) gives the sign from bit 63 and the magnitude `0x3B00 + ((z mod 2^32) * 0x380 >> 32)`, which is
/// about 0.002 to 0.25. Integer tensors stay zero.
fn write_shard(path: &Path, shard: usize, tensors: &[Entry], noise: u64) -> Result<u64> {
    let (head, data) = header(tensors)?;
    let mut file = BufWriter::new(File::create(path).map_err(at(path))?);
    file.write_all(&head).map_err(at(path))?;
    let h = fnv1a64(&format!("sparse/{shard}"));
    let (mut start, mut written) = (head.len() as u64, 0);
    for e in tensors {
        let bytes = e.bytes()?;
        if e.dtype == "BF16" && written < noise {
            file.seek(SeekFrom::Start(start)).map_err(at(path))?;
            let until = noise.min(written + bytes);
            while written < until {
                let z = word(h, written / 2);
                let magnitude = 0x3B00 + (((z & 0xFFFF_FFFF) * 0x380) >> 32) as u16;
                let sign = (z >> 63) as u16;
                file.write_all(&(sign << 15 | magnitude).to_le_bytes()).map_err(at(path))?;
                written += 2;
            }
        }
        start += bytes;
    }
    let file = file.into_inner().map_err(|e| at(path)(e.into_error()))?;
    file.set_len(head.len() as u64 + data).map_err(at(path))?;
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(options: SparseOptions) -> (std::path::PathBuf, SparseSummary) {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let n = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("testkit-sparse-{}-{n}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let shapes = "order\tI64\t[300000]\nbig\tBF16\t[1000, 1000]\nsmall\tBF16\t[8]\n";
        fs::write(dir.join("shapes.tsv"), shapes).unwrap();
        fs::write(dir.join("c.json"), "{ \"model_type\":\"x\" }").unwrap();
        let out = dir.join("out");
        let summary = sparse(&dir.join("shapes.tsv"), &dir.join("c.json"), &out, options).unwrap();
        (dir, summary)
    }

    #[test]
    fn shards_are_closed_before_the_limit_and_data_are_zeros() {
        let (dir, summary) = made(SparseOptions { shard_gb: 0.003, noise_mib: 0 });
        assert_eq!(summary, SparseSummary { shards: 2, tensors: 3, bytes: 4_400_016 });
        let shard = fs::read(dir.join("out/model-00002-of-00002.safetensors")).unwrap();
        let head = concat!(
            r#"{"__metadata__":{"format":"pt"},"#,
            r#""big":{"dtype":"BF16","shape":[1000,1000],"data_offsets":[0,2000000]},"#,
            r#""small":{"dtype":"BF16","shape":[8],"data_offsets":[2000000,2000016]}}"#,
        );
        assert_eq!(std::str::from_utf8(&shard[8..8 + head.len()]).unwrap(), head);
        let data = 8 + head.len().next_multiple_of(8);
        assert_eq!(shard.len(), data + 2_000_016);
        assert!(shard[data..].iter().all(|&b| b == 0));
        let config = fs::read_to_string(dir.join("out/config.json")).unwrap();
        assert_eq!(config, "{ \"model_type\":\"x\" }");
        let index = fs::read_to_string(dir.join("out/model.safetensors.index.json")).unwrap();
        let index: serde_json::Value = serde_json::from_str(&index).unwrap();
        assert_eq!(index["metadata"]["total_size"], 4_400_016);
        assert_eq!(index["weight_map"]["order"], "model-00001-of-00002.safetensors");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn noise_fills_bf16_tensors_only_and_ends_at_its_size() {
        let (dir, summary) = made(SparseOptions { shard_gb: 5.0, noise_mib: 1 });
        assert_eq!(summary.shards, 1);
        let shard = fs::read(dir.join("out/model-00001-of-00001.safetensors")).unwrap();
        let data = &shard[shard.len() - 4_400_016..];
        assert!(data[..2_400_000].iter().all(|&b| b == 0), "the integer tensor has noise");
        let (noise, rest) = data[2_400_000..].split_at(1 << 20);
        assert!(rest.iter().all(|&b| b == 0), "noise goes on past 1 MiB");
        let mut patterns = std::collections::BTreeSet::new();
        for pair in noise.chunks_exact(2) {
            let v = u16::from_le_bytes([pair[0], pair[1]]);
            assert!((0x3B00..0x3E80).contains(&(v & 0x7FFF)), "{v:04x}");
            patterns.insert(v);
        }
        assert_eq!(patterns.len(), 2 * 0x380, "all signs and magnitudes occur in 524,288 draws");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_line_that_is_no_tensor_is_named() {
        let path = std::env::temp_dir().join(format!("testkit-shapes-{}", std::process::id()));
        fs::write(&path, "a\tBF16\t[1]\nb BF16 [1]\n").unwrap();
        let e = read_shapes(&path).unwrap_err();
        fs::remove_file(&path).unwrap();
        let want = "expected name, dtype and shape, separated by tabs";
        assert_eq!(e, format!("{}:2: {want}", path.display()));
    }
}
