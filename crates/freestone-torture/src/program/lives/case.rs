//! The steps of a run of mode lives, drawn from a seed. The steps are plain values, and any subset is a valid
//! run.

use freestone_testkit::Rng;
use serde::{Deserialize, Serialize};

/// Number of threads that run verbs, and number of threads that run clients.
pub const VERB_THREADS: u8 = 3;
pub const CLIENTS: u8 = 4;
/// Maximum number of lives that end under load. A further life ends with the removal of all devices.
const LIVES_MAX: u64 = 6;
const VERBS_MAX: u64 = 40;
const VISITS_MAX: u64 = 8;
/// Base-2 logarithm of a bound: a life ends after fewer completions than the bound.
const AFTER_LOG_MAX: u64 = 11;
/// Upper limit of the time from a start to a kill, in microseconds: about as long as most starts take.
const KILLED_TWICE_MICROS: u64 = 150_000;

/// A step of a run. Steps of one thread run in order; the threads run concurrently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// Runs a random verb on one of the verb threads.
    Verb {
        by: u8,
        /// Seed of all random choices of the verb.
        seed: u64,
    },
    /// Connects a client to a device. The client sends random requests or reads the whole device.
    Visit {
        by: u8,
        /// Seed of all random choices of the client.
        seed: u64,
    },
    /// Reads all devices, before any verb or client of this life starts.
    Sweep,
    /// Kills the process that holds the memory of a recoverable server after this number of completions, and waits
    /// for the next one.
    KillHolder {
        /// Number of completed requests and verbs.
        after: u64,
    },
    /// Ends the life of a server after this number of completions, or earlier if all steps are done.
    End {
        /// Number of completed requests and verbs.
        after: u64,
        how: End,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    Killed,
    /// The program takes its own place (`freestone upgrade`), and is killed when it has started.
    Upgraded,
    /// SIGTERM: an orderly end.
    #[serde(rename = "Told")]
    Terminated,
    /// SIGKILL, and the next server is killed this number of microseconds after its start, even if it is not
    /// ready.
    KilledTwice {
        /// Time in microseconds from the start of the next server to its kill.
        micros: u64,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// Seed of the devices and their files.
    pub devices: u64,
    /// Devices in memory survive a kill of the server (`serve --recoverable`).
    pub recoverable: bool,
    pub ops: Vec<Op>,
}

impl Case {
    pub fn draw(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let devices = rng.word();
        let recoverable = rng.chance(50);
        let mut ops = Vec::new();
        let lives = 2 + rng.below(LIVES_MAX - 1);
        for _ in 0..lives {
            add_life(&mut ops, &mut rng);
            let most = 2 << rng.below(AFTER_LOG_MAX);
            let after = rng.below(most);
            if recoverable && rng.chance(20) {
                ops.push(Op::KillHolder { after: rng.below(after + 1) });
            }
            let how = match rng.below(10) {
                0..5 => End::Killed,
                5 => {
                    if recoverable {
                        End::Upgraded
                    } else {
                        End::Killed
                    }
                }
                6 => End::KilledTwice { micros: rng.below(KILLED_TWICE_MICROS) },
                _ => End::Terminated,
            };
            ops.push(Op::End { after, how });
        }
        add_life(&mut ops, &mut rng);
        Self { devices, recoverable, ops }
    }

    /// Returns for each life the steps, and the number of completions and the way in which it ends. The last
    /// life has no end.
    pub fn lives(&self) -> impl Iterator<Item = (&[Op], Option<(u64, End)>)> {
        let mut lives: Vec<_> = self.ops.split_inclusive(|op| matches!(op, Op::End { .. })).collect();
        if lives.last().is_none_or(|life| matches!(life.last(), Some(Op::End { .. }))) {
            lives.push(&[]);
        }
        lives.into_iter().map(|life| match life.split_last() {
            Some((Op::End { after, how }, ops)) => (ops, Some((*after, *how))),
            _ => (life, None),
        })
    }
}

fn add_life(ops: &mut Vec<Op>, rng: &mut Rng) {
    if rng.chance(50) {
        ops.push(Op::Sweep);
    }
    let count = 1 + rng.below(VERBS_MAX);
    for by in 0..VERB_THREADS {
        ops.extend((0..count).map(|_| Op::Verb { by, seed: rng.word() }));
    }
    let count = 1 + rng.below(VISITS_MAX);
    for by in 0..CLIENTS {
        ops.extend((0..count).map(|_| Op::Visit { by, seed: rng.word() }));
    }
}

#[cfg(test)]
mod tests {
    use super::{Case, Op};

    #[test]
    fn subset_of_run_is_a_run() {
        let case = Case::draw(7);
        assert_eq!(case, Case::draw(7));
        assert_ne!(case, Case::draw(8));
        let ends = case.ops.iter().filter(|op| matches!(op, Op::End { .. })).count();
        assert!(ends >= 2);
        assert_eq!(case.lives().count(), ends + 1);
        let all: usize = case.lives().map(|(ops, end)| ops.len() + usize::from(end.is_some())).sum();
        assert_eq!(all, case.ops.len());
        for ops in [Vec::new(), vec![case.ops[case.ops.len() - 1]]] {
            let short = Case { ops, ..case.clone() };
            let lives: Vec<_> = short.lives().collect();
            assert_eq!((lives.len(), lives[0].1), (1, None));
        }
        let text = serde_json::to_string(&case).unwrap();
        assert_eq!(serde_json::from_str::<Case>(&text).unwrap(), case);
    }
}
