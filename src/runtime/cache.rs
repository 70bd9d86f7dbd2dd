//! Keys and values of one device.

use super::value::{Value, fault};
use crate::diag::Result;
use crate::graph::{KvLayout, KvTensor};
use crate::tensor::DType;

/// One cache tensor of one device, in f32.
#[derive(Debug, Clone)]
pub(super) struct Cache {
    heads: usize,
    width: usize,
    dtype: DType,
    space: Space,
}

#[derive(Debug, Clone)]
enum Space {
    /// Blocks `[heads, tokens, width]`, empty until they are first written.
    Paged { tokens: usize, blocks: Vec<Vec<f32>> },
    /// Rings `[slots, heads, tokens, width]`.
    Window { tokens: usize, slots: usize, rings: Vec<f32> },
}

impl Cache {
    /// An empty cache with that many blocks, if it has blocks.
    pub(super) fn new(tensor: &KvTensor, blocks: usize) -> Result<Cache> {
        let size = |n: u64| usize::try_from(n).map_err(fault);
        let (heads, width) = (size(tensor.heads)?, size(tensor.head_dim)?);
        let space = match tensor.layout {
            KvLayout::Paged { block } => {
                let tokens = size(block)?;
                elements(&[heads, tokens, width], tensor)?;
                Space::Paged { tokens, blocks: vec![Vec::new(); blocks] }
            }
            KvLayout::Window { slots, tokens } => {
                let (slots, tokens) = (size(slots)?, size(tokens)?);
                let all = elements(&[slots, heads, tokens, width], tensor)?;
                let mut rings = Vec::new();
                rings.try_reserve_exact(all).map_err(|e| fault(format!("{}: {e}", tensor.name)))?;
                rings.resize(all, 0.0);
                Space::Window { tokens, slots, rings }
            }
        };
        Ok(Cache { heads, width, dtype: tensor.dtype, space })
    }

    /// Element type that the programs state.
    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Heads on this device.
    pub(super) fn heads(&self) -> usize {
        self.heads
    }

    /// Tokens of a block or of a ring.
    pub(super) fn tokens(&self) -> usize {
        match self.space {
            Space::Paged { tokens, .. } | Space::Window { tokens, .. } => tokens,
        }
    }

    /// Writes one row (all heads side by side) to a token of a block or ring.
    pub(super) fn write(&mut self, unit: i64, token: usize, row: &[f32]) -> Result<()> {
        let (heads, width) = (self.heads, self.width);
        let at = usize::try_from(unit).map_err(|_| outside(unit))?;
        let (data, tokens) = match &mut self.space {
            Space::Paged { tokens, blocks } => {
                let block = blocks.get_mut(at).ok_or_else(|| outside(unit))?;
                if block.is_empty() {
                    block.try_reserve_exact(heads * *tokens * width).map_err(fault)?;
                    block.resize(heads * *tokens * width, 0.0);
                }
                (&mut block[..], *tokens)
            }
            Space::Window { tokens, slots, rings } => {
                let size = heads * *tokens * width;
                if at >= *slots {
                    return Err(outside(unit));
                }
                (&mut rings[at * size..(at + 1) * size], *tokens)
            }
        };
        if token >= tokens || row.len() != heads * width {
            return Err(fault(format!("token {token} of {tokens} in a cache of {heads} heads")));
        }
        for (head, from) in row.chunks_exact(width).enumerate() {
            let to = (head * tokens + token) * width;
            data[to..to + width].copy_from_slice(from);
        }
        Ok(())
    }

    /// Appends one head's row of a token to `out`; zeros for a block that nothing was written to.
    pub(super) fn read(
        &self,
        unit: i64,
        token: usize,
        head: usize,
        out: &mut Vec<f32>,
    ) -> Result<()> {
        let (heads, width) = (self.heads, self.width);
        let at = usize::try_from(unit).map_err(|_| outside(unit))?;
        let (data, tokens) = match &self.space {
            Space::Paged { tokens, blocks } => {
                let block = blocks.get(at).ok_or_else(|| outside(unit))?;
                if block.is_empty() {
                    out.resize(out.len() + width, 0.0);
                    return Ok(());
                }
                (&block[..], *tokens)
            }
            Space::Window { tokens, slots, rings } => {
                let size = heads * tokens * width;
                if at >= *slots {
                    return Err(outside(unit));
                }
                (&rings[at * size..(at + 1) * size], *tokens)
            }
        };
        let from = (head * tokens + token) * width;
        let row = data.get(from..from + width).filter(|_| token < tokens && head < heads);
        out.extend_from_slice(row.ok_or_else(|| fault(format!("token {token} of {tokens}")))?);
        Ok(())
    }
}

fn elements(extents: &[usize], tensor: &KvTensor) -> Result<usize> {
    let all = extents.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
    all.ok_or_else(|| fault(format!("{} is too large", tensor.name)))
}

fn outside(unit: i64) -> crate::diag::Failure {
    fault(format!("the cache has no block or ring {unit}"))
}

/// The block tables of a call: the block that holds a slot of a sequence.
pub(super) struct Tables<'a> {
    entries: &'a [i64],
    each: usize,
    block: usize,
}

impl<'a> Tables<'a> {
    pub(super) fn new(table: &'a Value, batch: usize, block: usize) -> Result<Tables<'a>> {
        let entries = table.as_ints()?;
        Ok(Tables { entries, each: entries.len() / batch.max(1), block: block.max(1) })
    }

    /// (block, token in it) of a slot of sequence `b`.
    pub(super) fn find(&self, b: usize, slot: i64) -> Result<(i64, usize)> {
        let wrong =
            || fault(format!("slot {slot} lies outside of a table of {} blocks", self.each));
        let slot = usize::try_from(slot).map_err(|_| wrong())?;
        let entry = slot / self.block;
        if entry >= self.each {
            return Err(wrong());
        }
        let block = self.entries.get(b * self.each + entry).copied().ok_or_else(wrong)?;
        Ok((block, slot % self.block))
    }
}
