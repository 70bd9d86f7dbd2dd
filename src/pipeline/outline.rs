//! A plan as far as memory goes: who holds what, which programs run, which sizes they have. Nothing of the file that a
//! conversion would write, so one source can be tried under many recipes.

use super::plan::{self, Understood};
use super::programs::{self, Compiled};
use super::sources::Sources;
use crate::diag::{Diagnostic, Failure, FailureKind, Result};
use crate::graph::{Programs, Sizes};
use crate::model::ModelSpec;
use crate::partition::{self, Models, Placement};
use crate::recipe::Recipe;

/// Sources whose meaning is known: what every recipe starts from.
#[derive(Debug)]
pub struct Subject {
    sources: Sources,
    understood: Understood,
}

/// What one recipe makes of a [`Subject`].
#[derive(Debug, Clone, PartialEq)]
pub struct Outline {
    /// Who holds what.
    pub placement: Placement,
    /// The programs.
    pub programs: Programs,
    /// What they are compiled for.
    pub sizes: Sizes,
    /// What looks odd and stops nothing.
    pub warnings: Vec<Diagnostic>,
}

impl Subject {
    /// Reads what sources mean, by family.
    ///
    /// # Errors
    /// A quantization that is not read, or a model that is not understood.
    pub fn of(sources: impl Into<Sources>) -> Result<Subject> {
        let sources = sources.into();
        sources.refuse_quantized()?;
        let understood = plan::understand(&sources, false)?;
        Ok(Subject { sources, understood })
    }

    /// The sources.
    pub fn sources(&self) -> &Sources {
        &self.sources
    }

    /// What the model is; none for a weights-only source.
    pub fn spec(&self) -> Option<&ModelSpec> {
        self.understood.spec.as_ref()
    }

    fn models(&self) -> Models<'_> {
        let Understood { spec, draft, .. } = &self.understood;
        Models { main: spec.as_ref(), draft: draft.as_ref() }
    }

    /// The numbers of devices that the decoder splits over under a recipe, ascending.
    ///
    /// # Errors
    /// A recipe that does not resolve.
    pub fn device_counts(&self, recipe: &Recipe) -> Result<Vec<u32>> {
        let table = &self.understood.table;
        let assignment = recipe.resolve(table, self.sources.main.display_name())?;
        Ok(partition::device_counts(self.models(), table, &assignment))
    }

    /// Places and compiles the model under a recipe.
    ///
    /// # Errors
    /// As planning a conversion refuses it; a model without programs.
    pub fn outline(&self, recipe: &Recipe) -> Result<Outline> {
        let Understood { spec, draft, table } = &self.understood;
        let assignment = recipe.resolve(table, self.sources.main.display_name())?;
        let placement = plan::place(recipe, self.models(), table, &assignment)?;
        let Some(spec) = spec.as_ref().filter(|spec| spec.draft.is_none()) else {
            let what = "it has no programs, so it keeps no keys and values: encoders, draft heads alone, weights-only files";
            let problem = Diagnostic::new("estimate", what)
                .help("give a decoder that radpack has a family for");
            let headline = "there is no KV cache to estimate";
            return Err(Failure::one(FailureKind::Refused, headline, problem));
        };
        let input = programs::Input {
            recipe,
            spec,
            draft: draft.as_ref(),
            table,
            assignment: &assignment,
            placement: &placement,
        };
        let (Compiled { programs, sizes, .. }, odd) = programs::compile_only(&input)?;
        let mut warnings = self.sources.main.notes().to_vec();
        warnings.extend(assignment.warnings.iter().cloned());
        warnings.extend(odd);
        Ok(Outline { placement, programs, sizes, warnings })
    }
}
