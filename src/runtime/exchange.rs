//! Where devices meet: sums and gathers in the order of ranks, whoever arrives first.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// What is made of the parts of all devices.
#[derive(Debug, Clone, Copy)]
pub(super) enum Joining {
    /// Elementwise sum.
    Sum,
    /// Rows of `width` side by side, of which the first `keep` columns stay.
    Gather { width: usize, keep: usize },
}

/// A meeting point of a fixed number of devices, used again for every collective of a run.
#[derive(Debug)]
pub(super) struct Exchange {
    devices: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    parts: Vec<Option<Arc<Vec<f32>>>>,
    arrived: usize,
    /// The joined value, and how many devices have yet to take it.
    joined: Option<(Arc<Vec<f32>>, usize)>,
    /// A device gave up: nobody may wait for it.
    broken: bool,
}

impl Exchange {
    pub(super) fn new(devices: usize) -> Exchange {
        let state = State { parts: vec![None; devices], ..State::default() };
        Exchange { devices, state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves nothing half done here.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the wait of every device.
    pub(super) fn give_up(&self) {
        self.lock().broken = true;
        self.changed.notify_all();
    }

    /// Joins this device's part with the others'; `None` when a device gave up.
    pub(super) fn join(
        &self,
        rank: usize,
        part: Arc<Vec<f32>>,
        joining: Joining,
    ) -> Option<Arc<Vec<f32>>> {
        let mut state = self.lock();
        // The value of the last meeting has to be taken by all first.
        while state.joined.is_some() && !state.broken {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        *state.parts.get_mut(rank)? = Some(part);
        state.arrived += 1;
        if state.arrived == self.devices {
            let parts: Vec<Arc<Vec<f32>>> =
                state.parts.iter_mut().filter_map(Option::take).collect();
            state.arrived = 0;
            state.joined = Some((Arc::new(joined(&parts, joining)), self.devices));
            self.changed.notify_all();
        }
        loop {
            if state.broken {
                return None;
            }
            if let Some((value, left)) = state.joined.as_mut() {
                let value = Arc::clone(value);
                *left -= 1;
                if *left == 0 {
                    state.joined = None;
                    self.changed.notify_all();
                }
                return Some(value);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn joined(parts: &[Arc<Vec<f32>>], joining: Joining) -> Vec<f32> {
    let Some((first, rest)) = parts.split_first() else { return Vec::new() };
    match joining {
        Joining::Sum => {
            let mut sum = first.to_vec();
            for part in rest {
                for (s, p) in sum.iter_mut().zip(part.iter()) {
                    *s += p;
                }
            }
            sum
        }
        Joining::Gather { width, keep } => {
            let rows = first.len().checked_div(width).unwrap_or(0);
            let mut out = Vec::with_capacity(rows * keep);
            for row in 0..rows {
                let all = parts.iter().flat_map(|p| p.iter().skip(row * width).take(width));
                out.extend(all.take(keep));
            }
            out
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_gathers_follow_ranks() {
        let exchange = Exchange::new(3);
        let results: Vec<(Vec<f32>, Vec<f32>)> = std::thread::scope(|scope| {
            let handles: Vec<_> = (0..3usize)
                .map(|rank| {
                    let exchange = &exchange;
                    scope.spawn(move || {
                        // 1e8 + 1 - 1e8 depends on the order.
                        let part = Arc::new(vec![[1e8, 1.0, -1e8][rank], rank as f32]);
                        let mut sum = Vec::new();
                        for _ in 0..50 {
                            let joined = exchange.join(rank, Arc::clone(&part), Joining::Sum);
                            sum = joined.expect("nobody gave up").to_vec();
                        }
                        let gather = Joining::Gather { width: 1, keep: 2 };
                        let gathered = exchange.join(rank, part, gather);
                        (sum, gathered.expect("nobody gave up").to_vec())
                    })
                })
                .collect();
            handles.into_iter().map(|h| h.join().expect("no panic")).collect()
        });
        for (sum, gathered) in results {
            assert_eq!(sum, [(1e8f32 + 1.0) - 1e8, 3.0]);
            assert_eq!(gathered, [1e8, 1.0, 0.0, 1.0]);
        }
    }

    #[test]
    fn a_device_that_gives_up_frees_the_others() {
        let exchange = Exchange::new(2);
        let waiting = std::thread::scope(|scope| {
            let other = scope.spawn(|| exchange.join(0, Arc::new(vec![1.0]), Joining::Sum));
            exchange.give_up();
            other.join().expect("no panic")
        });
        assert_eq!(waiting, None);
    }
}
