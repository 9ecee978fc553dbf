//! Checks the devices of a server that was started on the state directory of the last one.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use freestone_testkit::Rng;
use serde_json::{Value, json};

use crate::oracle::SECTOR_BYTES;
use crate::program::server;
use crate::program::server::control;
use crate::program::setup;
use crate::program::transport::{Address, Connection};
use crate::program::world::interrupted_verb::InterruptedVerb;
use crate::program::world::{ContentEnd, Disk, Kind, KnownState, World};

/// Text that replaces the addresses of the server itself in sets of addresses.
const HOME: &str = "home";
const POLL_INTERVAL: Duration = Duration::from_millis(5);
const LOAD_MAX: Duration = Duration::from_secs(5);

/// A device as a server reports it.
#[derive(Debug)]
struct ListedDevice {
    uuid: String,
    generation: u64,
    withheld: bool,
    adopted: bool,
    /// Number of addresses at which clients find the device now.
    seen: usize,
    bytes: u64,
    below: Option<String>,
    limit: Option<u64>,
    /// Name of the image; `None` if the device is not an image.
    image: Option<String>,
    /// Addresses of the device, including those at which clients do not find it because it is
    /// withheld.
    addresses: BTreeSet<String>,
}

/// The settings of a device that verbs change and a server must keep.
#[derive(Debug, Clone, PartialEq, Eq)]
struct KeptState {
    addresses: BTreeSet<String>,
    /// Memory limit in bytes; `None` if none was set.
    limit: Option<u64>,
    is_limit_unknown: bool,
    /// Size in bytes; `None` if it is unknown.
    bytes: Option<u64>,
    /// The device is withheld, even if the restart did not lose its content.
    withheld: bool,
}

/// The reported devices by name, and the names of those that the server could not create again.
type ListedDevices = (BTreeMap<String, ListedDevice>, BTreeSet<String>);

/// Checks the devices of the first server, whose state directory was empty.
pub fn check_first_start(world: &World) -> Result<(), String> {
    let (listed, _) = list_devices(world)?;
    for disk in world.disks(|_| true) {
        let Some(listed) = listed.get(&disk.name) else {
            return Err(format!("{} does not exist", disk.name));
        };
        if (listed.generation, listed.withheld) != (1, false) {
            return Err(format!("{} is new: {listed:?}", disk.name));
        }
        disk.update_known(|known| known.uuid = Some(listed.uuid.clone()));
    }
    Ok(())
}

/// Compares the reported devices with the expected ones, and updates the devices of the world.
/// `killed`: the last server was killed and wrote nothing at its end. `adopts`: content in memory survived the kill; true
/// if all of it was in memory. `starts`: number of servers started since then.
pub fn judge(world: &World, killed: bool, adopts: Option<bool>, starts: u64) -> Result<(), String> {
    let (mut listed, missing) = list_devices(world)?;
    let mut changes = HashMap::new();
    for verb in world.take_interrupted() {
        resolve_interrupted(world, verb, &listed, &missing, &mut changes)?;
    }
    let mut missed = world.missing();
    for lost in &missed {
        if !missing.contains(&lost.name) {
            return Err(format!("{} was missing and is not any more", lost.name));
        }
    }
    let disks = world.disks(|_| true);
    let half_merged: BTreeSet<String> = disks
        .iter()
        .filter(|disk| disk.is_merging())
        .filter_map(|disk| Some(disk.parent.as_ref()?.name.clone()))
        .collect();
    let mut now: Vec<Arc<Disk>> = Vec::new();
    let mut unchecked: Vec<Arc<Disk>> = Vec::new();
    // Names of devices that lost their content, and of the devices over them.
    let mut lost: BTreeSet<&str> = BTreeSet::new();
    for disk in &disks {
        let name = disk.name.as_str();
        let is_in = |disks: &[Arc<Disk>], of: &Disk| disks.iter().any(|disk| disk.name == of.name);
        // The COW device of a snapshot can be a RAM disk, which is adopted.
        let cow = listed.get(&name.replacen('s', "c", 1));
        let has_copies = disk.kind == Kind::Cow && adopts.is_some() && cow.is_some_and(|cow| cow.adopted);
        // A new snapshot of a half merged origin has unknown content.
        let is_new = disk.kind == Kind::Cow && !disk.survives_restart && !has_copies;
        let parent = disk.parent.as_ref();
        let found = listed.remove(name);
        // A snapshot in memory survives the removal of its origin, but after a restart it cannot be
        // created again.
        let is_gone = |of: &Arc<Disk>| of.is_removed() || missed.iter().any(|disk| disk.name == of.name);
        let mut below = std::iter::successors(parent, |of| of.parent.as_ref());
        let is_parent_lost = below.any(|of| lost.contains(of.name.as_str()) || is_in(&unchecked, of));
        let survives = adopts.is_some() && disk.is_adoptable() && !is_parent_lost;
        let is_adopted = found.as_ref().is_some_and(|found| found.adopted);
        // A server that was killed at its start may have left devices with lost content.
        if is_adopted != survives && if survives { adopts == Some(true) } else { starts == 1 } {
            let not = if survives { "" } else { " not" };
            return Err(format!("{name} should{not} be adopted: {found:?}\n  {}", disk.describe()));
        }
        let survives = survives && is_adopted;
        // A device with saved or adopted content can be created without its base or origin.
        let has_content = survives || disk.keeps && (!killed || disk.saved.is_some());
        if parent.is_some_and(is_gone) && !has_content {
            if found.is_some() || !missing.contains(name) {
                return Err(format!(
                    "{name} should be missing, since its base or origin was removed\n  {}",
                    disk.describe()
                ));
            }
            world.add_missing(disk);
            missed.push(Arc::clone(disk));
            world.counts.add("restarts", "devices missing", 1);
            continue;
        }
        if parent.is_some_and(|of| is_in(&unchecked, of) || is_new && half_merged.contains(&of.name)) {
            unchecked.push(Arc::clone(disk));
            continue;
        }
        let is_own = disk.is_lost && !survives && !has_copies && (killed || !disk.keeps);
        if is_own || is_parent_lost {
            lost.insert(name);
        }
        let is_lost = lost.contains(name);
        let Some(found) = found else {
            return Err(format!("{name} does not exist after the restart\n  {}", disk.describe()));
        };
        let parent_now = parent.and_then(|of| now.iter().find(|disk| disk.name == of.name)).cloned();
        let mut allowed = changes.remove(name).unwrap_or_else(|| vec![kept_state(world, disk)]);
        if let Some(base) = parent_now.as_ref().filter(|_| disk.kind == Kind::Fork && !has_content) {
            // A lost snapshot is created again with the present size of its origin. A fork is at least as large.
            let min_bytes = base.oracle().size() * SECTOR_BYTES as u64;
            let sizes = allowed.iter_mut().filter_map(|state| state.bytes.as_mut());
            sizes.for_each(|bytes| *bytes = min_bytes.max(*bytes));
        }
        let known = check_device(disk, &found, &allowed, is_lost, starts)
            .map_err(|why| format!("{name}: {why}\n  it is {found:?}\n  {}", disk.describe()))?;
        world.counts.add("restarts", if known.withheld { "devices withheld" } else { "devices seen" }, 1);
        if has_content {
            let what = match (survives, killed) {
                (true, _) => "devices adopted",
                (_, true) => "devices with an older content",
                _ => "devices with their content",
            };
            world.counts.add("restarts", what, 1);
        }
        let addresses = addresses_of(world, &found);
        let removed_parent = parent.filter(|of| is_gone(of)).cloned();
        let parent = parent_now.or(removed_parent);
        now.push(Arc::new(disk.after_restart(
            if survives || has_copies { ContentEnd::Adopted } else { ContentEnd::of(killed) },
            parent,
            addresses,
            known,
            Some(found.bytes / SECTOR_BYTES as u64),
        )));
    }
    for (name, found) in &listed {
        if setup::is_unpublished_backing(name) && found.seen > 0 {
            return Err(format!("{name}, a COW or backing device, is published"));
        }
    }
    let unchecked_names: BTreeSet<&str> = unchecked.iter().map(|disk| disk.name.as_str()).collect();
    let unknown = |name: &&String| {
        !setup::is_unpublished_backing(name)
            && !unchecked_names.contains(name.as_str())
            && missed.iter().all(|disk| disk.name != **name)
    };
    if let Some(name) = listed.keys().chain(&missing).find(unknown) {
        return Err(format!("{name} exists or is missing, but is unknown"));
    }
    for disk in &now {
        check_hidden(disk)?;
    }
    world.set_disks(now);
    remove_unchecked(world, &unchecked)
}

/// Removes these devices, whose content is unknown and is not judged.
fn remove_unchecked(world: &World, unchecked: &[Arc<Disk>]) -> Result<(), String> {
    for disk in unchecked.iter().rev() {
        ask(world, "remove", &json!({ "name": disk.name, "force": true }))?;
    }
    Ok(())
}

/// Determines whether a verb without an answer took effect, and records which settings are
/// possible.
fn resolve_interrupted(
    world: &World,
    verb: InterruptedVerb,
    listed: &BTreeMap<String, ListedDevice>,
    missing: &BTreeSet<String>,
    changes: &mut HashMap<String, Vec<KeptState>>,
) -> Result<(), String> {
    let verb_group = verb.verb();
    let is_there = |disk: &Disk| listed.contains_key(&disk.name) || missing.contains(&disk.name);
    let mut may = |disk: &Arc<Disk>, change: &dyn Fn(&mut KeptState)| {
        let allowed = changes.entry(disk.name.clone()).or_insert_with(|| vec![kept_state(world, disk)]);
        let before = allowed.len();
        for at in 0..before {
            let mut then = allowed[at].clone();
            change(&mut then);
            allowed.push(then);
        }
        // Returns true if the device has a state that is only possible with the change. False if it
        // does not exist.
        let Some(now) = listed.get(&disk.name) else { return false };
        allowed[..before].iter().all(|allowed_state| !allowed_state.matches(now))
    };
    let was_done = match verb {
        InterruptedVerb::Creates(disks) => {
            let made = disks.iter().filter(|disk| is_there(disk)).count();
            if made > 0 && made < disks.len() {
                let names: Vec<_> = disks.iter().map(|disk| (&disk.name, is_there(disk))).collect();
                return Err(format!("a verb that was cut off took effect in part: {names:?}"));
            }
            if made > 0 {
                for disk in disks {
                    world.add(disk);
                }
            }
            made > 0
        }
        InterruptedVerb::Removes(disk) => {
            let is_gone = !is_there(&disk);
            if is_gone {
                world.forget(&disk);
            }
            is_gone
        }
        InterruptedVerb::Publishes(disk, addresses) => {
            let addresses: Vec<String> = addresses.iter().map(|place| address_text(world, place)).collect();
            may(&disk, &|allowed_state| {
                allowed_state.addresses.extend(addresses.iter().cloned());
                allowed_state.withheld = false;
            })
        }
        InterruptedVerb::Unpublishes(disk) => may(&disk, &|allowed_state| {
            allowed_state.addresses.clear();
            allowed_state.withheld = false;
        }),
        InterruptedVerb::Limits(disk, bytes) => may(&disk, &|allowed_state| {
            (allowed_state.limit, allowed_state.is_limit_unknown) = (Some(bytes), false);
        }),
        InterruptedVerb::Grows(disk, bytes) => may(&disk, &|allowed_state| allowed_state.bytes = Some(bytes)),
    };
    let outcome = if was_done { "done" } else { "not done" };
    world.counts.add("restarts", format!("verbs cut off {verb_group}: {outcome}"), 1);
    Ok(())
}

impl KeptState {
    fn matches(&self, listed: &ListedDevice) -> bool {
        self.addresses == listed.addresses
            && (self.is_limit_unknown || self.limit == listed.limit)
            && self.bytes.is_none_or(|bytes| bytes == listed.bytes)
    }
}

/// Checks one reported device. Returns the state that later servers must keep.
fn check_device(
    disk: &Disk,
    listed: &ListedDevice,
    allowed: &[KeptState],
    is_lost: bool,
    starts: u64,
) -> Result<KnownState, String> {
    let known = disk.known();
    if known.uuid.as_ref().is_some_and(|uuid| *uuid != listed.uuid) {
        return Err(format!("should have UUID {:?}", known.uuid));
    }
    let before = 1 + known.losses;
    let generations = if is_lost { before + 1..=before + starts } else { before..=before };
    if !generations.contains(&listed.generation) {
        return Err(format!("should have generation {generations:?}"));
    }
    // A withheld device stays withheld until a verb releases it.
    let withheld = |allowed: &KeptState| (is_lost || allowed.withheld) && !disk.serves_lost;
    if allowed.iter().all(|allowed| withheld(allowed) != listed.withheld) {
        return Err(format!("should{} be withheld", if listed.withheld { " not" } else { "" }));
    }
    if !allowed.iter().any(|allowed| allowed.matches(listed) && withheld(allowed) == listed.withheld) {
        return Err(format!("should be one of {allowed:?}"));
    }
    if listed.seen != if listed.withheld { 0 } else { listed.addresses.len() } {
        return Err(format!("is found at {} addresses", listed.seen));
    }
    if disk.image.is_some() && disk.image != listed.image {
        return Err(format!("should be image {:?}", disk.image));
    }
    let below = disk.parent.as_ref().map(|of| of.name.as_str());
    if below != listed.below.as_deref() {
        return Err(format!("should lie on {below:?}"));
    }
    Ok(KnownState {
        uuid: Some(listed.uuid.clone()),
        losses: listed.generation - 1,
        limit: listed.limit,
        is_limit_unknown: false,
        // Remember the size only if a verb has set it: otherwise it may change with the device
        // below.
        size: known.size.map(|_| listed.bytes),
        withheld: listed.withheld,
    })
}

/// Returns the settings that a server must keep for a device, given the verbs that were answered.
fn kept_state(world: &World, disk: &Disk) -> KeptState {
    let addresses = disk.all_addresses().iter().map(|place| address_text(world, place)).collect();
    let KnownState { limit, is_limit_unknown, size: bytes, withheld, .. } = disk.known();
    KeptState { addresses, limit, is_limit_unknown, bytes, withheld }
}

/// Checks that clients cannot connect to a withheld device at any of its addresses.
fn check_hidden(disk: &Disk) -> Result<(), String> {
    if !disk.is_withheld() {
        return Ok(());
    }
    for place in disk.all_addresses() {
        if Connection::connect(&place, &disk.name, &mut Rng::new(1)).is_ok() {
            return Err(format!("{}: lost its content, but is served at {place:?}", disk.name));
        }
    }
    Ok(())
}

fn address_text(world: &World, place: &Address) -> String {
    match place {
        Address::Nbd(path) if *path == world.dir().join(server::NBD) => HOME.to_owned(),
        Address::Nbd(path) => format!("nbd unix:{}", path.display()),
        Address::Machine(path) => format!("vhost_user unix:{}", path.display()),
        Address::Block(path) => path.display().to_string(),
    }
}

fn addresses_of(world: &World, listed: &ListedDevice) -> Vec<Address> {
    let place = |text: &String| match text.split_once(" unix:") {
        Some(("nbd", path)) => Address::Nbd(path.into()),
        Some((_, path)) => Address::Machine(path.into()),
        None => Address::Nbd(world.dir().join(server::NBD)),
    };
    listed.addresses.iter().map(place).collect()
}

fn ask(world: &World, method: &str, params: &Value) -> Result<Value, String> {
    control::ask(&world.control(), method, params).map_err(|error| format!("{method} {params}: {error:?}"))
}

/// Returns true if all saved content is in memory. If `waits` is set, waits for it, but not long: content that was
/// saved in groups, or shared objects, can be too large for a memory limit when it is loaded page by page.
pub fn is_loaded(world: &World, waits: bool) -> Result<bool, String> {
    let end = Instant::now() + LOAD_MAX;
    loop {
        let stat = ask(world, "stat", &json!({}))?;
        let mut devices = stat["devices"].as_array().into_iter().flatten();
        let is_loaded = devices.all(|device| device["keep"]["loaded_percent"].is_null());
        if is_loaded || !waits || Instant::now() > end {
            return Ok(is_loaded);
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Returns the devices that a server reports, read right after its start.
fn list_devices(world: &World) -> Result<ListedDevices, String> {
    let list = ask(world, "list", &json!({}))?;
    let stat = ask(world, "stat", &json!({}))?;
    let dump = ask(world, "dump", &json!({}))?;
    let dump: toml::Table =
        dump["toml"].as_str().unwrap_or_default().parse().map_err(|e| format!("dump: {e}"))?;
    let named = |all: &Value| -> BTreeMap<String, Value> {
        let all = all.as_array().into_iter().flatten();
        all.map(|one| (one["name"].as_str().unwrap_or_default().to_owned(), one.clone())).collect()
    };
    let (listed, stats) = (named(&list["devices"]), named(&stat["devices"]));
    let missing = named(&list["missing"]).into_keys().collect();
    let dumped = dump.get("device").and_then(toml::Value::as_array).into_iter().flatten();
    let dumped: HashMap<&str, &toml::Value> =
        dumped.filter_map(|device| Some((device.get("name")?.as_str()?, device))).collect();
    let mut all = BTreeMap::new();
    for (name, row) in listed {
        let (Some(stat), Some(words)) = (stats.get(&name), dumped.get(name.as_str())) else {
            return Err(format!("{name} is listed, but missing in stat or dump"));
        };
        let text = |key: &str| words.get(key).and_then(toml::Value::as_str);
        let exports = words.get("export").and_then(toml::Value::as_array).into_iter().flatten();
        let place = |export: &toml::Value| {
            let at = |key: &str| Some(format!("{key} {}", export.get(key)?.as_str()?));
            at("nbd").or_else(|| at("vhost_user"))
        };
        let mut addresses: BTreeSet<String> = exports.filter_map(place).collect();
        if words.get("publish").is_none() {
            addresses.insert(HOME.to_owned());
        }
        let listed = ListedDevice {
            uuid: stat["uuid"].as_str().unwrap_or_default().to_owned(),
            generation: stat["generation"].as_u64().unwrap_or_default(),
            withheld: row["withheld"] == true,
            adopted: row["adopted"] == true,
            seen: row["exports"].as_array().map_or(0, Vec::len),
            bytes: row["disksize"].as_u64().unwrap_or_default(),
            below: text("base").or_else(|| text("origin")).map(str::to_owned),
            limit: text("mem_limit").and_then(|limit| setup::limit_of(&format!("mem_limit={limit}"))),
            image: text("url").and_then(|url| Some(url.rsplit_once('@')?.1.to_owned())),
            addresses,
        };
        all.insert(name, listed);
    }
    Ok((all, missing))
}
