//! Partition: which slice of which weight each of N devices holds.
//!
//! ```text
//! ModelSpec + WeightTable + Assignment ─ place ─ Placement
//! ```
//!
//! Tensor parallel: query and key heads, MLP widths, vocabulary rows; whole experts over devices; the image encoder and
//! its projector on a list of devices of their own. A cut falls where blocks of every plane begin, so the pieces of a
//! quantized weight are pieces of its planes and the numbers never depend on N. Where blocks do not divide evenly,
//! devices get whole blocks as evenly as possible and pieces are padded with zero bytes to the largest, so that all
//! devices run one program.
//!
//! | file | what |
//! |---|---|
//! | `role` | what a weight is to the partition, by its logical name |
//! | `rules` | the cut of every weight for one number of devices, and what does not fit |
//! | `placement` | the result |

mod placement;
mod role;
mod rules;
#[cfg(test)]
mod tests;

pub use placement::{
    Cut, DeviceBytes, LayerShare, PlacedWeight, Placement, Shard, Shares, VocabularyShare,
};

use self::rules::{Misfit, Rules, choices};
use crate::diag::{self, Diagnostic, FailureKind, Problems};
use crate::model::{ModelSpec, WeightTable};
use crate::recipe::Assignment;

const AREA: &str = "partition";

/// What the weights of a table mean: heads and widths come from here.
#[derive(Debug, Clone, Copy, Default)]
pub struct Models<'a> {
    /// The model that is converted; none for a weights-only conversion.
    pub main: Option<&'a ModelSpec>,
    /// The draft model that was merged into it.
    pub draft: Option<&'a ModelSpec>,
}

impl<'a> From<Option<&'a ModelSpec>> for Models<'a> {
    fn from(main: Option<&'a ModelSpec>) -> Models<'a> {
        Models { main, draft: None }
    }
}

/// Places every stored weight on `devices` devices, and image weights on `vision_devices` of them.
///
/// With one device, and for a list of one vision device, every weight is whole. Sound stays with the host: its weights
/// are whole on no device.
///
/// # Errors
/// Everything that does not split, with the device counts that work for the whole model: heads, experts, blocks cut in
/// two, encodings whose padding would not decode to zeros, a device list that is empty, repeats or exceeds `devices`;
/// several devices for a model without a family.
pub fn place<'a>(
    models: impl Into<Models<'a>>,
    table: &WeightTable,
    assignment: &Assignment,
    devices: u32,
    vision_devices: &[u32],
) -> diag::Result<Placement> {
    let models = models.into();
    let mut problems = Problems::new();
    problems.extend(list_problem(devices, vision_devices));
    if devices > 1 && models.main.is_none() {
        problems.push(
            Diagnostic::new(
                AREA,
                format!("{devices} devices share a model by its heads, which only a family tells"),
            )
            .help("a weights-only conversion is for 1 device"),
        );
    }
    if !problems.is_empty() {
        return problems.finish(FailureKind::Refused, HEADLINE, Placement::default());
    }
    let attempt = |devices: u32, vision: &[u32]| {
        Rules::new(models, table, assignment, devices, vision).apply()
    };
    let (placement, misfits) = attempt(devices, vision_devices);
    if misfits.is_empty() {
        return Ok(placement);
    }
    let works = |n: u64, of_vision: bool| {
        let Ok(n) = u32::try_from(n) else { return false };
        let (_, misfits) =
            if of_vision { attempt(1, &(0..n).collect::<Vec<_>>()) } else { attempt(n, &[0]) };
        misfits.iter().all(|m| m.vision != of_vision)
    };
    let counts = |of_vision: bool, heads: u64| -> Vec<u64> {
        divisors(heads).filter(|n| works(*n, of_vision)).collect()
    };
    let vision = misfits.iter().any(|m| m.vision).then(|| counts(true, vision_heads(models)));
    let text = misfits.iter().any(|m| !m.vision).then(|| counts(false, heads(models)));
    for misfit in misfits {
        let fitting = if misfit.vision { &vision } else { &text };
        problems.push(problem(misfit, fitting.as_deref().unwrap_or_default()));
    }
    problems.finish(FailureKind::Refused, HEADLINE, placement)
}

/// The numbers of devices that the decoder splits over, ascending. None is larger than its number of query heads.
pub fn device_counts<'a>(
    models: impl Into<Models<'a>>,
    table: &WeightTable,
    assignment: &Assignment,
) -> Vec<u32> {
    let models = models.into();
    if models.main.is_none() {
        return vec![1];
    }
    let counts = divisors(heads(models)).filter_map(|n| u32::try_from(n).ok());
    let works = |n: &u32| {
        let (_, misfits) = Rules::new(models, table, assignment, *n, &[0]).apply();
        misfits.iter().all(|m| m.vision)
    };
    counts.filter(works).collect()
}

fn divisors(heads: u64) -> impl Iterator<Item = u64> {
    (1..=heads.min(MAX_TRIED)).filter(move |n| heads.is_multiple_of(*n))
}

const HEADLINE: &str = "this model does not split over these devices";

/// Device counts that are tried when one does not fit.
const MAX_TRIED: u64 = 1024;

fn problem(misfit: Misfit, fitting: &[u64]) -> Diagnostic {
    let mut out = Diagnostic::new(AREA, misfit.message);
    if !fitting.is_empty() {
        let unit = if fitting == [1] { "device" } else { "devices" };
        let whose = if misfit.vision { "for the image encoder, use" } else { "use" };
        out = out.help(format!("{whose} {} {unit}", choices(fitting)));
    }
    match misfit.help {
        Some(help) => out.help(help),
        None => out,
    }
}

/// Query heads of the decoder layers with the fewest: no larger number of devices works.
fn heads(models: Models<'_>) -> u64 {
    let all = [models.main, models.draft].into_iter().flatten();
    let layers = all.flat_map(|m| &m.text.layers).map(|l| l.attention.q_heads);
    layers.reduce(gcd).unwrap_or(1)
}

fn vision_heads(models: Models<'_>) -> u64 {
    use crate::model::VisionSpec;
    match models.main.and_then(|m| m.vision.as_ref()) {
        Some(VisionSpec::Tower(t)) => t.q_heads,
        Some(VisionSpec::Siglip(t)) => t.heads,
        Some(VisionSpec::Embedder(_)) | None => 1,
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn list_problem(devices: u32, vision: &[u32]) -> Option<Diagnostic> {
    let say = |message: String| {
        let help = match devices {
            1 => "devices = [0] in [vision]".to_owned(),
            n => format!("[vision] devices lists some of 0 to {}", n - 1),
        };
        Some(Diagnostic::new(AREA, message).help(help))
    };
    if devices == 0 {
        return Some(Diagnostic::new(AREA, "no devices").help("use 1 device or more"));
    }
    if vision.is_empty() {
        return say("the list of vision devices is empty".to_owned());
    }
    if let Some(high) = vision.iter().find(|&&d| d >= devices) {
        return say(format!("the image encoder is for device {high}, the model for {devices}"));
    }
    let mut seen = std::collections::BTreeSet::new();
    let twice = vision.iter().find(|d| !seen.insert(**d))?;
    say(format!("the list of vision devices names device {twice} twice"))
}
