//! Files as llama.cpp's `llama-imatrix` writes them, in both of its forms.

fn text(out: &mut Vec<u8>, s: &str, wide: bool) {
    match wide {
        true => out.extend((s.len() as u64).to_le_bytes()),
        false => out.extend((s.len() as i32).to_le_bytes()),
    }
    out.extend(s.as_bytes());
}

/// The older form: name, calls and sums (means times calls) of each entry, then the chunks and the text's name.
pub fn legacy(entries: &[(&str, i32, &[f32])]) -> Vec<u8> {
    let mut out = (entries.len() as i32).to_le_bytes().to_vec();
    for (name, calls, sums) in entries {
        text(&mut out, name, false);
        out.extend(calls.to_le_bytes());
        out.extend((sums.len() as i32).to_le_bytes());
        sums.iter().for_each(|v| out.extend(v.to_le_bytes()));
    }
    out.extend(7i32.to_le_bytes());
    text(&mut out, "wiki.txt", false);
    out
}

/// The form since 2025-07, a GGUF file of f32 tensors: name, extents (fastest first) and values of each. For a weight
/// these are `NAME.in_sum2` and `NAME.counts`.
pub fn gguf(tensors: &[(&str, &[u64], &[f32])]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend(4u64.to_le_bytes());
    text(&mut out, "general.type", true);
    out.extend(8u32.to_le_bytes());
    text(&mut out, "imatrix", true);
    text(&mut out, "imatrix.datasets", true);
    out.extend(9u32.to_le_bytes());
    out.extend(8u32.to_le_bytes());
    out.extend(2u64.to_le_bytes());
    text(&mut out, "wiki.txt", true);
    text(&mut out, "code.txt", true);
    for key in ["imatrix.chunk_count", "imatrix.chunk_size"] {
        text(&mut out, key, true);
        out.extend(4u32.to_le_bytes());
        out.extend(512u32.to_le_bytes());
    }
    let mut data = Vec::new();
    for (name, dims, values) in tensors {
        text(&mut out, name, true);
        out.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
        out.extend(0u32.to_le_bytes());
        out.extend((data.len() as u64).to_le_bytes());
        values.iter().for_each(|v| data.extend(v.to_le_bytes()));
        data.resize(data.len().next_multiple_of(32), 0);
    }
    out.resize(out.len().next_multiple_of(32), 0);
    out.extend(data);
    out
}
