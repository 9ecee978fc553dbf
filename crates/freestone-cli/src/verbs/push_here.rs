//! `push` without a server. The pushed device is opened only for this push, or restored from a file that `save` wrote.

use std::io::{self, Write as _};
use std::mem;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use freestone::save::{Contents, Device as Saved, inspect};
use freestone_control::protocol::RpcError;
use freestone_server::persistence::restoring::{self, RestoreRequest, RestoredDevices, refused};
use freestone_server::usage::Usage;
use freestone_server::verbs::content::push::{Content, Line, Params, Push, Reply, send};
use freestone_server::verbs::content::restore::Restore;
use freestone_server::verbs::text::keys;
use freestone_server::verbs::{Verb, check_bare};
use freestone_spec::entries::Entries;
use freestone_spec::kinds::{self, Entry, KindSpec, RESTORED, RestoreDependencies, RestoreOptions};
use freestone_spec::refusal::{Errno, Refusal};
use freestone_spec::{Devices, OpenError, schema};
use serde_json::{Map, Value};

use crate::client::long::{LocalProgress, Long};
use crate::client::{Common, print_json};
use crate::error::Stdout;

/// Maximum number of devices in the saved file that an error message names.
const NAMES_SHOWN: usize = 3;
/// Part of the error message if a base of the saved device is missing.
const GIVE_BASE: &str = "which no --device is; give it with --device NAME=KIND,KEY=VALUE...";

/// The device to push, which is opened only for this push.
struct LocalSource {
    /// The device itself; for a device in a saved file, only its bases.
    devices: Devices,
    /// The saved file that contains the device; None if the device was opened from a specification.
    file: Option<SavedFile>,
}

/// A file that `save` wrote, and how to restore a device from it.
struct SavedFile {
    path: PathBuf,
    contents: Contents,
    /// Index of the device to push in `contents`.
    index: usize,
    /// Keys of the family (RAM disks and forks that share one memory pool) that the restored devices form.
    family_keys: Map<String, Value>,
    /// Specification of a RAM disk with the keys of the family.
    disk: KindSpec,
}

/// Opens the device, pushes it, and prints the result. Returns the exit status.
pub fn push_here(mut line: Line, long: &Long, common: &Common) -> Result<ExitCode> {
    let (file, bases) = (line.restore.take(), mem::take(&mut line.devices));
    let family_words = if file.is_some() { take_family_words(&mut line.words) } else { Vec::new() };
    let params: Params = line.try_into()?;
    let (url, spec) = params.parse().map_err(|fault| Usage(fault.message))?;
    let name = params.label();
    if long.is_background() {
        return Err(Usage(format!("{name}: push: --background is for a server")).into());
    }
    let source = match &file {
        Some(_) if params.has_device_spec() => {
            return Err(Usage(format!("{name}: push: with --restore NAME is a device in the file")).into());
        }
        Some(file) => LocalSource::of_file(name, file, &family_words, &bases)?,
        None => LocalSource::of_words(name, &params.name)?,
    };
    let progress = LocalProgress::new(long, name, source.first_verb())?;
    let pushed = source.entry(name, &progress).and_then(|entry| {
        progress.begin_next(Push::METHOD);
        check_bare(&entry, "pushed")?;
        let content = Content::of(&entry)?;
        let spec = content.inherit_store(&url, spec, &params.keys);
        let pushed = send(&content, name, &url, &spec, params.full, &progress);
        pushed.map_err(|refusal| RpcError::from(refusal.of(&error_prefix(name))))
    });
    let pushed = match progress.end(pushed.map_err(anyhow::Error::from))? {
        Ok(pushed) => pushed,
        Err(interrupted) => return Ok(interrupted),
    };
    let reply = Reply::new(name, &url, &pushed);
    if common.json {
        print_json(&serde_json::to_string(&reply)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = io::stdout().lock();
    Push::show(&params, &reply, &mut out).and_then(|()| out.flush()).map_err(Stdout::from)?;
    Ok(ExitCode::SUCCESS)
}

/// Removes the words that are keys of a family from `words`, and returns them.
fn take_family_words(words: &mut Vec<String>) -> Vec<String> {
    let is_family_key =
        |word: &str| word.split_once('=').is_some_and(|(key, _)| schema::has(schema::FAMILY, key));
    let (taken, left) = mem::take(words).into_iter().partition(|word| is_family_key(word));
    *words = left;
    taken
}

fn error_prefix(name: &str) -> String {
    format!("{name}: {}", Push::METHOD)
}

fn open(words: &[String]) -> Result<Devices> {
    Devices::open(words).map_err(|OpenError { errno, sentence }| match errno {
        libc::EINVAL => Usage(sentence).into(),
        _ => anyhow::Error::msg(sentence),
    })
}

/// Fails if the device would be opened for writing, because a push only reads.
fn check_read_only(entry: &Entry) -> Result<(), Usage> {
    if entry.device().is_some_and(|device| !device.geometry().read_only) {
        let name = entry.name();
        return Err(Usage(format!("{name}: push: would be opened for writing; say readonly=yes")));
    }
    Ok(())
}

impl LocalSource {
    /// Opens the device that the words of a specification describe.
    fn of_words(name: &str, words: &str) -> Result<Self> {
        let devices = open(&[words.to_owned()])?;
        devices.registry().find(name).map_or(Ok(()), |entry| check_read_only(&entry))?;
        Ok(Self { devices, file: None })
    }

    /// Reads the list of devices in the saved file, and opens the bases. The device itself is restored later.
    fn of_file(name: &str, file: &Path, family_words: &[String], bases: &[String]) -> Result<Self> {
        let family_keys = keys::parse_words(name, Push::METHOD, family_words)?;
        let disk = restoring::disk(name, family_keys.iter()).map_err(Usage::from)?.kind;
        let failed = |refusal: Refusal| RpcError::from(refusal.of(&error_prefix(name)));
        let contents = inspect(file).map_err(|error| failed(refused(&error)))?;
        let index = index_of(&contents.devices, name)
            .map_err(|why| failed(Refusal::failed(Errno::ENODEV, format!("{}: {why}", file.display()))))?;
        let devices = open(bases)?;
        for entry in devices.registry().all() {
            // A device that is the base of another device, or the backing device, may have to be opened for writing.
            let is_needed =
                devices.registry().users(&entry).is_some() || disk.claimed_devices().contains(&entry.name());
            if entry.ram_data().is_none() && !is_needed {
                check_read_only(&entry)?;
            }
        }
        let file = SavedFile { path: file.to_owned(), contents, index, family_keys, disk };
        Ok(Self { devices, file: Some(file) })
    }

    /// Returns the name of the verb whose progress is shown while the device is opened.
    fn first_verb(&self) -> &'static str {
        if self.file.is_some() { Restore::METHOD } else { Push::METHOD }
    }

    /// Returns the entry of the device to push. If the device is in a saved file, restores it.
    fn entry(&self, name: &str, progress: &LocalProgress) -> Result<Arc<Entry>, RpcError> {
        let registry = self.devices.registry();
        let failed = |refusal: Refusal| RpcError::from(refusal.of(&error_prefix(name)));
        let Some(SavedFile { path, contents, index, family_keys, disk }) = &self.file else {
            return registry.find(name).ok_or_else(|| RpcError::internal(format!("{name}: is not there")));
        };
        let asked = RestoreRequest { name, disk, keys: family_keys, no_base: GIVE_BASE };
        let restored =
            restoring::restore_devices(registry, path, contents, &asked, progress).map_err(failed)?;
        let Some(RestoredDevices { base, backing, mut devices }) = restored else {
            return Err(failed(Refusal::failed(Errno::ECANCELED, "cancelled")));
        };
        // The other devices of the saved file are dropped.
        let (_, ram) = devices.swap_remove(*index);
        let words = Entries { name: name.to_owned(), kind: RESTORED.to_owned(), pairs: Vec::new() };
        let kind = contents.devices[*index].kind;
        let on = RestoreDependencies { base: base.as_ref(), backing: backing.as_ref() };
        let entry = kinds::build_restored(words, kind, ram, path.clone(), on, RestoreOptions::default());
        Ok(Arc::new(entry?))
    }
}

/// Returns the index of a device in a saved file, or an error message that names the devices in the file.
fn index_of(devices: &[Saved], name: &str) -> Result<usize, String> {
    devices.iter().position(|device| device.name == name).ok_or_else(|| {
        let names = devices.iter().take(NAMES_SHOWN).map(|device| device.name.as_str());
        let more = match devices.len().saturating_sub(NAMES_SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        match devices {
            [] => "no device is in it".to_owned(),
            _ => format!(
                "no device of that name is in it; there is {}{more}",
                names.collect::<Vec<_>>().join(", ")
            ),
        }
    })
}
