//! `restore FILE [NAME]`: creates the devices in a file that `save` wrote.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use freestone::save::{Contents, Device as Saved, DeviceKind, inspect};
use freestone_control::protocol::RpcError;
use freestone_spec::entries::{Entries, check_name};
use freestone_spec::kinds::{
    self, Entry, KindSpec, RESTART_KEYS, RESTORED, RestartPolicy, RestoreDependencies, Spec,
};
use freestone_spec::layers::{LayerSpec, NUMBER};
use freestone_spec::path_text;
use freestone_spec::refusal::Refusal;
use freestone_spec::schema::{self, FAMILY, FAULTS};
use freestone_spec::size::{exact, human};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::changes::recording::Recording;
use crate::devices::claims::Claim;
use crate::jobs::JobKind;
use crate::persistence::restoring::{self, CREATE_BASE, OWN_KEYS, RestoredDevices, TLS_CLIENTS, refused};
use crate::service::Service;
use crate::usage::Usage;
use crate::verbs::Verb;
use crate::verbs::content::delta::absolute;
use crate::verbs::text::words;

/// Part of the error message after a cancelled restore, about its effect.
const NOTHING_CREATED: &str = "no device was created";

pub struct Restore;

/// Parameters of the verb `restore`, from a JSON request or the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// The file
    #[serde(with = "path_text")]
    pub file: PathBuf,
    /// Name of the device, if the file has only one [default: its name when it was saved]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[arg(value_name = "KEY=VALUE", value_parser = crate::verbs::text::keys::words_parser())]
    #[arg(
        help = "mem_limit=SIZE, comp_algorithm=NAME, backing_dev=PATH|device:NAME and the other keys of ram \
                that a family has (for forks: the keys of their base); for disks and forks also faults, \
                seed, power_cut, power_cut_unit and record, in which %n stands for the number of the device \
                from 0; readonly=yes; keep, on_data_loss and tls_clients as for serve"
    )]
    #[serde(skip)]
    words: Vec<String>,
    /// Keys of the family (RAM disks and forks that share one memory pool), for example `{"mem_limit": "2G"}`.
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    family: Map<String, Value>,
    /// Keys of the layers over each RAM disk and fork, for example `{"faults": "none"}`.
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    layers: Map<String, Value>,
}

impl Params {
    /// Converts the words of the command line to keys, and makes paths absolute, because the server opens the files.
    pub fn checked(mut self) -> Result<Self, Usage> {
        let label = self.file.display().to_string();
        // The name of the device is optional, so a word with `=` in its place is a key.
        if let Some(word) = self.name.take_if(|name| name.contains('=')) {
            self.words.insert(0, word);
        }
        let keys = FAMILY.iter().chain(FAULTS).map(|key| key.name);
        let allowed: Vec<&str> = keys.chain(OWN_KEYS).collect();
        let values = words::parse(&label, "restore", &self.words, &allowed)?;
        let mut entries = Entries::new("restored", "ram")?;
        for (key, value) in values {
            entries.add(&key, &value)?;
        }
        let here = std::env::current_dir();
        let here = here.map_err(|e| Usage(format!("the working directory cannot be found: {e}")))?;
        let entries = entries.with_base(&here);
        let pairs = entries.pairs.into_iter().map(|(key, value)| (key, Value::from(value)));
        (self.layers, self.family) = pairs.partition(|(key, _)| schema::has(FAULTS, key));
        self.file = absolute(&label, &self.file)?;
        self.disk_spec().map_err(|fault| Usage(fault.message))?;
        Ok(self)
    }

    /// Returns the keys as the specification of a RAM disk, or an error if they are invalid.
    fn disk_spec(&self) -> Result<Spec, RpcError> {
        let label = self.name.as_deref().unwrap_or("restored");
        check_name(label)?;
        Ok(restoring::disk(label, self.family.iter().chain(&self.layers))?)
    }
}

/// Result of the verb `restore`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    #[serde(with = "path_text")]
    file: PathBuf,
    devices: Vec<RestoredDevice>,
}

/// A device that was created from the saved file.
#[derive(Debug, Serialize, Deserialize)]
struct RestoredDevice {
    name: String,
    kind: String,
    /// Size of the device in bytes.
    disksize: u64,
    /// Seed of the injected faults, if the request contained none and a random seed was chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
}

impl Verb for Restore {
    const METHOD: &'static str = "restore";
    const READ_ONLY: bool = false;
    const LONG: Option<fn(&Params) -> String> = Some(|params| params.file.display().to_string());
    type Params = Params;
    type Reply = Reply;

    // Only the names are claimed (locked against other verbs), because a slow disk would block verbs on other devices.
    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let Params { file, name, .. } = &params;
        let at = file.display();
        let spec = params.disk_spec()?;
        let failed = |refusal: Refusal| RpcError::from(refusal.of(Self::METHOD));
        let contents = inspect(file).map_err(|error| failed(refused(&error)))?;
        let names = names(&contents, name.as_deref(), &at.to_string())?;
        // The claim reserves the names until the devices exist.
        let all: Vec<_> = names.iter().map(String::as_str).collect();
        let claimed: Vec<_> = all.iter().copied().chain(spec.kind.claimed_devices()).collect();
        let claim = service.claim_all(Self::METHOD, &claimed)?;
        check_can_start_again(&contents, &spec, &at.to_string())?;
        service.check_has_state(&names[0], spec.key_of_state())?;
        service.check_unpublished(&spec)?;
        service.exports.tls.check_device(&spec)?;
        for name in &names {
            if service.registry.find(name).is_some() {
                refuse!(EEXIST, "{name}: a device of that name exists");
            }
        }
        let job = service.jobs.begin(&at.to_string(), Self::METHOD, JobKind::EXCLUSIVE)?;
        let live = contents.devices.iter().filter(|device| device.kind != DeviceKind::Snapshot).count();
        if live > 1 && !spec.layers.has_logs() {
            let why = format!("{live} disks and forks, and one log; %n in its name is the number of each");
            refuse!(EINVAL, "{at}: restore: record: {why}");
        }
        let layers = spec.layers.clone();
        let spec_words = spec.words.clone();
        let readonly = matches!(&spec.kind, KindSpec::Ram(disk) if disk.readonly);
        let request = restoring::RestoreRequest {
            name: &names[0],
            disk: &spec.kind,
            keys: &params.family,
            no_base: CREATE_BASE,
        };
        let restored = restoring::restore_devices(&service.registry, file, &contents, &request, &job);
        let Some(RestoredDevices { base, backing, devices }) = restored.map_err(failed)? else {
            return Err(job.cancelled(NOTHING_CREATED));
        };
        let recording = Recording::begin(service, &claim, Self::METHOD, &all)?;
        let mut made: Vec<Arc<Entry>> = Vec::with_capacity(devices.len());
        let mut numbers = 0..;
        let pairs = spec_words.pairs;
        for ((saved, (_, ram)), name) in contents.devices.iter().zip(devices).zip(&names) {
            let (base, backing) = (base.as_ref(), backing.as_ref());
            let number = match saved.kind {
                DeviceKind::Snapshot => None,
                DeviceKind::Disk | DeviceKind::Fork => numbers.next(),
            };
            let layers = number.map_or_else(LayerSpec::default, |number| layers.numbered(number));
            let restart = RestartPolicy { keep: spec.keep, on_data_loss: spec.on_data_loss };
            let settings =
                kinds::RestoreOptions { layers, readonly, tls_clients: spec.tls_clients.clone(), restart };
            let words = words_of(name, saved, number, base.map(|base| (base.name(), base.size())), &pairs);
            let entry = kinds::build_restored(
                words,
                saved.kind,
                ram,
                file.clone(),
                RestoreDependencies { base, backing },
                settings,
            );
            let added = entry.map(Arc::new).map_err(RpcError::from).and_then(|entry| {
                service.check_keep(&entry)?;
                made.push(Arc::clone(&entry));
                service.add(&entry)
            });
            added.inspect_err(|_| undo_create(service, &claim, &made))?;
        }
        recording.commit().inspect_err(|_| undo_create(service, &claim, &made))?;
        let devices = made.iter().map(|entry| RestoredDevice {
            name: entry.name().to_owned(),
            kind: entry.kind.name().to_owned(),
            disksize: entry.size(),
            seed: entry.layers.seed_is_random.then_some(entry.layers.seed),
        });
        Ok(Reply { devices: devices.collect(), file: file.clone() })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        reply.devices.iter().try_for_each(|RestoredDevice { name, kind, disksize, seed }| {
            if let Some(seed) = seed {
                writeln!(out, "{name}: faults with seed={seed}")?;
            }
            writeln!(out, "{name}: {kind} {}, not published", human(*disksize))
        })
    }
}

/// Fails if the request has keys about the next start of the server, but the file contains a device that no
/// start can create again.
fn check_can_start_again(contents: &Contents, spec: &Spec, at: &str) -> Result<(), RpcError> {
    let Some(key) = spec.key_of_state() else { return Ok(()) };
    let is_lost = |device: &&Saved| {
        device.kind == DeviceKind::Snapshot || device.kind == DeviceKind::Fork && device.base.is_none()
    };
    let Some(device) = contents.devices.iter().find(is_lost) else { return Ok(()) };
    refuse!(
        EINVAL,
        "{at}: restore: {key}: {} stands on a snapshot or is one, which the next start cannot create again",
        device.name
    )
}

fn undo_create(service: &Service, claim: &Claim<'_>, made: &[Arc<Entry>]) {
    for entry in made.iter().rev() {
        service.undo_create(claim, entry);
    }
}

/// Returns the specification entries that would create an empty RAM disk or fork like the saved device. For a
/// snapshot, only name and kind are returned, because its origin is unknown.
fn words_of(
    name: &str,
    device: &Saved,
    number: Option<u64>,
    base: Option<(&str, u64)>,
    pairs: &[(String, String)],
) -> Entries {
    let mut words = Entries { name: name.to_owned(), kind: RESTORED.to_owned(), pairs: Vec::new() };
    let (Some(number), size) = (number, exact(device.size)) else { return words };
    let number = number.to_string();
    match (device.kind, base) {
        (DeviceKind::Disk, None) => {
            "ram".clone_into(&mut words.kind);
            words.pairs.extend_from_slice(pairs);
            words.put("disksize", &size);
            if !pairs.iter().any(|(key, _)| key == "comp_algorithm") {
                words.put("comp_algorithm", device.comp_algorithm.name());
            }
        }
        (_, Some((base, base_size))) => {
            "fork".clone_into(&mut words.kind);
            words.put("base", base);
            // The size is only added if it differs, because the size of an image may not be a valid value of the key.
            if device.size != base_size {
                words.put("size", &size);
            }
            if device.mem_limit > 0 {
                words.put("mem_limit", &exact(device.mem_limit));
            }
            let is_own =
                |key: &str| schema::has(FAULTS, key) || RESTART_KEYS.contains(&key) || key == TLS_CLIENTS;
            words.pairs.extend(pairs.iter().filter(|(key, _)| is_own(key)).cloned());
        }
        // The device is a fork of a snapshot in the same file, which cannot be specified.
        (_, None) => return words,
    }
    for (_, value) in words.pairs.iter_mut().filter(|(key, _)| key == "record") {
        *value = value.replace(NUMBER, &number);
    }
    words
}

/// Returns the names of the devices to create, or an error if they are invalid or `name` is ambiguous.
fn names(contents: &Contents, name: Option<&str>, at: &str) -> Result<Vec<String>, RpcError> {
    let names: Vec<String> = match (contents.devices.as_slice(), name) {
        ([], _) => refuse!(EINVAL, "{at}: restore: no device is in it"),
        ([_], Some(name)) => vec![name.to_owned()],
        (devices, Some(name)) => {
            refuse!(EINVAL, "{name}: restore: {at} has {} devices, which keep their names", devices.len());
        }
        (devices, None) => devices.iter().map(|device| device.name.clone()).collect(),
    };
    for name in &names {
        check_name(name).map_err(|e| refusal!(EINVAL, "{at}: restore: {e}"))?;
    }
    Ok(names)
}
