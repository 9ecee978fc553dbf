//! What must be there when a server is started on the state of the last one.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use freestone_testkit::Rng;
use serde_json::{Value, json};

use super::super::control;
use super::super::flight::Flight;
use super::super::link::{Link, Place};
use super::super::plan;
use super::super::server;
use super::super::world::{Disk, Kind, Known, World};
use crate::oracle::SECTOR_BYTES;

/// Instead of a place: the addresses of the server itself.
const HOME: &str = "home";

/// What a server says of a device.
#[derive(Debug)]
struct There {
    uuid: String,
    generation: u64,
    withheld: bool,
    /// How many places clients find it at.
    seen: usize,
    bytes: u64,
    below: Option<String>,
    limit: Option<u64>,
    /// Which image it is.
    image: Option<String>,
    /// Where it is to be seen.
    places: BTreeSet<String>,
}

/// What of a device verbs change, and keep.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Kept {
    places: BTreeSet<String>,
    limit: Option<u64>,
    /// Where that is known.
    bytes: Option<u64>,
}

/// Devices by name, and the names of those that could not be made again.
type All = (BTreeMap<String, There>, BTreeSet<String>);

/// The first server of all has what it was told.
pub fn first(world: &World) -> Result<(), String> {
    let (there, _) = look(world)?;
    for disk in world.disks(|_| true) {
        let Some(there) = there.get(&disk.name) else { return Err(format!("{} is not there", disk.name)) };
        if (there.generation, there.withheld) != (1, false) {
            return Err(format!("{} is new: {there:?}", disk.name));
        }
        disk.learn(|known| known.uuid = Some(there.uuid.clone()));
    }
    Ok(())
}

/// Compares what is there with what must be there, and gives the world the devices as they are now.
/// `killed`: the last server had no chance to write anything. So many servers were `starts`ed since.
pub fn judge(world: &World, killed: bool, starts: u64) -> Result<(), String> {
    let (mut there, missing) = look(world)?;
    let mut changes = HashMap::new();
    for flight in world.take_flights() {
        land(world, flight, &there, &missing, &mut changes)?;
    }
    let mut missed = world.missing();
    for lost in &missed {
        if !missing.contains(&lost.name) {
            return Err(format!("{} was missing, and is so no longer", lost.name));
        }
    }
    let disks = world.disks(|_| true);
    let half_merged: BTreeSet<String> = disks
        .iter()
        .filter(|disk| disk.is_merging())
        .filter_map(|disk| Some(disk.of.as_ref()?.name.clone()))
        .collect();
    let mut now: Vec<Arc<Disk>> = Vec::new();
    let mut vague: Vec<Arc<Disk>> = Vec::new();
    // In memory alone, with what stands on it.
    let mut lost: BTreeSet<&str> = BTreeSet::new();
    for disk in &disks {
        let name = disk.name.as_str();
        let is_in = |disks: &[Arc<Disk>], of: &Disk| disks.iter().any(|disk| disk.name == of.name);
        // Of what is half merged nobody knows what a new snapshot shows.
        let is_new = disk.kind == Kind::Cow && !disk.kept;
        let of = disk.of.as_ref();
        let found = there.remove(name);
        // A snapshot in memory outlives what it was taken of, but words cannot say what it is then.
        let is_gone = |of: &Arc<Disk>| of.is_removed() || missed.iter().any(|disk| disk.name == of.name);
        // With its content it comes alone.
        let has_content = disk.keeps && (!killed || disk.saved.is_some());
        if of.is_some_and(is_gone) && !has_content {
            if found.is_some() || !missing.contains(name) {
                return Err(format!(
                    "{name} is not missing, as what it stands on is gone\n  {}",
                    disk.story()
                ));
            }
            world.miss(disk);
            missed.push(Arc::clone(disk));
            world.counts.add("restarts", "devices missing", 1);
            continue;
        }
        if of.is_some_and(|of| is_in(&vague, of) || is_new && half_merged.contains(&of.name)) {
            vague.push(Arc::clone(disk));
            continue;
        }
        let is_own = disk.is_lost && (killed || !disk.keeps);
        if is_own || of.is_some_and(|of| lost.contains(of.name.as_str())) {
            lost.insert(name);
        }
        let is_lost = lost.contains(name);
        let Some(found) = found else {
            return Err(format!("{name} is not there again\n  {}", disk.story()));
        };
        let allowed = changes.remove(name).unwrap_or_else(|| vec![kept(world, disk)]);
        let known = checked(disk, &found, &allowed, is_lost, starts)
            .map_err(|why| format!("{name}: {why}\n  it is {found:?}\n  {}", disk.story()))?;
        world.counts.add("restarts", if known.withheld { "devices withheld" } else { "devices seen" }, 1);
        if has_content {
            let what = if killed { "devices with an older content" } else { "devices with their content" };
            world.counts.add("restarts", what, 1);
        }
        let places = places_of(world, &found);
        let alone = of.filter(|of| is_gone(of)).cloned();
        let of = of.and_then(|of| now.iter().find(|disk| disk.name == of.name)).cloned().or(alone);
        now.push(Arc::new(disk.again(killed, of, places, known, Some(found.bytes / SECTOR_BYTES as u64))));
    }
    for (name, found) in &there {
        if plan::is_taken(name) && found.seen > 0 {
            return Err(format!("{name}, where copies go, is seen"));
        }
    }
    let vague_names: BTreeSet<&str> = vague.iter().map(|disk| disk.name.as_str()).collect();
    let unknown = |name: &&String| {
        !plan::is_taken(name)
            && !vague_names.contains(name.as_str())
            && missed.iter().all(|disk| disk.name != **name)
    };
    if let Some(name) = there.keys().chain(&missing).find(unknown) {
        return Err(format!("{name} is there or missing, and nobody knows of it"));
    }
    for disk in &now {
        nobody_sees(disk)?;
    }
    world.set_disks(now);
    forget(world, &vague)
}

/// Nobody looks at these, whether they are there or missing.
fn forget(world: &World, vague: &[Arc<Disk>]) -> Result<(), String> {
    for disk in vague.iter().rev() {
        ask(world, "remove", &json!({ "name": disk.name, "force": true }))?;
    }
    Ok(())
}

/// A verb that had no answer was done, or was not.
fn land(
    world: &World,
    flight: Flight,
    there: &BTreeMap<String, There>,
    missing: &BTreeSet<String>,
    changes: &mut HashMap<String, Vec<Kept>>,
) -> Result<(), String> {
    let verb = flight.verb();
    let is_there = |disk: &Disk| there.contains_key(&disk.name) || missing.contains(&disk.name);
    let mut may = |disk: &Arc<Disk>, change: &dyn Fn(&mut Kept)| {
        let allowed = changes.entry(disk.name.clone()).or_insert_with(|| vec![kept(world, disk)]);
        let before = allowed.len();
        for at in 0..before {
            let mut then = allowed[at].clone();
            change(&mut then);
            allowed.push(then);
        }
        // As it is now, where it is at all.
        let Some(now) = there.get(&disk.name) else { return false };
        allowed[..before].iter().all(|kept| !kept.is(now))
    };
    let was_done = match flight {
        Flight::Makes(disks) => {
            let made = disks.iter().filter(|disk| is_there(disk)).count();
            if made > 0 && made < disks.len() {
                let names: Vec<_> = disks.iter().map(|disk| (&disk.name, is_there(disk))).collect();
                return Err(format!("of one verb that was cut off some is there: {names:?}"));
            }
            if made > 0 {
                for disk in disks {
                    world.add(disk);
                }
            }
            made > 0
        }
        Flight::Removes(disk) => {
            let is_gone = !is_there(&disk);
            if is_gone {
                world.forget(&disk);
            }
            is_gone
        }
        Flight::Shows(disk, places) => {
            let places: Vec<String> = places.iter().map(|place| text(world, place)).collect();
            may(&disk, &|kept| kept.places.extend(places.iter().cloned()))
        }
        Flight::Hides(disk) => may(&disk, &|kept| kept.places.clear()),
        Flight::Limits(disk, bytes) => may(&disk, &|kept| kept.limit = Some(bytes)),
        Flight::Grows(disk, bytes) => may(&disk, &|kept| kept.bytes = Some(bytes)),
    };
    let outcome = if was_done { "done" } else { "not done" };
    world.counts.add("restarts", format!("verbs cut off {verb}: {outcome}"), 1);
    Ok(())
}

impl Kept {
    fn is(&self, there: &There) -> bool {
        self.places == there.places
            && self.limit == there.limit
            && self.bytes.is_none_or(|bytes| bytes == there.bytes)
    }
}

/// What is known of a device, once all is as it must be.
fn checked(
    disk: &Disk,
    there: &There,
    allowed: &[Kept],
    is_lost: bool,
    starts: u64,
) -> Result<Known, String> {
    let known = disk.known();
    if known.uuid.as_ref().is_some_and(|uuid| *uuid != there.uuid) {
        return Err(format!("had the UUID {:?}", known.uuid));
    }
    let before = 1 + known.losses;
    let generations = if is_lost { before + 1..=before + starts } else { before..=before };
    if !generations.contains(&there.generation) {
        return Err(format!("should have a generation of {generations:?}"));
    }
    // What was withheld stays so until somebody has said that it may be seen.
    let withheld = (is_lost || known.withheld) && !disk.serves_lost;
    if there.withheld != withheld {
        return Err(format!("should{} be withheld", if withheld { "" } else { " not" }));
    }
    if !allowed.iter().any(|kept| kept.is(there)) {
        return Err(format!("should be one of {allowed:?}"));
    }
    if there.seen != if withheld { 0 } else { there.places.len() } {
        return Err(format!("is seen at {} places", there.seen));
    }
    if disk.image.is_some() && disk.image != there.image {
        return Err(format!("should be image {:?}", disk.image));
    }
    let below = disk.of.as_ref().map(|of| of.name.as_str());
    if below != there.below.as_deref() {
        return Err(format!("should stand on {below:?}"));
    }
    Ok(Known {
        uuid: Some(there.uuid.clone()),
        losses: there.generation - 1,
        limit: there.limit,
        // That of what it stands on may change.
        size: known.size.map(|_| there.bytes),
        withheld,
    })
}

/// What of a device is kept, as far as all was answered.
fn kept(world: &World, disk: &Disk) -> Kept {
    let known = disk.known();
    let places = disk.places().iter().map(|place| text(world, place)).collect();
    Kept { places, limit: known.limit, bytes: known.size }
}

/// Where a device is withheld from, no client finds it.
fn nobody_sees(disk: &Disk) -> Result<(), String> {
    if !disk.is_withheld() {
        return Ok(());
    }
    for place in disk.places() {
        if Link::connect(&place, &disk.name, &mut Rng::new(1)).is_ok() {
            return Err(format!("{}: has lost its content, and is served at {place:?}", disk.name));
        }
    }
    Ok(())
}

fn text(world: &World, place: &Place) -> String {
    match place {
        Place::Nbd(path) if *path == world.dir().join(server::NBD) => HOME.to_owned(),
        Place::Nbd(path) => format!("nbd unix:{}", path.display()),
        Place::Machine(path) => format!("vhost_user unix:{}", path.display()),
        Place::Block(path) => path.display().to_string(),
    }
}

fn places_of(world: &World, there: &There) -> Vec<Place> {
    let place = |text: &String| match text.split_once(" unix:") {
        Some(("nbd", path)) => Place::Nbd(path.into()),
        Some((_, path)) => Place::Machine(path.into()),
        None => Place::Nbd(world.dir().join(server::NBD)),
    };
    there.places.iter().map(place).collect()
}

fn ask(world: &World, method: &str, params: &Value) -> Result<Value, String> {
    control::ask(&world.control(), method, params).map_err(|no| format!("{method} {params}: {no:?}"))
}

/// What a server that has just been started says that it has.
fn look(world: &World) -> Result<All, String> {
    let list = ask(world, "list", &json!({}))?;
    let stat = ask(world, "stat", &json!({}))?;
    let dump = ask(world, "dump", &json!({}))?;
    let dump: toml::Table =
        dump["toml"].as_str().unwrap_or_default().parse().map_err(|e| format!("dump: {e}"))?;
    let named = |all: &Value| -> BTreeMap<String, Value> {
        let all = all.as_array().into_iter().flatten();
        all.map(|one| (one["name"].as_str().unwrap_or_default().to_owned(), one.clone())).collect()
    };
    let (listed, told) = (named(&list["devices"]), named(&stat["devices"]));
    let missing = named(&list["missing"]).into_keys().collect();
    let dumped = dump.get("device").and_then(toml::Value::as_array).into_iter().flatten();
    let dumped: HashMap<&str, &toml::Value> =
        dumped.filter_map(|device| Some((device.get("name")?.as_str()?, device))).collect();
    let mut all = BTreeMap::new();
    for (name, row) in listed {
        let (Some(stat), Some(words)) = (told.get(&name), dumped.get(name.as_str())) else {
            return Err(format!("{name} is listed, but not told by stat and dump"));
        };
        let text = |key: &str| words.get(key).and_then(toml::Value::as_str);
        let exports = words.get("export").and_then(toml::Value::as_array).into_iter().flatten();
        let place = |export: &toml::Value| {
            let at = |key: &str| Some(format!("{key} {}", export.get(key)?.as_str()?));
            at("nbd").or_else(|| at("vhost_user"))
        };
        let mut places: BTreeSet<String> = exports.filter_map(place).collect();
        if words.get("publish").is_none() {
            places.insert(HOME.to_owned());
        }
        let there = There {
            uuid: stat["uuid"].as_str().unwrap_or_default().to_owned(),
            generation: stat["generation"].as_u64().unwrap_or_default(),
            withheld: row["withheld"] == true,
            seen: row["exports"].as_array().map_or(0, Vec::len),
            bytes: row["disksize"].as_u64().unwrap_or_default(),
            below: text("base").or_else(|| text("origin")).map(str::to_owned),
            limit: text("mem_limit").and_then(|limit| plan::limit_of(&format!("mem_limit={limit}"))),
            image: text("url").and_then(|url| Some(url.rsplit_once('@')?.1.to_owned())),
            places,
        };
        all.insert(name, there);
    }
    Ok((all, missing))
}
