//! `radpack convert`

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use radpack::artifact::errors::WeightError;
use radpack::artifact::manifest::Manifest;
use radpack::artifact::verify::{Options as VerifyOptions, verify};
use radpack::artifact::{digests, layout as names, partial_path};
use radpack::checkpoint::Extent;
use radpack::diag::{Diagnostic, Failure, FailureKind, Result, count, list, size};
use radpack::model::{ModelSpec, Origin};
use radpack::pipeline::{self, ConvertOptions, Earlier, PartPlan, Plan, Request, Reuse};
use radpack::recipe::{Assigned, EncodingChoice, Fate, Method, Rounding, Use};

use super::args::Convert;
use super::documents::{
    ConvertDocument, DeviceDocument, ImatrixDocument, PartDocument, ProblemDocument, RuleDocument,
    TailDocument, UseDocument, WeightDocument,
};
use super::output::Output;
use super::progress::Bars;
use super::request;
use super::table::{Align, table};

/// Plans, and unless it is a dry run, writes.
pub fn run(args: &Convert, output: &Output) -> Result<ExitCode> {
    request::kernel(args.common.kernel)?;
    let plan = plan(args).map_err(nothing_written)?;
    output.warnings(&plan.warnings);
    let part = args.part.map(|(index, parts)| PartPlan::of(&plan, index, parts));
    let part = part.transpose().map_err(nothing_written)?;
    if args.dry_run {
        dry_run(args, &plan, part.as_ref(), output)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(file) = &args.check {
        return check(args, &plan, file, output);
    }
    let Some(out) = &args.output else {
        return Err(Failure::plain(FailureKind::Usage, "an output is needed: -o OUT.rad"));
    };
    let reuse = args.reuse.as_deref().map(Reuse::open).transpose().map_err(nothing_written)?;
    let (hashed, encoded) = match &part {
        None => (plan.sources.bytes(), plan.assignment.total.source_bytes),
        Some(part) => (part.hashed_bytes, part.source_bytes),
    };
    let written = match args.part {
        None => out.clone(),
        Some((index, parts)) => pipeline::part_path(out, index, parts),
    };
    let bars = Bars::new(hashed, encoded);
    let started = Instant::now();
    let options = ConvertOptions {
        threads: request::threads(&args.common),
        progress: &bars,
        cancelled: request::stop_on_signals(),
    };
    let earlier = Earlier { artifact: reuse.as_ref(), partial: args.resume };
    if !args.resume {
        // Between here and the conversion's claim of the partial file, nothing mapped is read.
        let partial = partial_path(&written.canonicalize().unwrap_or(written.clone()));
        super::mapped::remove_when_truncated([&partial, &pipeline::journal_path(&partial)]);
    }
    let converted = match &part {
        None => pipeline::convert_from(&plan, out, options, earlier),
        Some(part) => pipeline::convert_part(&plan, part, &written, options, earlier),
    };
    bars.finish();
    let converted = converted?;

    if output.json() {
        let errors = converted.errors.iter().map(|e| (e.weight.as_str(), e)).collect();
        let mut document = document(&plan, false, Some(&written), &errors);
        document.part = part.as_ref().map(part_document);
        document.digest = Some(digests::hex(&converted.digest));
        document.reused = converted.reused;
        document.resumed = converted.resumed;
        output.document(&document)?;
        return Ok(ExitCode::SUCCESS);
    }
    let seconds = started.elapsed().as_secs_f64();
    let speed = encoded as f64 / 1e9 / seconds.max(1e-9);
    let mut text = format!(
        "wrote     {}   {} in {seconds:.1} s ({speed:.2} GB/s of weights)\n",
        written.display(),
        size(converted.file_bytes),
    );
    // Writing to a String cannot fail.
    if reuse.is_some() {
        let of = converted.errors.len();
        let _ = writeln!(text, "reused    {} of {of} quantized weights", converted.reused);
    }
    if args.resume {
        let all = || plan.assignment.stored(&plan.table).count();
        let of = part.as_ref().map_or_else(all, |part| part.weights);
        let _ =
            writeln!(text, "resumed   {} of {of} weights were there already", converted.resumed);
    }
    let _ = writeln!(text, "digest    sha256:{}", digests::hex(&converted.digest));
    text.push_str(&worst(&converted.errors, args.report));
    let _ = match &part {
        None => writeln!(
            text,
            "next      radpack validate {0} · radpack inspect {0} --weights",
            out.display()
        ),
        Some(part) => {
            let (_, parts) = part.number();
            writeln!(text, "next      radpack merge {0}.part-*-of-{parts} -o {0}", out.display())
        }
    };
    output.text(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn part_document(part: &PartPlan) -> PartDocument {
    let (index, parts) = part.number();
    PartDocument {
        index,
        parts,
        file_bytes: part.layout.file_bytes(),
        weights: part.weights,
        source_bytes: part.source_bytes,
    }
}

/// Whether a file is what the plan would write: sound by itself, and equal in all that the plan derives.
fn check(args: &Convert, plan: &Plan, file: &Path, output: &Output) -> Result<ExitCode> {
    let artifact = super::inspect::open(file)?;
    let threads = request::threads(&args.common);
    let mut findings =
        request::pool(threads)?.install(|| verify(&artifact, VerifyOptions::default()).faults);
    let mut compared = None;
    if findings.is_empty() {
        let bars = Bars::new(plan.sources.bytes(), plan.assignment.total.source_bytes);
        let options =
            ConvertOptions { threads, progress: &bars, cancelled: request::stop_on_signals() };
        let comparison = pipeline::compare(plan, &artifact, file, options);
        bars.finish();
        let comparison = comparison?;
        findings.extend(comparison.findings.iter().cloned());
        let graphs = Manifest::of(&artifact)?.and_then(|m| m.graphs);
        if let Some(n) = graphs.and_then(|g| g.kv.blocks) {
            let what =
                format!("{} cache blocks were set, a conversion leaves the number open", count(n));
            let open = format!("radpack set-kv-blocks {} 0", file.display());
            findings.push(Diagnostic::new("manifest", what).help(open));
        }
        compared = Some(comparison);
    }
    if !findings.is_empty() {
        let headline = format!("{} is not what this conversion writes", file.display());
        let closing = compared.is_none().then(|| "the source was not compared".to_owned());
        return Err(Failure { kind: FailureKind::Invalid, headline, problems: findings, closing });
    }
    if output.json() {
        let mut document = document(plan, true, Some(file), &BTreeMap::new());
        document.digest = artifact.meta_text(names::DIGEST_KEY).map(|t| t.to_string());
        output.document(&document)?;
    } else {
        let weights = compared.map_or(0, |c| c.weights);
        output.text(&format!(
            "same      {} is what this conversion writes: {} weights and every other byte, {}\n",
            file.display(),
            count(weights as u64),
            size(artifact.file_bytes())
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn plan(args: &Convert) -> Result<Plan> {
    let left_out: &[&str] = if args.text_only { &["vision", "audio", "projector"] } else { &[] };
    let sets: Vec<String> = left_out.iter().map(|tower| format!("towers.{tower}=false")).collect();
    let recipe = request::recipe(&args.recipe, &sets)?;
    // A model on the hub is planned from its headers; only a conversion fetches the weights.
    let extent = if args.dry_run { Extent::Headers } else { Extent::Everything };
    let (draft, imatrix) = (args.draft_model.as_deref(), args.imatrix.as_deref());
    let sources = request::sources(&args.source, draft, imatrix, extent)?;
    let request =
        Request { weights_only: args.weights_only, tokenizer_required: !args.no_tokenizer };
    pipeline::plan(sources, recipe, request)
}

fn nothing_written(mut failure: Failure) -> Failure {
    failure
        .closing
        .get_or_insert_with(|| "nothing was read beyond the headers, nothing was written".into());
    failure
}

/// The worst weights and the mean, by relative error.
fn worst(errors: &[WeightError], show: usize) -> String {
    let mut known: Vec<(f64, &str)> =
        errors.iter().filter_map(|e| Some((e.relative()?, e.weight.as_str()))).collect();
    if known.is_empty() {
        return String::new();
    }
    let mean = known.iter().map(|(e, _)| e).sum::<f64>() / known.len() as f64;
    known.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    let mut text = String::new();
    for (i, (error, name)) in known.iter().take(show).enumerate() {
        let _ = match i {
            0 => writeln!(text, "worst     {name}  relative error {error:.4} (mean {mean:.4})"),
            _ => writeln!(text, "          {name}  {error:.4}"),
        };
    }
    text
}

fn dry_run(args: &Convert, plan: &Plan, part: Option<&PartPlan>, output: &Output) -> Result<()> {
    if output.json() {
        let mut document = document(plan, true, args.output.as_deref(), &BTreeMap::new());
        document.part = part.map(part_document);
        return output.document(&document);
    }
    let mut text = String::new();
    let _ = writeln!(text, "model     {}", describe_model(plan));
    let digest = plan.recipe.digest();
    let name = if plan.recipe.name.is_empty() { "unnamed" } else { &plan.recipe.name };
    let mut roundings: Vec<Rounding> = plan
        .recipe
        .rules
        .iter()
        .filter(|rule| matches!(rule.encoding.method, Method::Grid(_)))
        .map(|rule| rule.rounding)
        .collect();
    roundings.sort_unstable();
    roundings.dedup();
    let roundings = match roundings.as_slice() {
        [] => "rad".to_owned(),
        some => list(&some.iter().map(|r| r.name()).collect::<Vec<_>>(), some.len()),
    };
    let _ = writeln!(text, "recipe    {name} (sha256 {}…) · rounding {roundings}\n", &digest[..8]);
    if let Some(imatrix) = &plan.sources.imatrix {
        let _ = writeln!(
            text,
            "imatrix   {} (sha256 {}…) · weighs {} of {} searched weights\n",
            size(imatrix.file().bytes),
            &digests::hex(&imatrix.file().sha256)[..8],
            count(plan.importances.entries.len() as u64),
            count(plan.importances.searched as u64)
        );
    }
    text.push_str(&rules(plan));
    text.push('\n');
    if !plan.placement.single() {
        text.push_str(&super::devices::devices(&devices(plan)));
        text.push('\n');
    }
    if let Some(compiled) = &plan.compiled {
        let names: Vec<&str> = compiled.programs.programs.iter().map(|p| p.name.as_str()).collect();
        let s = &compiled.sizes;
        let _ = writeln!(
            text,
            "programs  {}\nsequence  up to {} tokens, {} at a time · cache {} in blocks of {} tokens\n",
            list(&names, names.len()),
            count(s.max_seq_len),
            s.batch_size,
            s.kv_dtype,
            count(s.block)
        );
    }
    for tail in &plan.assignment.tails {
        let _ = writeln!(
            text,
            "tails     {} weights of {} columns: the last group of {} has {} columns",
            count(tail.weights),
            count(tail.cols),
            tail.group,
            tail.tail
        );
    }
    for (tensor, reason) in plan.table.unused.iter().take(10) {
        let _ = writeln!(text, "unused    {tensor}: {reason}");
    }
    if plan.table.unused.len() > 10 {
        let _ = writeln!(text, "          and {} more", plan.table.unused.len() - 10);
    }
    let out = args.output.clone().unwrap_or_else(|| default_output(plan));
    let folder = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let free = pipeline::free_bytes(folder)
        .map_or(String::new(), |f| format!(" (free there: {})", size(f)));
    let (file, planes) = (plan.layout.file_bytes(), plan.assignment.total.stored_bytes);
    let _ = writeln!(
        text,
        "writes    {}, {}{free}\n          weights {} + tables, side files and alignment {}",
        out.display(),
        size(file),
        size(planes),
        size(file.saturating_sub(planes))
    );
    if let Some(part) = part {
        let (index, parts) = part.number();
        let _ = writeln!(
            text,
            "part      {}, {}\n          {} weights of {}, {} of source files to hash",
            pipeline::part_path(&out, index, parts).display(),
            size(part.layout.file_bytes()),
            count(part.weights as u64),
            size(part.source_bytes),
            size(part.hashed_bytes)
        );
    }
    text.push_str("nothing was written\n");
    text.push('\n');
    text.push_str(&weights(plan));
    output.text(&text)
}

/// `NAME-RECIPE.rad` in lower case, as a suggestion.
fn default_output(plan: &Plan) -> PathBuf {
    let recipe = plan.recipe.name.rsplit('/').next().unwrap_or_default();
    let name = format!("{}-{recipe}.rad", plan.sources.main.display_name()).to_lowercase();
    PathBuf::from(name.rsplit('/').next().unwrap_or("out.rad"))
}

fn describe_model(plan: &Plan) -> String {
    let (main, draft) = plan.sources.tensors();
    let tensors = main + draft.unwrap_or(0);
    let unused = plan.table.unused.len() as u64;
    let claimed = match unused {
        0 => "all claimed".to_owned(),
        n => format!("{} claimed, {} unused", count(tensors - n.min(tensors)), count(n)),
    };
    let shown = match draft {
        None => count(main),
        Some(draft) => format!("{} + {}", count(main), count(draft)),
    };
    // What the model has: not its draft, and a tied table once, however often it is stored.
    let own = plan.assignment.weights.iter().filter(|a| a.fate != Fate::LeftOut);
    let own = own.filter_map(|a| plan.table.weights.get(a.weight));
    let own = own.filter(|w| w.origin == Origin::Main && w.tied_to.is_none());
    let elements: u64 = own.filter_map(|w| w.shape.elements()).sum();
    let layers = plan.spec.as_ref().map_or("weights only".to_owned(), describe_layers);
    format!(
        "{} · {layers} · {} parameters · {} tensors, {claimed}",
        plan.sources.main.display_name(),
        parameters(elements),
        shown
    )
}

fn describe_layers(spec: &ModelSpec) -> String {
    let layers = &spec.text.layers;
    let windows: Vec<u64> = layers.iter().filter_map(|l| l.attention.window()).collect();
    match windows.first() {
        Some(window) => format!(
            "{} · {} layers ({} window {window}, {} full)",
            spec.family,
            layers.len(),
            windows.len(),
            layers.len() - windows.len()
        ),
        None => format!("{} · {} layers", spec.family, layers.len()),
    }
}

/// `31.3 B`, `135 M`.
fn parameters(n: u64) -> String {
    match n {
        n if n >= 1_000_000_000 => format!("{:.1} B", n as f64 / 1e9),
        n if n >= 1_000_000 => format!("{:.1} M", n as f64 / 1e6),
        n => count(n),
    }
}

fn rules(plan: &Plan) -> String {
    let assignment = &plan.assignment;
    let row = |number: &str, what: String, u: &Use, encoding: String| {
        vec![
            number.to_owned(),
            what,
            count(u.weights),
            size(u.source_bytes),
            size(u.stored_bytes),
            format!("{:.2}", u.bits_per_weight()),
            encoding,
        ]
    };
    let mut rows: Vec<Vec<String>> = plan
        .recipe
        .rules
        .iter()
        .zip(&assignment.rules)
        .enumerate()
        .map(|(i, (rule, used))| {
            row(&format!("{}", i + 1), rule.selects(), &used.stored, encoding_name(&rule.encoding))
        })
        .collect();
    let kept: Vec<&str> = assignment.kept_dtypes.iter().map(|d| d.name()).collect();
    rows.push(row("–", "kept as in the checkpoint".into(), &assignment.kept, kept.join(" ")));
    rows.push(row("", "total".into(), &assignment.total, String::new()));
    use Align::{Left, Right};
    table(
        &["", "rule", "weights", "source", "stored", "bits/weight", "encoding"],
        &[Right, Left, Right, Right, Right, Right, Left],
        &rows,
    )
}

/// A named encoding's name, a spelled-out grid's planes.
fn encoding_name(choice: &EncodingChoice) -> String {
    match (choice.name, &choice.method) {
        (Some(name), _) => name.to_owned(),
        (None, Method::Grid(grid)) => grid.encoding().to_string(),
        (None, Method::Cast(dtype)) => dtype.to_string(),
        (None, Method::Keep) => "keep".to_owned(),
    }
}

/// Every weight with the rule that decided it.
fn weights(plan: &Plan) -> String {
    let rows: Vec<Vec<String>> = plan
        .assignment
        .weights
        .iter()
        .filter_map(|a| Some((a, plan.table.weights.get(a.weight)?)))
        .map(|(a, w)| {
            let bytes = if a.stored() { size(stored_bytes(a, w)) } else { "not stored".into() };
            vec![
                w.name.clone(),
                w.shape.to_string(),
                a.encoding_name.to_string(),
                bytes,
                a.rule.map_or("–".into(), |r| format!("{}", r + 1)),
                from(w).join(" + "),
            ]
        })
        .collect();
    use Align::{Left, Right};
    table(
        &["weight", "shape", "encoding", "bytes", "rule", "from"],
        &[Left, Left, Left, Right, Right, Left],
        &rows,
    )
}

fn stored_bytes(assigned: &Assigned, weight: &radpack::model::Weight) -> u64 {
    assigned.encoding.bytes(&weight.shape).unwrap_or(0)
}

fn from(weight: &radpack::model::Weight) -> Vec<String> {
    weight
        .parts
        .iter()
        .map(|p| match p.index {
            Some(i) => format!("{}[{i}]", weight.tensor_name(p)),
            None => weight.tensor_name(p).into_owned(),
        })
        .collect()
}

/// What every device holds.
fn devices(plan: &Plan) -> Vec<DeviceDocument> {
    let all = plan.placement.device_bytes().into_iter().zip(0u32..);
    all.map(|(bytes, device)| DeviceDocument {
        device,
        whole: bytes.whole,
        shards: bytes.shards,
        padding: bytes.padding,
        bytes: bytes.total(),
    })
    .collect()
}

fn sums(u: &Use) -> UseDocument {
    UseDocument {
        weights: u.weights,
        parameters: u.elements,
        source_bytes: u.source_bytes,
        stored_bytes: u.stored_bytes,
        bits_per_weight: u.bits_per_weight(),
    }
}

fn document(
    plan: &Plan,
    dry_run: bool,
    out: Option<&Path>,
    errors: &BTreeMap<&str, &WeightError>,
) -> ConvertDocument {
    let assignment = &plan.assignment;
    let rules = plan.recipe.rules.iter().zip(&assignment.rules).map(|(rule, used)| RuleDocument {
        selects: rule.selects(),
        encoding: encoding_name(&rule.encoding),
        hits: used.hits,
        stored: sums(&used.stored),
    });
    let short = assignment.tails.iter().map(|t| TailDocument {
        cols: t.cols,
        group: t.group,
        tail: t.tail,
        weights: t.weights,
    });
    let weights =
        assignment.weights.iter().filter_map(|a| Some((a, plan.table.weights.get(a.weight)?))).map(
            |(a, w)| WeightDocument {
                name: w.name.clone(),
                from: from(w),
                tower: w.tower.to_string(),
                class: w.class.to_string(),
                shape: w.shape.extents().to_vec(),
                encoding: a.encoding_name.to_string(),
                rule: a.rule.map(|r| r + 1),
                importance: plan.importances.entries.get(&a.weight).map(|e| e.shown.clone()),
                stored: a.stored(),
                bytes: if a.stored() { stored_bytes(a, w) } else { 0 },
                relative_error: errors.get(w.name.as_str()).and_then(|e| e.relative()),
                squared_error: errors.get(w.name.as_str()).map(|e| e.squared_error),
                squared: errors.get(w.name.as_str()).map(|e| e.squared),
            },
        );
    ConvertDocument {
        schema: "radpack.convert",
        dry_run,
        output: out.map(|o| o.display().to_string()),
        file_bytes: plan.layout.file_bytes(),
        digest: None,
        reused: 0,
        resumed: 0,
        part: None,
        recipe: plan.recipe.name.clone(),
        recipe_sha256: plan.recipe.digest(),
        imatrix: plan.sources.imatrix.as_ref().map(|imatrix| ImatrixDocument {
            bytes: imatrix.file().bytes,
            sha256: digests::hex(&imatrix.file().sha256),
            searched: plan.importances.searched,
            weighed: plan.importances.entries.len(),
        }),
        family: plan.spec.as_ref().map(|s| s.family.to_owned()),
        totals: sums(&assignment.total),
        devices: devices(plan),
        rules: rules.collect(),
        kept: sums(&assignment.kept),
        short_groups: short.collect(),
        weights: weights.collect(),
        unused: plan.table.unused.iter().cloned().collect(),
        warnings: plan.warnings.iter().map(ProblemDocument::of).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_weights_come_first_with_the_mean_over_all() {
        let error = |weight: &str, squared_error: f64| WeightError {
            weight: weight.into(),
            squared_error,
            squared: 100.0,
        };
        let text = worst(&[error("a", 1.0), error("b", 4.0), error("c", 1.0)], 2);
        assert_eq!(text, "worst     b  relative error 0.2000 (mean 0.1333)\n          a  0.1000\n");
        assert_eq!(worst(&[], 5), "");
    }

    #[test]
    fn parameter_counts_read_as_people_say_them() {
        assert_eq!(parameters(31_273_088_000), "31.3 B");
        assert_eq!(parameters(134_515_008), "134.5 M");
        assert_eq!(parameters(12_345), "12,345");
    }
}
