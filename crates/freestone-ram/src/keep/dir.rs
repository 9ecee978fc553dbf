//! The directory of kept devices, and the choice of the present chain: a whole file and the
//! increments that continue it.
//!
//! A file's name gives its place, `NUMBER.whole` or `NUMBER-INCREMENT.part`; its header repeats it,
//! with the salt of the file that it continues. There is no other list. A file gets its name
//! atomically when it is durable, so every file is complete, and the newest whole file with its
//! increments is always the present chain. A list would be another file that could be torn.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::FlockOperation;

use super::file::scan;
use super::{Damaged, KeepError};
use crate::save::format::KeptRecord;
use crate::save::reader::Reader;
use crate::save::{Contents, RestoreError, contents};
use freestone_core::replace;

const WHOLE: &str = "whole";
const PART: &str = "part";

pub struct Dir {
    pub path: PathBuf,
    /// Locked while the directory is open. Its fsync makes names durable.
    lock: File,
}

#[derive(Debug, Clone)]
pub struct ChainFile {
    pub path: PathBuf,
    pub bytes: u64,
    /// Salt by which the next file refers to this one.
    pub salt: u64,
    pub when: SystemTime,
    pub has_lost: bool,
}

/// The files of the newest save.
pub struct Chain {
    pub generation: u64,
    /// The whole file first.
    pub files: Vec<ChainFile>,
    pub contents: Contents,
    /// Number of newer, unusable files.
    pub left_out: usize,
}

impl Chain {
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Returns true if a file has lost pages, which older files may still have.
    pub fn has_lost(&self) -> bool {
        self.files.iter().any(|file| file.has_lost)
    }
}

impl Dir {
    /// Creates the directory if necessary, and removes unfinished files of a crash.
    pub fn open(path: &Path) -> Result<Self, KeepError> {
        let failed = |source| KeepError::Directory { path: path.to_owned(), source };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
        let path = fs::canonicalize(path).map_err(failed)?;
        let lock = File::open(&path).map_err(failed)?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(KeepError::InUse(path)),
            Err(errno) => return Err(failed(errno.into())),
        }
        for left in replace::left_behind(&path.join("file")) {
            fs::remove_file(left).map_err(failed)?;
        }
        Ok(Self { path, lock })
    }

    pub fn place(&self, generation: u64, number: u32) -> PathBuf {
        self.path.join(match number {
            0 => format!("{generation:010}.{WHOLE}"),
            number => format!("{generation:010}-{number:04}.{PART}"),
        })
    }

    fn failed(&self, source: io::Error) -> KeepError {
        KeepError::Directory { path: self.path.clone(), source }
    }

    /// Returns the files with valid names, in order.
    fn files(&self) -> Result<Vec<(u64, u32)>, KeepError> {
        let mut files = Vec::new();
        for row in fs::read_dir(&self.path).map_err(|error| self.failed(error))? {
            let name = row.map_err(|error| self.failed(error))?.file_name();
            // Accept the canonical form of a name only.
            let is_ours = |&(generation, number): &(u64, u32)| {
                self.place(generation, number).file_name() == Some(&name)
            };
            files.extend(name.to_str().and_then(parse_name).filter(is_ours));
        }
        files.sort_unstable();
        Ok(files)
    }

    /// Returns an unused generation.
    pub fn next_generation(&self) -> Result<u64, KeepError> {
        Ok(self.files()?.last().map_or(1, |(newest, _)| newest + 1))
    }

    /// Returns the present chain. An older chain is used only if a newer one is damaged: a file
    /// that is just unreadable now might be readable later, and would then supersede newer saves.
    pub fn chain(&self, damaged: Damaged) -> Result<Option<Chain>, KeepError> {
        let files = self.files()?;
        let mut generations: Vec<u64> = files.iter().map(|(generation, _)| *generation).collect();
        generations.dedup();
        let mut first_error = None;
        for generation in generations.into_iter().rev() {
            let is_part = |(of, number): &&(u64, u32)| *of == generation && *number > 0;
            let parts = files.iter().filter(is_part).count();
            match self.chain_of(generation, parts, damaged) {
                Ok(mut chain) => {
                    chain.left_out += files.iter().filter(|(of, _)| *of > generation).count();
                    return Ok(Some(chain));
                }
                Err(error) if !is_damage(&error) => return Err(error.into()),
                Err(error) => {
                    tracing::warn!("kept devices: {error}");
                    first_error = first_error.or(Some(error));
                }
            }
        }
        match first_error {
            Some(error) if damaged == Damaged::Refuse => Err(error.into()),
            _ => Ok(None),
        }
    }

    fn chain_of(&self, generation: u64, parts: usize, damaged: Damaged) -> Result<Chain, RestoreError> {
        let (whole, mut contents) = self.member(generation, 0, 0, damaged)?;
        let mut chain = vec![whole];
        for number in 1..=parts as u32 {
            let before = chain.last().map_or(0, |file| file.salt);
            match self.member(generation, number, before, damaged) {
                Ok((file, newer)) if same_devices(&contents, &newer) => {
                    chain.push(file);
                    contents = newer;
                }
                Ok((file, _)) => {
                    let what = "the increment has other devices than the file before it";
                    return Err(RestoreError::Damaged { path: file.path, at: 0, what });
                }
                // A save that was never completed.
                Err(error @ RestoreError::Incomplete(_)) if number as usize == parts => {
                    tracing::warn!("kept devices: {error}; using the save before it");
                    break;
                }
                Err(error) if damaged == Damaged::LeaveOut && is_damage(&error) => {
                    tracing::warn!("kept devices: {error}; using the save before it");
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        let left_out = parts + 1 - chain.len();
        Ok(Chain { generation, files: chain, contents, left_out })
    }

    fn member(
        &self,
        generation: u64,
        number: u32,
        continues: u64,
        damaged: Damaged,
    ) -> Result<(ChainFile, Contents), RestoreError> {
        let path = self.place(generation, number);
        let reader = Reader::open_any(&path)?;
        let Some(kept) = reader.kept else { return Err(RestoreError::Foreign(path)) };
        let place = (kept.generation.get(), kept.number.get(), kept.continues.get());
        if place != (generation, number, continues) {
            return Err(RestoreError::Damaged {
                path,
                at: 0,
                what: "the file name does not match the header",
            });
        }
        if damaged == Damaged::LeaveOut {
            scan(&path, 0)?;
        }
        let (salt, bytes, when) = (reader.salt, reader.end.file_bytes, when(&kept));
        let has_lost = reader.has_lost();
        Ok((ChainFile { path, bytes, salt, when, has_lost }, contents(&reader)))
    }

    pub fn remove_others(&self, present: u64) -> Result<(), KeepError> {
        self.remove(|(generation, _)| generation != present)
    }

    pub fn remove(&self, which: impl Fn((u64, u32)) -> bool) -> Result<(), KeepError> {
        // Newest first: the remaining files are a valid chain at any time.
        let mut gone = self.files()?;
        gone.retain(|file| which(*file));
        for &(generation, number) in gone.iter().rev() {
            fs::remove_file(self.place(generation, number)).map_err(|error| self.failed(error))?;
        }
        if gone.is_empty() { Ok(()) } else { self.sync() }
    }

    pub fn sync(&self) -> Result<(), KeepError> {
        replace::sync_dir(&self.lock).map_err(|error| self.failed(error))
    }

    /// Returns the bytes that this process can still write there.
    pub fn free_bytes(&self) -> Result<u64, KeepError> {
        let stat = rustix::fs::statvfs(&self.path).map_err(|errno| self.failed(errno.into()))?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }
}

/// Returns true if the error is permanent: the file is missing, or not what was written.
fn is_damage(error: &RestoreError) -> bool {
    match error {
        RestoreError::Foreign(_) | RestoreError::Incomplete(_) | RestoreError::Damaged { .. } => true,
        RestoreError::Read { source, .. } => source.kind() == io::ErrorKind::NotFound,
        _ => false,
    }
}

/// Parses a file name into its place.
fn parse_name(name: &str) -> Option<(u64, u32)> {
    let (stem, kind) = name.rsplit_once('.')?;
    match (kind, stem.split_once('-')) {
        (WHOLE, None) => Some((stem.parse().ok()?, 0)),
        (PART, Some((generation, number))) => {
            Some((generation.parse().ok()?, number.parse().ok().filter(|number| *number > 0)?))
        }
        _ => None,
    }
}

/// Returns true if an increment has the same devices, which may have grown.
fn same_devices(before: &Contents, after: &Contents) -> bool {
    before.bases == after.bases
        && before.devices.len() == after.devices.len()
        && before.devices.iter().zip(&after.devices).all(|(before, after)| {
            (&before.name, before.kind, before.base) == (&after.name, after.kind, after.base)
                && before.size <= after.size
        })
}

/// Returns the time at which the devices had this content.
pub fn when(kept: &KeptRecord) -> SystemTime {
    let since =
        Duration::from_secs(kept.seconds.get()).saturating_add(Duration::from_nanos(kept.nanos.get().into()));
    UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
}
