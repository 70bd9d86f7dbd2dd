//! Importances for the searches of a conversion: a file of llama.cpp, and which of its matrices each weight gets.
//!
//! Logical names are those of llama.cpp, so most weights find the entry of their own name. Beyond that:
//! * an expert `blk.1.ffn_down_exps.5.weight` is matrix 5 of `blk.1.ffn_down_exps`; an entry of one matrix serves all;
//! * `ffn_gate_up_exps`, which llama.cpp has as two weights that read the same input, takes the entry of either half;
//! * a head that repeats the embedding takes the embedding's entry: a tied head has no name of its own there.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::Sources;
use crate::checkpoint::FileDigest;
use crate::diag::{Diagnostic, Failure, FailureKind, Result, count, list, size};
use crate::hash;
use crate::model::{Weight, WeightTable};
use crate::quantize::Importance;
use crate::recipe::{Assignment, Grid, Method, Quantizer, Recipe, ScaleRule};

/// The path of the file in manifests, whatever it is called: a name must not reach the output.
pub const IMATRIX_FILE: &str = "imatrix";

/// Largest file that is read; that of a model with 400 B parameters in experts has some hundred MiB.
const MAX_FILE: u64 = 4 << 30;

/// Weights that a message lists.
const LISTED: usize = 5;

/// A file of importances, read whole.
#[derive(Debug)]
pub struct Imatrix {
    path: PathBuf,
    file: FileDigest,
    importance: Importance,
}

impl Imatrix {
    /// Reads a file of `llama-imatrix`, of either form.
    ///
    /// # Errors
    /// A file that cannot be read ([`FailureKind::Failed`]), is none of both forms or damaged
    /// ([`FailureKind::Refused`]).
    pub fn open(path: &Path) -> Result<Imatrix> {
        let refused = |why: String| {
            let problem = Diagnostic::new("imatrix", format!("{}: {why}", path.display()))
                .help("llama-imatrix of llama.cpp makes such files (GGUF or its older .dat)");
            Failure::one(FailureKind::Refused, "these importances cannot be used", problem)
        };
        let mut bytes = Vec::new();
        File::open(path)
            .and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut bytes))
            .map_err(|error| Failure::io("read the imatrix", path, &error))?;
        if bytes.len() as u64 > MAX_FILE {
            return Err(refused(format!("it is larger than {}", size(MAX_FILE))));
        }
        let importance = Importance::parse(&bytes).map_err(|error| refused(error.to_string()))?;
        let sha256 = hash::sha256([bytes.as_slice()]);
        let file = FileDigest { path: IMATRIX_FILE.to_owned(), bytes: bytes.len() as u64, sha256 };
        Ok(Imatrix { path: path.to_owned(), file, importance })
    }

    /// Length and digest.
    pub fn file(&self) -> &FileDigest {
        &self.file
    }

    /// Where it was read from.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The importances of a weight's columns.
    pub(super) fn columns(&self, entry: &Entry, cols: u64) -> Option<&[f32]> {
        self.importance.columns(&entry.name, entry.matrix, usize::try_from(cols).ok()?)
    }
}

/// A matrix of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Name of the weight there, without `.weight`.
    pub name: String,
    /// The expert; 0 for a weight that is no expert.
    pub matrix: usize,
    /// As the manifest shows it: `blk.0.attn_q`, `blk.1.ffn_down_exps[5]`.
    pub shown: String,
}

/// What a file says about the weights of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Importances {
    /// Stored weights whose scales are searched.
    pub searched: usize,
    /// The matrix of every weight that has one, by index in the table.
    pub entries: BTreeMap<usize, Entry>,
}

/// Refuses a file that nothing in the recipe would read.
///
/// # Errors
/// [`FailureKind::Usage`]: importances, and no rule that searches.
pub(super) fn wanted(sources: &Sources, recipe: &Recipe) -> Result<()> {
    let searches =
        |r: &crate::recipe::Rule| r.quantizer == Quantizer::Search && r.imatrix != Some(false);
    if sources.imatrix.is_none() || recipe.rules.iter().any(searches) {
        return Ok(());
    }
    let name = if recipe.name.is_empty() { "the recipe" } else { &recipe.name };
    let why = format!(
        "importances weigh the errors of quantizer \"search\", and no rule of {name} searches with them"
    );
    let problem = Diagnostic::new("recipe", why)
        .help("quantizer = \"search\" in the rules whose weights they are for")
        .help("without --imatrix the recipe works as it is");
    Err(Failure::one(FailureKind::Usage, "the recipe has no use for an imatrix", problem))
}

/// Finds every searched weight's matrix. The second and third value are problems and warnings.
pub(super) fn assign(
    sources: &Sources,
    recipe: &Recipe,
    table: &WeightTable,
    assignment: &Assignment,
) -> (Importances, Vec<Diagnostic>, Vec<Diagnostic>) {
    let mut out = Importances::default();
    let (mut problems, mut warnings) = (Vec::new(), Vec::new());
    let (mut rotated, mut absent, mut needed) = (Vec::new(), Vec::new(), Vec::new());
    let experts = experts(table);
    for (assigned, weight) in assignment.stored(table) {
        let Method::Grid(Grid { rule: ScaleRule::Search, fwht, .. }) = &*assigned.method else {
            continue;
        };
        out.searched += 1;
        let wish = assigned.rule.and_then(|r| recipe.rules.get(r)).and_then(|r| r.imatrix);
        let Some(imatrix) = &sources.imatrix else {
            if wish == Some(true) {
                needed.push(weight.name.as_str());
            }
            continue;
        };
        if wish == Some(false) {
            continue;
        }
        if fwht.is_some() {
            rotated.push(weight.name.as_str());
            continue;
        }
        match find(&imatrix.importance, weight, &experts) {
            Ok(Some(entry)) => {
                out.entries.insert(assigned.weight, entry);
            }
            Ok(None) if wish == Some(true) => needed.push(weight.name.as_str()),
            Ok(None) => absent.push(weight.name.as_str()),
            Err(why) => problems.push(
                Diagnostic::new("imatrix", why)
                    .help("an imatrix belongs to one model: make it with this one's GGUF file"),
            ),
        }
    }
    if !needed.is_empty() {
        let (what, help) = match &sources.imatrix {
            None => ("and none were given", "--imatrix FILE names the file of importances"),
            Some(_) => (
                "and the imatrix has none for them",
                "imatrix = false in a rule of their own searches without",
            ),
        };
        let why = format!(
            "{} weights want importances (imatrix = true) {what}: {}",
            count(needed.len() as u64),
            list(&needed, LISTED)
        );
        problems.push(Diagnostic::new("imatrix", why).help(help));
    }
    if out.entries.is_empty() && !absent.is_empty() && problems.is_empty() {
        let names: Vec<&str> =
            sources.imatrix.iter().flat_map(|i| i.importance.names()).take(3).collect();
        let why = format!(
            "no weight that is searched is in the imatrix: the weights are {}; its entries begin with {}",
            list(&absent, 3),
            list(&names, 3)
        );
        problems.push(
            Diagnostic::new("imatrix", why)
                .help("names are those of llama.cpp; an imatrix of this model is needed"),
        );
    } else if !absent.is_empty() {
        warnings.push(Diagnostic::new(
            "imatrix",
            format!(
                "{} of {} searched weights have no importances and weigh all columns alike: {}",
                count(absent.len() as u64),
                count(out.searched as u64),
                list(&absent, LISTED)
            ),
        ));
    }
    if !rotated.is_empty() {
        warnings.push(Diagnostic::new(
            "imatrix",
            format!(
                "{} rotated weights are searched without importances, which a rotation would mix: {}",
                count(rotated.len() as u64),
                list(&rotated, LISTED)
            ),
        ));
    }
    (out, problems, warnings)
}

/// The name that llama.cpp gives a weight, and the matrix within it.
fn base(weight: &Weight) -> (&str, usize) {
    let name = weight.name.strip_suffix(".weight").unwrap_or(&weight.name);
    match usize::try_from(weight.expert) {
        Ok(expert) => match name.strip_suffix(&format!(".{expert}")) {
            Some(base) => (base, expert),
            None => (name, 0),
        },
        Err(_) => (name, 0),
    }
}

/// Experts by the name of the weight that stacks them.
fn experts(table: &WeightTable) -> BTreeMap<&str, usize> {
    let mut out: BTreeMap<&str, usize> = BTreeMap::new();
    for weight in table.weights.iter().filter(|w| w.expert >= 0) {
        let (name, expert) = base(weight);
        let most = out.entry(name).or_default();
        *most = (*most).max(expert.saturating_add(1));
    }
    out
}

/// The weight's matrix; `None` for one that the file does not have or that is 0 throughout.
///
/// # Errors
/// An entry of another size.
fn find(
    importance: &Importance,
    weight: &Weight,
    experts: &BTreeMap<&str, usize>,
) -> std::result::Result<Option<Entry>, String> {
    let (base, matrix) = base(weight);
    let mut names = vec![base.to_owned()];
    if let Some(front) = base.strip_suffix("gate_up_exps") {
        names.extend([format!("{front}gate_exps"), format!("{front}up_exps")]);
    }
    names.extend(weight.tied_to.as_deref().map(|t| t.trim_end_matches(".weight").to_owned()));
    let Some((name, values)) =
        names.into_iter().find_map(|n| importance.values(&n).map(|values| (n, values)))
    else {
        return Ok(None);
    };
    let cols = weight.shape.matrix().map_or(0, |(_, cols)| cols);
    let stacked = experts.get(base).copied().unwrap_or(1);
    let per_matrix = usize::try_from(cols).ok();
    let fits =
        |matrices: usize| per_matrix.and_then(|cols| cols.checked_mul(matrices)) == Some(values);
    let found = (fits(1) || fits(stacked))
        .then(|| importance.columns(&name, matrix, per_matrix.unwrap_or(0)))
        .flatten();
    let Some(found) = found else {
        let has = count(values as u64);
        return Err(match stacked {
            1 => format!(
                "{}: the imatrix has {has} values for `{name}`, the weight {} columns",
                weight.name,
                count(cols)
            ),
            n => format!(
                "{}: the imatrix has {has} values for `{name}`, the weights {n} experts of {} columns",
                weight.name,
                count(cols)
            ),
        });
    };
    if found.iter().all(|v| *v == 0.0) {
        return Ok(None);
    }
    let shown = if stacked > 1 { format!("{name}[{matrix}]") } else { name.clone() };
    Ok(Some(Entry { name, matrix, shown }))
}
