//! Forks of read-only content: snapshots, files and images.
//!
//! Some forks are nodes. Others belong to clients of a template: one fork per client, as long as
//! the client is connected, several at once.

use freestone::device::{Blocking as _, Device, Error, Flags, Result as Answer};
use freestone::ram::{Family, ForkConfig, Ram, SetupError};
use freestone_testkit::Rng;

use super::queries::read_all;
use super::{
    BaseSource, Below, Causes, DiskId, Finding, Kind, NodeId, VerbTask, World, act, finding, finish, pick,
};
use crate::oracle::{self, Fill, Kind as Write, Oracle, Outcome, SECTOR_BYTES};
use crate::rt::sync::Arc;
use crate::rt::thread::{self, JoinHandle};

/// Maximum number of requests of one client of a template.
const STEPS_MAX: u64 = 24;
/// Maximum number of clients of a template.
const CLIENTS_MAX: u8 = 3;
/// Maximum number of sectors per request of a client.
const SECTORS_MAX: u64 = 200;

/// A read-only device to fork, and the family of its forks.
struct ForkBase {
    /// The snapshot to fork, if its forks belong to the same family (RAM disks that share a pool).
    snapshot: Option<Ram>,
    device: Arc<dyn Device>,
    /// Index of the family of the forks.
    into: usize,
    family: Family,
    shown: Oracle,
    below: Below,
}

impl ForkBase {
    fn fork(&self, config: &ForkConfig) -> Result<Ram, SetupError> {
        match &self.snapshot {
            Some(snapshot) => snapshot.fork(config),
            None => self.family.fork(Arc::clone(&self.device), config),
        }
    }
}

impl World {
    /// Returns the nodes that can be forked: snapshots of RAM disks and forks, files and images.
    pub(super) fn forkable(&self) -> Vec<NodeId> {
        self.nodes_that(|node| match &node.kind {
            Kind::Ram(ram) => ram.ram.is_snapshot(),
            Kind::Base(_) => !self.families.is_empty(),
            _ => false,
        })
    }

    /// Prepares forking a node. `family` defaults to the family of a snapshot, or to the first family for a
    /// file or image.
    fn fork_base(&self, id: NodeId, family: Option<u16>) -> Option<ForkBase> {
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
        Some(ForkBase { snapshot, device: Arc::clone(&node.device), into, family, shown, below })
    }

    pub(super) fn fork(
        &mut self,
        id: NodeId,
        more_sectors: u32,
        cap_kib: u32,
        family: Option<u16>,
    ) -> Option<VerbTask> {
        let fork_base = self.fork_base(id, family)?;
        let size = fork_base.device.geometry().size + u64::from(more_sectors) * SECTOR_BYTES as u64;
        let cap = u64::from(cap_kib) << 10;
        let config = ForkConfig { size: Some(size), mem_limit: cap, mem_min: 0 };
        act(move || {
            let made = fork_base.fork(&config);
            let ForkBase { into, shown, below, .. } = fork_base;
            finish(move |world| {
                world.count(match below.file {
                    Some(BaseSource::File { .. }) => "forks of files",
                    Some(BaseSource::Image(_)) => "forks of images",
                    None => "forks",
                });
                let made = match made {
                    Ok(made) => made,
                    Err(SetupError::TooDeep) => return Ok(()),
                    Err(error) => return finding(format!("a fork could not be made: {error}")),
                };
                let fork = world.add_ram("fork", made, into, Some(shown), Some(below));
                world.inherit(fork, id);
                world.families[into].limited |= cap > 0;
                Ok(())
            })
        })
    }

    /// Runs clients of a template, each with a fork that is dropped when the client ends.
    pub(super) fn template(
        &mut self,
        id: NodeId,
        clients: u8,
        seed: u64,
        family: Option<u16>,
    ) -> Option<VerbTask> {
        let fork_base = self.fork_base(id, family)?;
        let clients = 1 + clients % CLIENTS_MAX;
        let mut disks = self.nodes[&id].disks.clone();
        disks.extend(self.families[fork_base.into].backing);
        let before = self.causes(&disks);
        let first = self.writes + 1;
        self.writes += u64::from(clients) * STEPS_MAX;
        act(move || {
            let into = fork_base.into;
            let ended: Vec<ClientOutcome> = {
                let fork_base = Arc::new(fork_base);
                let started = (0..u64::from(clients)).map(|number| {
                    let fork_base = Arc::clone(&fork_base);
                    thread::spawn(move || Client::run(&fork_base, seed ^ number, first + number * STEPS_MAX))
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
    ) -> Result<(), Finding> {
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
        finding(format!("a client of a template over {}: {what}: \"{error}\" without a cause", self.name(id)))
    }
}

/// The outcome of a client: the description and error of the request that ended it early, or `None`.
type ClientOutcome = Result<Option<(String, Error)>, Finding>;

impl From<&str> for Finding {
    fn from(what: &str) -> Self {
        Self::Message(what.to_owned())
    }
}

/// A client of a template, with a fork of its own.
struct Client {
    fork: Ram,
    oracle: Oracle,
    /// The content to which a rewind returns the fork.
    base: Arc<Oracle>,
    rng: Rng,
}

impl Client {
    fn run(fork_base: &ForkBase, seed: u64, first_write: u64) -> ClientOutcome {
        let mut rng = Rng::new(seed);
        let fork = match fork_base.fork(&ForkConfig::default()) {
            Ok(fork) => fork,
            Err(SetupError::TooDeep) => return Ok(None),
            Err(error) => return finding(format!("a template has no fork: {error}")),
        };
        let (mut oracle, base) = (fork_base.shown.clone(), Arc::new(fork_base.shown.clone()));
        oracle.rename("the fork of a template's client");
        oracle.grow(fork.geometry().size / SECTOR_BYTES as u64);
        let steps = rng.below(STEPS_MAX);
        let mut client = Self { fork, oracle, base, rng };
        for write in first_write..first_write + steps {
            if let Some(failed) = client.step(write)? {
                return Ok(Some(failed));
            }
        }
        client.check_all()
    }

    fn step(&mut self, number: u64) -> ClientOutcome {
        let sectors = self.oracle.size();
        let first = self.rng.below(sectors);
        let end = (first + 1 + self.rng.below(SECTORS_MAX)).min(sectors);
        let (offset, len) = (first * SECTOR_BYTES as u64, (end - first) * SECTOR_BYTES as u64);
        let (what, kind) = match self.rng.below(20) {
            0..10 => ("a write", Write::Write),
            10..12 => ("zeroes", Write::Zeroes),
            12..14 => ("a discard", Write::Discard { zeroing: false }),
            14 => return self.rewind(),
            15 => return self.check_all(),
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

    /// Rewinds the fork, as before the next client uses it.
    fn rewind(&mut self) -> ClientOutcome {
        let token = self.oracle.begin_replacement(&self.base);
        let done = if self.rng.chance(50) { self.fork.rewind() } else { self.fork.reset() };
        self.oracle.replace_content(token, &self.base, false);
        if let Err(error) = done {
            return finding(format!("the fork of a template's client was not rewound: {error}"));
        }
        self.check_all()
    }

    /// Reads all of the fork and judges the bytes.
    fn check_all(&mut self) -> ClientOutcome {
        let token = self.oracle.begin_read();
        let bytes = read_all(&self.fork);
        self.judge_read(token, 0, bytes)
    }

    fn judge_read(
        &mut self,
        token: oracle::ReadToken,
        offset: u64,
        answer: Answer<Vec<u8>>,
    ) -> ClientOutcome {
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

    /// A client detects a base whose content differs from its oracle.
    #[test]
    fn template_client_detects_wrong_base() {
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
        let fork_base = |shown: Oracle| ForkBase {
            device: Arc::new(snapshot.clone()),
            snapshot: Some(snapshot.clone()),
            into: 0,
            family: family.clone(),
            below: Below { shows: Arc::new(shown.clone()), device: None, file: None },
            shown,
        };
        let good = fork_base(shown.clone());
        for seed in 0..20 {
            assert_eq!(Client::run(&good, seed, 100), Ok(None));
        }
        let write = shown.begin_write(Fill::Text.id(2), 8..16, Write::Write);
        shown.end(write, Outcome::Done { fua: false });
        let found = Client::run(&fork_base(shown), 1, 100);
        assert!(matches!(found, Err(Finding::Content(_))), "{found:?}");
    }
}
