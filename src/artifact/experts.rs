//! The one ordering rule that a reader enforces on the directory: a layer's experts form one run of equal units.
//!
//! A run starts with expert 0; its rows define one to eight slots, numbered from 0. Experts follow 0, 1, 2, … with
//! the same slots in order, and expert x lies at expert 0 plus x times one stride, so that an engine finds expert x
//! by multiplication. As in radiance's reader, an expert's layer is read on its first row only, and the stride may
//! be zero or negative.

use std::collections::BTreeSet;

use super::layout::MAX_EXPERT_SLOTS;
use super::refusal::{Reason, Refused};
use super::wire::DirRow;

/// Checks all runs.
pub(super) fn check(rows: &[DirRow]) -> Result<(), Refused> {
    let mut seen = BTreeSet::new();
    let mut at = 0;
    while let Some(first) = rows.get(at) {
        if first.expert < 0 {
            at += 1;
            continue;
        }
        let layer = first.layer;
        let refuse = |row: usize, reason: Reason| {
            Err(Refused { field: format!("layer {layer} experts, entry[{row}]"), reason })
        };
        if !seen.insert(layer) {
            return refuse(at, Reason::SecondRun { layer });
        }
        let run = rows.get(at..).unwrap_or_default();
        let slots = run.iter().take_while(|r| (r.layer, r.expert) == (layer, 0)).count();
        let zero = run.get(..slots).unwrap_or_default();
        if !(1..=MAX_EXPERT_SLOTS).contains(&slots) {
            return refuse(at, Reason::ExpertSlots { layer, slots: slots as u64 });
        }
        if zero.iter().any(|r| r.offset < first.offset) {
            return refuse(at, Reason::SlotBeforeFirst { layer });
        }
        let mut stride = 0i128;
        let mut expert = 0u64;
        while let Some(head) = rows.get(at).filter(|r| r.layer == layer && r.expert >= 0) {
            let unit = rows.get(at..).unwrap_or_default();
            let unit = unit.get(..slots).unwrap_or(unit);
            if expert == 1 {
                stride = i128::from(head.offset) - i128::from(first.offset);
            }
            let ordered = unit.len() == slots
                && unit.iter().enumerate().all(|(s, r)| {
                    (i128::from(r.expert), i128::from(r.slot)) == (i128::from(expert), s as i128)
                });
            if !ordered {
                return refuse(at, Reason::ExpertOrder { layer, expert, last: slots as u64 - 1 });
            }
            let regular = unit.iter().zip(zero).all(|(r, z)| {
                i128::from(r.offset) == i128::from(z.offset) + i128::from(expert) * stride
                    && r.bytes == z.bytes
            });
            if !regular {
                return refuse(at, Reason::ExpertLayout { layer, expert, stride });
            }
            at += slots;
            expert += 1;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of `(layer, expert, slot, offset, bytes)`.
    fn verdict(rows: &[(i32, i32, i32, u64, u64)]) -> Option<Reason> {
        let row = |&(layer, expert, slot, offset, bytes)| DirRow {
            name: 0,
            quantizer: 0,
            options: 0,
            enc: 0,
            rank: 1,
            shape: [1, 0, 0, 0, 0, 0],
            layer,
            expert,
            slot,
            n_planes: 1,
            plane_first: 0,
            offset,
            bytes,
            reserved: [0; 2],
        };
        let rows: Vec<DirRow> = rows.iter().map(row).collect();
        check(&rows).err().map(|r| r.reason)
    }

    #[test]
    fn regular_runs_pass_wherever_other_entries_lie() {
        let run = [
            (0, 0, 0, 0, 5),
            (0, 0, 1, 8, 6),
            (0, 1, 0, 16, 5),
            (0, 1, 1, 24, 6),
            (0, -1, 0, 99, 1),
        ];
        assert_eq!(verdict(&run), None);
        assert_eq!(verdict(&[(3, 0, 0, 0, 5), (1, 0, 0, 9, 7)]), None, "one-expert layers");
        assert_eq!(
            verdict(&[(0, 0, 0, 9, 1), (0, 1, 0, 5, 1), (0, 2, 0, 1, 1)]),
            None,
            "negative stride"
        );
        assert_eq!(
            verdict(&[(-5, 0, 0, 9, 1), (-5, 1, 0, 9, 1)]),
            None,
            "zero stride, negative layer"
        );
    }

    #[test]
    fn a_later_slots_layer_is_not_read() {
        let run = [(0, 0, 0, 0, 5), (0, 0, 1, 8, 6), (0, 1, 0, 16, 5), (7, 1, 1, 24, 6)];
        assert_eq!(verdict(&run), None);
    }

    #[test]
    fn each_rule_of_a_run_is_checked() {
        assert_eq!(verdict(&[(2, 1, 0, 0, 1)]), Some(Reason::ExpertSlots { layer: 2, slots: 0 }));
        let nine: Vec<_> = (0..9).map(|s| (0, 0, s, s as u64, 1)).collect();
        assert_eq!(verdict(&nine), Some(Reason::ExpertSlots { layer: 0, slots: 9 }));
        assert_eq!(
            verdict(&[(0, 0, 0, 0, 1), (0, -1, 0, 1, 1), (0, 0, 0, 2, 1)]),
            Some(Reason::SecondRun { layer: 0 })
        );
        assert_eq!(
            verdict(&[(0, 0, 0, 8, 1), (0, 0, 1, 0, 1)]),
            Some(Reason::SlotBeforeFirst { layer: 0 })
        );
        assert_eq!(
            verdict(&[(0, 0, 0, 0, 1), (0, 2, 0, 1, 1)]),
            Some(Reason::ExpertOrder { layer: 0, expert: 1, last: 0 })
        );
        assert_eq!(
            verdict(&[(0, 0, 1, 0, 1)]),
            Some(Reason::ExpertOrder { layer: 0, expert: 0, last: 0 })
        );
        assert_eq!(
            verdict(&[(0, 0, 0, 0, 1), (0, 0, 1, 1, 1), (0, 1, 0, 2, 1)]),
            Some(Reason::ExpertOrder { layer: 0, expert: 1, last: 1 })
        );
        assert_eq!(
            verdict(&[(0, 0, 0, 0, 1), (0, 1, 0, 4, 1), (0, 2, 0, 9, 1)]),
            Some(Reason::ExpertLayout { layer: 0, expert: 2, stride: 4 })
        );
        assert_eq!(
            verdict(&[(0, 0, 0, 0, 1), (0, 1, 0, 4, 2)]),
            Some(Reason::ExpertLayout { layer: 0, expert: 1, stride: 4 })
        );
    }
}
