//! Stage 1: open a source. The noun is [`Checkpoint`].
//!
//! | file | one noun each |
//! |---|---|
//! | `open` | [`Checkpoint`]: the order of the steps below |
//! | `reader` | the steps over a folder, collecting problems |
//! | `source` | what a user can name: paths, [`HubId`], [`HubEnvironment`] |
//! | `folder` | the folder's files; which symbolic links are followed; Git LFS pointers |
//! | `layout` | which files hold the weights, by names alone |
//! | `index` | the index of shards and its cross-check |
//! | `safetensors` | headers, read strictly |
//! | `shard` | one mapped weight file |
//! | `parts` | a weight assembled from tensors, read by rows |
//! | `json` | [`JsonFile`]: configs, read strictly |
//! | `quantized` | signs that the weights are quantized already |
//! | `gguf` | files of llama.cpp: headers, and the model that their metadata describe |
//! | `tokenizer` | token ids against the rows of the embedding |
//! | `side` | which other files go into the artifact |
//! | `digest` | sha256 of every file that the output depends on |
//! | `blob` | files of a hub cache against the digests that name them |
//! | `hub` | models on the hub (feature `hub`), the only network code; `hub/heads` fetches headers in place of weights, `hub/download` whole files, `hub/answer` says why something did not come |

mod blob;
mod digest;
mod folder;
pub mod gguf;
#[cfg(feature = "hub")]
mod hub;
mod index;
mod json;
mod layout;
mod open;
mod parts;
mod quantized;
mod reader;
pub mod safetensors;
mod shard;
mod side;
mod source;
mod tokenizer;

pub use digest::{FileDigest, Hashing, SourceFile};
pub use gguf::original_name as gguf_original_name;
pub use json::{JsonFile, MAX_CONFIG_BYTES};
pub use open::Checkpoint;
pub use quantized::{FACTOR_KEY, QuantizedWith};
pub use safetensors::dtype_name as safetensors_dtype;
pub use side::{LeftOut, MAX_SIDE_FILE_BYTES, SideFile};
pub use source::{
    Extent, HubEnvironment, HubId, HubIdentity, OnTransfer, OpenOptions, Transfer, is_hub_id,
};
pub use tokenizer::TokenizerReport;
