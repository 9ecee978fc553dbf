//! Content that is there after the next start (`keep=yes`): saved in the directory of the state, and
//! restored from there.
//!
//! Devices that share memory are saved together, in a directory of their own; a device is known there
//! by its UUID. One thread saves what changed, when that is due, and merges the files; others load what
//! was restored, each of one directory, while it is used already. The end of the server stops them all,
//! and saves once more.

pub mod saver;
pub mod start;
mod unused;

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use freestone::keep::{Keep, KeepError};
use freestone::ram::{Family, Ram};
use freestone_spec::config::FileConfig;
use freestone_spec::kinds::registry::Registry;
use freestone_spec::kinds::{Entry, KindSpec};
use freestone_spec::refusal::Errno;
use freestone_spec::{size, times};
use serde_json::{Value, json};
use tracing::{error, warn};
use uuid::Uuid;

use crate::control::protocol::Fault;
use crate::records::Records;
use crate::standby::Standby;

/// The directory of all content, in that of the state.
const DIR: &str = "content";

/// When content is saved, beside the end of the server.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// So often, if something changed.
    pub every: Option<Duration>,
    /// When so many bytes changed, before they are compressed.
    pub after: Option<u64>,
    /// How long the end of the server waits for it.
    pub timeout: Duration,
}

impl Default for Plan {
    fn default() -> Self {
        Self { every: None, after: None, timeout: Duration::from_secs(300) }
    }
}

impl Plan {
    /// What a file says of that, as it is written.
    pub fn keys_of(file: &FileConfig) -> Vec<(&'static str, String)> {
        let every = file.save_every.map(|every| ("save_every", times::exact(every)));
        let after = file.save_after.map(|bytes| ("save_after", size::exact(bytes)));
        let timeout = file.save_timeout.map(|time| ("save_timeout", times::exact(time)));
        [every, after, timeout].into_iter().flatten().collect()
    }
}

/// The saves of a server; nothing where it has no state.
///
/// Lock order: `groups`, then `told` of one. Both are locked for a look or a change; the `keep` of a
/// group for as long as it is saved, with nothing else locked.
#[derive(Default)]
pub struct Saves {
    at: OnceLock<(PathBuf, Plan)>,
    groups: Mutex<Vec<Arc<Group>>>,
    /// What runs until the server ends.
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// The thread of the last save.
    last_save: Mutex<Option<Standby>>,
    stops: AtomicBool,
    /// That is also said here, to who sleeps.
    bell: (Mutex<()>, Condvar),
    /// Devices that had an older content when the server started than when the one before ended, and of
    /// when that was.
    behind: Mutex<HashMap<String, SystemTime>>,
    /// Devices whose base changed while no server ran, and the file that did.
    changed_bases: Mutex<HashMap<String, PathBuf>>,
    /// What the log was last told that comes again and again.
    complaint: Mutex<String>,
}

/// Devices that share memory.
struct Group {
    family: Family,
    /// Its directory.
    dir: PathBuf,
    keep: Mutex<Keep>,
    told: Mutex<Told>,
}

/// A device of a group, with its UUID.
type Member = (String, Arc<Entry>);

/// What is known of a group without waiting for a save.
#[derive(Debug, Clone, Default)]
struct Told {
    /// The last save.
    saved: Option<SystemTime>,
    /// The devices in it, by their UUIDs.
    members: HashSet<String>,
    file_bytes: u64,
    increments: usize,
    /// By UUID: bytes that a save which runs is about to make durable.
    under_way: HashMap<String, u64>,
    /// Why the last try came to nothing.
    failed: Option<String>,
    /// When it was tried last, or the group was seen first.
    tried: Option<Instant>,
    /// Pages that cannot be read: of what was restored, or of the last save that found more or wrote all.
    lost_pages: u64,
    /// What the next save needs, and what is free.
    needs: Option<(u64, u64)>,
    /// Of what was restored, how much is in memory.
    loading: Option<(u64, u64)>,
}

impl Told {
    fn under_way_of(&self, entry: &Entry) -> u64 {
        let uuid = entry.identity.uuid.simple().to_string();
        self.under_way.get(&uuid).copied().unwrap_or_default()
    }
}

impl Group {
    fn new(family: Family, dir: PathBuf, keep: Keep) -> Self {
        let told = Mutex::new(Told { tried: Some(Instant::now()), ..Told::default() });
        let group = Self { family, dir, keep: Mutex::new(keep), told };
        group.tell(&group.keep());
        group
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        // Nothing in here can be half done.
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self) -> MutexGuard<'_, Keep> {
        // A save that panicked has put nothing in its place.
        self.keep.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device that could not be made again, whose content is with that of the others: a save would go
    /// over it.
    fn missing(&self, records: &Records) -> Option<String> {
        let state = records.state()?;
        let told = self.told();
        let is_in =
            |name: &String| state.find(name).is_some_and(|device| told.members.contains(&device.uuid));
        records.all_missing().into_iter().map(|(name, _)| name).find(is_in)
    }

    /// What the directory holds is told from now on.
    fn tell(&self, keep: &Keep) {
        let mut told = self.told();
        if let Some(kept) = keep.contents() {
            (told.saved, told.file_bytes, told.increments) =
                (Some(kept.when), kept.file_bytes, kept.increments);
            told.members = kept.contents.devices.iter().map(|device| device.name.clone()).collect();
        }
    }
}

impl Saves {
    /// Content goes to the directory of the state from now on.
    pub fn begin(&self, state: &Path, plan: Plan) {
        // Once, before there are devices.
        let _ = self.at.set((state.join(DIR), plan));
    }

    /// The plan, as a file says it.
    pub fn keys(&self) -> Vec<(&'static str, String)> {
        let Some((_, plan)) = self.at.get() else { return Vec::new() };
        let file = FileConfig {
            save_every: plan.every,
            save_after: plan.after,
            save_timeout: Some(plan.timeout),
            ..FileConfig::default()
        };
        Plan::keys_of(&file)
    }

    /// How long the last save may take, where there is one.
    pub fn timeout(&self) -> Option<Duration> {
        self.at.get().map(|(_, plan)| plan.timeout)
    }

    fn groups(&self) -> MutexGuard<'_, Vec<Arc<Group>>> {
        // Nothing in here can be half done.
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs what goes wrong, and comes again and again.
    fn tell_once(&self, why: &str) {
        let mut last = self.complaint.lock().unwrap_or_else(PoisonError::into_inner);
        if *last != why {
            error!("{why}");
            why.clone_into(&mut last);
        }
    }

    fn behind(&self) -> MutexGuard<'_, HashMap<String, SystemTime>> {
        // Nothing in here can be half done.
        self.behind.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stops(&self) -> bool {
        self.stops.load(Ordering::SeqCst)
    }

    /// A directory for devices that share memory.
    fn add(&self, family: Family, dir: PathBuf, keep: Keep) -> Arc<Group> {
        let group = Arc::new(Group::new(family, dir, keep));
        self.groups().push(Arc::clone(&group));
        group
    }

    /// A new one, where there is none yet.
    fn make(&self, family: Family) -> Result<(), KeepError> {
        let Some((content, _)) = self.at.get() else { unreachable!("only where there is a state") };
        let dir = content.join(Uuid::new_v4().simple().to_string());
        let mut keep = Keep::open(&dir)?;
        // A save in a directory whose name is not durable is none.
        let parents = [Some(content.as_path()), content.parent()];
        for path in parents.into_iter().flatten() {
            let synced = File::open(path).and_then(|parent| parent.sync_all());
            synced.map_err(|source| {
                forget(&mut keep, &dir);
                KeepError::Directory { path: path.to_owned(), source }
            })?;
        }
        let group = Group::new(family, dir, keep);
        {
            let mut groups = self.groups();
            if !groups.iter().any(|other| other.family.is(&group.family)) {
                groups.push(Arc::new(group));
                return Ok(());
            }
        }
        // Somebody else has seen its device meanwhile. Of two directories the next start could take the
        // older one.
        forget(&mut group.keep(), &group.dir);
        Ok(())
    }

    fn group_of(&self, ram: &Ram) -> Option<Arc<Group>> {
        let family = ram.family();
        self.groups().iter().find(|group| group.family.is(&family)).cloned()
    }

    /// Of a device that is kept: its last save, in a way that people read and programs, too.
    pub fn saved(&self, entry: &Entry) -> Option<String> {
        let ram = entry.kind.ram().filter(|_| entry.spec.keep)?;
        Some(times::shown(self.group_of(ram)?.told().saved?))
    }

    /// Of when the content is, where it is older than what the server before had.
    pub fn behind_of(&self, name: &str) -> Option<String> {
        self.behind().get(name).copied().map(times::shown)
    }

    /// A device has the content of that moment, which is older than what it had.
    pub fn put_behind(&self, name: &str, when: SystemTime) {
        self.behind().insert(name.to_owned(), when);
    }

    /// The device has another content, or is gone.
    pub fn forget_behind(&self, name: &str) {
        self.behind().remove(name);
        self.changed_bases().remove(name);
    }

    fn changed_bases(&self) -> MutexGuard<'_, HashMap<String, PathBuf>> {
        // A panic cannot leave the map inconsistent, so poisoning is ignored.
        self.changed_bases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the file of the device's base that changed while no server ran.
    pub fn changed_base_of(&self, name: &str) -> Option<PathBuf> {
        self.changed_bases().get(name).cloned()
    }

    /// Notes that a file of the device's base changed while no server ran.
    pub fn put_changed_base(&self, name: &str, file: PathBuf) {
        self.changed_bases().insert(name.to_owned(), file);
    }

    /// All that is known of the saves of a device, for `stat`.
    pub fn stat(&self, entry: &Entry) -> Option<Value> {
        let ram = entry.kind.ram().filter(|_| entry.spec.keep)?;
        let told = self.group_of(ram).map(|group| group.told().clone()).unwrap_or_default();
        let mut stat = json!({
            "saved": told.saved.map(times::shown),
            "file_bytes": told.file_bytes,
            "increments": told.increments,
            "unsaved_bytes": unsaved_bytes(ram) + told.under_way_of(entry),
        });
        if told.lost_pages > 0 {
            stat["lost_pages"] = told.lost_pages.into();
        }
        if let Some((bytes, free)) = told.needs {
            stat["next_save_bytes"] = bytes.into();
            stat["free_bytes"] = free.into();
        }
        if let Some((done, all)) = told.loading {
            stat["loaded_percent"] = (done * 100).checked_div(all).unwrap_or(100).into();
        }
        if let Some(why) = told.failed {
            stat["failed"] = why.into();
        }
        Some(stat)
    }
}

/// Refuses a device whose content cannot be kept.
pub fn check(registry: &Registry, entry: &Entry) -> Result<(), Fault> {
    if !entry.spec.keep {
        return Ok(());
    }
    let name = entry.name();
    let refuse = |why: &str| Err(Fault::failed(Errno::EINVAL, format!("{name}: keep=yes: {why}")));
    if entry.kind.ram().is_none() {
        return refuse("copies of a file's snapshot in memory are not kept; cow=PATH keeps them");
    }
    let KindSpec::Fork(fork) = &entry.spec.kind else { return Ok(()) };
    match registry.find(&fork.base) {
        Some(base) if base.kind.ram().is_some() && !base.spec.keep => {
            refuse(&format!("its base {} is not kept; make that with keep=yes", base.name()))
        }
        _ => Ok(()),
    }
}

/// Bytes of a device that no save has, before they are compressed; of one that was never saved, all.
fn unsaved_bytes(ram: &Ram) -> u64 {
    ram.unsaved_bytes().unwrap_or_else(|| ram.mm_stat().orig_data_size)
}

/// What a device holds, if that is kept.
fn kept(entry: &Entry) -> Option<&Arc<Ram>> {
    entry.kind.ram().filter(|_| entry.spec.keep && entry.template.is_none())
}

/// A save by its moment, as a number that the state keeps: nanoseconds since 1970.
fn stamp(when: SystemTime) -> u64 {
    when.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// Removes a directory that no device needs any more, with the files of saves in it. Other files stay, and
/// the directory with them.
fn forget(keep: &mut Keep, path: &Path) {
    if let Err(why) = keep.forget() {
        return warn!("{}: is not needed any more, and stays: {why}", path.display());
    }
    if let Err(why) = fs::remove_dir(path) {
        warn!("{}: is not needed any more, and stays: {why}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use freestone::ram::Config;

    use super::*;

    #[test]
    fn two_who_see_a_new_device_at_once_make_one_directory() {
        let dir = tempfile::tempdir().unwrap();
        let saves = Saves::default();
        saves.begin(dir.path(), Plan::default());
        let (one, other) = (Family::new(Config::default()), Family::new(Config::default()));
        let families = [one.unwrap(), other.unwrap()];
        for family in [0, 1, 0, 1] {
            saves.make(families[family].clone()).unwrap();
        }
        assert_eq!(saves.groups().len(), 2);
        assert_eq!(fs::read_dir(dir.path().join(DIR)).unwrap().count(), 2);
    }
}
