//! Which programs a prompt runs: the chunk plan that the host follows and `explain` prints.
//!
//! The rules are those of optimum-rbln 0.11.2 for models with images: text in chunks, each image run in the smallest
//! bucket that holds it, chunks packed so that the next one overwrites the padding of the last, and a chunk that would
//! cross a block border moved to the next block.

use std::ops::Range;

use super::sizes::Sizes;
use crate::diag::{self, Diagnostic, FailureKind, Problems};

/// A prompt, or its continuation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Request {
    /// Positions and slots that the sequence holds already.
    pub held: Held,
    /// New tokens.
    pub tokens: u64,
    /// Runs of image (or video frame) tokens among the new ones, in order, apart from each other or adjacent.
    pub images: Vec<Range<u64>>,
}

/// What a sequence holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Held {
    /// Tokens, and so the position of the next.
    pub positions: u64,
    /// Slots in use: positions and the padding between them.
    pub slots: u64,
}

/// The calls that a request takes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RequestPlan {
    /// The calls, in order.
    pub chunks: Vec<Chunk>,
    /// What the sequence holds afterwards.
    pub held: Held,
    /// Slots that this request left empty at block borders.
    pub padding: u64,
    /// Blocks of the sequence that its calls write to, padding rows included, ascending.
    pub blocks: Vec<u64>,
}

/// One call of a prefill program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Whether it is a run of image tokens; decides the program together with `rows`.
    pub image: bool,
    /// Rows of the program.
    pub rows: u64,
    /// First token, counted in the request.
    pub first: u64,
    /// Tokens; the rows after them are padding.
    pub valid: u64,
    /// Position of the first row.
    pub position: u64,
    /// Slot of the first row; the call writes `rows` slots.
    pub slot: u64,
}

impl RequestPlan {
    /// Rows that are computed for nothing.
    pub fn wasted_rows(&self) -> u64 {
        self.chunks.iter().map(|c| c.rows.saturating_sub(c.valid)).sum()
    }
}

impl Chunk {
    /// Name of the program that it runs.
    pub fn program(&self) -> String {
        if self.image { format!("image_prefill_{}", self.rows) } else { "prefill".to_owned() }
    }
}

/// Plans the calls of a request.
///
/// # Errors
/// [`FailureKind::Refused`]: no tokens, image runs out of order, a run longer than the largest bucket, a program whose
/// rows do not fit a block, more slots than the longest sequence has.
pub fn plan_request(sizes: &Sizes, request: &Request) -> diag::Result<RequestPlan> {
    let mut problems = Problems::new();
    let mut say = |message: String, help: Option<String>| {
        let problem = Diagnostic::new("request", message);
        problems.push(match help {
            Some(help) => problem.help(help),
            None => problem,
        });
    };
    let mut plan = RequestPlan { held: request.held, ..RequestPlan::default() };
    if request.tokens == 0 {
        say("the request has no tokens".to_owned(), None);
    }
    let mut images = request.images.iter().filter(|r| !r.is_empty()).peekable();
    let largest = sizes.image_prefill.iter().copied().max().unwrap_or(0);
    let mut at = 0u64;
    while at < request.tokens {
        let (image, rows, valid) = match images.peek() {
            Some(run) if run.start == at && run.end <= request.tokens => {
                let length = run.end - run.start;
                images.next();
                let bucket = sizes.image_prefill.iter().copied().filter(|b| *b >= length).min();
                let Some(bucket) = bucket else {
                    let found = diag::count(length);
                    let (message, help) = match largest {
                        0 => ("no program takes image tokens".to_owned(), None),
                        n => (
                            format!(
                                "an image of {found} tokens passes the largest image program of {}",
                                diag::count(n)
                            ),
                            Some(format!("image_prefill_chunk_size = [{length}] or more")),
                        ),
                    };
                    say(message, help);
                    at += length;
                    continue;
                };
                (true, bucket, length)
            }
            Some(run) if run.start < at || run.end > request.tokens => {
                say(
                    format!(
                        "image tokens {} to {} overlap others or pass the end of {} tokens",
                        run.start, run.end, request.tokens
                    ),
                    None,
                );
                break;
            }
            next => {
                let border = next.map_or(request.tokens, |run| run.start);
                (false, sizes.prefill_chunk, (border - at).min(sizes.prefill_chunk))
            }
        };
        // Only an aligned call lies in one block; others spread their rows over as many as they need.
        if rows == 0 || valid == 0 || (sizes.aligned && rows > sizes.block) {
            say(
                format!(
                    "a program of {} rows does not fit a block of {} tokens",
                    diag::count(rows),
                    diag::count(sizes.block)
                ),
                None,
            );
            break;
        }
        let over = plan.held.slots % sizes.block;
        if sizes.aligned && over + rows > sizes.block {
            plan.held.slots = plan.held.slots.saturating_add(sizes.block - over);
            plan.padding = plan.padding.saturating_add(sizes.block - over);
        }
        let Held { positions, slots } = plan.held;
        plan.chunks.push(Chunk { image, rows, first: at, valid, position: positions, slot: slots });
        let end = slots.saturating_add(rows);
        if end > sizes.max_seq_len {
            say(
                format!(
                    "{} cache slots are needed, the longest sequence has {}",
                    diag::count(end),
                    diag::count(sizes.max_seq_len)
                ),
                Some("a shorter prompt, or a recipe with a larger max_seq_len".to_owned()),
            );
            break;
        }
        for block in slots / sizes.block..=(end - 1) / sizes.block {
            // A call may begin before the padding rows of the one before it end.
            if plan.blocks.last().is_none_or(|last| *last < block) {
                plan.blocks.push(block);
            }
        }
        at += valid;
        plan.held =
            Held { positions: positions.saturating_add(valid), slots: slots.saturating_add(valid) };
    }
    problems.finish(FailureKind::Refused, "this request does not fit the programs", plan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    fn sizes() -> Sizes {
        Sizes {
            max_seq_len: 128,
            batch_size: 4,
            decoder_batch_sizes: vec![4, 1],
            prefill_chunk: 16,
            image_prefill: vec![24, 8],
            block: 32,
            kv_dtype: DType::F32,
            float: DType::F32,
            soft_tokens: vec![12],
            embeds: true,
            aligned: true,
            draft_tokens: 0,
            hidden: false,
        }
    }

    fn plan(tokens: u64, images: &[(u64, u64)]) -> diag::Result<RequestPlan> {
        let images = images.iter().map(|(start, end)| *start..*end).collect();
        let request = Request { tokens, images, ..Request::default() };
        plan_request(&sizes(), &request)
    }

    /// (image, rows, first, valid, slot) of every chunk.
    fn chunks(plan: &RequestPlan) -> Vec<(bool, u64, u64, u64, u64)> {
        plan.chunks.iter().map(|c| (c.image, c.rows, c.first, c.valid, c.slot)).collect()
    }

    #[test]
    fn text_runs_in_chunks_and_only_the_last_is_padded() {
        let plan = plan(40, &[]).expect("it fits");
        let expected = [(false, 16, 0, 16, 0), (false, 16, 16, 16, 16), (false, 16, 32, 8, 32)];
        assert_eq!(chunks(&plan), expected);
        assert_eq!((plan.padding, plan.wasted_rows()), (0, 8));
        assert_eq!(plan.blocks, [0, 1]);
        assert_eq!(plan.held, Held { positions: 40, slots: 40 });
    }

    #[test]
    fn an_image_takes_the_smallest_bucket_and_text_stops_before_it() {
        let plan = plan(25, &[(5, 11)]).expect("it fits");
        let expected = [(false, 16, 0, 5, 0), (true, 8, 5, 6, 5), (false, 16, 11, 14, 11)];
        assert_eq!(chunks(&plan), expected);
        assert_eq!(plan.chunks[1].program(), "image_prefill_8");
        assert_eq!(plan.chunks[2].program(), "prefill");
    }

    #[test]
    fn a_chunk_that_would_cross_a_block_starts_the_next_one() {
        // Slot 10 + 24 rows passes 32; and after the image slot 52 + 16 passes 64.
        let plan = plan(42, &[(10, 30)]).expect("it fits");
        let expected = [(false, 16, 0, 10, 0), (true, 24, 10, 20, 32), (false, 16, 30, 12, 64)];
        assert_eq!(chunks(&plan), expected);
        assert_eq!(plan.padding, 22 + 12);
        assert_eq!(plan.held, Held { positions: 42, slots: 42 + 34 });
        assert_eq!(plan.chunks[2].position, 30);
        assert_eq!(plan.blocks, [0, 1, 2]);
    }

    #[test]
    fn without_alignment_slots_are_positions() {
        let sizes = Sizes { aligned: false, ..sizes() };
        let held = Held { positions: 20, slots: 20 };
        let plan =
            plan_request(&sizes, &Request { held, tokens: 3, images: Vec::new() }).expect("fits");
        assert_eq!(chunks(&plan), [(false, 16, 0, 3, 20)]);
        assert_eq!(plan.blocks, [0, 1]);
    }

    #[test]
    fn without_alignment_a_call_may_be_larger_than_a_block() {
        let sizes = Sizes { aligned: false, block: 4, ..sizes() };
        let request = Request { tokens: 18, ..Request::default() };
        let plan = plan_request(&sizes, &request).expect("fits");
        assert_eq!(chunks(&plan), [(false, 16, 0, 16, 0), (false, 16, 16, 2, 16)]);
        assert_eq!(plan.blocks, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn a_block_counts_once_though_later_calls_begin_before_it() {
        let sizes = Sizes { aligned: false, block: 8, ..sizes() };
        let request = Request { tokens: 20, images: vec![1..3, 4..12], ..Request::default() };
        let plan = plan_request(&sizes, &request).expect("fits");
        let slots: Vec<(u64, u64)> = plan.chunks.iter().map(|c| (c.slot, c.rows)).collect();
        assert_eq!(slots, [(0, 16), (1, 8), (3, 16), (4, 8), (12, 16)]);
        assert_eq!(plan.blocks, [0, 1, 2, 3]);
    }

    proptest::proptest! {
        #[test]
        fn every_token_runs_once_in_a_chunk_that_lies_in_one_block(
            gaps in proptest::collection::vec((1u64..20, 1u64..=24), 0..4),
            rest in 1u64..20,
            start in 0u64..30,
        ) {
            let sizes = Sizes { max_seq_len: 1024, ..sizes() };
            let (mut tokens, mut images) = (0, Vec::new());
            for (text, image) in gaps {
                images.push(tokens + text..tokens + text + image);
                tokens += text + image;
            }
            tokens += rest;
            let held = Held { positions: start, slots: start };
            let request = Request { held, tokens, images: images.clone() };
            let plan = plan_request(&sizes, &request).expect("it fits");
            let (mut next, mut free, mut blocks) = (0, start, Vec::new());
            for c in &plan.chunks {
                proptest::prop_assert_eq!((c.first, c.position), (next, start + next));
                proptest::prop_assert!(c.slot >= free && c.valid <= c.rows);
                proptest::prop_assert_eq!(c.slot / 32, (c.slot + c.rows - 1) / 32);
                // A chunk moves only when it has to.
                proptest::prop_assert!(c.slot == free || free % 32 + c.rows > 32);
                proptest::prop_assert_eq!(c.image, images.contains(&(c.first..c.first + c.valid)));
                (next, free) = (c.first + c.valid, c.slot + c.valid);
                blocks.push(c.slot / 32);
            }
            blocks.dedup();
            proptest::prop_assert_eq!(next, tokens);
            proptest::prop_assert_eq!(plan.blocks, blocks);
            proptest::prop_assert_eq!(plan.held, Held { positions: start + tokens, slots: free });
            proptest::prop_assert_eq!(plan.padding, free - start - tokens);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_both_numbers() {
        let text =
            |r: diag::Result<RequestPlan>| r.expect_err("a refusal").problems[0].message.clone();
        assert_eq!(
            text(plan(30, &[(2, 28)])),
            "an image of 26 tokens passes the largest image program of 24"
        );
        // The last chunk writes its padding rows too.
        assert!(plan(128, &[]).is_ok());
        assert_eq!(
            text(plan(130, &[])),
            "144 cache slots are needed, the longest sequence has 128"
        );
        assert_eq!(text(plan(0, &[])), "the request has no tokens");
        assert_eq!(
            text(plan(20, &[(4, 8), (6, 10)])),
            "image tokens 6 to 10 overlap others or pass the end of 20 tokens"
        );
    }
}
