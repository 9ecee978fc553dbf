//! The steps of a run of several lives, drawn from a seed: plain values, so that any subset of them is
//! a run, too.

use freestone_testkit::Rng;
use serde::{Deserialize, Serialize};

/// Number of threads that run verbs, and of client threads.
pub const VERB_THREADS: u8 = 3;
pub const CLIENTS: u8 = 4;
/// Maximum number of lives that end under load; one more ends with all devices removed.
const LIVES_MAX: u64 = 6;
const VERBS_MAX: u64 = 40;
const VISITS_MAX: u64 = 8;
/// Logarithm of the largest number of completions after which a server ends.
const AFTER_LOG_MAX: u64 = 11;

/// A step. Steps of one thread run in order; threads run concurrently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// A verb, run by one of the verb threads.
    Verb {
        /// Thread.
        by: u8,
        /// Seed of all its choices.
        seed: u64,
    },
    /// A client connects to a device, and sends random requests or reads all of it.
    Visit {
        /// Thread.
        by: u8,
        /// Seed of all its choices.
        seed: u64,
    },
    /// Reads everything before anything else happens.
    Sweep,
    /// Ends the life when this many requests and verbs have completed, or nothing is left to do.
    End {
        /// Number of completions.
        after: u64,
        /// How the server ends.
        how: End,
    },
}

/// How a server ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// `kill -9`.
    Killed,
    /// SIGTERM.
    #[serde(rename = "Told")]
    Terminated,
    /// `kill -9`; the next server is killed this many microseconds after its start, ready or not.
    KilledTwice {
        /// Time after its start.
        micros: u64,
    },
}

/// A run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// Seed of the devices and files.
    pub devices: u64,
    /// The steps.
    pub ops: Vec<Op>,
}

impl Case {
    /// Draws the run of a seed.
    pub fn draw(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let devices = rng.word();
        let mut ops = Vec::new();
        let lives = 2 + rng.below(LIVES_MAX - 1);
        for _ in 0..lives {
            add_life(&mut ops, &mut rng);
            let most = 2 << rng.below(AFTER_LOG_MAX);
            let after = rng.below(most);
            let how = match rng.below(10) {
                0..6 => End::Killed,
                6 => End::KilledTwice { micros: rng.below(60_000) },
                _ => End::Terminated,
            };
            ops.push(Op::End { after, how });
        }
        add_life(&mut ops, &mut rng);
        Self { devices, ops }
    }

    /// Returns the steps of each life, and its end; the last life has none.
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
