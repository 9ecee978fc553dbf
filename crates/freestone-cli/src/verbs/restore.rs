//! `restore FILE [NAME]`: the devices of a file that `save` wrote.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use freestone::save::{Contents, Device as Saved, DeviceKind, inspect};
use freestone_spec::entries::{Entries, check_name};
use freestone_spec::family;
use freestone_spec::kinds::Entry;
use freestone_spec::kinds::{self, KindSpec, RESTORED, Spec, StandsOn};
use freestone_spec::layers::{FAULT_KEYS, LayerSpec, NUMBER};
use freestone_spec::path_text;
use freestone_spec::refusal::{Errno, Refusal};
use freestone_spec::size::{exact, human};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::delta::absolute;
use super::{Verb, words};
use crate::claims::Claim;
use crate::control::protocol::Fault;
use crate::error::Usage;
use crate::job::Kind;
use crate::recording::Recording;
use crate::restoring::{self, CREATE_BASE, OWN_KEYS, Restored, TLS_CLIENTS, refused};
use crate::service::Service;

/// How a restore that was cancelled leaves things.
const NOTHING_MADE: &str = "no device was made";

/// The verb.
pub struct Restore;

/// The command line.
#[derive(Debug, Args)]
pub struct Line {
    /// The file
    file: PathBuf,
    /// The name of the device, where the file has only one [default: as it was saved]
    name: Option<String>,
    /// Of the devices' family.
    #[arg(value_name = "KEY=VALUE", value_parser = super::keys::words_parser())]
    #[arg(
        help = "mem_limit=SIZE, comp_algorithm=NAME, backing_dev=PATH|device:NAME and the other keys of a ram device that a \
                  family has; of forks, these are their base's; and for disks and forks faults, seed, power_cut, power_cut_unit, record as \
                  for serve, with %n in record for the number of each, from 0 on. readonly=yes: clients cannot write; tls_clients as for serve"
    )]
    words: Vec<String>,
}

/// Its parameters.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    #[serde(with = "path_text")]
    pub file: PathBuf,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// `{"mem_limit": "2G"}`
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    family: Map<String, Value>,
    /// What lies over each disk and fork: `{"faults": "none"}`
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    layers: Map<String, Value>,
}

impl TryFrom<Line> for Params {
    type Error = Usage;

    fn try_from(line: Line) -> Result<Self, Usage> {
        let Line { file, mut name, mut words } = line;
        let label = file.display().to_string();
        // The name can be left out.
        if name.as_ref().is_some_and(|name| name.contains('=')) {
            words.insert(0, name.take().unwrap_or_default());
        }
        let allowed: Vec<&str> = family::KEYS.into_iter().chain(FAULT_KEYS).chain(OWN_KEYS).collect();
        let values = words::parse(&label, "restore", &words, &allowed)?;
        let mut entries = Entries::new("restored", "ram").map_err(|e| Usage(e.to_string()))?;
        for (key, value) in values {
            entries.add(&key, &value).map_err(|e| Usage(e.to_string()))?;
        }
        let here = std::env::current_dir();
        let here = here.map_err(|e| Usage(format!("the working directory cannot be found: {e}")))?;
        let entries = entries.with_base(&here);
        let pairs = entries.pairs.into_iter().map(|(key, value)| (key, Value::from(value)));
        let (layers, family) = pairs.partition(|(key, _)| FAULT_KEYS.contains(&key.as_str()));
        let params = Self { file: absolute(&label, &file)?, name, family, layers };
        params.checked().map_err(|fault| Usage(fault.message))?;
        Ok(params)
    }
}

impl Params {
    /// What was said of the family, as a RAM disk says it.
    fn checked(&self) -> Result<Spec, Fault> {
        let label = self.name.as_deref().unwrap_or("restored");
        check_name(label).map_err(|e| Fault::invalid(e.to_string()))?;
        let disk = restoring::disk(label, self.family.iter().chain(&self.layers));
        disk.map_err(|e| Fault::invalid(e.to_string()))
    }
}

/// What was made.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    #[serde(with = "path_text")]
    file: PathBuf,
    devices: Vec<Made>,
}

/// A device.
#[derive(Debug, Serialize, Deserialize)]
struct Made {
    name: String,
    kind: String,
    /// Bytes.
    disksize: u64,
    /// What faults are decided by, where nobody chose it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
}

impl Verb for Restore {
    const METHOD: &'static str = "restore";
    const READ_ONLY: bool = false;
    const LONG: Option<fn(&Params) -> String> = Some(|params| params.file.display().to_string());
    type Params = Params;
    type Reply = Reply;

    // Takes as long as the disk does: nothing is claimed but the names.
    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let Params { file, name, .. } = &params;
        let at = file.display();
        let asked = params.checked()?;
        let failed = |refusal: Refusal| Fault::from(refusal.of(Self::METHOD));
        let contents = inspect(file).map_err(|error| failed(refused(&error)))?;
        let names = names(&contents, name.as_deref(), &at.to_string())?;
        // The names are taken until the devices are there.
        let all: Vec<_> = names.iter().map(String::as_str).collect();
        let claimed: Vec<_> = all.iter().copied().chain(asked.kind.changes()).collect();
        let claim = service.claim_all(Self::METHOD, &claimed)?;
        service.check_unseen(&asked)?;
        service.exports.tls.check_device(&asked)?;
        for name in &names {
            if service.registry.find(name).is_some() {
                return Err(Fault::failed(Errno::EEXIST, format!("{name}: a device of that name exists")));
            }
        }
        let job = service.jobs.begin(&at.to_string(), Self::METHOD, Kind::ALONE)?;
        let live = contents.devices.iter().filter(|device| device.kind != DeviceKind::Snapshot).count();
        if live > 1 && !asked.layers.has_logs() {
            let why = format!("{live} disks and forks, and one log; %n in its name is the number of each");
            return Err(Fault::failed(Errno::EINVAL, format!("{at}: restore: record: {why}")));
        }
        let layers = asked.layers.clone();
        let asked_words = asked.words.clone();
        let readonly = matches!(&asked.kind, KindSpec::Ram(disk) if disk.readonly);
        let said = restoring::Asked {
            name: &names[0],
            disk: &asked.kind,
            said: &params.family,
            no_base: CREATE_BASE,
        };
        let restored = restoring::make(&service.registry, file, &contents, &said, &job);
        let Some(Restored { base, backing, devices }) = restored.map_err(failed)? else {
            return Err(job.cancelled(NOTHING_MADE));
        };
        let recording = Recording::begin(service, &claim, Self::METHOD, &all)?;
        let mut made: Vec<Arc<Entry>> = Vec::with_capacity(devices.len());
        let mut numbers = 0..;
        let said = asked_words.pairs;
        for ((told, (_, ram)), name) in contents.devices.iter().zip(devices).zip(&names) {
            let (base, backing) = (base.as_ref(), backing.as_ref());
            let number = match told.kind {
                DeviceKind::Snapshot => None,
                DeviceKind::Disk | DeviceKind::Fork => numbers.next(),
            };
            let layers = number.map_or_else(LayerSpec::default, |number| layers.numbered(number));
            let of_device = kinds::Said { layers, readonly, tls_clients: asked.tls_clients.clone() };
            let words = words_of(name, told, number, base.map(|base| (base.name(), base.size())), &said);
            let entry =
                kinds::restored(words, told.kind, ram, file.clone(), StandsOn { base, backing }, of_device);
            let added = entry.map(Arc::new).map_err(Fault::from).and_then(|entry| {
                made.push(Arc::clone(&entry));
                service.add(&entry)
            });
            added.inspect_err(|_| undo(service, &claim, &made))?;
        }
        recording.commit().inspect_err(|_| undo(service, &claim, &made))?;
        let devices = made.iter().map(|entry| Made {
            name: entry.name().to_owned(),
            kind: entry.kind.name().to_owned(),
            disksize: entry.size(),
            seed: entry.layers.seed_is_random.then_some(entry.layers.seed),
        });
        Ok(Reply { devices: devices.collect(), file: file.clone() })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        reply.devices.iter().try_for_each(|Made { name, kind, disksize, seed }| {
            if let Some(seed) = seed {
                writeln!(out, "{name}: faults with seed={seed}")?;
            }
            writeln!(out, "{name}: {kind} {}, not published", human(*disksize))
        })
    }
}

fn undo(service: &Service, claim: &Claim<'_>, made: &[Arc<Entry>]) {
    for entry in made.iter().rev() {
        service.undo(claim, entry);
    }
}

/// The words of a disk or fork that is like this one and holds nothing. A snapshot has none: what it
/// was taken of is not known.
fn words_of(
    name: &str,
    device: &Saved,
    number: Option<u64>,
    base: Option<(&str, u64)>,
    said: &[(String, String)],
) -> Entries {
    let mut words = Entries { name: name.to_owned(), kind: RESTORED.to_owned(), pairs: Vec::new() };
    let (Some(number), size) = (number, exact(device.size)) else { return words };
    let number = number.to_string();
    match (device.kind, base) {
        (DeviceKind::Disk, None) => {
            "ram".clone_into(&mut words.kind);
            words.pairs.extend_from_slice(said);
            words.put("disksize", &size);
            if !said.iter().any(|(key, _)| key == "comp_algorithm") {
                words.put("comp_algorithm", device.comp_algorithm.name());
            }
        }
        (_, Some((base, base_size))) => {
            "fork".clone_into(&mut words.kind);
            words.put("base", base);
            // That of an image need not be one that can be typed.
            if device.size != base_size {
                words.put("size", &size);
            }
            let own = |key: &str| FAULT_KEYS.contains(&key) || key == TLS_CLIENTS;
            words.pairs.extend(said.iter().filter(|(key, _)| own(key)).cloned());
        }
        // Of a snapshot beside it in the file.
        (_, None) => return words,
    }
    for (_, value) in words.pairs.iter_mut().filter(|(key, _)| key == "record") {
        *value = value.replace(NUMBER, &number);
    }
    words
}

/// What the devices are called here.
fn names(contents: &Contents, name: Option<&str>, at: &str) -> Result<Vec<String>, Fault> {
    let names: Vec<String> = match (contents.devices.as_slice(), name) {
        ([], _) => return Err(Fault::failed(Errno::EINVAL, format!("{at}: restore: no device is in it"))),
        ([_], Some(name)) => vec![name.to_owned()],
        (devices, Some(name)) => {
            let why = format!("{name}: restore: {at} has {} devices, which keep their names", devices.len());
            return Err(Fault::failed(Errno::EINVAL, why));
        }
        (devices, None) => devices.iter().map(|device| device.name.clone()).collect(),
    };
    for name in &names {
        check_name(name).map_err(|e| Fault::failed(Errno::EINVAL, format!("{at}: restore: {e}")))?;
    }
    Ok(names)
}
