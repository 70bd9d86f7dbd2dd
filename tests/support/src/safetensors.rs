//! A safetensors writer that streams: the header is laid out first, then the tensors' bytes follow in order.
//!
//! Layout: u64 LE header length; compact JSON whose first key is `__metadata__`, padded with spaces to a multiple of 8;
//! then the data without gaps.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use crate::{Result, at};

/// One tensor as the header lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Name in the checkpoint.
    pub name: String,
    /// Dtype as safetensors spells it (`BF16`, `F32`, `I64`, …).
    pub dtype: String,
    /// Dimensions, outermost first; empty for a scalar.
    pub shape: Vec<u64>,
}

impl Entry {
    /// Size of the tensor in bytes. Errors: an unknown dtype, or a size beyond u64.
    pub fn bytes(&self) -> Result<u64> {
        self.shape
            .iter()
            .try_fold(dtype_bytes(&self.dtype)?, |n, &d| n.checked_mul(d))
            .ok_or_else(|| format!("{}: {:?} elements are too many", self.name, self.shape))
    }
}

/// Bytes of one element.
pub fn dtype_bytes(dtype: &str) -> Result<u64> {
    match dtype {
        "U8" | "I8" | "F8_E4M3" => Ok(1),
        "BF16" | "F16" => Ok(2),
        "F32" | "I32" => Ok(4),
        "I64" => Ok(8),
        other => Err(format!("dtype {other} is not one of U8 I8 F8_E4M3 BF16 F16 F32 I32 I64")),
    }
}

/// Orders entries as the safetensors library does when it saves: wider dtypes first, then by name.
pub fn sort(entries: &mut [Entry]) -> Result<()> {
    for e in &*entries {
        dtype_bytes(&e.dtype)?;
    }
    entries
        .sort_by_key(|e| (std::cmp::Reverse(dtype_bytes(&e.dtype).unwrap_or(0)), e.name.clone()));
    Ok(())
}

/// The file's bytes up to the first tensor (length word and padded header), and the size of the data that follow.
pub fn header(entries: &[Entry]) -> Result<(Vec<u8>, u64)> {
    let mut json = String::from(r#"{"__metadata__":{"format":"pt"}"#);
    let mut offset = 0u64;
    for e in entries {
        let end =
            offset.checked_add(e.bytes()?).ok_or_else(|| format!("{}: ends past u64", e.name))?;
        let name = serde_json::to_string(&e.name).map_err(|e| e.to_string())?;
        let shape: Vec<String> = e.shape.iter().map(u64::to_string).collect();
        json.push_str(&format!(
            r#",{name}:{{"dtype":"{}","shape":[{}],"data_offsets":[{offset},{end}]}}"#,
            e.dtype,
            shape.join(","),
        ));
        offset = end;
    }
    json.push('}');
    while json.len() % 8 != 0 {
        json.push(' ');
    }
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    Ok((bytes, offset))
}

/// Writes a file with the entries in the given order; `data` gives each entry's bytes.
pub fn write(
    path: &Path,
    entries: &[Entry],
    mut data: impl FnMut(&Entry) -> Result<Vec<u8>>,
) -> Result<()> {
    let mut file = BufWriter::new(File::create(path).map_err(at(path))?);
    file.write_all(&header(entries)?.0).map_err(at(path))?;
    for e in entries {
        let bytes = data(e)?;
        if bytes.len() as u64 != e.bytes()? {
            return Err(format!("{}: {} bytes given for {:?}", e.name, bytes.len(), e.shape));
        }
        file.write_all(&bytes).map_err(at(path))?;
    }
    file.flush().map_err(at(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, dtype: &str, shape: &[u64]) -> Entry {
        Entry { name: name.into(), dtype: dtype.into(), shape: shape.into() }
    }

    #[test]
    fn the_header_is_compact_and_padded_with_spaces() {
        let (bytes, data) =
            header(&[entry("a.b", "BF16", &[2, 3]), entry("s", "F32", &[])]).unwrap();
        let text = std::str::from_utf8(&bytes[8..]).unwrap();
        assert_eq!(
            text,
            concat!(
                r#"{"__metadata__":{"format":"pt"},"#,
                r#""a.b":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},"#,
                r#""s":{"dtype":"F32","shape":[],"data_offsets":[12,16]}}       "#,
            )
        );
        assert_eq!(bytes[..8], (text.len() as u64).to_le_bytes());
        assert_eq!(data, 16);
    }

    #[test]
    fn wider_dtypes_come_first_and_names_decide_the_rest() {
        let mut e = [entry("a", "BF16", &[]), entry("c", "I64", &[]), entry("b", "I64", &[])];
        sort(&mut e).unwrap();
        assert_eq!(e.map(|e| e.name), ["b", "c", "a"]);
    }

    #[test]
    fn a_tensor_with_too_few_bytes_is_an_error() {
        let dir = std::env::temp_dir().join(format!("testkit-short-{}", std::process::id()));
        let e = write(&dir, &[entry("a", "F32", &[2])], |_| Ok(vec![0; 7])).unwrap_err();
        std::fs::remove_file(&dir).unwrap();
        assert_eq!(e, "a: 7 bytes given for [2]");
    }
}
