//! `radpack validate`

use std::process::ExitCode;

use radpack::artifact::manifest::Manifest;
use radpack::artifact::verify::Options;
use radpack::artifact::{self, Artifact, layout as names};
use radpack::checkpoint::Extent;
use radpack::diag::{Diagnostic, Failure, FailureKind, Result, count, size};
use radpack::pipeline::{self, Comparison, ConvertOptions};
use radpack::quantize;
use radpack::runtime::{self, BOUND, Compared, Proof};

use super::args::Validate;
use super::documents::{ComparedDocument, ProblemDocument, ValidateDocument};
use super::inspect::open;
use super::output::Output;
use super::progress::Bars;
use super::request;

/// Checks a file, alone and against a source.
pub fn run(args: &Validate, output: &Output) -> Result<ExitCode> {
    request::kernel(args.common.kernel)?;
    let threads = request::threads(&args.common);
    let artifact = open(&args.file)?;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .map_err(|e| Failure::plain(FailureKind::Failed, format!("cannot start threads: {e}")))?;
    let mut findings = pool.install(|| {
        let mut findings = artifact::verify(&artifact, Options::default()).faults;
        findings.extend(quantize::verify_decodes(artifact_planes(&artifact)));
        if findings.is_empty() {
            // A manifest that cannot be read is a finding already.
            let manifest = Manifest::of(&artifact).ok().flatten();
            findings.extend(pipeline::check_programs(&artifact, manifest.as_ref()).into_vec());
        }
        // Says more of a damaged section than the digest of all tables does.
        findings.extend(pipeline::check_vocabulary(&artifact));
        findings
    });
    let mut proof = None;
    if args.deep && findings.is_empty() {
        let memory = request::memory();
        let proved = pool.install(|| runtime::prove(&runtime::open(&artifact)?, memory))?;
        findings.extend(proved.problems.iter().cloned());
        proof = Some(proved);
    }
    let mut compared = None;
    if let Some(source) = &args.against
        && findings.is_empty()
    {
        let comparison = against(args, source, &artifact, threads)?;
        findings.extend(comparison.findings.iter().cloned());
        compared = Some(comparison);
    }
    if output.json() {
        output.document(&ValidateDocument {
            schema: "radpack.validate",
            file: args.file.display().to_string(),
            valid: findings.is_empty(),
            entries: artifact.len(),
            file_bytes: artifact.file_bytes(),
            digest: artifact.meta_text(names::DIGEST_KEY).map(|t| t.to_string()),
            against: args.against.clone(),
            ran: proof.as_ref().map_or(Vec::new(), |p| p.programs.clone()),
            compared: proof.as_ref().and_then(|p| ComparedDocument::of(p.compared)),
            derived_weights: compared.as_ref().map_or(0, |c| c.weights),
            findings: findings.iter().map(ProblemDocument::of).collect(),
        })?;
        let code = if findings.is_empty() { 0 } else { FailureKind::Invalid.exit_code() };
        return Ok(ExitCode::from(code));
    }
    if !findings.is_empty() {
        let headline = format!("{} is not valid", args.file.display());
        let closing = (args.against.is_some() && compared.is_none())
            .then(|| "the source was not compared".to_owned());
        return Err(Failure { kind: FailureKind::Invalid, headline, problems: findings, closing });
    }
    output.text(&report(&artifact, proof.as_ref(), compared.as_ref())?)?;
    Ok(ExitCode::SUCCESS)
}

/// Weights whose values can be decoded, for the check that every one does.
fn artifact_planes(artifact: &Artifact) -> impl Iterator<Item = quantize::StoredWeight<'_>> {
    artifact.entries().filter(|e| !e.name().to_string().starts_with(names::OWN_PREFIX)).map(|e| {
        quantize::StoredWeight {
            name: e.name().to_string(),
            encoding: e.encoding(),
            shape: e.shape(),
            planes: (0..e.encoding().planes.len()).map(|k| e.plane(k)).collect(),
        }
    })
}

fn against(
    args: &Validate,
    source: &str,
    artifact: &Artifact,
    threads: usize,
) -> Result<Comparison> {
    let Some(manifest) = Manifest::of(artifact)? else {
        let problem =
            Diagnostic::new("against", "the file has no manifest: its recipe is not known")
                .help("only files that radpack wrote can be derived again");
        return Err(Failure::one(FailureKind::Refused, "there is nothing to compare", problem));
    };
    let drafted = manifest.source.files.iter().any(|f| f.path.starts_with(pipeline::DRAFT_FOLDER));
    if drafted != args.draft_model.is_some() {
        let (message, help) = if drafted {
            ("the file holds a draft model", "--draft-model SOURCE names the one it was made from")
        } else {
            ("the file holds no draft model", "leave --draft-model out")
        };
        let problem = Diagnostic::new("against", message).help(help);
        return Err(Failure::one(FailureKind::Usage, "there is nothing to compare", problem));
    }
    let weighed = manifest.source.files.iter().any(|f| f.path == pipeline::IMATRIX_FILE);
    if weighed != args.imatrix.is_some() {
        let (message, help) = if weighed {
            ("an imatrix weighed the file's searches", "--imatrix FILE names it")
        } else {
            ("no imatrix weighed the file's searches", "leave --imatrix out")
        };
        let problem = Diagnostic::new("against", message).help(help);
        return Err(Failure::one(FailureKind::Usage, "there is nothing to compare", problem));
    }
    let sources = request::sources(
        source,
        args.draft_model.as_deref(),
        args.imatrix.as_deref(),
        Extent::Everything,
    )?;
    let weights_only = manifest.model.family.is_none();
    let plan = pipeline::plan_of(artifact, sources, weights_only)?;
    let bars = Bars::new(plan.sources.bytes(), plan.assignment.total.source_bytes);
    let options =
        ConvertOptions { threads, progress: &bars, cancelled: request::stop_on_signals() };
    let comparison = pipeline::compare(&plan, artifact, &args.file, options);
    bars.finish();
    comparison
}

fn report(
    artifact: &Artifact,
    proof: Option<&Proof>,
    compared: Option<&Comparison>,
) -> Result<String> {
    let mut parts =
        vec!["container ok".to_owned(), format!("{} entries", count(artifact.len() as u64))];
    if artifact.meta_text(names::DIGEST_KEY).is_some() {
        parts.push(format!("digests ok ({})", size(artifact.file_bytes())));
        parts.push("manifest ok".to_owned());
    } else {
        parts.push("no digests: this file was not written by radpack".to_owned());
    }
    parts.push("encodings decode".to_owned());
    if let Some(proof) = proof {
        parts.push(format!("{} programs ran, all values finite", proof.programs.len()));
        match proof.compared {
            Compared::Nothing => {}
            Compared::Equal => {
                parts.push("the programs are those of the model compiled anew".to_owned());
            }
            Compared::OneDevice { devices, largest } => parts.push(format!(
                "on {devices} {} as the model compiled anew on one (largest difference {largest:.1e} of a value's size, bound {BOUND:.0e})",
                if devices == 1 { "device" } else { "devices" }
            )),
        }
    }
    if let Some(compared) = compared {
        parts.push(format!(
            "{} weights equal the source under the recipe ({})",
            count(compared.weights as u64),
            size(compared.bytes)
        ));
    }
    Ok(format!("{}\nvalid\n", parts.join(" · ")))
}
