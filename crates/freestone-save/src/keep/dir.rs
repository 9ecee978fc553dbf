//! The directory of kept devices, and the choice of the present chain: a whole file and the
//! increments that continue it.
//!
//! A file's name contains its generation and number in the chain, `NUMBER.whole` or
//! `NUMBER-INCREMENT.part`. The header of the file repeats both, with the salt of the file that it
//! continues. The directory does not have another list of files, as a crash could tear one. A file
//! is renamed to its final name atomically when it is durable, so every file is complete. The
//! newest whole file with its increments is always the present chain.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::FlockOperation;

use super::file::scan;
use super::{DamagePolicy, KeepError};
use crate::save::format::KeptRecord;
use crate::save::reader::Reader;
use crate::save::{Contents, RestoreError, contents};
use freestone_core::replace;

const WHOLE: &str = "whole";
const PART: &str = "part";

pub struct Dir {
    pub path: PathBuf,
    /// The opened directory, locked while in use. An fsync of it makes file names durable.
    lock: File,
}

#[derive(Debug, Clone)]
pub struct ChainFile {
    pub path: PathBuf,
    pub bytes: u64,
    /// Random number in the file's header, by which the next file refers to this one.
    pub salt: u64,
    pub saved_at: SystemTime,
    pub has_lost: bool,
}

/// The files of the newest save that can be restored.
pub struct Chain {
    pub generation: u64,
    /// The files in order, the whole one first.
    pub files: Vec<ChainFile>,
    pub contents: Contents,
    /// Number of newer files that cannot be used.
    pub unusable_files: usize,
}

impl Chain {
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Returns true if a file contains lost (unreadable) pages, which files of older chains may
    /// still have.
    pub fn has_lost(&self) -> bool {
        self.files.iter().any(|file| file.has_lost)
    }
}

impl Dir {
    /// Opens the directory, creates it if necessary, and removes unfinished files of a crash.
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
        for left in replace::find_stale_files(&path.join("file")) {
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

    /// Returns the generation and number of each file with a valid name, in ascending order.
    fn files(&self) -> Result<Vec<(u64, u32)>, KeepError> {
        let mut files = Vec::new();
        for row in fs::read_dir(&self.path).map_err(|error| self.failed(error))? {
            let name = row.map_err(|error| self.failed(error))?.file_name();
            // Accept only the exact spelling that `place` produces.
            let is_ours = |&(generation, number): &(u64, u32)| {
                self.place(generation, number).file_name() == Some(&name)
            };
            files.extend(name.to_str().and_then(parse_name).filter(is_ours));
        }
        files.sort_unstable();
        Ok(files)
    }

    /// Returns a generation above those of all files.
    pub fn next_generation(&self) -> Result<u64, KeepError> {
        Ok(self.files()?.last().map_or(1, |(newest, _)| newest + 1))
    }

    /// Returns the present chain, or `None` if there is none. An older chain is used only if the
    /// newer one is damaged. A file that is unreadable only for now must fail the call: if it were
    /// readable later, it would supersede newer saves.
    pub fn chain(&self, damaged: DamagePolicy) -> Result<Option<Chain>, KeepError> {
        let files = self.files()?;
        let mut generations: Vec<u64> = files.iter().map(|(generation, _)| *generation).collect();
        generations.dedup();
        let mut first_error = None;
        for generation in generations.into_iter().rev() {
            let is_part = |(of, number): &&(u64, u32)| *of == generation && *number > 0;
            let parts = files.iter().filter(is_part).count();
            match self.chain_of(generation, parts, damaged) {
                Ok(mut chain) => {
                    chain.unusable_files += files.iter().filter(|(of, _)| *of > generation).count();
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
            Some(error) if damaged == DamagePolicy::Refuse => Err(error.into()),
            _ => Ok(None),
        }
    }

    fn chain_of(&self, generation: u64, parts: usize, damaged: DamagePolicy) -> Result<Chain, RestoreError> {
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
                // The last increment may be a save that was never completed.
                Err(error @ RestoreError::Incomplete(_)) if number as usize == parts => {
                    tracing::warn!("kept devices: {error}; using the save before it");
                    break;
                }
                Err(error) if damaged == DamagePolicy::UseOlder && is_damage(&error) => {
                    tracing::warn!("kept devices: {error}; using the save before it");
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        let unusable_files = parts + 1 - chain.len();
        Ok(Chain { generation, files: chain, contents, unusable_files })
    }

    fn member(
        &self,
        generation: u64,
        number: u32,
        continues: u64,
        damaged: DamagePolicy,
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
        if damaged == DamagePolicy::UseOlder {
            scan(&path, 0)?;
        }
        let (salt, bytes, saved_at) = (reader.salt, reader.end.file_bytes, saved_at(&kept));
        let has_lost = reader.has_lost();
        Ok((ChainFile { path, bytes, salt, saved_at, has_lost }, contents(&reader)))
    }

    pub fn remove_others(&self, present: u64) -> Result<(), KeepError> {
        self.remove(|(generation, _)| generation != present)
    }

    pub fn remove(&self, which: impl Fn((u64, u32)) -> bool) -> Result<(), KeepError> {
        // Newest first, so that the remaining files are a valid chain at any time.
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

    /// Returns the bytes that this process can still write in the directory's file system.
    pub fn free_bytes(&self) -> Result<u64, KeepError> {
        let stat = rustix::fs::statvfs(&self.path).map_err(|errno| self.failed(errno.into()))?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }
}

/// Returns true if the error is permanent: the file is missing, or its content is not what was
/// written.
fn is_damage(error: &RestoreError) -> bool {
    match error {
        RestoreError::Foreign(_) | RestoreError::Incomplete(_) | RestoreError::Damaged { .. } => true,
        RestoreError::Read { source, .. } => source.kind() == io::ErrorKind::NotFound,
        _ => false,
    }
}

/// Parses a file name into generation and number (0: the whole file); `None` if it is invalid.
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

/// Returns true if the increment `after` has the same devices as `before`; they may have grown.
fn same_devices(before: &Contents, after: &Contents) -> bool {
    before.bases == after.bases
        && before.devices.len() == after.devices.len()
        && before.devices.iter().zip(&after.devices).all(|(before, after)| {
            (&before.name, before.kind, before.base) == (&after.name, after.kind, after.base)
                && before.size <= after.size
        })
}

/// Returns the time at which the devices held the content of the file.
pub fn saved_at(kept: &KeptRecord) -> SystemTime {
    let since =
        Duration::from_secs(kept.seconds.get()).saturating_add(Duration::from_nanos(kept.nanos.get().into()));
    UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
}
