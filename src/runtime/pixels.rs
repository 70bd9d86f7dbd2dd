//! From a picture's bytes to patches, as the image processors of transformers 5.24 make them for Gemma 4 and Gemma 3.
//!
//! ```text
//! bytes ─ decode ─ Picture (RGB) ─ target_size ─ resize ─ patches ─ Image
//! ```
//!
//! Gemma 4 keeps proportions and gives pixels from 0 to 1; Gemma 3 makes every picture a square of one size, without crops
//! of it, and gives pixels from −1 to 1.
//!
//! Resizing is Pillow's: bicubic (a = −0.5) or bilinear over as many pixels as the reduction spans, in a pass over columns
//! and one over rows, each in fixed point and rounded to a byte. Every value equals that of the processor built on Pillow;
//! the one built on torchvision does not round between the passes.

use std::borrow::Cow;
use std::io::Cursor;

use image::{DynamicImage, ImageDecoder, ImageReader, Limits};

use super::images::Image;
use super::value::fault;
use crate::diag::{Diagnostic, Failure, FailureKind, Result, count, size};
use crate::model::{SiglipTower, VisionSpec};

/// Longest side and most pixels of a picture that is read; Pillow refuses more than 178 956 970 pixels too.
const MAX_SIDE: u32 = 1 << 16;
const MAX_PIXELS: u64 = 178_956_970;

/// Most bytes that a decoder may take for itself.
const MAX_DECODING: u64 = 2 << 30;

/// Most bytes of a picture's file.
pub const MAX_FILE: u64 = 1 << 28;

/// A picture: rows of red, green and blue, a byte each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    width: usize,
    height: usize,
    rgb: Vec<u8>,
}

fn refuse(message: String, help: &str) -> Failure {
    let problem = Diagnostic::new("image", message).help(help);
    Failure::one(FailureKind::Refused, "this picture cannot be used", problem)
}

impl Picture {
    /// Decodes PNG, JPEG, WebP or BMP, turned as its metadata says. Transparency is dropped, grey and palettes become RGB.
    ///
    /// # Errors
    /// Bytes of another format or broken ones; a picture too large to be read.
    pub fn decode(bytes: &[u8]) -> Result<Picture> {
        let unreadable = |why: image::ImageError| {
            refuse(
                format!("it cannot be decoded: {why}"),
                "PNG, JPEG, WebP and BMP pictures can be read",
            )
        };
        let mut limits = Limits::default();
        limits.max_image_width = Some(MAX_SIDE);
        limits.max_image_height = Some(MAX_SIDE);
        limits.max_alloc = Some(MAX_DECODING);
        let mut reader =
            ImageReader::new(Cursor::new(bytes)).with_guessed_format().map_err(|e| {
                Failure::plain(FailureKind::Failed, format!("cannot read a picture: {e}"))
            })?;
        reader.limits(limits);
        let mut decoder = reader.into_decoder().map_err(unreadable)?;
        let (width, height) = decoder.dimensions();
        let pixels = u64::from(width) * u64::from(height);
        if pixels > MAX_PIXELS {
            return Err(refuse(
                format!("it has {} pixels; at most {} are read", count(pixels), count(MAX_PIXELS)),
                "make it smaller",
            ));
        }
        let orientation = decoder.orientation().map_err(unreadable)?;
        let mut image = DynamicImage::from_decoder(decoder).map_err(unreadable)?;
        image.apply_orientation(orientation);
        let rgb = image.into_rgb8();
        let (width, height) = (rgb.width() as usize, rgb.height() as usize);
        Picture::new(width, height, rgb.into_raw())
    }

    /// A picture of those bytes.
    ///
    /// # Errors
    /// No pixels, or another number of bytes than three a pixel.
    pub fn new(width: usize, height: usize, rgb: Vec<u8>) -> Result<Picture> {
        let bytes = width.checked_mul(height).and_then(|n| n.checked_mul(3));
        if bytes != Some(rgb.len()) || rgb.is_empty() {
            return Err(refuse(
                format!("{width} × {height} pixels in {}", size(rgb.len() as u64)),
                "a picture has three bytes for each of its pixels, and at least one",
            ));
        }
        Ok(Picture { width, height, rgb })
    }

    /// Width and height in pixels.
    pub fn size(&self) -> (usize, usize) {
        (self.width, self.height)
    }

    /// The patches that an encoder reads, at most `soft_tokens` soft tokens of them.
    ///
    /// # Errors
    /// An encoder whose rule is not known, or no size that fits.
    pub fn patches(&self, vision: &VisionSpec, soft_tokens: u64) -> Result<Image> {
        let (patch, pooling, merged) = match vision {
            VisionSpec::Tower(v) => (v.patch_size, v.pooling, false),
            VisionSpec::Embedder(v) => (v.patch_size, v.pooling, true),
            VisionSpec::Siglip(v) => return self.square(v, soft_tokens),
        };
        let pixels = |n: usize| u64::try_from(n).map_err(fault);
        let (height, width) =
            target_size(pixels(self.height)?, pixels(self.width)?, patch, pooling, soft_tokens)?;
        if height.saturating_mul(width) > MAX_PIXELS {
            return Err(refuse(
                format!(
                    "the encoder takes {width} × {height} pixels; at most {} are made",
                    count(MAX_PIXELS)
                ),
                "fewer image tokens",
            ));
        }
        let side = if merged { patch.saturating_mul(pooling) } else { patch };
        let size = |n: u64| usize::try_from(n).map_err(fault);
        Ok(self.resized(size(width)?, size(height)?, &BICUBIC).cut(size(side)?))
    }

    /// The patches of the square that Gemma 3's encoder reads.
    fn square(&self, v: &SiglipTower, soft_tokens: u64) -> Result<Image> {
        if soft_tokens != v.soft_tokens {
            return Err(refuse(
                format!(
                    "{soft_tokens} tokens are asked for; every image of this model becomes {}",
                    v.soft_tokens
                ),
                "leave the number of tokens out",
            ));
        }
        let size = |n: u64| usize::try_from(n).map_err(fault);
        let (side, patch) = (size(v.image_size)?, size(v.patch_size)?);
        if v.image_size.saturating_mul(v.image_size) > MAX_PIXELS || side == 0 {
            return Err(refuse(
                format!(
                    "the encoder takes {side} × {side} pixels; at most {} are made",
                    count(MAX_PIXELS)
                ),
                "a model with a smaller image_size",
            ));
        }
        let squares = self.resized(side, side, &BILINEAR).cut(patch);
        // From pixels of three colours to three planes, and from 0 to 1 to −1 to 1: mean and deviation ½ of each colour, as
        // the processor computes it.
        let mut pixels = Vec::with_capacity(squares.pixels.len());
        for patch in
            squares.pixels.chunks_exact(patch.saturating_mul(patch).saturating_mul(3).max(1))
        {
            for colour in 0..3 {
                pixels.extend(patch.iter().skip(colour).step_by(3).map(|p| (p - 0.5) / 0.5));
            }
        }
        Ok(Image { pixels, positions: squares.positions })
    }

    /// The picture in another size.
    fn resized(&self, width: usize, height: usize, filter: &Filter) -> Picture {
        let (from, tall) = (self.width, self.height);
        let rgb = if rows_first([tall, from], [height, width]) {
            let low = down(&self.rgb, from * 3, [tall, height], filter);
            if width == from { low } else { across(&low, [from, width], filter) }
        } else {
            let wide = match width == from {
                true => Cow::Borrowed(&self.rgb),
                false => Cow::Owned(across(&self.rgb, [from, width], filter)),
            };
            match height == tall {
                true => wide.into_owned(),
                false => down(&wide, width * 3, [tall, height], filter),
            }
        };
        Picture { width, height, rgb }
    }

    /// Squares of `side` pixels from left to right, then down; within a square row, column, channel.
    fn cut(&self, side: usize) -> Image {
        let side = side.max(1);
        let mut image = Image::default();
        for y in 0..self.height / side {
            for x in 0..self.width / side {
                for row in 0..side {
                    let first = ((y * side + row) * self.width + x * side) * 3;
                    let bytes = self.rgb.get(first..first + side * 3).unwrap_or_default();
                    // As the processor computes it: in f64, then rounded.
                    image
                        .pixels
                        .extend(bytes.iter().map(|b| (f64::from(*b) * (1.0 / 255.0)) as f32));
                }
                image.positions.push([x as i64, y as i64]);
            }
        }
        image
    }
}

/// Height and width that a picture is resized to: as large as `soft_tokens` squares of `pooling` × `pooling` patches of
/// `patch` pixels allow at its own proportions, both sides whole squares.
///
/// # Errors
/// Sides or sizes of 0, or beyond 64 bits.
pub fn target_size(
    height: u64,
    width: u64,
    patch: u64,
    pooling: u64,
    soft_tokens: u64,
) -> Result<(u64, u64)> {
    let area = |a: u64, b: u64| a.checked_mul(b).filter(|n| *n > 0 && *n < 1 << 53);
    let square = area(patch, pooling);
    let room = square.and_then(|s| area(s, s)).and_then(|s| area(s, soft_tokens));
    let (Some(square), Some(room), Some(pixels)) = (square, room, area(height, width)) else {
        return Err(fault(format!(
            "a picture of {width} × {height} pixels for {soft_tokens} soft tokens of {pooling} × {pooling} patches of {patch}"
        )));
    };
    let factor = (room as f64 / pixels as f64).sqrt();
    let squares = |n: u64| (factor * n as f64 / square as f64).floor() as u64;
    let (mut high, mut wide) = (squares(height), squares(width));
    // A side too short for one square gets one; the other follows the proportions as far as there is room.
    if high == 0 {
        (high, wide) = (1, (width / height).clamp(1, soft_tokens));
    } else if wide == 0 {
        (high, wide) = ((height / width).clamp(1, soft_tokens), 1);
    }
    if high.saturating_mul(wide) > soft_tokens {
        return Err(refuse(
            format!(
                "{width} × {height} pixels become {wide} × {high} squares; {soft_tokens} soft tokens are the most"
            ),
            "proportions nearer to a square",
        ));
    }
    Ok((high * square, wide * square))
}

/// Whether rows are resized before columns, `[height, width]` to `[height, width]`: where more than twice as many rows as
/// columns go. Pillow 13.0.0 does so in every case in which its results show the order (`fixtures/images/pass_order.json`).
fn rows_first(from: [usize; 2], to: [usize; 2]) -> bool {
    let [rows, columns] = [0, 1].map(|n| from[n].saturating_sub(to[n]));
    rows > 0 && rows > columns.saturating_mul(2)
}

/// Fixed point of the weights (Pillow, `PRECISION_BITS`): 8 bits of value and 2 of overshoot stay free in 32.
const FRACTION: u32 = 32 - 8 - 2;

/// What one place of the result is made of: the first source place, and weights from there on.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

/// How much places count by their distance.
struct Filter {
    weight: fn(f64) -> f64,
    /// Distance from which on they do not.
    reach: f64,
}

const BICUBIC: Filter = Filter { weight: cubic, reach: 2.0 };

const BILINEAR: Filter = Filter { weight: |x| (1.0 - x.abs()).max(0.0), reach: 1.0 };

/// The cubic of Keys with a = −0.5.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

/// Weights of every place when `from` places become `to`.
fn taps([from, to]: [usize; 2], filter: &Filter) -> Vec<Taps> {
    let scale = from as f64 / to as f64;
    let stretch = scale.max(1.0);
    let support = filter.reach * stretch;
    (0..to)
        .map(|place| {
            let center = (place as f64 + 0.5) * scale;
            // Truncation towards zero, as a cast does.
            let first = (center - support + 0.5).max(0.0) as usize;
            let end = ((center + support + 0.5) as usize).min(from);
            let weights: Vec<f64> = (first..end)
                .map(|n| (filter.weight)((n as f64 - center + 0.5) * (1.0 / stretch)))
                .collect();
            let sum: f64 = weights.iter().sum();
            let fixed = |w: &f64| {
                let w = if sum == 0.0 { *w } else { w / sum } * f64::from(1u32 << FRACTION);
                (if w < 0.0 { w - 0.5 } else { w + 0.5 }) as i32
            };
            Taps { first, weights: weights.iter().map(fixed).collect() }
        })
        .collect()
}

/// A sum in fixed point, rounded to a byte.
fn byte(sum: i64) -> u8 {
    (sum >> FRACTION).clamp(0, 255) as u8
}

const HALF: i64 = 1 << (FRACTION - 1);

/// Rows of `from` pixels made `to` pixels wide.
fn across(rgb: &[u8], [from, to]: [usize; 2], filter: &Filter) -> Vec<u8> {
    let taps = taps([from, to], filter);
    let mut out = Vec::with_capacity(rgb.len() / from.max(1) * to);
    for row in rgb.chunks_exact((from * 3).max(1)) {
        let pixels = row.as_chunks::<3>().0;
        for tap in &taps {
            let mut sums = [HALF; 3];
            for (pixel, weight) in pixels.iter().skip(tap.first).zip(&tap.weights) {
                for (sum, value) in sums.iter_mut().zip(pixel) {
                    *sum += i64::from(*value) * i64::from(*weight);
                }
            }
            out.extend(sums.map(byte));
        }
    }
    out
}

/// `from` rows of `width` bytes made `to` rows.
fn down(rgb: &[u8], width: usize, [from, to]: [usize; 2], filter: &Filter) -> Vec<u8> {
    let mut out = Vec::with_capacity(width * to);
    let mut sums = vec![HALF; width];
    for tap in taps([from, to], filter) {
        sums.fill(HALF);
        let rows = rgb.chunks_exact(width.max(1)).skip(tap.first);
        for (row, weight) in rows.zip(&tap.weights) {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += i64::from(*value) * i64::from(*weight);
            }
        }
        out.extend(sums.iter().map(|sum| byte(*sum)));
    }
    out
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;
    use crate::model::{Activation, ProjectorSpec, VisionEmbedder, VisionTower};

    fn fixture(name: &str) -> Vec<u8> {
        let path = format!("{}/fixtures/images/{name}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read(&path).expect("a fixture")
    }

    const PROJECTOR: ProjectorSpec = ProjectorSpec { inputs: 8, outputs: 8, norm_eps: 1e-6 };

    /// Patches of 4 pixels, 3 × 3 of them a soft token.
    fn tower() -> VisionSpec {
        VisionSpec::Tower(VisionTower {
            hidden_size: 8,
            mlp_width: 8,
            layers: 1,
            q_heads: 1,
            kv_heads: 1,
            head_dim: 8,
            patch_size: 4,
            pooling: 3,
            position_table: 64,
            soft_tokens: 12,
            rope_theta: 100.0,
            norm_eps: 1e-6,
            activation: Activation::GeluTanh,
            standardize: false,
            clipped_linears: false,
            projector: PROJECTOR,
        })
    }

    fn embedder() -> VisionSpec {
        VisionSpec::Embedder(VisionEmbedder {
            patch_size: 2,
            pooling: 3,
            width: 8,
            position_table: 16,
            soft_tokens: 12,
            layer_norm_eps: 1e-5,
            projector: PROJECTOR,
        })
    }

    fn bytes_of(image: &Image) -> Vec<u8> {
        image.pixels.iter().map(|p| (p * 255.0).round() as u8).collect()
    }

    #[test]
    fn every_published_size_is_the_one_of_the_processor() {
        let rows: serde_json::Value =
            serde_json::from_slice(&fixture("image_sizes.json")).expect("JSON");
        let rows = rows.as_array().expect("rows");
        assert_eq!(rows.len(), 36);
        for row in rows {
            let n = |key: &str| row[key].as_u64().expect("a number");
            let pair = |key: &str| [row[key][0].as_u64(), row[key][1].as_u64()].map(Option::unwrap);
            let (h, w) = target_size(n("h"), n("w"), 16, 3, n("max_soft_tokens")).expect("a size");
            assert_eq!([h, w], pair("target"), "{row}");
            assert_eq!([h / 16, w / 16], pair("patches"), "{row}");
            assert_eq!(h * w / (48 * 48), n("soft"), "{row}");
        }
    }

    #[test]
    fn sizes_that_mean_nothing_are_errors() {
        for (h, w, patch, pooling, soft) in [
            (0, 5, 16, 3, 70),
            (5, 0, 16, 3, 70),
            (5, 5, 0, 3, 70),
            (5, 5, 16, 0, 70),
            (5, 5, 16, 3, 0),
            (u64::MAX, 2, 16, 3, 70),
            (5, 5, u64::MAX, 3, 70),
            (5, 5, 1 << 20, 1 << 20, 1 << 20),
        ] {
            assert!(target_size(h, w, patch, pooling, soft).is_err(), "{h} {w} {patch}");
        }
        // Thin pictures take as many squares in a row as there may be.
        assert_eq!(target_size(1, 1000, 4, 3, 12).expect("a size"), (12, 144));
        assert_eq!(target_size(1000, 1, 4, 3, 12).expect("a size"), (144, 12));
    }

    #[test]
    fn patches_equal_those_of_the_processor_byte_for_byte() {
        let processed = fixture("processed.safetensors");
        let file = SafeTensors::deserialize(&processed).expect("safetensors");
        let about: serde_json::Value =
            serde_json::from_slice(&fixture("processed.json")).expect("JSON");
        let mut compared = 0;
        for (name, counts) in about["soft tokens"].as_object().expect("pictures") {
            let picture = Picture::decode(&fixture(name)).unwrap_or_else(|f| panic!("{name}\n{f}"));
            for soft in [12, 6] {
                let image =
                    picture.patches(&tower(), soft).unwrap_or_else(|f| panic!("{name}\n{f}"));
                assert_eq!(counts[soft.to_string()], image.soft_tokens(&tower()), "{name}");
                let at = file.tensor(&format!("{name}/{soft}/positions")).expect("positions");
                let at: Vec<i64> =
                    at.data().as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
                assert_eq!(image.positions.as_flattened(), at, "{name}");
                let theirs = file.tensor(&format!("{name}/{soft}/pixels")).expect("pixels");
                let ours = bytes_of(&image);
                if name.ends_with(".jpg") {
                    // Decoders of JPEG differ by a few steps.
                    let far = ours.iter().zip(theirs.data()).map(|(a, b)| a.abs_diff(*b)).max();
                    assert!(far <= Some(4), "{name}: {far:?} steps of 255");
                } else {
                    let differ =
                        ours.iter().zip(theirs.data()).enumerate().filter(|(_, (a, b))| a != b);
                    let differ: Vec<_> = differ.take(5).collect();
                    assert!(differ.is_empty(), "{name} in {soft} soft tokens: {differ:?}");
                }
                compared += ours.len();
            }
        }
        assert!(compared > 60_000, "{compared}");
    }

    #[test]
    fn passes_come_in_the_order_that_shows_in_pillows_results() {
        let cases: Vec<(usize, usize, usize, usize, bool)> =
            serde_json::from_slice(&fixture("pass_order.json")).expect("JSON");
        assert!(cases.len() > 200 && cases.iter().filter(|c| c.4).count() > 50, "{}", cases.len());
        for (h, w, high, wide, first) in cases {
            assert_eq!(rows_first([h, w], [high, wide]), first, "{h} × {w} to {high} × {wide}");
        }
    }

    #[test]
    fn squares_of_a_merging_encoder_are_those_of_its_processor() {
        let processed = fixture("processed.safetensors");
        let file = SafeTensors::deserialize(&processed).expect("safetensors");
        let picture = Picture::decode(&fixture("rgb.png")).expect("decodes");
        let image = picture.patches(&embedder(), 12).expect("patches");
        assert_eq!(bytes_of(&image), file.tensor("unified/pixels").expect("pixels").data());
        let at = file.tensor("unified/positions").expect("positions");
        let at: Vec<i64> = at.data().as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
        assert_eq!(image.positions.as_flattened(), at);
        assert_eq!(image.soft_tokens(&embedder()), 8);
    }

    /// Squares of `side` pixels in patches of `patch`, each side of which has `row` soft tokens.
    fn siglip(side: u64, patch: u64, row: u64) -> VisionSpec {
        VisionSpec::Siglip(SiglipTower {
            hidden_size: 8,
            mlp_width: 8,
            layers: 1,
            heads: 1,
            image_size: side,
            patch_size: patch,
            activation: Activation::GeluTanh,
            layer_norm_eps: 1e-6,
            soft_tokens: row * row,
            projector: PROJECTOR,
        })
    }

    #[test]
    fn patches_of_gemma3_equal_those_of_its_processor_to_the_bit() {
        let processed = fixture("gemma3.safetensors");
        let file = SafeTensors::deserialize(&processed).expect("safetensors");
        let mut compared = 0;
        for (name, tensor) in file.tensors() {
            let (picture, side) = name.split_once('/').expect("a picture and a side");
            let vision = match side {
                "32" => siglip(32, 4, 4),
                _ => siglip(75, 7, 5),
            };
            let VisionSpec::Siglip(v) = &vision else { unreachable!() };
            let decoded = Picture::decode(&fixture(picture)).unwrap_or_else(|f| panic!("{f}"));
            let image = decoded.patches(&vision, v.soft_tokens).unwrap_or_else(|f| panic!("{f}"));
            let n = v.side() as i64;
            assert_eq!(tensor.shape(), [image.positions.len(), v.patch_values() as usize]);
            let at: Vec<[i64; 2]> = (0..n * n).map(|i| [i % n, i / n]).collect();
            assert_eq!(image.positions, at, "{name}");
            assert_eq!(image.soft_tokens(&vision), v.soft_tokens);
            // The processor's floats are made of these bytes so.
            let float = |b: u8| ((f64::from(b) * (1.0 / 255.0)) as f32 - 0.5) / 0.5;
            let far =
                image.pixels.iter().zip(tensor.data()).map(|(ours, b)| (ours - float(*b)).abs());
            let far = far.fold(0.0, f32::max);
            // Decoders of JPEG differ by a few steps.
            let bound = if picture.ends_with(".jpg") { 4.5 * 2.0 / 255.0 } else { 0.0 };
            assert!(far <= bound, "{name}: {far}");
            assert_eq!(image.pixels.len(), tensor.data().len());
            compared += image.pixels.len();
        }
        assert!(compared > 190_000, "{compared}");
        let dot = Picture::new(1, 1, vec![7, 8, 9]).expect("a picture");
        let said = |vision: &VisionSpec, tokens| {
            dot.patches(vision, tokens).expect_err("a refusal").problems[0].message.clone()
        };
        assert_eq!(
            said(&siglip(32, 4, 4), 6),
            "6 tokens are asked for; every image of this model becomes 16"
        );
        assert!(said(&siglip(1 << 40, 4, 4), 16).contains("at most 178,956,970 are made"));
    }

    #[test]
    fn pixels_are_bytes_over_255_as_numpy_computes_them() {
        let bytes: Vec<u8> = (0..=255).flat_map(|b| [b; 3]).collect();
        let image = Picture::new(16, 16, bytes).expect("a picture").cut(16);
        assert_eq!(image.pixels.len(), 768);
        for (n, p) in image.pixels.iter().enumerate() {
            assert_eq!(*p, ((n / 3) as f64 * (1.0 / 255.0)) as f32);
        }
        assert_eq!(image.pixels[767], 1.0);
    }

    #[test]
    fn broken_and_oversized_pictures_are_refused() {
        let said = |bytes: &[u8]| {
            let failure = Picture::decode(bytes).expect_err("a refusal");
            assert_eq!(failure.kind, FailureKind::Refused);
            failure.problems[0].message.clone()
        };
        assert!(said(b"no picture").contains("cannot be decoded"), "{}", said(b"no picture"));
        assert!(said(b"").contains("cannot be decoded"));
        let png = fixture("rgb.png");
        for end in [9, 33, 60, png.len() / 2] {
            assert!(said(&png[..end]).contains("cannot be decoded"), "{end}");
        }
        // Nothing is allocated for what a header claims.
        let bmp = |width: u32, height: u32| {
            let mut bmp = fixture("plain.bmp");
            bmp[18..22].copy_from_slice(&width.to_le_bytes());
            bmp[22..26].copy_from_slice(&height.to_le_bytes());
            bmp
        };
        assert!(said(&bmp(70_000, 2)).contains("cannot be decoded"));
        let text = said(&bmp(60_000, 60_000));
        assert!(text.contains("3,600,000,000 pixels; at most 178,956,970"), "{text}");
        assert!(Picture::new(2, 2, vec![0; 11]).is_err());
        assert!(Picture::new(0, 2, Vec::new()).is_err());
    }
}
