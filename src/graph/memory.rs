//! Where intermediate values lie: each gets an offset in one arena per device, reused when the value is no longer read.

use super::ir::{Op, Program, ValueId};

/// Alignment of a value in the arena: a cache line pair, and what vector units of all targets load at once.
pub const ALIGN: u64 = 256;

/// The arena of one program, on each of its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arena {
    /// Its size in bytes.
    pub bytes: u64,
    /// Offset of every value, by [`ValueId`]; `None` for inputs, which the host owns, and values that nothing makes.
    pub offsets: Vec<Option<u64>>,
    /// Bytes of all inputs.
    pub input_bytes: u64,
    /// Most bytes that live at one time: no placement can need less.
    pub peak: u64,
}

/// A value's life: made at one node, read last at another.
struct Life {
    value: usize,
    bytes: u64,
    from: usize,
    to: usize,
}

impl Program {
    /// Bytes of a value on one device.
    pub fn value_bytes(&self, id: ValueId) -> Option<u64> {
        let v = self.value(id)?;
        let bits = v.shape.elements()?.checked_mul(u64::from(v.dtype.bits()))?;
        Some(bits.div_ceil(8))
    }
}

/// Places the values of a program: longest-lived big values first, each at the lowest free offset (first fit). A
/// reshape's result is its operand and takes no bytes of its own. `None` when sizes exceed 64 bits.
pub fn arena(program: &Program) -> Option<Arena> {
    let n = program.values.len();
    // A reshape's result stands for its operand, however long the chain.
    let mut root: Vec<usize> = (0..n).collect();
    for node in &program.nodes {
        if let (Op::Reshape, [from], [to]) = (&node.op, &node.inputs[..], &node.outputs[..]) {
            let base = *root.get(from.0 as usize)?;
            *root.get_mut(to.0 as usize)? = base;
        }
    }
    let mut born: Vec<Option<usize>> = vec![None; n];
    let mut last: Vec<usize> = vec![0; n];
    for (at, node) in program.nodes.iter().enumerate() {
        for id in &node.inputs {
            let base = *root.get(id.0 as usize)?;
            *last.get_mut(base)? = at;
        }
        if node.op != Op::Reshape {
            for id in &node.outputs {
                *born.get_mut(id.0 as usize)? = Some(at);
                *last.get_mut(id.0 as usize)? = at;
            }
        }
    }
    for port in &program.outputs {
        let base = *root.get(port.value.0 as usize)?;
        *last.get_mut(base)? = program.nodes.len();
    }
    let mut lives = Vec::new();
    for (value, from) in born.iter().enumerate() {
        if let Some(from) = *from {
            let bytes = program.value_bytes(ValueId(u32::try_from(value).ok()?))?;
            let bytes = bytes.checked_next_multiple_of(ALIGN)?.max(ALIGN);
            lives.push(Life { value, bytes, from, to: *last.get(value)? });
        }
    }
    let peak = peak(&lives, program.nodes.len())?;
    lives.sort_by_key(|l| (std::cmp::Reverse(l.bytes), l.from, l.value));
    let mut offsets = vec![None; n];
    let mut placed: Vec<(u64, u64, usize, usize)> = Vec::with_capacity(lives.len()); // offset, end, from, to
    let mut size = 0u64;
    for life in &lives {
        // `placed` is sorted by offset: the first gap between those that live at the same time is taken.
        let mut at = 0u64;
        for &(offset, end, from, to) in &placed {
            if from > life.to || life.from > to {
                continue;
            }
            if at.checked_add(life.bytes)? <= offset {
                break;
            }
            at = at.max(end);
        }
        let end = at.checked_add(life.bytes)?;
        size = size.max(end);
        let slot = placed.partition_point(|p| p.0 <= at);
        placed.insert(slot, (at, end, life.from, life.to));
        *offsets.get_mut(life.value)? = Some(at);
    }
    for value in 0..n {
        let base = *root.get(value)?;
        if base != value {
            let offset = *offsets.get(base)?;
            *offsets.get_mut(value)? = offset;
        }
    }
    let mut input_bytes = 0u64;
    for port in &program.inputs {
        input_bytes = input_bytes.checked_add(program.value_bytes(port.value)?)?;
    }
    Some(Arena { bytes: size, offsets, input_bytes, peak })
}

fn peak(lives: &[Life], nodes: usize) -> Option<u64> {
    let mut change = vec![0i128; nodes + 2];
    for life in lives {
        *change.get_mut(life.from)? += i128::from(life.bytes);
        *change.get_mut(life.to + 1)? -= i128::from(life.bytes);
    }
    let (mut now, mut most) = (0i128, 0i128);
    for c in change {
        now += c;
        most = most.max(now);
    }
    u64::try_from(most).ok()
}
