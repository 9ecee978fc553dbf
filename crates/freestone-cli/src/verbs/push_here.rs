//! `push` without a server: of a device that is opened for this alone, or that is in a saved file.

use std::io::{self, Write as _};
use std::mem;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use freestone::save::{Contents, Device as Saved, inspect};
use freestone_spec::entries::Entries;
use freestone_spec::family;
use freestone_spec::kinds::{self, Entry, KindSpec, RESTORED, Said, StandsOn};
use freestone_spec::refusal::{Errno, Refusal};
use freestone_spec::{Devices, OpenError};
use serde_json::{Map, Value};

use super::long::{Here, Long};
use super::push::{Line, Moment, Params, Push, Reply, send};
use super::restore::Restore;
use super::{Common, Verb, check_bare, keys, print_json};
use crate::control::protocol::Fault;
use crate::error::{Stdout, Usage};
use crate::restoring::{self, Asked, Restored, refused};

/// Names of a file that a refusal lists.
const NAMES_SHOWN: usize = 3;
/// What is told of a base that is missing.
const GIVE_BASE: &str = "which no --device is; give it with --device NAME=KIND,KEY=VALUE...";

/// Devices that were opened for this alone.
struct Source {
    devices: Devices,
    /// The file that the one to push is in; else it is the last of them.
    file: Option<SavedFile>,
}

/// A file that `save` wrote.
struct SavedFile {
    path: PathBuf,
    contents: Contents,
    /// Which of them is pushed.
    number: usize,
    /// What was said of the family.
    said: Map<String, Value>,
    /// A RAM disk with that.
    disk: KindSpec,
}

/// Opens the device, pushes it, and shows what came of it.
pub fn push_here(mut line: Line, long: &Long, common: &Common) -> Result<ExitCode> {
    let (file, bases) = (line.restore.take(), mem::take(&mut line.devices));
    let of_family = if file.is_some() { take_family(&mut line.words) } else { Vec::new() };
    let params: Params = line.try_into()?;
    let (url, spec) = params.parse().map_err(|fault| Usage(fault.message))?;
    let name = params.label();
    if long.is_background() {
        return Err(Usage(format!("{name}: push: --background is for a server")).into());
    }
    let source = match &file {
        Some(_) if params.is_opened() => {
            return Err(Usage(format!("{name}: push: with --restore NAME is a device in the file")).into());
        }
        Some(file) => Source::of_file(name, file, &of_family, &bases)?,
        None => Source::of_words(name, &params.name)?,
    };
    let here = Here::new(long, name, source.verb())?;
    let pushed = source.entry(name, &here).and_then(|entry| {
        here.go_on(Push::METHOD);
        check_bare(&entry, "pushed")?;
        let moment = Moment::of(&entry)?;
        let spec = moment.reached_as(&url, spec, &params.keys);
        let pushed = send(&moment, name, &url, &spec, params.full, &here);
        pushed.map_err(|refusal| Fault::from(refusal.of(&of_push(name))))
    });
    let pushed = match here.end(pushed.map_err(anyhow::Error::from))? {
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

/// Takes out what is said of the family that the devices of a file get.
fn take_family(words: &mut Vec<String>) -> Vec<String> {
    let of_family = |word: &str| word.split_once('=').is_some_and(|(key, _)| family::KEYS.contains(&key));
    let (taken, left) = mem::take(words).into_iter().partition(|word| of_family(word));
    *words = left;
    taken
}

fn of_push(name: &str) -> String {
    format!("{name}: {}", Push::METHOD)
}

fn open(words: &[String]) -> Result<Devices> {
    Devices::open(words).map_err(|OpenError { errno, sentence }| match errno {
        libc::EINVAL => Usage(sentence).into(),
        _ => anyhow::Error::msg(sentence),
    })
}

fn check_read_only(entry: &Entry) -> Result<(), Usage> {
    if entry.device().is_some_and(|device| !device.geometry().read_only) {
        let name = entry.name();
        return Err(Usage(format!("{name}: push: would be opened for writing; say readonly=yes")));
    }
    Ok(())
}

impl Source {
    /// The device that these words describe.
    fn of_words(name: &str, words: &str) -> Result<Self> {
        let devices = open(&[words.to_owned()])?;
        devices.registry().find(name).map_or(Ok(()), |entry| check_read_only(&entry))?;
        Ok(Self { devices, file: None })
    }

    /// The device of that name in a file. Nothing is made of that yet.
    fn of_file(name: &str, file: &Path, of_family: &[String], bases: &[String]) -> Result<Self> {
        let said = keys::of_words(name, Push::METHOD, of_family)?;
        let disk = restoring::disk(name, said.iter()).map_err(|e| Usage(e.to_string()))?.kind;
        let failed = |refusal: Refusal| Fault::from(refusal.of(&of_push(name)));
        let contents = inspect(file).map_err(|error| failed(refused(&error)))?;
        let number = number_of(&contents.devices, name)
            .map_err(|has| failed(Refusal::failed(Errno::ENODEV, format!("{}: {has}", file.display()))))?;
        let devices = open(bases)?;
        for entry in devices.registry().all() {
            // What another one stands on, or what is spilled to, may have to be written for that.
            let is_needed =
                devices.registry().users(&entry).is_some() || disk.changes().contains(&entry.name());
            if entry.in_memory().is_none() && !is_needed {
                check_read_only(&entry)?;
            }
        }
        let file = SavedFile { path: file.to_owned(), contents, number, said, disk };
        Ok(Self { devices, file: Some(file) })
    }

    /// What is done first.
    fn verb(&self) -> &'static str {
        if self.file.is_some() { Restore::METHOD } else { Push::METHOD }
    }

    /// The device; one of a file is made now.
    fn entry(&self, name: &str, here: &Here) -> Result<Arc<Entry>, Fault> {
        let registry = self.devices.registry();
        let failed = |refusal: Refusal| Fault::from(refusal.of(&of_push(name)));
        let Some(SavedFile { path, contents, number, said, disk }) = &self.file else {
            return registry.find(name).ok_or_else(|| Fault::internal(format!("{name}: is not there")));
        };
        let asked = Asked { name, disk, said, no_base: GIVE_BASE };
        let restored = restoring::make(registry, path, contents, &asked, here).map_err(failed)?;
        let Some(Restored { base, backing, mut devices }) = restored else {
            return Err(failed(Refusal::failed(Errno::ECANCELED, "cancelled")));
        };
        // The others go.
        let (_, ram) = devices.swap_remove(*number);
        let words = Entries { name: name.to_owned(), kind: RESTORED.to_owned(), pairs: Vec::new() };
        let kind = contents.devices[*number].kind;
        let on = StandsOn { base: base.as_ref(), backing: backing.as_ref() };
        let entry = kinds::restored(words, kind, ram, path.clone(), on, Said::default());
        Ok(Arc::new(entry?))
    }
}

/// Where a device is among those of a file; else what is there.
fn number_of(devices: &[Saved], name: &str) -> Result<usize, String> {
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
