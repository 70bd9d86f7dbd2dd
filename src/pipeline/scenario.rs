//! The same source under other settings: which number of devices, which length, how large a batch.

use std::fmt;

use super::outline::Subject;
use crate::diag::{Diagnostic, Failure, FailureKind, Result, count, list};
use crate::estimate::{self, Estimate, MemoryModel, Options};
use crate::graph::Sizes;
use crate::recipe::{Profile, Recipe};

/// Settings that decide how much cache there is; what is `None` stays as the recipe says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Settings {
    /// Devices that share the model.
    pub devices: Option<u64>,
    /// Element type of the cache, as recipes name it.
    pub kv_dtype: Option<String>,
    /// Longest sequence, in tokens.
    pub max_seq_len: Option<u64>,
    /// Sequences that are served together.
    pub batch_size: Option<u64>,
}

impl Settings {
    /// A recipe with these settings. Decode programs for more sequences than are served together go.
    ///
    /// # Errors
    /// A value that the recipe language does not take.
    pub fn apply(&self, recipe: &Recipe) -> Result<Recipe> {
        let mut sets: Vec<String> = Vec::new();
        sets.extend(self.devices.map(|n| format!("target.devices={n}")));
        sets.extend(self.kv_dtype.as_ref().map(|t| format!("graphs.kv_dtype={t:?}")));
        sets.extend(self.max_seq_len.map(|n| format!("graphs.max_seq_len={n}")));
        if let Some(n) = self.batch_size {
            sets.push(format!("graphs.batch_size={n}"));
            if let Some(decoders) = &recipe.graphs.decoder_batch_sizes {
                let mut kept: Vec<u64> = decoders.iter().copied().filter(|b| *b < n).collect();
                kept.push(n);
                sets.push(format!("graphs.decoder_batch_sizes={kept:?}"));
            }
        }
        let mut changed = recipe.clone();
        changed.set_all(&sets)?;
        Ok(changed)
    }
}

/// What a search for a fitting value varies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FitAxis {
    /// The fewest devices.
    Devices,
    /// The longest sequence.
    Length,
}

impl fmt::Display for FitAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FitAxis::Devices => "devices",
            FitAxis::Length => "length",
        })
    }
}

/// A value that was tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tried {
    /// Devices, or tokens.
    pub value: u64,
    /// Why it does not fit; `None` when it does.
    pub refusal: Option<String>,
}

/// The value that fits, and the answer with it.
#[derive(Debug, Clone, PartialEq)]
pub struct Fit {
    /// What was varied.
    pub axis: FitAxis,
    /// The fewest devices, or the longest sequence in tokens.
    pub value: u64,
    /// Every value that was tried, ascending.
    pub tried: Vec<Tried>,
    /// The recipe with the value.
    pub recipe: Recipe,
}

/// An answer and what it is the answer to.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// What the devices hold.
    pub model: MemoryModel,
    /// How many blocks fit.
    pub estimate: Estimate,
    /// What looks odd and stops nothing.
    pub warnings: Vec<Diagnostic>,
}

impl Measured {
    /// What the programs are compiled for.
    pub fn sizes(&self) -> &Sizes {
        &self.model.sizes
    }
}

impl Subject {
    /// How many blocks fit under a recipe, on its target.
    ///
    /// # Errors
    /// A recipe without a target; a model that does not split or compile. One that does not fit the memory is an
    /// answer.
    pub fn measure(&self, recipe: &Recipe, options: Options) -> Result<Measured> {
        let profile = profile(recipe)?;
        let outline = self.outline(recipe)?;
        let model = MemoryModel::of_plan(&outline.placement, &outline.programs, &outline.sizes);
        let options = Options { budget: options.budget.or(recipe.target.memory_budget), ..options };
        let estimate = estimate::estimate(&model, &profile, options)?;
        Ok(Measured { model, estimate, warnings: outline.warnings })
    }

    /// Searches the fewest devices, or the longest sequence, with which one full-length sequence is served and the
    /// policy's rules hold. A length that the recipe names bounds the search; else the model's own does.
    ///
    /// # Errors
    /// Refused, with what stopped each value, when none fits.
    pub fn fit(&self, recipe: &Recipe, options: Options, axis: FitAxis) -> Result<Fit> {
        let mut search = Search { subject: self, recipe, options, axis, tried: Vec::new() };
        let value = match axis {
            FitAxis::Devices => search.devices()?,
            FitAxis::Length => search.length()?,
        };
        let mut tried = search.tried;
        tried.sort_by_key(|t| t.value);
        match value {
            Some(value) => {
                Ok(Fit { axis, value, tried, recipe: settings(axis, value).apply(recipe)? })
            }
            None => Err(nothing_fits(axis, &tried)),
        }
    }
}

/// The target of a recipe.
fn profile(recipe: &Recipe) -> Result<Profile> {
    match &recipe.target.profile {
        Some(name) => Profile::find(name),
        None => {
            let problem = Diagnostic::new(
                "estimate",
                "neither the recipe nor --target says which device it is for",
            );
            let names: Vec<&str> = crate::recipe::PROFILES.iter().map(|(name, _)| *name).collect();
            let problem = problem.help(format!("--target {}", list(&names, usize::MAX)));
            Err(Failure::one(FailureKind::Usage, "no target", problem))
        }
    }
}

fn settings(axis: FitAxis, value: u64) -> Settings {
    match axis {
        FitAxis::Devices => Settings { devices: Some(value), ..Settings::default() },
        FitAxis::Length => Settings { max_seq_len: Some(value), ..Settings::default() },
    }
}

fn nothing_fits(axis: FitAxis, tried: &[Tried]) -> Failure {
    let (what, help) = match axis {
        FitAxis::Devices => (
            "no number of devices that the model splits over has the memory",
            "a shorter --max-seq-len, a smaller --batch-size, or weights in fewer bits need less",
        ),
        FitAxis::Length => (
            "not even the shortest sequence fits",
            "more devices (--fit devices finds how many), or weights in fewer bits, leave more room",
        ),
    };
    let said = tried.iter().filter_map(|t| {
        let why = t.refusal.as_ref()?;
        let unit = match (axis, t.value) {
            (FitAxis::Devices, 1) => "device",
            (FitAxis::Devices, _) => "devices",
            (FitAxis::Length, _) => "tokens",
        };
        Some(Diagnostic::new("estimate", format!("{} {unit}: {why}", count(t.value))))
    });
    let mut problems: Vec<Diagnostic> = said.collect();
    match problems.pop() {
        Some(last) => problems.push(last.help(help)),
        None => problems.push(Diagnostic::new("estimate", what).help(help)),
    }
    Failure { kind: FailureKind::Refused, headline: what.to_owned(), problems, closing: None }
}

struct Search<'a> {
    subject: &'a Subject,
    recipe: &'a Recipe,
    options: Options,
    axis: FitAxis,
    tried: Vec<Tried>,
}

impl Search<'_> {
    /// Whether a value fits; asks once.
    fn fits(&mut self, value: u64) -> Result<bool> {
        if let Some(known) = self.tried.iter().find(|t| t.value == value) {
            return Ok(known.refusal.is_none());
        }
        let recipe = settings(self.axis, value).apply(self.recipe)?;
        let refusal = match self.subject.measure(&recipe, self.options) {
            Ok(measured) => why_not(&measured.estimate),
            // Settings that nobody can take are no answer to the question.
            Err(failure) if failure.kind != FailureKind::Refused => return Err(failure),
            Err(failure) => Some(first_problem(&failure)),
        };
        let fits = refusal.is_none();
        self.tried.push(Tried { value, refusal });
        Ok(fits)
    }

    fn devices(&mut self) -> Result<Option<u64>> {
        for n in self.subject.device_counts(self.recipe)? {
            if self.fits(u64::from(n))? {
                return Ok(Some(u64::from(n)));
            }
        }
        Ok(None)
    }

    /// Whole blocks, by halving: what fits is fitted by everything shorter that the target takes.
    fn length(&mut self) -> Result<Option<u64>> {
        let profile = profile(self.recipe)?;
        let graphs = &self.recipe.graphs;
        let block = graphs.kv_partition_len.unwrap_or(profile.graphs.kv_partition_len).max(1);
        let trained = self.subject.spec().map_or(0, |s| s.text.max_positions);
        let most = graphs.max_seq_len.unwrap_or(trained) / block;
        let limits = &profile.limits;
        let least = limits.flash_min_seq_len.unwrap_or(1).div_ceil(block);
        let least = least.max(limits.partitions_min.unwrap_or(1));
        // Chunks of a prefill call are no longer than a sequence.
        let chunks =
            graphs.image_prefill_chunk_size.iter().flatten().chain(&graphs.prefill_chunk_size);
        let chunk = chunks.copied().max().unwrap_or(1);
        let least = least.max(chunk.div_ceil(block)).min(most);
        if most == 0 {
            return Ok(None);
        }
        if self.fits(most * block)? {
            return Ok(Some(most * block));
        }
        let (mut low, mut high, mut best) = (least, most - 1, None);
        while low <= high {
            let middle = low + (high - low) / 2;
            if self.fits(middle * block)? {
                best = Some(middle * block);
                low = middle + 1;
            } else {
                high = middle - 1;
            }
        }
        Ok(best)
    }
}

/// Why an answer serves no full-length sequence; `None` when it does.
pub fn why_not(estimate: &Estimate) -> Option<String> {
    if estimate.serves_full_length() {
        return None;
    }
    Some(estimate.misfits.first().map_or_else(
        || {
            format!(
                "{} tokens fit, one sequence has {}",
                count(estimate.allocatable_tokens),
                count(estimate.max_seq_len)
            )
        },
        |p| p.message.clone(),
    ))
}

/// The first problem of a failure, and how many more there are.
pub fn first_problem(failure: &Failure) -> String {
    match failure.problems.as_slice() {
        [] => failure.headline.clone(),
        [only] => only.message.clone(),
        [first, more @ ..] => format!("{} (and {} more)", first.message, more.len()),
    }
}
