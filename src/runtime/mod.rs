//! Runs compiled programs: the reference against which engines, encodings and partitions are measured.
//!
//! ```text
//! Programs + LocalWeights ─ Executor ─ Engine: prefill, decode, generate
//! ```
//!
//! [`Executor`] interprets [`Programs`](crate::graph::Programs) on N simulated devices in f32, one thread each, with
//! collectives in the order of ranks, so that a result depends on the programs, the weights and the processor's
//! instruction set, never on threads or timing.
//!
//! | file | what |
//! |---|---|
//! | `value` | tensors of a run |
//! | `weights`, `sources` | where weights come from, and what is kept decoded |
//! | `cache`, `attention` | keys and values of a device, and what reads them |
//! | `rope`, `rows`, `product` | the arithmetic of the other operations |
//! | `exchange` | collectives |
//! | `device`, `executor` | one device, all devices |
//! | `pool`, `images`, `engine` | the host: blocks and sequences, images, prompts and steps |
//! | `generate` | greedy text, and what a draft head adds |

mod attention;
mod cache;
mod device;
mod engine;
mod exchange;
mod executor;
mod generate;
mod images;
mod pool;
mod product;
mod rope;
mod rows;
mod sources;
mod value;
mod weights;

pub use engine::{Engine, Rows};
pub use executor::{Executor, Memory, Outcome, View};
pub use generate::{Drafted, Drafting, Proposal, Verify, greedy};
pub use images::Image;
pub use sources::{ArtifactWeights, Placed, SourceWeights, WholeWeights};
pub use value::Value;
pub use weights::LocalWeights;
