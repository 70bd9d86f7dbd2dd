//! From pixels to rows of the text space.

use super::executor::{Executor, View};
use super::value::{Value, fault};
use crate::diag::{self, Diagnostic, Failure, FailureKind, Result};
use crate::graph::ProgramKind;

/// One image, cut into patches.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Image {
    /// Pixels of the patches, 0 to 1, one patch after the other; within a patch row, column, channel.
    pub pixels: Vec<f32>,
    /// Column and row of each patch. Patches at negative positions are padding and are left out.
    pub positions: Vec<[i64; 2]>,
}

/// Runs the encoder and the projector of the smallest size that the image fits: one row of the text space for each soft
/// token of the image, `[rows, width]`.
pub(super) fn encode(executor: &mut Executor<'_>, image: &Image) -> Result<Value> {
    let count = image.positions.len();
    let width = image.pixels.len().checked_div(count).unwrap_or(0);
    let real: Vec<usize> =
        (0..count).filter(|n| image.positions[*n].iter().all(|c| *c >= 0)).collect();
    if width == 0 || real.is_empty() || width * count != image.pixels.len() {
        return Err(refuse(format!("{} pixels for {count} patches", image.pixels.len()), None));
    }
    // (patches, soft tokens, program), the smallest that fits.
    let mut programs: Vec<(usize, u64, String, usize)> = Vec::new();
    for program in &executor.programs().programs {
        let ProgramKind::Vision { soft_tokens } = program.kind else { continue };
        let shape = program.input("pixel_values").and_then(|p| program.value(p.value));
        if let Some([1, patches, width]) = shape.map(|v| v.shape.extents()) {
            let size = |n: u64| usize::try_from(n).map_err(fault);
            programs.push((size(*patches)?, soft_tokens, program.name.clone(), size(*width)?));
        }
    }
    programs.sort();
    let largest = programs.last().map(|p| p.0);
    let fitting = programs.into_iter().find(|p| p.0 >= real.len());
    let Some((patches, soft_tokens, program, needed)) = fitting else {
        return Err(match largest {
            Some(n) => refuse(
                format!(
                    "an image of {} patches passes the largest encoder of {}",
                    diag::count(real.len() as u64),
                    diag::count(n as u64)
                ),
                Some("a smaller image, or a recipe with more max_soft_tokens".to_owned()),
            ),
            None => refuse("no program takes images".to_owned(), None),
        });
    };
    if needed != width {
        return Err(refuse(
            format!("patches have {width} values, the encoder takes {needed}"),
            None,
        ));
    }
    let padding = patches - real.len();
    let mut pixels: Vec<f32> = Vec::with_capacity(patches * width);
    let mut at: Vec<i64> = Vec::with_capacity(patches * 2);
    for n in &real {
        pixels.extend(&image.pixels[n * width..(n + 1) * width]);
        at.extend(image.positions[*n]);
    }
    pixels.resize(patches * width, 0.0);
    at.resize(patches * 2, -1);
    let mut mask = vec![0.0f32; real.len()];
    mask.resize(patches, f32::MIN);
    let mut padded = vec![0i64; real.len()];
    padded.resize(real.len() + padding, 1);
    let inputs = [
        ("pixel_values", Value::floats([1, patches, width], pixels)?),
        ("pixel_position_ids", Value::ints([1, patches, 2], at)?),
        ("attention_mask", Value::floats([1, patches], mask)?),
        ("padding_positions", Value::ints([1, patches], padded)?),
    ];
    let encoded = executor.run(&program, &inputs, &View::default())?;
    let features = encoded.output("hidden")?.clone();
    let rows = features.shape().get(1).copied().unwrap_or(0);
    let valid: Vec<bool> = match encoded.get("pooler_mask") {
        Some(mask) => mask.as_ints()?.iter().map(|v| *v != 0).collect(),
        None => (0..rows).map(|row| row < real.len()).collect(),
    };
    let project = format!("project_t{soft_tokens}");
    let projected = executor.run(&project, &[("image_features", features)], &View::default())?;
    let embeds = projected.output("image_embeds")?;
    let columns = embeds.columns();
    let mut kept = Vec::new();
    for (row, valid) in embeds.as_floats()?.chunks_exact(columns.max(1)).zip(&valid) {
        if *valid {
            kept.extend(row);
        }
    }
    Value::floats([kept.len() / columns.max(1), columns], kept)
}

fn refuse(message: String, help: Option<String>) -> Failure {
    let problem = Diagnostic::new("image", message);
    let problem = match help {
        Some(help) => problem.help(help),
        None => problem,
    };
    Failure::one(FailureKind::Refused, "this image cannot be encoded", problem)
}
