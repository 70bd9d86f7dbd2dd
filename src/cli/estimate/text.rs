//! The sum and the answer as text.

use std::fmt::Write;

use radpack::diag::{count, size};
use radpack::estimate::{DeviceSum, Estimate, LayerRow};
use radpack::pipeline::{Fit, FitAxis};

use super::super::table::{Align, table};

/// What a search for a fitting value found.
pub fn fit(fit: &Fit) -> String {
    let unit = match fit.axis {
        FitAxis::Devices if fit.value == 1 => "device is",
        FitAxis::Devices => "devices are",
        FitAxis::Length => "tokens are",
    };
    let word = match fit.axis {
        FitAxis::Devices => "the fewest that fit",
        FitAxis::Length => "the longest sequence that fits",
    };
    let mut out = format!("fit          {} {unit} {word}\n", count(fit.value));
    // The neighbour that did not fit says what the limit is.
    let next = match fit.axis {
        FitAxis::Devices => fit.tried.iter().rfind(|t| t.value < fit.value),
        FitAxis::Length => fit.tried.iter().find(|t| t.value > fit.value),
    };
    if let Some((next, why)) = next.and_then(|n| Some((n, n.refusal.as_ref()?))) {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "             with {}: {why}", count(next.value));
    }
    out.push('\n');
    out
}

/// MiB with one decimal and thousands separators.
fn mib(bytes: i128) -> String {
    let tenths = (bytes.unsigned_abs() * 10 + (1 << 19)) >> 20;
    let whole = count(u64::try_from(tenths / 10).unwrap_or(u64::MAX));
    format!("{}{whole}.{}", if bytes < 0 { "-" } else { "" }, tenths % 10)
}

/// The number that a file was set to, beside the one that fits.
pub fn set(e: &Estimate, blocks: u64) -> String {
    let fits = match blocks.cmp(&e.blocks) {
        std::cmp::Ordering::Greater => "more than fit",
        std::cmp::Ordering::Equal => "as many as fit",
        std::cmp::Ordering::Less => "fewer than fit",
    };
    format!("set          {} blocks, {fits}: radpack set-kv-blocks\n", count(blocks))
}

/// The sum of the tightest device and what follows from it.
pub fn sum(e: &Estimate) -> String {
    let cell = |bytes: u64| mib(i128::from(bytes));
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut row = |what: String, bytes: String, how: String| rows.push(vec![what, bytes, how]);
    let whose = if e.capacity.chiplets > 1 { "a chiplet" } else { "a device" };
    row(format!("  memory of {whose}, {}", e.target), cell(e.capacity.memory), String::new());
    if e.capacity.reserve > 0 {
        row("  – system reserve".into(), cell(e.capacity.reserve), String::new());
    }
    let budget = match &e.capacity.said {
        Some(said) => format!("  = memory budget {said}"),
        None => "  = to use".to_owned(),
    };
    row(budget, cell(e.capacity.budget), format!("{} B", count(e.capacity.budget)));
    if let Some(device) = e.decisive() {
        for term in &device.terms {
            row(format!("  – {}", term.name), cell(term.bytes), term.how.clone());
        }
        row("  = for KV blocks".into(), mib(i128::from(device.left)), String::new());
    }
    row("  ÷ one block".into(), cell(e.block_bytes), e.block_how.clone());
    let decisive = e.decisive().map_or(0, |d| d.device);
    let title = match e.devices.len() {
        0 | 1 => "per device".to_owned(),
        n => format!("per device (tightest of {n}: device {decisive})"),
    };
    let mut out = table(&[&title, "MiB", ""], &[Align::Left, Align::Right, Align::Left], &rows);
    let same = |a: &DeviceSum, b: &DeviceSum| a.terms == b.terms;
    let runs: Vec<&[DeviceSum]> = e.devices.chunk_by(same).collect();
    // Writing to a String cannot fail.
    if runs.len() > 1 {
        let _ = writeln!(out, "\nleft for KV blocks");
        for run in runs {
            if let [first, .., last] | [first @ last] = run {
                let _ = writeln!(
                    out,
                    "  device {}–{}: {} MiB",
                    first.device,
                    last.device,
                    mib(i128::from(first.left))
                );
            }
        }
    }
    let kept = match &e.kept_blocks {
        Some(why) => format!(" · {} allocatable ({why})", count(e.allocatable_tokens)),
        None => String::new(),
    };
    let _ = writeln!(out, "\n{} blocks   {} tokens{kept}", count(e.blocks), count(e.tokens));
    let mut line = |label: &str, text: String| {
        let _ = writeln!(out, "{label:<12} {text}");
    };
    line(
        "contexts",
        format!(
            "{:.2} of {} tokens · limits: {} blocks minimum, {} full",
            e.contexts,
            count(e.max_seq_len),
            count(e.min_blocks),
            count(e.full_blocks)
        ),
    );
    line(
        "at a time",
        format!(
            "{} of {} sequences at full length · {} tokens each with all {}",
            e.batch_at_full_length,
            e.batch_size,
            count(e.length_at_full_batch),
            e.batch_size
        ),
    );
    match e.next_block {
        Some(bytes) => line(
            "next block",
            format!("needs {} MiB more · {} MiB are left over", cell(bytes), cell(e.left_over)),
        ),
        None => line("next block", "is of no use: all sequences fit in full".to_owned()),
    }
    if let Some(a) = &e.allowance {
        let times = if a.times == 1 { String::new() } else { format!("{} × ", a.times) };
        line(
            "assumed",
            format!(
                "{} {times}{} (--workspace): {} blocks for {}–{} MiB",
                a.name,
                size(a.bytes),
                count(e.blocks),
                count(a.least >> 20),
                count(a.most >> 20)
            ),
        );
    }
    if let Some(w) = &e.with_encoder {
        let with = w.blocks.map_or("no block".to_owned(), |n| format!("{} blocks", count(n)));
        line(
            "not counted",
            format!(
                "image encoder on device {}: {} MiB + {} MiB workspace",
                w.device,
                cell(w.weights),
                cell(w.workspace),
            ),
        );
        line("", format!("{with} with it · {} MiB lie outside the budget", cell(w.outside)));
    }
    for note in &e.notes {
        line("note", note.clone());
    }
    out
}

/// What every layer keeps.
pub fn layers(layers: &[LayerRow], e: &Estimate) -> String {
    let rows = layers.iter().map(|l| {
        let kind = l.window.map_or("full".to_owned(), |w| format!("window {}", count(w)));
        let keeps = match (l.shares, l.token_bytes) {
            (Some(of), _) => format!("shares layer {of}"),
            (None, 0) => "–".to_owned(),
            (None, _) if l.keys_are_values => "own, v = raw k".to_owned(),
            (None, _) => "own".to_owned(),
        };
        let held = l.block_bytes.saturating_mul(e.blocks).saturating_add(l.window_bytes);
        vec![
            l.layer.to_string(),
            kind,
            keeps,
            format!("{} ({})", l.heads, l.device_heads),
            l.head_dim.to_string(),
            count(l.token_bytes),
            size(held),
        ]
    });
    use Align::{Left, Right};
    table(
        &["layer", "sees", "keeps", "heads (device)", "width", "bytes a token", "on a device"],
        &[Right, Left, Left, Right, Right, Right, Right],
        &rows.collect::<Vec<_>>(),
    )
}
