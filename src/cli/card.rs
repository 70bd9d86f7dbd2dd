//! `radpack card`

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use radpack::artifact::digests;
use radpack::card::{self, Additions};
use radpack::diag::{Diagnostic, Failure, FailureKind, Result};

use super::args::Card;
use super::confined;
use super::inspect::open;
use super::output::{self, Output};

/// Largest document or template that is read; real ones have some kilobytes.
const MAX_BYTES: u64 = 16 << 20;

/// Writes the card.
pub fn run(args: &Card, output: &Output) -> Result<ExitCode> {
    let artifact = open(&args.file)?;
    let document = |path: &PathBuf| -> Result<serde_json::Value> {
        serde_json::from_str(&text(path)?).map_err(|error| {
            let problem = Diagnostic::new("card", format!("{}: {error}", path.display()));
            Failure::one(FailureKind::Usage, "a document is not JSON", problem)
        })
    };
    let additions = Additions {
        title: args.title.clone(),
        license: args.license.clone(),
        base_model: args.base_model.clone(),
        evals: args.evals.iter().map(document).collect::<Result<_>>()?,
        estimate: args.estimate.as_ref().map(document).transpose()?,
        file_name: file_name(&args.file),
        sha256: digests::hex(&artifact.sha256()),
    };
    if args.facts {
        additions.check(&artifact)?;
        output.document(&card::facts(&artifact, &additions)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let card = match &args.template {
        None => card::card(&artifact, &additions, "recipes/cards/model.md.jinja", card::TEMPLATE)?,
        Some(path) => {
            additions.check(&artifact)?;
            let facts = card::facts(&artifact, &additions)?;
            confined::card(facts, path.display().to_string(), text(path)?)?
        }
    };
    match &args.output {
        None => output.text(&card)?,
        Some(path) => {
            output::replace(path, card.as_bytes())?;
            output.note(&format!("wrote     {}", path.display()));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The last part of a path, as readers of the card will see the file.
pub fn file_name(path: &Path) -> String {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned());
    name.unwrap_or_else(|| path.display().to_string())
}

/// A text file of bounded size.
fn text(path: &Path) -> Result<String> {
    let fail = |e: io::Error| Failure::io("read", path, &e);
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(fail)?;
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(fail)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(fail(io::Error::other("it is larger than the 16 MiB that are read")));
    }
    String::from_utf8(bytes).map_err(|_| fail(io::Error::other("it is not UTF-8")))
}
