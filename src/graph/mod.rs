//! Compiles a model into static programs.
//!
//! [`compile`] lowers a [`ModelSpec`](crate::model::ModelSpec) for the sizes of a recipe ([`Sizes`]) over the shards of a partition ([`Shards`])
//! into [`Programs`]: prefill, image prefill, decode, draft, vision and projector, each a list of typed operations
//! ([`ir`]). [`verify`] checks them, [`arena`] places their intermediate values, [`Text`] prints them, [`plan_request`] says
//! which of them a prompt runs.
//!
//! What transformers does at run time with shapes, an engine with static shapes does with a few programs and a host
//! that picks among them; the inputs are those of optimum-rbln 0.11.2, by name and order.

mod build;
mod fuse;
mod infer;
pub mod ir;
mod lower;
mod memory;
mod prune;
mod request;
mod rope;
mod sizes;
pub mod stablehlo;
mod text;
mod verify;
pub mod wire;

pub use infer::Spread;
pub use ir::{
    KvId, KvLayout, KvPair, KvTensor, Node, Op, OwnRows, Port, Program, ProgramKind, Programs,
    Projection, ValueId, ValueType, WeightId, WeightRef, WeightShare,
};
pub use lower::{Shard, Shards, compile};
pub use memory::{ALIGN, Arena, arena};
pub use request::{Chunk, Held, Request, RequestPlan, plan_request};
pub use rope::frequencies;
pub use sizes::{Sized, Sizes, derive};
pub use stablehlo::{ArgumentKind, Module, ModuleArgument, module};
pub use text::Text;
pub use verify::verify;
pub use wire::{WireError, WireIndex, WireProgram, to_wire};
