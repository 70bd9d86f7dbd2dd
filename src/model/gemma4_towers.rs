//! Gemma 4's image and audio encoders, the unified model's embedders, and the projections into the text space.

use super::census::{Census, Dim, Scope};
use super::config::Config;
use super::decoder::{self, HIDDEN, MAX_LAYERS};
use super::spec::{AudioSpec, AudioTower, ProjectorSpec, VisionEmbedder, VisionSpec, VisionTower};
use super::weights::{Class, Tower};

const TEXT_HIDDEN: &str = "text hidden_size";

/// The image side, unless the configuration has none.
pub(super) fn vision(root: &Config, outputs: u64, unified: bool) -> Option<VisionSpec> {
    root.need_present("vision_config");
    root.value("vision_config")?;
    let v = root.need_section("vision_config")?;
    let eps = v.positive("rms_norm_eps");
    let patch_size = v.size("patch_size");
    let pooling = v.size("pooling_kernel_size");
    if unified {
        let width = v.size("mm_embed_dim");
        let inputs = v.size("output_proj_dims");
        if inputs != width && v.states("mm_embed_dim") && v.states("output_proj_dims") {
            v.refuse(
                "output_proj_dims",
                format!("is {inputs}, but rows are mm_embed_dim {width} wide"),
            );
        }
        if let Some(merged) = v.opt_size("model_patch_size")
            && v.states("patch_size")
            && v.states("pooling_kernel_size")
            && merged != patch_size.saturating_mul(pooling)
        {
            v.refuse(
                "model_patch_size",
                format!("is {merged}, not patch_size {patch_size} × pooling_kernel_size {pooling}"),
            );
        }
        return Some(VisionSpec::Embedder(VisionEmbedder {
            patch_size,
            pooling,
            width,
            position_table: v.size("mm_posemb_size"),
            soft_tokens: v.size("num_soft_tokens"),
            layer_norm_eps: 1e-5,
            projector: ProjectorSpec { inputs, outputs, norm_eps: eps },
        }));
    }
    let hidden_size = v.size(HIDDEN);
    let rope = v.need_section("rope_parameters");
    let rope_theta = rope.as_ref().map_or(1.0, |r| r.positive("rope_theta"));
    if let Some(rope) = rope {
        // "axial" is how transformers 5.24 spells the two-axis rotation that "default" means here.
        let kind = rope.opt_word("rope_type").unwrap_or("default");
        if !["default", "axial"].contains(&kind) {
            rope.refuse("rope_type", format!("is `{kind}`; known here are default and axial"));
        }
    }
    let (q_heads, kv_heads) = (v.size("num_attention_heads"), v.size("num_key_value_heads"));
    decoder::divides(&v, q_heads, kv_heads, "num_key_value_heads");
    let head_dim = v.size("head_dim");
    if !head_dim.is_multiple_of(4) && v.states("head_dim") {
        v.refuse("head_dim", format!("is {head_dim}; two-axis rotation needs a multiple of 4"));
    }
    let soft_tokens = match root.opt_size("vision_soft_tokens_per_image") {
        Some(n) => n,
        None => v.size("default_output_length"),
    };
    Some(VisionSpec::Tower(VisionTower {
        hidden_size,
        mlp_width: v.size("intermediate_size"),
        layers: v.bounded("num_hidden_layers", MAX_LAYERS),
        q_heads,
        kv_heads,
        head_dim,
        patch_size,
        pooling,
        position_table: v.size("position_embedding_size"),
        soft_tokens,
        rope_theta,
        norm_eps: eps,
        activation: decoder::activation(&v, "hidden_activation"),
        standardize: v.flag("standardize"),
        clipped_linears: v.flag("use_clipped_linears"),
        projector: ProjectorSpec { inputs: hidden_size, outputs, norm_eps: eps },
    }))
}

/// The audio side, unless the configuration has none.
pub(super) fn audio(root: &Config, outputs: u64, unified: bool) -> Option<AudioSpec> {
    root.value("audio_config")?;
    let a = root.need_section("audio_config")?;
    let norm_eps = a.positive("rms_norm_eps");
    if unified {
        let samples = a.size("audio_embed_dim");
        return Some(AudioSpec::Embedder {
            samples,
            projector: ProjectorSpec { inputs: samples, outputs, norm_eps },
        });
    }
    let conv_channels = match a.numbers("subsampling_conv_channels").as_deref() {
        Some(&[c0, c1]) if (1..=1 << 20).contains(&c0) && (1..=1 << 20).contains(&c1) => [c0, c1],
        Some(_) => {
            a.refuse("subsampling_conv_channels", "has to be two channel counts");
            [1, 1]
        }
        None if a.value("subsampling_conv_channels").is_none() => {
            a.missing("subsampling_conv_channels");
            [1, 1]
        }
        None => [1, 1],
    };
    let (hidden_size, heads) = (a.size(HIDDEN), a.size("num_attention_heads"));
    if !hidden_size.is_multiple_of(heads) && a.states(HIDDEN) {
        a.refuse(
            "num_attention_heads",
            format!("is {heads}, which does not divide hidden_size {hidden_size}"),
        );
    }
    let output_size = a.size("output_proj_dims");
    Some(AudioSpec::Tower(AudioTower {
        hidden_size,
        layers: a.bounded("num_hidden_layers", MAX_LAYERS),
        heads,
        conv_channels,
        conv_kernel: a.size("conv_kernel_size"),
        residual_weight: a.positive("residual_weight"),
        chunk: a.size("attention_chunk_size"),
        context_left: a.size("attention_context_left"),
        context_right: a.count("attention_context_right"),
        logit_cap: a.positive("attention_logit_cap"),
        masked_score: a.real("attention_invalid_logits_value"),
        clamp: a.positive("gradient_clipping"),
        norm_eps,
        activation: decoder::activation(&a, "hidden_act"),
        clipped_linears: a.flag("use_clipped_linears"),
        output_size,
        projector: ProjectorSpec { inputs: output_size, outputs, norm_eps },
    }))
}

/// `FROM.linear.weight` and, for clipped linears, the four bounds beside it.
fn clipped(
    c: &mut Census,
    s: &Scope,
    to: &str,
    from: &str,
    dims: [Dim; 2],
    clip: bool,
) -> Option<usize> {
    let weight = c.linear(s, to, &format!("{from}.linear"), dims[0], dims[1]);
    if clip {
        for bound in ["input_max", "input_min", "output_max", "output_min"] {
            let at =
                c.raw(s, &format!("{to}.{bound}"), &format!("{from}.{bound}"), Class::Other, &[]);
            c.may_be_infinite(at);
        }
    }
    weight
}

/// Weights that an engine can read as one: only when no bounds stand between them.
fn fuse(c: &mut Census, name: String, members: &[Option<usize>], clip: bool) {
    if !clip {
        c.fuse(&name, members);
    }
}

fn projector(
    c: &mut Census,
    to: &str,
    from: [&'static str; 2],
    p: &ProjectorSpec,
    inputs: &'static str,
) {
    let from = c.prefix(&from);
    let s = Scope { from, to: "mm.", tower: Tower::Projector, layer: -1 };
    let dims = [Dim(p.outputs, TEXT_HIDDEN), Dim(p.inputs, inputs)];
    c.linear(&s, to, "embedding_projection", dims[0], dims[1]);
}

pub(super) fn vision_weights(c: &mut Census, vision: &VisionSpec) {
    let (projection, inputs) = match vision {
        VisionSpec::Tower(v) => {
            vision_tower(c, v);
            (&v.projector, "vision hidden_size")
        }
        VisionSpec::Embedder(v) => {
            vision_embedder(c, v);
            (&v.projector, "output_proj_dims")
        }
        VisionSpec::Siglip(_) => return,
    };
    projector(c, "vision", ["model.embed_vision.", "embed_vision."], projection, inputs);
}

fn vision_tower(c: &mut Census, v: &VisionTower) {
    let prefix = c.prefix(&["model.vision_tower.", "vision_tower."]);
    let s = Scope { from: prefix, to: "vision.", tower: Tower::Vision, layer: -1 };
    let h = Dim(v.hidden_size, HIDDEN);
    // Three colour channels.
    let pixels =
        Dim(v.patch_size.saturating_mul(v.patch_size).saturating_mul(3), "3 × patch_size²");
    c.linear(&s, "patch_embd", "patch_embedder.input_proj", h, pixels);
    let table = [Dim(2, ""), Dim(v.position_table, "position_embedding_size"), h];
    c.raw(
        &s,
        "position_embd.weight",
        "patch_embedder.position_embedding_table",
        Class::Other,
        &table,
    );
    if v.standardize {
        c.raw(&s, "std_bias", "std_bias", Class::Other, &[h]);
        c.raw(&s, "std_scale", "std_scale", Class::Other, &[h]);
    }
    let q = Dim(v.q_heads.saturating_mul(v.head_dim), "num_attention_heads × head_dim");
    let kv = Dim(v.kv_heads.saturating_mul(v.head_dim), "num_key_value_heads × head_dim");
    let (d, w) = (Dim(v.head_dim, "head_dim"), Dim(v.mlp_width, "intermediate_size"));
    let clip = v.clipped_linears;
    let under = format!("{prefix}encoder.layers.");
    for n in c.layers(&under, v.layers, "vision_config.num_hidden_layers") {
        let (from, to) = (format!("{under}{n}."), format!("vision.blk.{n}."));
        let s = Scope { from: &from, to: &to, ..s };
        decoder::norms(c, &s, true, v.hidden_size);
        let qkv = [
            clipped(c, &s, "attn_q", "self_attn.q_proj", [q, h], clip),
            clipped(c, &s, "attn_k", "self_attn.k_proj", [kv, h], clip),
            clipped(c, &s, "attn_v", "self_attn.v_proj", [kv, h], clip),
        ];
        fuse(c, format!("{to}attn_qkv"), &qkv, clip);
        clipped(c, &s, "attn_output", "self_attn.o_proj", [h, q], clip);
        c.norm(&s, "attn_q_norm", "self_attn.q_norm", d);
        c.norm(&s, "attn_k_norm", "self_attn.k_norm", d);
        let gate_up = [
            clipped(c, &s, "ffn_gate", "mlp.gate_proj", [w, h], clip),
            clipped(c, &s, "ffn_up", "mlp.up_proj", [w, h], clip),
        ];
        fuse(c, format!("{to}ffn_gate_up"), &gate_up, clip);
        clipped(c, &s, "ffn_down", "mlp.down_proj", [h, w], clip);
    }
}

fn vision_embedder(c: &mut Census, v: &VisionEmbedder) {
    let prefix = c.prefix(&["model.vision_embedder.", "vision_embedder."]);
    let s = Scope { from: prefix, to: "vision.", tower: Tower::Vision, layer: -1 };
    let side = v.patch_size.saturating_mul(v.pooling);
    let pixels =
        Dim(side.saturating_mul(side).saturating_mul(3), "3 × (patch_size × pooling_kernel_size)²");
    let e = Dim(v.width, "mm_embed_dim");
    let layer_norm = |c: &mut Census, to: &str, from: &str, width: Dim| {
        c.norm(&s, to, from, width);
        c.bias(&s, to, from, Class::Norm, width);
    };
    layer_norm(c, "patch_norm_1", "patch_ln1", pixels);
    c.linear(&s, "patch_embd", "patch_dense", e, pixels);
    c.bias(&s, "patch_embd", "patch_dense", Class::Other, e);
    layer_norm(c, "patch_norm_2", "patch_ln2", e);
    let table = [Dim(v.position_table, "mm_posemb_size"), Dim(2, ""), e];
    c.raw(&s, "position_embd.weight", "pos_embedding", Class::Other, &table);
    layer_norm(c, "position_norm", "pos_norm", e);
}

pub(super) fn audio_weights(c: &mut Census, audio: &AudioSpec) {
    let (projection, inputs) = match audio {
        AudioSpec::Tower(a) => {
            audio_tower(c, a);
            (&a.projector, "output_proj_dims")
        }
        AudioSpec::Embedder { projector, .. } => (projector, "audio_embed_dim"),
    };
    projector(c, "audio", ["model.embed_audio.", "embed_audio."], projection, inputs);
}

fn audio_tower(c: &mut Census, a: &AudioTower) {
    let prefix = c.prefix(&["model.audio_tower.", "audio_tower."]);
    let s = Scope { from: prefix, to: "audio.", tower: Tower::Audio, layer: -1 };
    let h = Dim(a.hidden_size, HIDDEN);
    let conv = "subsample_conv_projection";
    let [c0, c1] = a.conv_channels;
    for (i, (outs, ins)) in [(c0, 1), (c1, c0)].into_iter().enumerate() {
        let outs = Dim(outs, "subsampling_conv_channels");
        let kernel = [outs, Dim(ins, ""), Dim(3, ""), Dim(3, "")];
        c.weight(&s, &format!("conv.{i}"), &format!("{conv}.layer{i}.conv"), Class::Other, &kernel);
        c.norm(&s, &format!("conv_norm.{i}"), &format!("{conv}.layer{i}.norm"), outs);
    }
    // Mel bins equal the first channel count; two strides of 2 leave a quarter of them.
    let flat = Dim((c0 / 4).saturating_mul(c1), "channels[0] / 4 × channels[1]");
    c.linear(&s, "input_proj", &format!("{conv}.input_proj_linear"), h, flat);
    let out = Dim(a.output_size, "output_proj_dims");
    c.linear(&s, "output_proj", "output_proj", out, h);
    c.bias(&s, "output_proj", "output_proj", Class::Other, out);

    let clip = a.clipped_linears;
    let w = Dim(a.hidden_size.saturating_mul(4), "4 × hidden_size");
    let double = Dim(a.hidden_size.saturating_mul(2), "2 × hidden_size");
    let d = Dim(a.hidden_size / a.heads.max(1), "hidden_size / num_attention_heads");
    let under = format!("{prefix}layers.");
    for n in c.layers(&under, a.layers, "audio_config.num_hidden_layers") {
        let (from, to) = (format!("{under}{n}."), format!("audio.blk.{n}."));
        let s = Scope { from: &from, to: &to, ..s };
        for (from, suffix) in [("feed_forward1", ""), ("feed_forward2", "_1")] {
            c.norm(&s, &format!("ffn_norm{suffix}"), &format!("{from}.pre_layer_norm"), h);
            clipped(
                c,
                &s,
                &format!("ffn_up{suffix}"),
                &format!("{from}.ffw_layer_1"),
                [w, h],
                clip,
            );
            clipped(
                c,
                &s,
                &format!("ffn_down{suffix}"),
                &format!("{from}.ffw_layer_2"),
                [h, w],
                clip,
            );
            c.norm(&s, &format!("ffn_post_norm{suffix}"), &format!("{from}.post_layer_norm"), h);
        }
        c.norm(&s, "attn_pre_norm", "norm_pre_attn", h);
        let qkv = [
            clipped(c, &s, "attn_q", "self_attn.q_proj", [h, h], clip),
            clipped(c, &s, "attn_k", "self_attn.k_proj", [h, h], clip),
            clipped(c, &s, "attn_v", "self_attn.v_proj", [h, h], clip),
        ];
        fuse(c, format!("{to}attn_qkv"), &qkv, clip);
        clipped(c, &s, "attn_output", "self_attn.post", [h, h], clip);
        c.linear(&s, "attn_k_rel", "self_attn.relative_k_proj", h, h);
        c.raw(&s, "per_dim_scale.weight", "self_attn.per_dim_scale", Class::Other, &[d]);
        c.norm(&s, "attn_post_norm", "norm_post_attn", h);
        c.norm(&s, "conv_pre_norm", "lconv1d.pre_layer_norm", h);
        clipped(c, &s, "conv_pw1", "lconv1d.linear_start", [double, h], clip);
        let kernel = [h, Dim(1, ""), Dim(a.conv_kernel, "conv_kernel_size")];
        c.weight(&s, "conv_dw", "lconv1d.depthwise_conv1d", Class::Other, &kernel);
        c.norm(&s, "conv_norm", "lconv1d.conv_norm", h);
        clipped(c, &s, "conv_pw2", "lconv1d.linear_end", [h, h], clip);
        c.norm(&s, "output_norm", "norm_out", h);
    }
}
