//! The image processor that a file carries, compared with what [`Picture::patches`](super::Picture::patches) computes.

use serde_json::Value as Json;

use super::stored::side_file;
use crate::artifact::Artifact;
use crate::diag::{Diagnostic, Failure, FailureKind, Result};
use crate::model::{SiglipTower, VisionSpec};

/// Files in which transformers keeps it: on its own, and since version 5 among other processors.
const FILES: [(&str, Option<&str>); 2] =
    [("preprocessor_config.json", None), ("processor_config.json", Some("image_processor"))];

/// Bilinear, as Pillow counts its filters.
const BILINEAR: u64 = 2;

/// Checks that pictures are made as the file's own processor would make them; a file that carries none, or leaves a key
/// out, is taken at transformers' defaults.
///
/// # Errors
/// [`FailureKind::Refused`] with every key of Gemma 3's processor that asks for something else.
pub(super) fn check(artifact: &Artifact, vision: &VisionSpec) -> Result<()> {
    // Gemma 4's processors follow the model's configuration alone.
    let VisionSpec::Siglip(v) = vision else { return Ok(()) };
    for (file, section) in FILES {
        let Some(bytes) = side_file(artifact, file) else { continue };
        let config: Json = serde_json::from_slice(bytes).map_err(|e| {
            Failure::plain(FailureKind::Invalid, format!("{file} in the file: {e}"))
        })?;
        let config = match section {
            Some(section) => config.get(section),
            None => Some(&config),
        };
        let problems: Vec<Diagnostic> = config
            .map(|config| others(config, v))
            .unwrap_or_default()
            .into_iter()
            .map(|said| Diagnostic::new("image", format!("{file}: {said}")))
            .collect();
        if !problems.is_empty() {
            return Err(Failure {
                problems,
                ..Failure::plain(FailureKind::Refused, "pictures for this model cannot be made")
            });
        }
    }
    Ok(())
}

/// Keys of Gemma 3's processor that ask for something else than is computed.
fn others(config: &Json, v: &SiglipTower) -> Vec<String> {
    let mut out = Vec::new();
    let said = |key: &str| config.get(key).filter(|value| !value.is_null());
    let number =
        |value: &Json, wanted: f64| value.as_f64().is_some_and(|n| (n - wanted).abs() < 1e-9);
    for key in ["image_mean", "image_std"] {
        let half = |value: &Json| match value.as_array() {
            Some(colours) => colours.len() == 3 && colours.iter().all(|c| number(c, 0.5)),
            None => number(value, 0.5),
        };
        if let Some(value) = said(key).filter(|value| !half(value)) {
            out.push(format!("{key} is {value}; pictures are made with 0.5 for each colour"));
        }
    }
    if let Some(value) = said("rescale_factor").filter(|value| !number(value, 1.0 / 255.0)) {
        out.push(format!("rescale_factor is {value}; pictures are made with 1/255"));
    }
    if let Some(value) = said("resample").filter(|value| value.as_u64() != Some(BILINEAR)) {
        out.push(format!("resample is {value}; pictures are resized bilinearly, which is 2"));
    }
    for key in ["do_resize", "do_rescale", "do_normalize"] {
        if said(key).is_some_and(|value| *value == Json::Bool(false)) {
            out.push(format!("{key} is false; it is done to every picture"));
        }
    }
    if said("do_pan_and_scan").is_some_and(|value| *value != Json::Bool(false)) {
        out.push("do_pan_and_scan is true; no crops are made of a picture".to_owned());
    }
    for key in ["height", "width"] {
        let side = said("size").and_then(|size| size.get(key));
        if let Some(side) = side.filter(|side| side.as_u64() != Some(v.image_size)) {
            out.push(format!("size.{key} is {side}; the encoder reads {} pixels", v.image_size));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::{Activation, ProjectorSpec};

    fn tower() -> SiglipTower {
        SiglipTower {
            hidden_size: 8,
            mlp_width: 8,
            layers: 1,
            heads: 1,
            image_size: 896,
            patch_size: 14,
            activation: Activation::GeluTanh,
            layer_norm_eps: 1e-6,
            soft_tokens: 256,
            projector: ProjectorSpec { inputs: 8, outputs: 8, norm_eps: 1e-6 },
        }
    }

    /// As published with Gemma 3.
    fn published() -> Json {
        json!({
            "do_convert_rgb": null, "do_normalize": true, "do_pan_and_scan": null, "do_rescale": true,
            "do_resize": true, "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "Gemma3ImageProcessor",
            "image_seq_length": 256, "image_std": [0.5, 0.5, 0.5], "resample": 2,
            "rescale_factor": 0.003_921_568_627_450_98, "size": {"height": 896, "width": 896},
        })
    }

    #[test]
    fn the_published_processor_is_the_one_that_is_computed_and_every_other_is_told() {
        assert_eq!(others(&published(), &tower()), Vec::<String>::new());
        assert_eq!(others(&json!({}), &tower()), Vec::<String>::new());
        for (key, value, said) in [
            ("image_mean", json!([0.48, 0.5, 0.5]), "image_mean is [0.48,0.5,0.5]; pictures"),
            ("image_std", json!([0.5, 0.5]), "image_std is [0.5,0.5]; pictures"),
            ("rescale_factor", json!(1.0), "rescale_factor is 1.0; pictures"),
            ("resample", json!(3), "resample is 3; pictures are resized bilinearly"),
            ("do_normalize", json!(false), "do_normalize is false"),
            ("do_pan_and_scan", json!(true), "do_pan_and_scan is true; no crops"),
            (
                "size",
                json!({"height": 896, "width": 448}),
                "size.width is 448; the encoder reads 896",
            ),
        ] {
            let mut config = published();
            config[key] = value;
            let found = others(&config, &tower());
            assert!(matches!(&found[..], [one] if one.starts_with(said)), "{key}: {found:?}");
        }
        let mut scalar = published();
        scalar["image_mean"] = json!(0.5);
        assert!(others(&scalar, &tower()).is_empty());
    }
}
