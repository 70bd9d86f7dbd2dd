//! From pixels to rows of the text space.

use super::executor::{Executor, View};
use super::text::Tokenizer;
use super::value::{Value, fault};
use crate::diag::{self, Diagnostic, Failure, FailureKind, Result};
use crate::graph::{ProgramKind, Programs};
use crate::model::{SpecialTokens, VisionSpec};

/// One image, cut into patches as the processor of its encoder does it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Image {
    /// Pixels of the patches, one patch after the other. Gemma 4: 0 to 1, within a patch row, column, channel. Gemma 3: −1
    /// to 1, within a patch channel, row, column.
    pub pixels: Vec<f32>,
    /// Column and row of each patch. Patches at negative positions are padding and are left out.
    pub positions: Vec<[i64; 2]>,
}

impl Image {
    /// Patches that are not padding.
    pub fn patches(&self) -> usize {
        self.positions.iter().filter(|at| at.iter().all(|c| *c >= 0)).count()
    }

    /// Soft tokens that an encoder makes of it.
    pub fn soft_tokens(&self, vision: &VisionSpec) -> u64 {
        let each = match vision {
            VisionSpec::Tower(v) => v.pooling.saturating_mul(v.pooling),
            VisionSpec::Embedder(_) => 1,
            VisionSpec::Siglip(v) => v.pooling().saturating_mul(v.pooling()),
        };
        (self.patches() as u64).checked_div(each).unwrap_or(0)
    }
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
    let Encoder { vision, project, patches, width: needed, whole } =
        encoder(executor.programs(), real.len())?;
    if whole && real.len() != patches {
        return Err(refuse(
            format!("an image of {} patches; the encoder takes {patches}", real.len()),
            None,
        ));
    }
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
    let encoded = executor.run(&vision, &inputs, &View::default())?;
    let features = encoded.output("hidden")?.clone();
    let rows = features.shape().get(1).copied().unwrap_or(0);
    let valid: Vec<bool> = match encoded.get("pooler_mask") {
        Some(mask) => mask.as_ints()?.iter().map(|v| *v != 0).collect(),
        None => (0..rows).map(|row| row < real.len()).collect(),
    };
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

/// Tokens of a prompt with every image token made as many as its image has soft tokens, between the tokens that begin and
/// end an image (transformers 5.24, the processor of Gemma 4). `images` counts the soft tokens of each.
///
/// # Errors
/// A model without an image token; more or fewer image tokens than images.
pub fn place_images(tokens: &[u64], images: &[u64], special: &SpecialTokens) -> Result<Vec<u64>> {
    let places = tokens.iter().filter(|t| Some(**t) == special.image).count();
    let Some(image) = special.image.filter(|_| places == images.len()) else {
        let help = match special.image {
            None => "the model's configuration names no image token".to_owned(),
            Some(token) => format!(
                "as many image tokens (token {token}) in the text as images; a chat template puts them there"
            ),
        };
        return Err(unequal(places, images.len(), &help));
    };
    let mut out = Vec::with_capacity(tokens.len());
    let mut images = images.iter();
    for token in tokens {
        if *token != image {
            out.push(*token);
            continue;
        }
        let count = images.next().copied().map(usize::try_from);
        out.extend(special.begin_image);
        out.extend(std::iter::repeat_n(image, count.unwrap_or(Ok(0)).map_err(fault)?));
        out.extend(special.end_image);
    }
    Ok(out)
}

/// Tokens of a prompt's text with the images in their places, as the model's processor puts them there; `around` as in
/// [`Tokenizer::tokens`]. `images` counts the soft tokens of each.
///
/// Gemma 4: [`place_images`]. Gemma 3 (transformers 5.24): in the text, every token that begins an image becomes that
/// token, the image's soft tokens and the one that ends it, between two empty lines; so newlines before and after join
/// those of the text.
///
/// # Errors
/// A text without tokens; more or fewer places than images; a model or a tokenizer without the tokens of an image.
pub fn image_tokens(
    tokenizer: &Tokenizer,
    text: &str,
    around: bool,
    images: &[u64],
    model: (&VisionSpec, &SpecialTokens),
) -> Result<Vec<u64>> {
    let (vision, special) = model;
    if !matches!(vision, VisionSpec::Siglip(_)) {
        return place_images(&tokenizer.tokens(text, around)?, images, special);
    }
    let text_of = |token: Option<u64>| token.and_then(|t| tokenizer.token_text(t));
    let (Some(begin), Some(soft), Some(end)) =
        (text_of(special.begin_image), text_of(special.image), text_of(special.end_image))
    else {
        return Err(no_place(
            "the tokenizer does not know the tokens of an image".to_owned(),
            "config.json names them: boi_token_index, image_token_index, eoi_token_index",
        ));
    };
    let mut parts = text.split(begin.as_str());
    let mut out = parts.next().unwrap_or_default().to_owned();
    let places = parts.clone().count();
    if places != images.len() {
        return Err(unequal(
            places,
            images.len(),
            &format!("as many {begin} in the text as images; a chat template puts them there"),
        ));
    }
    for (part, count) in parts.zip(images) {
        let rows = soft.repeat(usize::try_from(*count).map_err(fault)?);
        out.push_str(&format!("\n\n{begin}{rows}{end}\n\n{part}"));
    }
    tokenizer.tokens(&out, around)
}

fn unequal(places: usize, images: usize, help: &str) -> Failure {
    let (found, given) = (diag::count(places as u64), diag::count(images as u64));
    let place = if places == 1 { "place" } else { "places" };
    let image = if images == 1 { "image" } else { "images" };
    no_place(format!("the prompt has {found} {place} for {given} {image}"), help)
}

fn no_place(message: String, help: &str) -> Failure {
    let problem = Diagnostic::new("image", message).help(help);
    Failure::one(FailureKind::Refused, "there is no place for the images", problem)
}

/// Programs that an image of so many patches runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoder {
    /// The encoder.
    pub vision: String,
    /// The projector.
    pub project: String,
    /// Patches that the encoder takes.
    patches: usize,
    /// Values of a patch.
    width: usize,
    /// Whether it takes no fewer patches: it has no mask for padding.
    whole: bool,
}

/// The smallest programs that an image of `count` patches fits.
///
/// # Errors
/// None takes images, or none is large enough.
pub(super) fn encoder(programs: &Programs, count: usize) -> Result<Encoder> {
    let mut known: Vec<(usize, u64, &str, usize, bool)> = Vec::new();
    for program in &programs.programs {
        let ProgramKind::Vision { soft_tokens } = program.kind else { continue };
        let shape = program.input("pixel_values").and_then(|p| program.value(p.value));
        if let Some([1, patches, width]) = shape.map(|v| v.shape.extents()) {
            let size = |n: u64| usize::try_from(n).map_err(fault);
            let whole = program.input("padding_positions").is_none();
            known.push((size(*patches)?, soft_tokens, &program.name, size(*width)?, whole));
        }
    }
    known.sort_unstable();
    let largest = known.last().map(|p| p.0);
    match (known.into_iter().find(|p| p.0 >= count), largest) {
        (Some((patches, soft_tokens, name, width, whole)), _) => Ok(Encoder {
            vision: name.to_owned(),
            project: format!("project_t{soft_tokens}"),
            patches,
            width,
            whole,
        }),
        (None, Some(n)) => Err(refuse(
            format!(
                "an image of {} patches passes the largest encoder of {}",
                diag::count(count as u64),
                diag::count(n as u64)
            ),
            Some("a smaller image, or a recipe with more max_soft_tokens".to_owned()),
        )),
        (None, None) => Err(refuse("no program takes images".to_owned(), None)),
    }
}

fn refuse(message: String, help: Option<String>) -> Failure {
    let problem = Diagnostic::new("image", message);
    let problem = match help {
        Some(help) => problem.help(help),
        None => problem,
    };
    Failure::one(FailureKind::Refused, "this image cannot be encoded", problem)
}
