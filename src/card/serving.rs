//! What whoever serves an artifact has to know, as it follows from how the programs were compiled.

use crate::artifact::manifest::{GraphSummary, Manifest};
use crate::diag::{count, size};

/// Notes for serving; none for an artifact without programs.
pub(super) fn notes(manifest: &Manifest) -> Vec<String> {
    let Some(g) = &manifest.graphs else { return Vec::new() };
    let mut notes = vec![devices(manifest.devices)];
    notes.push(batches(g));
    notes.push(format!(
        "A sequence has at most {} tokens, prompt and answer together.",
        count(g.max_seq_len)
    ));
    notes.push(chunks(g));
    if !g.max_soft_tokens.is_empty() {
        notes.push(images(g));
    }
    notes.push(cache(g));
    if g.kv.window_bytes > 0 && g.kv.block_bytes > 0 {
        notes.push(
            "Prefix caching: blocks of layers that see every token can be shared by sequences of one beginning; layers \
             with a window keep a ring for each sequence, so a sequence that begins at a shared prefix has to run the \
             last window of it again."
                .to_owned(),
        );
    }
    if g.kv.draft_tokens > 0 {
        notes.push(format!(
            "The draft head proposes up to {} tokens at once; the cache holds as many slots more.",
            g.kv.draft_tokens
        ));
    }
    if g.host_embeddings {
        notes.push(
            "Prefill takes embeddings: the host looks tokens up in `token_embd.weight` and puts projected image rows \
             in their places."
                .to_owned(),
        );
    }
    notes
}

fn devices(n: u32) -> String {
    match n {
        1 => "The programs are for one device.".to_owned(),
        n => format!(
            "The number of devices is fixed: weights and programs are cut for {n}. For another number convert again; \
             the weights' values stay the same."
        ),
    }
}

fn batches(g: &GraphSummary) -> String {
    if g.batch_size == 1 {
        return "One sequence at a time.".to_owned();
    }
    let sizes: Vec<String> = g.decoder_batch_sizes.iter().map(u64::to_string).collect();
    format!(
        "At most {} sequences at once; a decoding step runs the smallest program that holds them (batch {}), with padding \
         rows.",
        g.batch_size,
        sizes.join(", ")
    )
}

fn chunks(g: &GraphSummary) -> String {
    let mut text = format!(
        "Prompts run in calls of {} tokens; the last one is padded.",
        count(g.prefill_chunk_size)
    );
    if g.kv.aligned {
        text.push_str(
            " No call crosses the end of a cache block: slots before it may stay unused, and count as taken (`radpack \
             explain` says how many).",
        );
    }
    text
}

fn images(g: &GraphSummary) -> String {
    let list = |sizes: &[u64]| sizes.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    format!(
        "An image becomes up to {} tokens, whichever is chosen first, and runs in one call of the smallest image prefill \
         program that holds it ({} rows).",
        list(&g.max_soft_tokens),
        list(&g.image_prefill_chunk_size)
    )
}

fn cache(g: &GraphSummary) -> String {
    let mut text = String::new();
    if g.kv.block_bytes > 0 {
        text = format!(
            "The {} cache has blocks of {} tokens, {} on each device; all sequences at full length take {}, fewer than {} \
             do not serve.",
            g.kv.dtype,
            count(g.kv.block_tokens),
            size(g.kv.block_bytes),
            count(g.kv.full_blocks),
            count(g.kv.min_blocks)
        );
    }
    if g.kv.window_bytes > 0 {
        if !text.is_empty() {
            text.push(' ');
        }
        text.push_str(&format!(
            "Layers with a window take {} on each device beside it, whatever the lengths.",
            size(g.kv.window_bytes)
        ));
    }
    text
}
