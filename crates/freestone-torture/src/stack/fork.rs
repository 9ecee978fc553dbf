//! Forks of what does not change: snapshots, files and images.
//!
//! Some stay, as nodes. Others are those of a template: one for each client, for as long as he
//! stays, several at once.

use freestone::device::{Blocking as _, Device, Error, Flags, Result as Answer};
use freestone::ram::{Family, ForkConfig, Ram, SetupError};
use freestone_testkit::Rng;

use super::look::read_all;
use super::{Act, Below, Bottom, Causes, DiskId, Kind, NodeId, World, Wrong, act, finish, pick, wrong};
use crate::oracle::{self, Fill, Kind as Write, Oracle, Outcome, SECTOR_BYTES};
use crate::rt::sync::Arc;
use crate::rt::thread::{self, JoinHandle};

/// What a client of a template does at most.
const STEPS_MAX: u64 = 24;
/// Clients at one time.
const CLIENTS_MAX: u8 = 3;
/// Sectors of one of their requests.
const SECTORS_MAX: u64 = 200;

/// What is forked.
struct Frozen {
    /// A snapshot that is forked within its family.
    snapshot: Option<Ram>,
    device: Arc<dyn Device>,
    /// Which family the forks are of.
    into: usize,
    family: Family,
    shown: Oracle,
    below: Below,
}

impl Frozen {
    fn fork(&self, config: &ForkConfig) -> Result<Ram, SetupError> {
        match &self.snapshot {
            Some(snapshot) => snapshot.fork(config),
            None => self.family.fork(Arc::clone(&self.device), config),
        }
    }
}

impl World {
    /// What can be forked.
    pub(super) fn forkable(&self) -> Vec<NodeId> {
        self.nodes_that(|node| match &node.kind {
            Kind::Ram(ram) => ram.ram.is_snapshot(),
            Kind::Base(_) => !self.families.is_empty(),
            _ => false,
        })
    }

    /// `family` is where forks of a snapshot go instead of its own, and those of a base.
    fn frozen(&self, id: NodeId, family: Option<u16>) -> Option<Frozen> {
        let node = self.nodes.get(&id)?;
        let shown = self.oracles.get(&node.oracle)?.clone();
        let all: Vec<usize> = (0..self.families.len()).collect();
        let into = family.and_then(|number| pick(&all, number));
        let (snapshot, into, bottom, file) = match &node.kind {
            Kind::Base(file) => (None, into.unwrap_or(0), Some(&node.device), Some(file)),
            Kind::Ram(ram) => {
                if let Some(other) = into.filter(|&other| other != ram.family) {
                    (None, other, Some(&node.device), None)
                } else {
                    let bottom = ram.below.as_ref().and_then(|below| below.device.as_ref());
                    (Some(ram.ram.clone()), ram.family, bottom, None)
                }
            }
            _ => return None,
        };
        let below = Below { shows: Arc::new(shown.clone()), device: bottom.cloned(), file: file.cloned() };
        let family = self.families.get(into)?.family.clone();
        Some(Frozen { snapshot, device: Arc::clone(&node.device), into, family, shown, below })
    }

    pub(super) fn fork(
        &mut self,
        id: NodeId,
        more_sectors: u32,
        cap_kib: u32,
        family: Option<u16>,
    ) -> Option<Act> {
        let frozen = self.frozen(id, family)?;
        let size = frozen.device.geometry().size + u64::from(more_sectors) * SECTOR_BYTES as u64;
        let cap = u64::from(cap_kib) << 10;
        let config = ForkConfig { size: Some(size), mem_limit: cap, mem_min: 0 };
        act(move || {
            let made = frozen.fork(&config);
            let Frozen { into, shown, below, .. } = frozen;
            finish(move |world| {
                world.count(match below.file {
                    Some(Bottom::File { .. }) => "forks of files",
                    Some(Bottom::Image(_)) => "forks of images",
                    None => "forks",
                });
                let made = match made {
                    Ok(made) => made,
                    Err(SetupError::TooDeep) => return Ok(()),
                    Err(error) => return wrong(format!("a fork could not be made: {error}")),
                };
                let fork = world.add_ram("fork", made, into, Some(shown), Some(below));
                world.inherit(fork, id);
                world.families[into].limited |= cap > 0;
                Ok(())
            })
        })
    }

    /// Forks as a template makes them: each is used by a client of its own, and goes with him.
    pub(super) fn template(
        &mut self,
        id: NodeId,
        clients: u8,
        seed: u64,
        family: Option<u16>,
    ) -> Option<Act> {
        let frozen = self.frozen(id, family)?;
        let clients = 1 + clients % CLIENTS_MAX;
        let mut disks = self.nodes[&id].disks.clone();
        disks.extend(self.families[frozen.into].backing);
        let before = self.causes(&disks);
        let first = self.writes + 1;
        self.writes += u64::from(clients) * STEPS_MAX;
        act(move || {
            let into = frozen.into;
            let ended: Vec<Ended> = {
                let frozen = Arc::new(frozen);
                let started = (0..u64::from(clients)).map(|number| {
                    let frozen = Arc::clone(&frozen);
                    thread::spawn(move || Client::run(&frozen, seed ^ number, first + number * STEPS_MAX))
                });
                let started: Vec<_> = started.collect();
                let ended = started.into_iter().map(JoinHandle::join);
                ended.map(|ended| ended.unwrap_or_else(|_| Err("a client panicked".into()))).collect()
            };
            finish(move |world| {
                world.count("templates");
                ended.into_iter().try_for_each(|ended| {
                    let Some((what, error)) = ended? else { return Ok(()) };
                    world.judge_client(id, &disks, into, before, &what, error)
                })
            })
        })
    }

    fn judge_client(
        &self,
        id: NodeId,
        disks: &std::collections::BTreeSet<DiskId>,
        into: usize,
        before: Causes,
        what: &str,
        error: Error,
    ) -> Result<(), Wrong> {
        let now = self.causes(disks);
        let is_caused = now.errors > before.errors || now.hung > 0;
        let has_cause = match error {
            Error::Media => is_caused,
            Error::NoSpace => is_caused || self.families[into].limited,
            _ => false,
        };
        if has_cause {
            return Ok(());
        }
        wrong(format!("a client of a template over {}: {what}: \"{error}\" without a cause", self.name(id)))
    }
}

/// What ended a client before his time, and the error.
type Ended = Result<Option<(String, Error)>, Wrong>;

impl From<&str> for Wrong {
    fn from(what: &str) -> Self {
        Self::Said(what.to_owned())
    }
}

/// Somebody who has a fork for himself.
struct Client {
    fork: Ram,
    oracle: Oracle,
    /// What the fork is rewound to.
    base: Arc<Oracle>,
    rng: Rng,
}

impl Client {
    fn run(frozen: &Frozen, seed: u64, first_write: u64) -> Ended {
        let mut rng = Rng::new(seed);
        let fork = match frozen.fork(&ForkConfig::default()) {
            Ok(fork) => fork,
            Err(SetupError::TooDeep) => return Ok(None),
            Err(error) => return wrong(format!("a template has no fork: {error}")),
        };
        let (mut oracle, base) = (frozen.shown.clone(), Arc::new(frozen.shown.clone()));
        oracle.rename("the fork of a template's client");
        oracle.grow(fork.geometry().size / SECTOR_BYTES as u64);
        let steps = rng.below(STEPS_MAX);
        let mut client = Self { fork, oracle, base, rng };
        for write in first_write..first_write + steps {
            if let Some(failed) = client.step(write)? {
                return Ok(Some(failed));
            }
        }
        client.look()
    }

    fn step(&mut self, number: u64) -> Ended {
        let sectors = self.oracle.size();
        let first = self.rng.below(sectors);
        let end = (first + 1 + self.rng.below(SECTORS_MAX)).min(sectors);
        let (offset, len) = (first * SECTOR_BYTES as u64, (end - first) * SECTOR_BYTES as u64);
        let (what, kind) = match self.rng.below(20) {
            0..10 => ("a write", Write::Write),
            10..12 => ("zeroes", Write::Zeroes),
            12..14 => ("a discard", Write::Discard { zeroing: false }),
            14 => return self.rewind(),
            15 => return self.look(),
            16 => return Ok(self.fork.flush().err().map(|error| ("a flush".into(), error))),
            _ => {
                let token = self.oracle.begin_read();
                let mut bytes = vec![0; len as usize];
                let answer = self.fork.read_at(offset, &mut bytes);
                return self.judge_read(token, offset, answer.map(|()| bytes));
            }
        };
        let fill = Fill::ALL[self.rng.below(Fill::ALL.len() as u64) as usize];
        let id = fill.id(number);
        let token = self.oracle.begin_write(id, first..end, kind);
        let answer = match kind {
            Write::Write => {
                let mut data = vec![0; len as usize];
                oracle::fill(id, first, &mut data);
                self.fork.write_at(offset, &data, Flags::empty())
            }
            Write::Zeroes => self.fork.write_zeroes(offset, len, Flags::MAY_FREE),
            Write::Discard { .. } => self.fork.discard(offset, len),
        };
        let outcome = if answer.is_ok() { Outcome::Done { fua: false } } else { Outcome::Failed };
        self.oracle.end(token, outcome);
        Ok(answer.err().map(|error| (format!("{what} of {len} bytes at {offset}"), error)))
    }

    /// The next one has the same fork, as if it were new.
    fn rewind(&mut self) -> Ended {
        let token = self.oracle.begin_turn(&self.base);
        let done = if self.rng.chance(50) { self.fork.rewind() } else { self.fork.reset() };
        self.oracle.turn_into(token, &self.base, false);
        if let Err(error) = done {
            return wrong(format!("the fork of a template's client was not rewound: {error}"));
        }
        self.look()
    }

    /// Reads all of it.
    fn look(&mut self) -> Ended {
        let token = self.oracle.begin_read();
        let bytes = read_all(&self.fork);
        self.judge_read(token, 0, bytes)
    }

    fn judge_read(&mut self, token: oracle::ReadToken, offset: u64, answer: Answer<Vec<u8>>) -> Ended {
        match answer {
            Ok(bytes) => {
                self.oracle.check_read(token, offset / SECTOR_BYTES as u64, &bytes)?;
                Ok(None)
            }
            Err(error) => {
                self.oracle.abandon(token);
                Ok(Some((format!("a read at {offset}"), error)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use freestone::ram::Config;

    use super::*;
    use crate::oracle::Durability;

    /// A base that shows other than what its oracle says is found by who forks it.
    #[test]
    fn a_client_sees_what_lies_below_him() {
        let family = Family::new(Config::default()).unwrap();
        let disk = family.ram(1 << 20).unwrap();
        let mut shown = Oracle::new("disk", (1 << 20) / SECTOR_BYTES as u64, Durability::Nothing);
        let id = Fill::Text.id(1);
        let mut data = vec![0; 8 * SECTOR_BYTES];
        oracle::fill(id, 8, &mut data);
        let write = shown.begin_write(id, 8..16, Write::Write);
        disk.write_at(8 * SECTOR_BYTES as u64, &data, Flags::empty()).unwrap();
        shown.end(write, Outcome::Done { fua: false });
        let snapshot = disk.snapshot().unwrap();
        let frozen = |shown: Oracle| Frozen {
            device: Arc::new(snapshot.clone()),
            snapshot: Some(snapshot.clone()),
            into: 0,
            family: family.clone(),
            below: Below { shows: Arc::new(shown.clone()), device: None, file: None },
            shown,
        };
        let good = frozen(shown.clone());
        for seed in 0..20 {
            assert_eq!(Client::run(&good, seed, 100), Ok(None));
        }
        let write = shown.begin_write(Fill::Text.id(2), 8..16, Write::Write);
        shown.end(write, Outcome::Done { fua: false });
        let found = Client::run(&frozen(shown), 1, 100);
        assert!(matches!(found, Err(Wrong::Content(_))), "{found:?}");
    }
}
