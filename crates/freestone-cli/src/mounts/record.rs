//! The records of mounts: a JSON file for each mount, beside a directory of the same name for its pidfiles and logs.
//!
//! A record is replaced by a rename, so that it is always complete. A command that changes a record holds a lock on
//! its directory.

use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{env, io};

use anyhow::{Context as _, Result, bail};
use freestone_spec::path_text;
use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::helper::wait_until;
use super::processes::ProcessId;

/// Environment variable with the directory of the records.
pub const VARIABLE: &str = "FREESTONE_MOUNTS";
/// Default directory of the records. Not below /run/freestone, which systemd removes when the service ends.
const DIR: &str = "/run/freestone-mounts";
const PRIVATE: u32 = 0o700;
const EXTENSION: &str = "json";
/// Longest wait for a lock that another command holds.
const LOCK_MAX: Duration = Duration::from_secs(10);

/// Way in which a device is attached as a block device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Via {
    /// The kernel's ublk driver: /dev/ublkbN
    Ublk,
    /// The kernel's NBD client: /dev/nbdN, by nbd-client
    Nbd,
    /// nbdfuse and a loop device
    Nbdfuse,
}

impl Via {
    /// Returns the value of `--via` for this way.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ublk => "ublk",
            Self::Nbd => "nbd",
            Self::Nbdfuse => "nbdfuse",
        }
    }
}

/// Record of a mount. Fields are filled in as the mount proceeds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// Name of the device on the server.
    pub name: String,
    /// The mount point, an absolute path.
    #[serde(with = "path_text")]
    pub dir: PathBuf,
    /// The control socket of the server, an absolute path.
    #[serde(with = "path_text")]
    pub control: PathBuf,
    /// Identity of the server's process.
    pub server: Option<ProcessId>,
    /// Way to attach the device; `None` before a way is chosen.
    pub via: Option<Via>,
    /// Block device that is mounted; `None` before it is known.
    pub device: Option<PathBuf>,
    /// Address of the export that `mount` published and `umount` unpublishes: an NBD address, `/dev/ublkbN`, or `ublk`
    /// before N is known.
    pub published: Option<String>,
    /// File-system type from the command line.
    pub fs: Option<String>,
    /// Options for mount(8) from the command line.
    pub options: Option<String>,
}

impl Record {
    /// Returns true if the options include `ro`.
    pub fn is_read_only(&self) -> bool {
        let mut words = self.options.iter().flat_map(|options| options.split(','));
        words.any(|word| word == "ro")
    }
}

/// The directory of the records.
pub struct Records(PathBuf);

/// A record, locked against other commands until dropped.
pub struct LockedRecord {
    records: PathBuf,
    id: String,
    lock: File,
    /// The content that [`save`](Self::save) writes.
    pub record: Record,
}

impl Records {
    /// Returns the directory of the records, which may not exist yet.
    pub fn locate() -> Self {
        let configured = env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
        Self(configured.unwrap_or_else(|| DIR.into()))
    }

    /// Returns all records. Records that are being removed may be missing.
    pub fn all(&self) -> Result<Vec<Record>> {
        let mut all: Vec<_> =
            self.ids()?.into_iter().filter_map(|id| self.read(&id).transpose()).collect::<Result<_>>()?;
        all.sort_by(|a: &Record, b| (&a.name, &a.dir).cmp(&(&b.name, &b.dir)));
        Ok(all)
    }

    fn ids(&self) -> Result<Vec<String>> {
        let at = self.0.display();
        let entries = match fs::read_dir(&self.0) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => {
                return Err(e).with_context(|| format!("{at}: cannot read the records of mounts; root can"));
            }
            Ok(entries) => entries,
        };
        let paths = entries.flatten().map(|entry| entry.path());
        let records = paths.filter(|path| path.extension().is_some_and(|extension| extension == EXTENSION));
        Ok(records.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect())
    }

    fn file(&self, id: &str) -> PathBuf {
        self.0.join(id).with_extension(EXTENSION)
    }

    fn read(&self, id: &str) -> Result<Option<Record>> {
        let file = self.file(id);
        let at = file.display();
        let text = match fs::read(&file) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read.with_context(|| format!("{at}: cannot read the record of a mount"))?,
        };
        let record = serde_json::from_slice(&text);
        record
            .map(Some)
            .with_context(|| format!("{at}: is not the record of a mount; unmount by hand, then remove it"))
    }

    /// Locks the first record for which `matches` returns true, or returns `None`.
    pub fn lock(&self, mut matches: impl FnMut(&Record) -> bool) -> Result<Option<LockedRecord>> {
        for id in self.ids()? {
            if !self.read(&id)?.is_some_and(|record| matches(&record)) {
                continue;
            }
            let dir = self.0.join(&id);
            make_private(&dir)?;
            let lock = lock_dir(&dir)
                .with_context(|| format!("{}: another command works on this mount", dir.display()))?;
            // Another command may have removed the record meanwhile.
            let Some(record) = self.read(&id)? else {
                let _ = fs::remove_dir(&dir);
                continue;
            };
            return Ok(Some(LockedRecord { records: self.0.clone(), id, lock, record }));
        }
        Ok(None)
    }

    /// Writes a new record. Fails if the device or directory has a record already.
    pub fn create(&self, record: Record) -> Result<LockedRecord> {
        make_private(&self.0)?;
        let at = self.0.display();
        let _all = lock_dir(&self.0).with_context(|| format!("{at}: another command makes a mount"))?;
        for other in self.all()? {
            let Record { name, dir, .. } = &other;
            let (dir, control) = (dir.display(), other.control.display());
            let same_device = *name == record.name && other.control == record.control;
            if same_device || other.dir == record.dir {
                let why = format!("{name} has a mount at {dir} already (control socket {control})");
                bail!(rpc_error!(EBUSY, "{}: mount: {why}; `freestone umount {dir}` ends it", record.name));
            }
        }
        self.remove_unfinished();
        let id = format!("{:08x}", Uuid::new_v4().as_fields().0);
        let dir = self.0.join(&id);
        DirBuilder::new()
            .mode(PRIVATE)
            .create(&dir)
            .with_context(|| format!("{}: cannot be made", dir.display()))?;
        let locked = LockedRecord { records: self.0.clone(), id, lock: lock_dir(&dir)?, record };
        locked.save().inspect_err(|_| drop(fs::remove_dir(&dir)))?;
        Ok(locked)
    }

    /// Removes directories of commands that were killed before they wrote a record. The lock of the records' directory
    /// ensures that no other command is creating one now.
    fn remove_unfinished(&self) {
        for entry in fs::read_dir(&self.0).into_iter().flatten().flatten() {
            let id = entry.file_name();
            if !id.to_str().is_some_and(|id| self.file(id).exists()) {
                // Fails unless the directory is empty, which keeps directories with files.
                let _ = fs::remove_dir(entry.path());
            }
        }
    }
}

impl LockedRecord {
    /// Writes the record to its file.
    pub fn save(&self) -> Result<()> {
        let file = self.records.join(&self.id).with_extension(EXTENSION);
        let new = file.with_extension("new");
        let text = serde_json::to_vec_pretty(&self.record).context("cannot write the record of a mount")?;
        let written = fs::write(&new, text).and_then(|()| fs::rename(&new, &file));
        written.with_context(|| format!("{}: cannot write the record of a mount", file.display()))
    }

    /// Returns the path of the file `name` in the directory of the mount.
    pub fn path(&self, name: &str) -> PathBuf {
        self.records.join(&self.id).join(name)
    }

    /// Returns the unique identifier of the mount.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the lock, for programs that must end before the next command may run.
    pub fn lock(&self) -> &File {
        &self.lock
    }

    /// Removes the record after the mount has been undone.
    pub fn remove(self) -> Result<()> {
        let dir = self.records.join(&self.id);
        let file = dir.with_extension(EXTENSION);
        let ignore_missing = |removed: io::Result<()>| match removed {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        };
        ignore_missing(fs::remove_dir_all(&dir))
            .with_context(|| format!("{}: cannot be removed", dir.display()))?;
        ignore_missing(fs::remove_file(file.with_extension("new")))?;
        ignore_missing(fs::remove_file(&file))
            .with_context(|| format!("{}: cannot be removed", file.display()))
    }
}

/// Creates a directory with access only for root. Fails if it exists with another owner or mode.
fn make_private(dir: &Path) -> Result<()> {
    let at = dir.display();
    match DirBuilder::new().mode(PRIVATE).create(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            return Err(e).with_context(|| format!("{at}: cannot create the directory"));
        }
        _ => {}
    }
    let meta = fs::symlink_metadata(dir).with_context(|| format!("{at}: cannot look at the directory"))?;
    if !meta.is_dir() || meta.uid() != geteuid().as_raw() || meta.mode() & 0o077 != 0 {
        bail!(
            "{at}: must be a directory of root with mode 0700, for the records of mounts; {VARIABLE} names another"
        );
    }
    Ok(())
}

fn lock_dir(dir: &Path) -> io::Result<File> {
    let file = File::open(dir)?;
    let mut last = None;
    let locked = wait_until(LOCK_MAX, || {
        last = flock(&file, FlockOperation::NonBlockingLockExclusive).err();
        last != Some(rustix::io::Errno::WOULDBLOCK)
    });
    match last {
        None => Ok(file),
        Some(error) if locked => Err(error.into()),
        Some(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "waited for 10 s")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::{Record, Records};

    fn record(name: &str, dir: &str) -> Record {
        let control = "/run/freestone/control.sock".into();
        let (name, dir) = (name.to_owned(), dir.into());
        let (server, via, device, published, fs, options) = (None, None, None, None, None, None);
        Record { name, dir, control, server, via, device, published, fs, options }
    }

    fn records(dir: &Path) -> Records {
        Records(dir.join("mounts"))
    }

    #[test]
    fn create_refuses_second_record_of_device_or_directory() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(dir.path());
        let locked = records.create(record("a", "/mnt/a")).unwrap();
        for (name, dir) in [("a", "/mnt/b"), ("b", "/mnt/a")] {
            let error = records.create(record(name, dir)).map(drop).unwrap_err().to_string();
            let why = format!("{name}: mount: a has a mount at /mnt/a already");
            assert!(error.starts_with(&why), "{error}");
        }
        drop(records.create(record("b", "/mnt/b")).unwrap());
        assert_eq!(records.all().unwrap().len(), 2);
        locked.remove().unwrap();
        assert_eq!(records.all().unwrap()[0].name, "b");
    }

    #[test]
    fn create_removes_unfinished_directories() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(dir.path());
        let first = records.create(record("a", "/mnt/a")).unwrap();
        let unfinished = dir.path().join("mounts/0");
        fs::create_dir(&unfinished).unwrap();
        let second = records.create(record("b", "/mnt/b")).unwrap();
        assert!(!unfinished.exists() && first.path("").exists() && second.path("").exists());
    }

    #[test]
    fn option_ro_makes_record_read_only() {
        let with =
            |options: &str| Record { options: Some(options.to_owned()), ..record("a", "/a") }.is_read_only();
        assert!(with("noatime,ro") && !with("errors=remount-ro") && !record("a", "/a").is_read_only());
    }
}
