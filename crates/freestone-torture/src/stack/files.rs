//! Files as devices, and as bases of forks. Deltas of forks are saved as qcow2 overlays, which are
//! bases again.

use std::path::Path;

use freestone::device::{Blocking as _, Device, Error};
use freestone::file::{self, File};
use freestone::qcow2::delta::{self, DeltaError};
use freestone::qcow2::{self, Format, Image};
use freestone::ram::{Family, ForkConfig, Ram, SetupError};
use freestone_testkit::Rng;

use super::queries::read_all;
use super::{BaseSource, Kind, NODES_MAX, NodeId, VerbTask, World, act, finding, finish};
use crate::oracle::{self, Durability, Fill, Kind as Write, Oracle, Outcome, SECTOR_BYTES};
use crate::rt::sync::Arc;

/// Maximum number of writes that make up the content of a base.
const WRITES_MAX: u64 = 24;

impl World {
    /// Creates a file of zeroes and opens it as a device.
    pub(super) fn make_file(&mut self, kib: u32) -> Option<VerbTask> {
        let size = (u64::from(kib) << 10).max(4096);
        let path = self.new_path("file")?;
        act(move || {
            let made = File::open(&file::Config { size: Some(size), ..file::Config::new(&path) });
            finish(move |world| match made {
                Ok(file) => {
                    let oracle = world.new_oracle("file", size, Durability::Nothing);
                    let oracle = world.add_oracle(oracle);
                    let (injector, device) = world.with_cuts(Arc::new(file), path);
                    let id = world.add("file", Kind::File(injector), device, oracle, Vec::new());
                    world.add_cause(id, Some(injector));
                    world.rename(id);
                    Ok(())
                }
                Err(error) => finding(format!("a file could not be opened: {error}")),
            })
        })
    }

    /// Creates a read-only file with content, as a base of forks. With `faults`, a fault layer
    /// above can make its reads fail.
    pub(super) fn make_base(&mut self, kib: u32, seed: u64, faults: bool) -> Option<VerbTask> {
        let size = (u64::from(kib) << 10).max(4096);
        let path = self.new_path("base")?;
        let (bytes, shows) = self.content_of_base(size, seed);
        act(move || {
            let config = file::Config { read_only: true, ..file::Config::new(&path) };
            let written = std::fs::write(&path, &bytes).map_err(|error| error.to_string());
            let opened = written.and_then(|()| File::open(&config).map_err(|error| error.to_string()));
            finish(move |world| {
                let device: Arc<dyn Device> = match opened {
                    Ok(file) => Arc::new(file),
                    Err(error) => return finding(format!("a base could not be opened: {error}")),
                };
                let (injector, device) = if faults {
                    match world.with_faults(device, seed) {
                        Ok((injector, device)) => (Some(injector), device),
                        Err(error) => {
                            return finding(format!(
                                "the fault layer of a base could not be created: {error}"
                            ));
                        }
                    }
                } else {
                    (None, device)
                };
                let id =
                    world.add_base("base", device, shows, BaseSource::File { path, format: Format::Raw });
                world.add_cause(id, injector);
                Ok(())
            })
        })
    }

    /// Generates the content of a base: some writes at random addresses. Returns the bytes and
    /// their oracle.
    pub(super) fn content_of_base(&mut self, size: u64, seed: u64) -> (Vec<u8>, Oracle) {
        let mut shows = self.new_oracle("base", size, Durability::Nothing);
        let mut bytes = vec![0; size as usize];
        let mut rng = Rng::new(seed);
        for _ in 0..rng.below(WRITES_MAX) {
            let fill = Fill::ALL[rng.below(Fill::ALL.len() as u64) as usize];
            let id = fill.id(self.next_write());
            let first = rng.below(shows.size());
            let end = (first + 1 + rng.below(300)).min(shows.size());
            let write = shows.begin_write(id, first..end, Write::Write);
            shows.end(write, Outcome::Done { fua: false });
            oracle::fill(id, first, &mut bytes[first as usize * SECTOR_BYTES..end as usize * SECTOR_BYTES]);
        }
        (bytes, shows)
    }

    pub(super) fn add_base(
        &mut self,
        name: &str,
        device: Arc<dyn Device>,
        shows: Oracle,
        file: BaseSource,
    ) -> NodeId {
        let oracle = self.add_oracle(shows);
        let id = self.add(name, Kind::Base(file), device, oracle, Vec::new());
        self.rename(id);
        id
    }

    /// Returns the snapshots of forks of files, whose changes can be saved as an overlay.
    pub(super) fn overlays(&self) -> Vec<NodeId> {
        self.nodes_that(|node| match &node.kind {
            Kind::Ram(ram) => {
                let file = ram.below.as_ref().and_then(|below| below.file.as_ref());
                ram.ram.is_snapshot() && matches!(file, Some(BaseSource::File { .. }))
            }
            _ => false,
        })
    }

    /// Saves the changes of a snapshot as a qcow2 overlay, which becomes a new base. If `as_fork`
    /// is set, also applies the overlay to a new fork of the old base.
    pub(super) fn save_delta(&mut self, id: NodeId, as_fork: bool) -> Option<VerbTask> {
        let node = &self.nodes[&id];
        let Kind::Ram(ram) = &node.kind else { return None };
        let (into, below) = (ram.family, ram.below.clone()?);
        let BaseSource::File { path: base, format } = below.file.clone()? else { return None };
        let device = below.device.clone()?;
        let (oracle, before) = (node.oracle, self.before(node));
        let over_base = ram.ram.over_base().ok()?;
        let family = self.families[into].family.clone();
        let as_fork = as_fork && self.nodes.len() + 1 < NODES_MAX;
        let path = self.new_path("delta")?;
        let token = self.oracles.get_mut(&oracle)?.begin_read();
        act(move || {
            let size = over_base.geometry().size;
            let saved = delta::save(&over_base, &base, format, &path, &mut |_, _| {});
            drop(over_base);
            let opened = saved.and_then(|_| {
                let image = Image::open(&qcow2::Config::new(&path))?;
                // The image opens the files themselves, below the fault layers, so no injected
                // fault affects this read.
                let bytes = read_all(&image);
                Ok((image, bytes))
            });
            let applied = (as_fork && opened.is_ok()).then(|| apply(&family, device, size, &path, &base));
            drop(family);
            finish(move |world| {
                world.count("deltas");
                let (image, bytes) = match opened {
                    Ok((image, Ok(bytes))) => (image, bytes),
                    Ok((_, Err(error))) => return finding(format!("a delta cannot be read: {error}")),
                    Err(error) => {
                        world.abandon(oracle, token);
                        return match error {
                            DeltaError::Read { error, .. } => world.judge_query(id, error, before),
                            error => finding(format!("a delta could not be saved: {error}")),
                        };
                    }
                };
                let Some(shown) = world.oracles.get_mut(&oracle) else { return Ok(()) };
                let mut shown = shown.snapshot_since(token, "delta", Durability::Nothing);
                let read = shown.begin_read();
                shown.check_read(read, 0, &bytes)?;
                world.add_base(
                    "delta",
                    Arc::new(image),
                    shown.clone(),
                    BaseSource::File { path, format: Format::Qcow2 },
                );
                match applied {
                    None => Ok(()),
                    Some(Ok(fork)) => {
                        world.count("deltas that were applied");
                        let fork = world.add_ram("fork with a delta", fork, into, Some(shown), Some(below));
                        world.inherit(fork, id);
                        Ok(())
                    }
                    Some(Err(DeltaError::Apply { error: Error::NoSpace, .. }))
                        if world.families[into].limited =>
                    {
                        Ok(())
                    }
                    Some(Err(DeltaError::Apply { error, .. })) => world.judge_query(id, error, before),
                    Some(Err(error)) => finding(format!("a delta could not be applied: {error}")),
                }
            })
        })
    }
}

/// Creates a fork of `device` and applies the delta in `path` to it.
fn apply(
    family: &Family,
    device: Arc<dyn Device>,
    size: u64,
    path: &Path,
    base: &Path,
) -> Result<Ram, DeltaError> {
    let config = ForkConfig { size: Some(size), mem_limit: 0, mem_min: 0 };
    let fork = family
        .fork(device, &config)
        .map_err(|error: SetupError| DeltaError::Base { path: base.to_owned(), reason: error.to_string() })?;
    delta::apply(path, &fork, Some(base), &mut |_, _| {})?;
    fork.flush().map_err(|error| DeltaError::Apply { at: size, error })?;
    Ok(fork)
}
