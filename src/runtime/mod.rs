//! Runs compiled programs: the reference against which engines, encodings and partitions are measured.
//!
//! ```text
//! Programs + LocalWeights ─ Executor ─ Engine: prefill, decode, generate
//! ```
//!
//! [`Executor`] interprets [`Programs`](crate::graph::Programs) on N simulated devices, one thread each, in f32 or
//! with the roundings that programs state ([`Precision`]), with
//! collectives in the order of ranks, so that a result depends on the programs, the weights and the processor's
//! instruction set, never on threads or timing.
//!
//! | file | what |
//! |---|---|
//! | `value` | tensors of a run |
//! | `weights`, `sources` | where weights come from, and what is kept decoded |
//! | `stored` | what a file holds for a run: programs, sizes, weights in pieces |
//! | `cache`, `attention` | keys and values of a device, and what reads them |
//! | `rope`, `rows`, `product` | the arithmetic of the other operations |
//! | `accepted` | what of a `tokenizer.json` is not handed on |
//! | `activations` | the roundings of a target's arithmetic |
//! | `exchange` | collectives |
//! | `device`, `executor` | one device, all devices |
//! | `text` | the tokenizer and the chat template that a file carries |
//! | `pixels`, `images` | pictures: decoded, resized, cut into patches, encoded |
//! | `pool`, `engine` | the host: blocks and sequences, prompts and steps |
//! | `generate` | greedy text, and what a draft head adds |
//! | `deep` | every program of a file once: finite values, and those of programs compiled anew |
//! | `divergence` | a corpus under two engines: Kullback-Leibler divergence, agreement, perplexity |

mod accepted;
mod activations;
mod attention;
mod cache;
mod deep;
mod device;
mod divergence;
mod engine;
mod exchange;
mod executor;
mod generate;
mod images;
mod pixels;
mod pool;
mod processor;
mod product;
mod rope;
mod rows;
mod sources;
mod stored;
mod text;
mod value;
mod weights;

pub use activations::Precision;
pub use deep::{BOUND, Compared, Proof, prove};
pub use divergence::{Document, Evaluation, Score, Window, evaluate, read_corpus, windows};
pub use engine::{Engine, Rows};
pub use executor::{Executor, Memory, Outcome, View};
pub use generate::{Drafted, Drafting, Proposal, Verify, greedy};
pub use images::{Encoder, Image, image_tokens, place_images};
pub use pixels::{MAX_FILE, Picture, target_size};
pub use sources::{ArtifactWeights, Placed, SourceWeights, WholeWeights};
pub use stored::{Opened, ProgramsError, StoredWeights, open, read_programs, side_file, sizes};
pub use text::{Chat, Tokenizer, Writing, chosen_template, stop_tokens};
pub use value::Value;
pub use weights::LocalWeights;
