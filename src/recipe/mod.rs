//! Second stage: a recipe decides the encoding of every weight of a model.
//!
//! A recipe is a TOML text. Its rules are tried in order; the first whose selectors all match a weight decides it, and
//! a weight that no rule selects keeps its checkpoint bytes.
//!
//! ```toml
//! schema = 1
//! name = "mine"
//! [[quantize]]
//! match = "*.{q,k,v,o,gate,up,down}_proj.weight"   # checkpoint names: exact, a glob, or `re:` and a regex
//! # weight = "blk.*.ffn_down.weight"               # logical names, by patterns of the same kind
//! tower = "text"                                   # text | vision | audio | projector | draft
//! class = ["linear", "expert"]                     # linear | embedding | lm_head | norm | router | expert | other
//! encoding = "int8-g128"                           # a name, or a table that spells a grid out
//! ```
//!
//! A pattern matches a whole name. In a glob `*` is any run of characters, dots included, `?` one character, `{a,b}`
//! alternatives, `[0-9]` or `[!0-9]` a class, and `\` takes the next character as it is; `re:` starts a regular
//! expression, anchored at both ends.
//!
//! [`Recipe::parse`] reads it with every problem at once, each with its place and a way out; [`Recipe::resolve`] turns
//! it and a [`WeightTable`](crate::model::WeightTable) into an [`Assignment`]. The table form of encodings is described
//! in `encoding`, the rules of resolution in `resolve`.

mod assignment;
mod builtin;
mod document;
mod encoding;
mod idle;
mod import;
mod method;
mod misfit;
mod names;
mod pattern;
mod profile;
mod read;
mod resolve;
mod rounding;
mod rule;
mod schema;
mod settings;

pub use assignment::{Assigned, Assignment, Fate, RuleUse, Share, Tail, Use};
pub use builtin::{BUILTINS, Builtin, DEFAULT, builtin, list, load};
pub use document::{Recipe, SCHEMA};
pub use encoding::{EncodingChoice, NAMED, Named, find};
pub use import::{import, import_file};
pub use method::{Clamp, Codebook, Grid, Method, ScaleRule, SecondScale, group_columns};
pub use pattern::{Pattern, PatternKind};
pub use profile::{
    Allocator, Allowances, DeviceMemory, GraphDefaults, Limits, PROFILES, Profile, Supports,
};
pub use read::Place;
pub use rounding::{Clash, Rounding};
pub(crate) use rounding::{Scheme, Strategy};
pub use rule::{Activations, Quantizer, Rule, RulePlaces};
pub use schema::schema;
pub use settings::{Attention, Graphs, KvDtype, MemoryBudget, Target, Towers, Vision, parse_size};
