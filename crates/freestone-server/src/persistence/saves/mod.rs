//! Content that survives a restart of the server (`keep=yes`): saved in the state directory, and restored
//! from there.
//!
//! Each family (RAM disks and forks that share one pool) has a directory of its own, in which devices are identified by
//! UUID. One thread saves changes when a save is due, and merges the files. For each restored directory another thread
//! loads the content into memory while the devices are already in use. Server shutdown stops all these threads, and
//! saves once more.

pub mod saver;
pub mod start;
mod unused;

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use freestone::keep::{Keep, KeepError};
use freestone::ram::{Family, Ram};
use freestone_core::sync::{Condvar, Mutex};
use freestone_core::work_queue::OwnedQueue;
use freestone_spec::kinds::Entry;
use freestone_spec::{size, times};
use serde_json::{Value, json};
use tracing::{error, warn};
use uuid::Uuid;

use crate::config::FileConfig;
use crate::persistence::records::Records;

/// Name of the directory in the state directory that contains all saved content.
const DIR: &str = "content";

/// Schedule of saves, in addition to the save at server shutdown.
#[derive(Debug, Clone, Copy)]
pub struct SaveSchedule {
    /// Interval of saves, which are omitted if nothing changed. `None` disables saves by time.
    pub every: Option<Duration>,
    /// Number of changed bytes, before compression, after which a save is due. `None` disables saves by size.
    pub after: Option<u64>,
    /// Longest time that server shutdown waits for the last save.
    pub timeout: Duration,
}

impl Default for SaveSchedule {
    fn default() -> Self {
        Self { every: None, after: None, timeout: Duration::from_secs(300) }
    }
}

impl SaveSchedule {
    /// Returns the keys of the schedule that a configuration file contains, with their values as text.
    pub fn keys_of(file: &FileConfig) -> Vec<(&'static str, String)> {
        let every = file.save_every.map(|every| ("save_every", times::exact(every)));
        let after = file.save_after.map(|bytes| ("save_after", size::exact(bytes)));
        let timeout = file.save_timeout.map(|time| ("save_timeout", times::exact(time)));
        [every, after, timeout].into_iter().flatten().collect()
    }
}

/// The saves of a server. Does nothing without a state directory.
///
/// Lock order: `groups`, then `status` of a group. Both are held only while they are read or changed. `keep`
/// of a group is held during a save, and is locked first: while no other lock is held.
#[derive(Default)]
pub struct Saves {
    at: OnceLock<(PathBuf, SaveSchedule)>,
    groups: Mutex<Vec<Arc<Group>>>,
    /// Threads that run until server shutdown, which joins them.
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Thread for the last save, started in advance.
    last_save: Mutex<Option<OwnedQueue>>,
    /// True once the server shuts down: all threads of the saves must end.
    stops: AtomicBool,
    /// Condition variable that wakes the saving thread when `stops` is set.
    bell: (Mutex<()>, Condvar),
    /// Devices that were restored with content older than they had when the previous server ended, with the time of
    /// that content.
    stale: Mutex<HashMap<String, SystemTime>>,
    /// Devices whose base changed while no server ran, with the path of the changed file.
    changed_bases: Mutex<HashMap<String, PathBuf>>,
    /// Last error that [`log_once`](Self::log_once) has logged.
    last_error: Mutex<String>,
}

/// The saved devices of one family (RAM disks and forks that share one pool).
struct Group {
    family: Family,
    /// Directory with the save files of the group.
    dir: PathBuf,
    keep: Mutex<Keep>,
    status: Mutex<GroupStatus>,
}

/// UUID and entry of a device of a group.
type Member = (String, Arc<Entry>);

/// Status of a group, which can be read without waiting for a running save.
#[derive(Debug, Clone, Default)]
struct GroupStatus {
    /// Time of the last save, or `None` if the group was never saved.
    saved: Option<SystemTime>,
    /// UUIDs of the devices in the last save.
    members: HashSet<String>,
    /// Total size of the save files, in bytes.
    file_bytes: u64,
    /// Number of incremental save files, each with only the changes since the save before.
    increments: usize,
    /// Number of bytes that a running save will make durable, by UUID of the device.
    under_way: HashMap<String, u64>,
    /// Reason why the last attempt to save failed, or `None` if it succeeded.
    failed: Option<String>,
    /// Time of the last attempt to save, or of the group's creation.
    tried: Option<Instant>,
    /// Number of unreadable pages. Set by restoring; a save raises the number to its own count, and a save that writes
    /// the whole content replaces it.
    lost_pages: u64,
    /// Estimate of the bytes that the next save needs, and the free bytes. `None` before the first estimate.
    needs: Option<(u64, u64)>,
    /// Progress of loading restored content, in blocks of about 1 MiB: loaded and total. `None` if all content is in
    /// memory.
    loading: Option<(u64, u64)>,
}

impl GroupStatus {
    fn under_way_of(&self, entry: &Entry) -> u64 {
        let uuid = entry.identity.uuid.simple().to_string();
        self.under_way.get(&uuid).copied().unwrap_or_default()
    }
}

impl Group {
    fn new(family: Family, dir: PathBuf, keep: Keep) -> Self {
        let status = Mutex::new(GroupStatus { tried: Some(Instant::now()), ..GroupStatus::default() });
        let group = Self { family, dir, keep: Mutex::new(keep), status };
        group.record_contents(&group.keep.lock());
        group
    }

    /// Returns a device whose content is in the last save, but which could not be created at the start. A save
    /// of the group would overwrite its content.
    fn missing(&self, records: &Records) -> Option<String> {
        let state = records.state()?;
        let status = self.status.lock();
        let is_in =
            |name: &String| state.find(name).is_some_and(|device| status.members.contains(&device.uuid));
        records.all_missing().into_iter().map(|(name, _)| name).find(is_in)
    }

    /// Copies time, size and devices of the last save into the status.
    fn record_contents(&self, keep: &Keep) {
        let mut status = self.status.lock();
        if let Some(kept) = keep.contents() {
            (status.saved, status.file_bytes, status.increments) =
                (Some(kept.saved_at), kept.file_bytes, kept.increments);
            status.members = kept.contents.devices.iter().map(|device| device.name.clone()).collect();
        }
    }
}

impl Saves {
    /// Sets the state directory and the schedule of saves. Called once, before devices exist.
    pub fn begin(&self, state: &Path, plan: SaveSchedule) {
        let _ = self.at.set((state.join(DIR), plan));
    }

    /// Returns the schedule as keys of a configuration file, or no keys without a state directory.
    pub fn keys(&self) -> Vec<(&'static str, String)> {
        let Some((_, plan)) = self.at.get() else { return Vec::new() };
        let file = FileConfig {
            save_every: plan.every,
            save_after: plan.after,
            save_timeout: Some(plan.timeout),
            ..FileConfig::default()
        };
        SaveSchedule::keys_of(&file)
    }

    /// Returns the longest time for the last save, or `None` without a state directory.
    pub fn timeout(&self) -> Option<Duration> {
        self.at.get().map(|(_, plan)| plan.timeout)
    }

    /// Logs an error that repeats, unless it is the same as the last one.
    fn log_once(&self, why: &str) {
        let mut last = self.last_error.lock();
        if *last != why {
            error!("{why}");
            why.clone_into(&mut last);
        }
    }

    fn stops(&self) -> bool {
        self.stops.load(Ordering::SeqCst)
    }

    /// Adds a group with an existing directory.
    fn add(&self, family: Family, dir: PathBuf, keep: Keep) -> Arc<Group> {
        let group = Arc::new(Group::new(family, dir, keep));
        self.groups.lock().push(Arc::clone(&group));
        group
    }

    /// Creates the group of a family with a new directory, unless the family has a group.
    fn make(&self, family: Family) -> Result<(), KeepError> {
        let Some((content, _)) = self.at.get() else { unreachable!("called only with a state directory") };
        let dir = content.join(Uuid::new_v4().simple().to_string());
        let mut keep = Keep::open(&dir)?;
        // Without this sync, a crash could undo the creation of the directory, and with it all saves in the directory.
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
            let mut groups = self.groups.lock();
            if !groups.iter().any(|other| other.family.is_same(&group.family)) {
                groups.push(Arc::new(group));
                return Ok(());
            }
        }
        // Another thread has created the group meanwhile. With two directories, the next start could use the
        // older one.
        forget(&mut group.keep.lock(), &group.dir);
        Ok(())
    }

    /// Returns true while saved content of devices of a family is only in files.
    pub fn is_loading(&self, family: &Family) -> bool {
        let groups = self.groups.lock();
        groups.iter().any(|group| group.family.is_same(family) && group.status.lock().loading.is_some())
    }

    fn group_of(&self, ram: &Ram) -> Option<Arc<Group>> {
        let family = ram.family();
        self.groups.lock().iter().find(|group| group.family.is_same(&family)).cloned()
    }

    /// Returns the time of a kept device's last save as text in UTC, or `None` if there is none.
    pub fn saved(&self, entry: &Entry) -> Option<String> {
        let ram = entry.kind.ram().filter(|_| entry.is_kept())?;
        Some(times::format_utc(self.group_of(ram)?.status.lock().saved?))
    }

    /// Returns the time of a device's restored content, if the device had newer content when the previous server ended.
    pub fn stale_since(&self, name: &str) -> Option<String> {
        self.stale.lock().get(name).copied().map(times::format_utc)
    }

    /// Records that a device was restored with content of the time `when`, older than its last content.
    pub fn set_stale(&self, name: &str, when: SystemTime) {
        self.stale.lock().insert(name.to_owned(), when);
    }

    /// Removes what [`set_stale`](Self::set_stale) and [`put_changed_base`](Self::put_changed_base) recorded, because
    /// the content was replaced or the device removed.
    pub fn clear_notes(&self, name: &str) {
        self.stale.lock().remove(name);
        self.changed_bases.lock().remove(name);
    }

    /// Returns the file of the device's base that changed while no server ran, or `None`.
    pub fn changed_base_of(&self, name: &str) -> Option<PathBuf> {
        self.changed_bases.lock().get(name).cloned()
    }

    /// Records that a file of the device's base changed while no server ran.
    pub fn put_changed_base(&self, name: &str, file: PathBuf) {
        self.changed_bases.lock().insert(name.to_owned(), file);
    }

    /// Returns the statistics of a device's saves, for `stat`, or `None` if its content is not kept.
    pub fn stat(&self, entry: &Entry) -> Option<Value> {
        let ram = entry.kind.ram().filter(|_| entry.is_kept())?;
        let status = self.group_of(ram).map(|group| group.status.lock().clone()).unwrap_or_default();
        let mut stat = json!({
            "saved": status.saved.map(times::format_utc),
            "file_bytes": status.file_bytes,
            "increments": status.increments,
            "unsaved_bytes": unsaved_bytes(ram) + status.under_way_of(entry),
        });
        if status.lost_pages > 0 {
            stat["lost_pages"] = status.lost_pages.into();
        }
        if let Some((bytes, free)) = status.needs {
            stat["next_save_bytes"] = bytes.into();
            stat["free_bytes"] = free.into();
        }
        if let Some((done, all)) = status.loading {
            stat["loaded_percent"] = (done * 100).checked_div(all).unwrap_or(100).into();
        }
        if let Some(why) = status.failed {
            stat["failed"] = why.into();
        }
        Some(stat)
    }
}

/// Returns the number of bytes of a device that are in no save, before compression. For a device that was never saved,
/// these are all its bytes.
fn unsaved_bytes(ram: &Ram) -> u64 {
    ram.unsaved_bytes().unwrap_or_else(|| ram.mm_stat().orig_data_size)
}

/// Returns the RAM disk, fork or snapshot of a device if its content is kept, or `None`. Forks of connections to a
/// template are not kept.
fn kept(entry: &Entry) -> Option<&Arc<Ram>> {
    entry.kind.ram().filter(|_| entry.is_kept() && entry.template.is_none())
}

/// Returns the time of a save as stored in the state: nanoseconds since 1970.
fn stamp(when: SystemTime) -> u64 {
    when.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// Removes a directory that no device needs any more, with its save files. A directory with other files remains.
fn forget(keep: &mut Keep, path: &Path) {
    if let Err(why) = keep.forget() {
        return warn!("{}: cannot remove files of an unused directory: {why}", path.display());
    }
    if let Err(why) = fs::remove_dir(path) {
        warn!("{}: cannot remove an unused directory: {why}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use freestone::ram::Config;

    use super::*;

    #[test]
    fn concurrent_makers_create_one_directory_per_family() {
        let dir = tempfile::tempdir().unwrap();
        let saves = Saves::default();
        saves.begin(dir.path(), SaveSchedule::default());
        let (one, other) = (Family::new(Config::default()), Family::new(Config::default()));
        let families = [one.unwrap(), other.unwrap()];
        for family in [0, 1, 0, 1] {
            saves.make(families[family].clone()).unwrap();
        }
        assert_eq!(saves.groups.lock().len(), 2);
        assert_eq!(fs::read_dir(dir.path().join(DIR)).unwrap().count(), 2);
    }
}
