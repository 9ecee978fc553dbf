//! Runs random verbs, concurrently with clients and other verbs, and reports their effects to the oracles.
//!
//! Owns the choice of verbs and the list of accepted refusals. The rounds and mode `lives` start its threads.

pub mod cli_verbs;
mod create;
mod images;
mod refusals;
mod saved;
pub mod stall;
mod upkeep;

use std::path::PathBuf;
use std::sync::{Arc, PoisonError};

use freestone_testkit::Rng;
use serde_json::{Value, json};

use super::server::control::{self, VerbError};
use super::setup;
use super::transport::Address;
use super::world::interrupted_verb::InterruptedVerb;

use super::watch::{VERB_MAX, WatchedThread};
use super::world::{Disk, Kind, World};
use crate::oracle::{Durability, Oracle, ReadToken, SECTOR_BYTES};

/// Maximum number of devices created by verbs that exist at one time.
const MADE_MAX: usize = 14;
const KIB: u64 = 1 << 10;
const SECTOR: u64 = SECTOR_BYTES as u64;

pub struct VerbThread<'a> {
    pub world: &'a World,
    pub slot: &'a WatchedThread,
    pub rng: Rng,
    /// The last verb had no answer, because the server was killed or ended meanwhile.
    interrupted: bool,
}

/// Runs random verbs until the world stops.
pub fn run(world: &World, slot: &WatchedThread, rng: Rng) {
    let mut verb_thread = VerbThread::new(world, slot, rng);
    while !world.is_stopped() {
        verb_thread.run_random_verb();
        slot.end();
    }
}

fn has_no_volatile_cache(disk: &Disk) -> bool {
    !disk.has_volatile_cache
}

impl<'a> VerbThread<'a> {
    pub fn new(world: &'a World, slot: &'a WatchedThread, rng: Rng) -> Self {
        Self { world, slot, rng, interrupted: false }
    }
}

impl VerbThread<'_> {
    pub fn run_random_verb(&mut self) {
        match self.rng.below(100) {
            0..12 => self.snapshot(),
            12..22 => self.fork(),
            22..34 => self.remove(),
            34..42 => self.rewind_or_reset(),
            42..50 => self.publish(),
            50..53 => self.unpublish(),
            53..60 => self.set(),
            60..66 => self.save_and_restore(),
            66..70 => self.delta(),
            70..76 => self.power_cut(),
            76..80 => self.merge(),
            80..84 => self.create(),
            84..88 => self.upkeep(),
            88..97 => self.images(),
            _ => self.query(),
        }
    }

    /// Runs a verb and judges a refusal. Returns `None` if the verb was refused or had no answer.
    pub fn ask(&mut self, method: &str, params: &Value) -> Option<Value> {
        self.ask_about(method, params, None)
    }

    /// Like [`ask`](Self::ask), but the verb may also fail because the memory limit or the COW device of `disk` is
    /// small.
    fn ask_about(&mut self, method: &str, params: &Value, disk: Option<&Disk>) -> Option<Value> {
        self.slot.begin(format!("{method} {params}"), VERB_MAX);
        let world = self.world;
        let answer = control::ask(&world.control(), method, params);
        self.slot.restart_timer();
        self.interrupted = matches!(answer, Err(VerbError::Ended(_)));
        if !self.interrupted {
            world.completions.add();
        }
        let outcome = match &answer {
            Ok(_) => "ok".to_owned(),
            Err(error) => format!("{error:?}"),
        };
        self.world.note(format!("{method} {params}: {outcome}"));
        match answer {
            Ok(result) => {
                self.world.counts.add("verbs", format!("{method} ok"), 1);
                return Some(result);
            }
            Err(VerbError::Refused { code, errno, message }) => {
                self.world.counts.add("verbs", format!("{method} {errno}"), 1);
                let known = matches!(code, -32000 | -32602);
                // While a server ends, verbs may fail with any error.
                let ends = self.world.is_server_ending();
                // Recompression does not wait until evictions free memory, so it may find no space.
                let tight = |disk: &Disk| disk.is_tight() || method == "recompress" && disk.spills;
                let full = errno == "ENOSPC" && disk.is_some_and(tight)
                    // A snapshot below is lost if its COW device was too small.
                    || errno == "EIO" && disk.is_some_and(Disk::may_fail);
                if !ends && !full && (!known || refusals::reason(method, &errno).is_none()) {
                    self.world.fail(format!(
                        "{method} {params}: failed without an accepted reason: {code} {errno}: {message}"
                    ));
                }
            }
            Err(VerbError::Ended(why)) if !self.world.is_server_ending() => {
                self.world.fail(format!("{method} {params}: the server ended the connection: {why}"));
            }
            Err(VerbError::Ended(_)) => {}
            Err(VerbError::Malformed(why)) => self.world.fail(format!("{method} {params}: {why}")),
        }
        None
    }

    fn choose(&mut self, fits: impl Fn(&Disk) -> bool) -> Option<Arc<Disk>> {
        let disks = self.world.disks(fits);
        let at = self.rng.below(disks.len() as u64) as usize;
        disks.get(at).cloned()
    }

    fn is_full(&self) -> bool {
        self.world.disks(|disk| !disk.from_start).len() >= MADE_MAX
    }

    fn name(&self, letter: char) -> String {
        format!("{letter}-{}", self.world.next_number())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.world.dir().join(name)
    }

    /// Adds a device that a verb created to the world, and often publishes it if it is not published yet.
    fn add_created(&mut self, disk: Disk) {
        let disk = self.world.add(disk);
        if disk.addresses().is_empty() && self.rng.chance(80) {
            self.publish_one(&disk);
        }
    }

    /// Adds devices that a verb created. If the verb was cut off, records that it may have created them.
    fn add_all_created(&mut self, disks: Vec<Disk>) {
        if self.interrupted {
            return self.world.add_interrupted(InterruptedVerb::Creates(disks));
        }
        for disk in disks {
            self.add_created(disk);
        }
    }

    fn publish_one(&mut self, disk: &Arc<Disk>) {
        let (mut params, mut places) = (json!({ "name": disk.name }), Vec::new());
        // Templates can only be published to NBD clients.
        let which = if disk.kind == Kind::Template { 0 } else { self.rng.below(6) };
        if matches!(which, 0..2 | 4) {
            let at = self.path(&format!("p{}", self.world.next_number()));
            params["nbd"] = json!(format!("unix:{}", at.display()));
            places.push(Address::Nbd(at));
        }
        if matches!(which, 2..=4) || which == 5 && !self.world.has_ublk {
            let at = self.path(&format!("p{}", self.world.next_number()));
            params["vhost_user"] = json!(format!("unix:{}", at.display()));
            places.push(Address::Machine(at));
        }
        if which >= 4 && self.world.has_ublk {
            params["ublk"] = json!(true);
        }
        let _publishing_guard = disk.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(answer) = self.ask("publish", &params) {
            places.extend(answer["ublk"].as_str().map(|path| Address::Block(path.into())));
            for place in places {
                disk.publish(place);
            }
            disk.update_known(|known| known.withheld = false);
        } else if self.interrupted {
            self.world.add_interrupted(InterruptedVerb::Publishes(Arc::clone(disk), places));
        }
    }

    /// Releases a withheld device (not served because its content was lost), so that it is served again.
    fn show_lost(&mut self) {
        let Some(disk) = self.choose(|disk| disk.is_withheld() && !disk.is_merging()) else { return };
        let _publishing_guard = disk.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        if !disk.is_withheld() {
            return;
        }
        if self.ask("publish", &json!({ "name": disk.name })).is_some() {
            disk.update_known(|known| known.withheld = false);
        } else if self.interrupted {
            self.world.add_interrupted(InterruptedVerb::Publishes(Arc::clone(&disk), Vec::new()));
        }
    }

    fn remove(&mut self) {
        let Some(disk) = self.choose(|disk| !disk.from_start) else { return };
        let force = self.rng.chance(75);
        // A kill of the server waits for the removal, since a removed COW device must not be opened again. A server
        // with a state directory ensures that itself.
        let world = self.world;
        let _no_kill_guard =
            (!world.has_state).then(|| world.no_kill.read().unwrap_or_else(PoisonError::into_inner));
        disk.begin_disconnect();
        let done = self.ask("remove", &json!({ "name": disk.name, "force": force })).is_some();
        if done {
            self.world.forget(&disk);
        } else if self.interrupted {
            self.world.add_interrupted(InterruptedVerb::Removes(Arc::clone(&disk)));
        }
        disk.end_disconnect();
    }

    fn rewind_or_reset(&mut self) {
        let Some(disk) = self.choose(|disk| matches!(disk.kind, Kind::Fork | Kind::Ram | Kind::Null)) else {
            return;
        };
        let verb = if disk.kind == Kind::Fork && self.rng.chance(70) { "rewind" } else { "reset" };
        let force = self.rng.chance(75);
        let below = match &disk.parent {
            Some(base) if disk.kind == Kind::Fork => {
                // The fork may have grown beyond its base, so the rewound content is longer.
                let mut below = base.oracle().snapshot(&disk.name, Durability::Completed);
                below.grow(disk.oracle().size());
                below
            }
            _ => Oracle::new(&disk.name, disk.oracle().size(), Durability::Completed),
        };
        let since = disk.begin_replacement();
        let done = self.ask(verb, &json!({ "name": disk.name, "force": force })).is_some();
        self.end_replacement(&disk, done, since, &below);
    }

    fn publish(&mut self) {
        if self.world.has_state && self.rng.chance(50) {
            return self.show_lost();
        }
        let Some(disk) = self.choose(|disk| disk.addresses().len() < 3 && !disk.is_merging()) else { return };
        self.publish_one(&disk);
    }

    fn unpublish(&mut self) {
        let lost = self.rng.chance(30);
        let is_seen = |disk: &Disk| !disk.addresses().is_empty() || lost && disk.is_withheld();
        let Some(disk) = self.choose(is_seen) else { return };
        let force = self.rng.chance(60);
        disk.begin_disconnect();
        disk.block_clients();
        let publishing_guard = disk.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        if self.ask("unpublish", &json!({ "name": disk.name, "force": force })).is_some() {
            disk.unpublish();
        } else if self.interrupted {
            self.world.add_interrupted(InterruptedVerb::Unpublishes(Arc::clone(&disk)));
        }
        drop(publishing_guard);
        disk.allow_clients();
        disk.end_disconnect();
        if disk.addresses().is_empty() && !disk.is_merging() && !self.world.is_server_ending() {
            self.publish_one(&disk);
        }
    }

    fn set(&mut self) {
        let Some(disk) = self.choose(|disk| matches!(disk.kind, Kind::Ram | Kind::Fork | Kind::Null)) else {
            return;
        };
        let mut attrs = json!({});
        // If two verbs set limits at once, the torture would not know the last one, which the server must keep.
        let world = self.world;
        let _publishing_guard =
            world.has_state.then(|| disk.publishing.lock().unwrap_or_else(PoisonError::into_inner));
        let (mut limit, mut size) = (None, None);
        if disk.faults && self.rng.chance(60) {
            let rules = if self.rng.chance(40) { "none".into() } else { setup::faults(&mut self.rng) };
            attrs["faults"] = json!(rules);
        } else if disk.kind == Kind::Null {
            return;
        } else if self.rng.chance(40) {
            let kib = (disk.oracle().size() * SECTOR / KIB).next_multiple_of(4) + 4 * self.rng.below(64);
            // Grow the oracle first: a client may see the new size before the answer to the verb arrives.
            disk.oracle().grow(kib * KIB / SECTOR);
            attrs["disksize"] = json!(format!("{kib}K"));
            size = Some(kib * KIB);
        } else {
            let kib = if disk.spills { 256 << self.rng.below(4) } else { 64 << self.rng.below(6) };
            if !disk.spills {
                // All devices of a family (a base and its forks, which share memory) are subject to the limit.
                let top = root(&disk).unwrap_or_else(|| Arc::clone(&disk));
                for other in self.world.disks(|_| true) {
                    let theirs = root(&other).unwrap_or_else(|| Arc::clone(&other));
                    if Arc::ptr_eq(&top, &theirs) {
                        other.set_tight(true);
                    }
                }
            }
            attrs["mem_limit"] = json!(format!("{kib}K"));
            limit = Some(kib * KIB);
        }
        if self.ask("set", &json!({ "name": disk.name, "attrs": attrs })).is_some() {
            disk.update_known(|known| {
                (known.limit, known.size) = (limit.or(known.limit), size.or(known.size));
            });
        } else if self.interrupted {
            let flight = match (limit, size) {
                (Some(bytes), _) => InterruptedVerb::Limits(Arc::clone(&disk), bytes),
                (_, Some(bytes)) => InterruptedVerb::Grows(Arc::clone(&disk), bytes),
                _ => return,
            };
            world.add_interrupted(flight);
        }
    }

    /// Reports to the oracle that a verb replaced the content of the device by that of `new`, unless `done` is false.
    fn end_replacement(&self, disk: &Disk, done: bool, since: ReadToken, new: &Oracle) {
        let judged = disk.end_replacement(|oracle| {
            if done {
                return oracle.replace_content(since, new, false);
            }
            oracle.abandon(since);
            if self.interrupted {
                oracle.replace_doubtfully(new);
            }
        });
        if let Err(why) = judged
            && !self.world.is_server_ending()
        {
            self.world.fail(format!("{why}\n  {}", disk.describe()));
        }
    }

    fn power_cut(&mut self) {
        let Some(disk) = self.choose(|disk| disk.has_volatile_cache) else { return };
        disk.block_clients();
        disk.begin_disconnect();
        let done = self.ask_about("power-cut", &json!({ "name": disk.name }), Some(&disk)).is_some();
        // Wait until all clients have noticed the cut, and have ended their requests in the oracle.
        self.slot.begin(format!("{}: its clients leave", disk.name), VERB_MAX);
        let publishing_guard = disk.gate.write().unwrap_or_else(PoisonError::into_inner);
        if done || self.interrupted || disk.is_tight() {
            // A cut fails halfway if unflushed data finds no space, and a cut without an answer may have happened.
            disk.oracle().crash();
        }
        disk.end_disconnect();
        disk.allow_clients();
        drop(publishing_guard);
    }

    fn merge(&mut self) {
        // Exclude snapshots with an earlier merge: it may have finished, and whether another one would start is
        // unknown.
        let stored = |disk: &Disk| {
            disk.kind == Kind::Cow && disk.device_args.is_some() && !disk.from_start && !disk.merged_before
        };
        let Some(snapshot) = self.choose(stored) else { return };
        let Some(origin) = snapshot.parent.clone() else { return };
        // During a merge both devices show the same content, so clients use only the origin.
        snapshot.block_clients();
        self.slot.begin(format!("{}: its clients leave", snapshot.name), VERB_MAX);
        drop(snapshot.gate.write().unwrap_or_else(PoisonError::into_inner));
        let _publishing_guard = snapshot.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        let below = snapshot.oracle().snapshot(&origin.name, Durability::Completed);
        let again = snapshot.is_merging();
        let params = json!({ "name": snapshot.name, "into_origin": true, "force": true, "background": true });
        // Prevent a kill until the answer arrives: the torture must know whether the merge has started.
        let world = self.world;
        let _no_kill_guard = world.no_kill.read().unwrap_or_else(PoisonError::into_inner);
        let since = origin.begin_replacement();
        let begun = self.ask("merge", &params).is_some() && !again;
        if begun {
            snapshot.set_merging();
        } else {
            snapshot.allow_clients();
        }
        self.end_replacement(&origin, begun, since, &below);
    }

    fn query(&mut self) {
        let there = self.world.disks(|disk| disk.from_start);
        match self.rng.below(4) {
            0 => {
                let Some(list) = self.ask("list", &json!({})) else { return };
                let names: Vec<_> =
                    list["devices"].as_array().into_iter().flatten().map(|row| &row["name"]).collect();
                if let Some(disk) = there.iter().find(|disk| !names.contains(&&json!(disk.name))) {
                    self.world.fail(format!("list: {} is missing in {list}", disk.name));
                }
            }
            1 => drop(self.ask("stat", &json!({}))),
            n => {
                let Some(disk) = self.choose(|_| true) else { return };
                let verb = if n == 2 { "stat" } else { "get" };
                let answer = self.ask(verb, &json!({ "name": disk.name }));
                if let Some(uuid) = answer.as_ref().and_then(|answer| answer["uuid"].as_str()) {
                    let known = disk.known().uuid;
                    if known.as_ref().is_some_and(|known| known != uuid) {
                        self.world.fail(format!("{}: has UUID {uuid}, had {known:?}", disk.name));
                    }
                    disk.update_known(|known| known.uuid = Some(uuid.to_owned()));
                }
            }
        }
    }
}

/// Returns the device at the bottom of the stack, or `None` if the device lies on no other.
fn root(disk: &Arc<Disk>) -> Option<Arc<Disk>> {
    let mut at = disk.parent.clone()?;
    while let Some(of) = at.parent.clone() {
        at = of;
    }
    Some(at)
}
