//! The programs of an artifact, for people.

use std::fmt::Write;

use radpack::artifact::Artifact;
use radpack::artifact::manifest::{GraphSummary, Manifest};
use radpack::diag::{Diagnostic, Failure, FailureKind, Result, count, list, nearest, size};
use radpack::graph::Text;
use radpack::runtime;

use super::table::{Align, table};

/// What the manifest says of the programs.
///
/// # Errors
/// A file without programs.
pub fn summary(manifest: Option<&Manifest>) -> Result<&GraphSummary> {
    manifest.and_then(|m| m.graphs.as_ref()).ok_or_else(|| {
        let problem = Diagnostic::new("graph", "the file holds weights and no programs")
            .help("files of --weights-only conversions and of draft heads alone have none");
        Failure::one(FailureKind::Refused, "there are no programs", problem)
    })
}

/// The programs and the cache, as two tables.
pub fn programs(g: &GraphSummary) -> String {
    use Align::{Left, Right};
    let rows: Vec<Vec<String>> = g
        .programs
        .iter()
        .map(|p| {
            vec![
                p.name.clone(),
                count(p.size),
                p.devices.to_string(),
                count(p.operations),
                size(p.input_bytes),
                size(p.arena_bytes),
            ]
        })
        .collect();
    let mut text = table(
        &["program", "rows", "devices", "operations", "inputs", "intermediate values"],
        &[Left, Right, Right, Right, Right, Right],
        &rows,
    );
    let kv = &g.kv;
    // Writing to a String cannot fail.
    let _ = write!(
        text,
        "\ntakes     {}\nsequence  up to {} tokens, {} at a time\ncache     {} · blocks of {} tokens, {} each on a device · {} to {} blocks{}\n",
        g.takes.join(", "),
        count(g.max_seq_len),
        g.batch_size,
        kv.dtype,
        count(kv.block_tokens),
        size(kv.block_bytes),
        count(kv.min_blocks),
        count(kv.full_blocks),
        kv.blocks.map(|n| format!(" · {} set", count(n))).unwrap_or_default(),
    );
    if kv.window_bytes > 0 {
        let _ = writeln!(text, "windows   {} on a device", size(kv.window_bytes));
    }
    if let Some(target) = &g.target {
        let _ = writeln!(text, "target    {target}");
    }
    text
}

/// One program as text.
///
/// # Errors
/// Programs that cannot be read, or none of that name.
pub fn program(artifact: &Artifact, name: &str) -> Result<String> {
    let broken = |why: String| {
        let problem = Diagnostic::new("graph", why);
        Failure::one(FailureKind::Invalid, "the programs cannot be read", problem)
    };
    let programs = runtime::read_programs(artifact).map_err(|e| broken(e.to_string()))?;
    let programs = programs.unwrap_or_default();
    if let Some(program) = programs.get(name) {
        return Ok(Text { program, kv: &programs.kv }.to_string());
    }
    let names: Vec<&str> = programs.programs.iter().map(|p| p.name.as_str()).collect();
    let mut problem = Diagnostic::new("graph", format!("there is no program {name}"));
    let near = nearest(name, names.iter().copied());
    if !near.is_empty() {
        problem = problem.help(format!("did you mean {}?", list(&near, 3)));
    }
    let problem = problem.help(format!("programs: {}", list(&names, usize::MAX)));
    Err(Failure::one(FailureKind::Usage, "no such program", problem))
}

/// Memory of every device: what it holds at rest, and what runs need.
///
/// # Errors
/// A file without programs.
pub fn memory(manifest: Option<&Manifest>) -> Result<String> {
    use Align::{Left, Right};
    let g = summary(manifest)?;
    let weights: Vec<(u32, u64)> = match manifest {
        Some(m) if !m.device_weights.is_empty() => {
            let held =
                m.device_weights.iter().map(|d| (d.device, d.whole.saturating_add(d.shards)));
            held.collect()
        }
        Some(m) => vec![(0, m.encodings.iter().map(|e| e.bytes).sum())],
        None => Vec::new(),
    };
    let most = |vision: bool| {
        let of =
            g.programs.iter().filter(|p| (p.kind == "vision" || p.kind == "project") == vision);
        of.map(|p| p.arena_bytes.saturating_add(p.input_bytes)).max().unwrap_or(0)
    };
    let (text, vision) = (most(false), most(true));
    // As many as were set, or the fewest to serve with.
    let blocks = g.kv.blocks.unwrap_or(g.kv.min_blocks);
    let cache = g.kv.block_bytes.saturating_mul(blocks);
    let rows: Vec<Vec<String>> = weights
        .iter()
        .map(|&(device, weights)| {
            let vision = if g.vision_devices.contains(&device) { vision } else { 0 };
            let runs = text.max(vision);
            let total = weights
                .saturating_add(g.kv.window_bytes)
                .saturating_add(cache)
                .saturating_add(runs);
            let windows = size(g.kv.window_bytes);
            vec![device.to_string(), size(weights), windows, size(cache), size(runs), size(total)]
        })
        .collect();
    let blocks = format!("{} blocks", count(blocks));
    Ok(table(
        &["device", "weights", "windows", &blocks, "largest run", "sum"],
        &[Left, Right, Right, Right, Right, Right],
        &rows,
    ))
}
