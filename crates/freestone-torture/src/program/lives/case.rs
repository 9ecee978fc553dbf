//! What a run of several lives consists of, drawn from a seed: plain values, so that any part of it
//! is a run, too.

use freestone_testkit::Rng;
use serde::{Deserialize, Serialize};

/// Threads of a life that ask for verbs, and such that are clients.
pub const HANDS: u8 = 3;
pub const CLIENTS: u8 = 4;
/// Most lives that end in the middle of everything; one more ends with all devices removed.
const LIVES_MAX: u64 = 6;
const VERBS_MAX: u64 = 40;
const VISITS_MAX: u64 = 8;
/// Powers of two of answers after which a server ends.
const AFTER_LOG_MAX: u64 = 11;

/// One step. Those of a thread come one after the other; threads run beside one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// A verb, by one of the threads that ask for them.
    Verb {
        /// Which of them.
        by: u8,
        /// Of all that it chooses.
        seed: u64,
    },
    /// A client connects to some device, and has random requests or reads all of it.
    Visit {
        /// Which of the clients' threads.
        by: u8,
        /// Of all that it chooses.
        seed: u64,
    },
    /// Everything is read before anything else happens.
    Sweep,
    /// The life ends, once so many requests and verbs were answered, or there is nothing else to do.
    End {
        /// Answers.
        after: u64,
        /// By which signal.
        how: End,
    },
}

/// How a server ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// `kill -9`.
    Killed,
    /// SIGTERM.
    Told,
    /// `kill -9`; and the next one so many microseconds after its start, ready or not.
    KilledTwice {
        /// After its start.
        micros: u64,
    },
}

/// A run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// Of the devices and files that are there in the beginning.
    pub devices: u64,
    /// What is done.
    pub ops: Vec<Op>,
}

impl Case {
    /// The run of a seed.
    pub fn draw(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let devices = rng.word();
        let mut ops = Vec::new();
        let lives = 2 + rng.below(LIVES_MAX - 1);
        for _ in 0..lives {
            life(&mut ops, &mut rng);
            let most = 2 << rng.below(AFTER_LOG_MAX);
            let after = rng.below(most);
            let how = match rng.below(10) {
                0..6 => End::Killed,
                6 => End::KilledTwice { micros: rng.below(60_000) },
                _ => End::Told,
            };
            ops.push(Op::End { after, how });
        }
        life(&mut ops, &mut rng);
        Self { devices, ops }
    }

    /// What is done in each life; only the last one has no end of its own.
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

fn life(ops: &mut Vec<Op>, rng: &mut Rng) {
    if rng.chance(50) {
        ops.push(Op::Sweep);
    }
    let count = 1 + rng.below(VERBS_MAX);
    for by in 0..HANDS {
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
    fn any_part_of_a_run_is_one() {
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
