//! Verbs at random, beside the clients and one another; what they change is told to the oracles.

mod images;
mod saved;
mod upkeep;

use std::path::PathBuf;
use std::sync::{Arc, PoisonError};

use freestone_testkit::Rng;
use serde_json::{Value, json};

use super::control::{self, No};
use super::flight::Flight;
use super::link::Place;
use super::plan;
use super::refusals;
use super::watch::{Slot, VERB_MAX};
use super::world::{Disk, Kind, World};
use crate::oracle::{Durability, Oracle, ReadToken, SECTOR_BYTES};

/// Devices that verbs made are no more than these.
const MADE_MAX: usize = 14;
const KIB: u64 = 1 << 10;
const SECTOR: u64 = SECTOR_BYTES as u64;

/// A thread that asks for verbs.
pub struct Hand<'a> {
    pub world: &'a World,
    pub slot: &'a Slot,
    pub rng: Rng,
    /// The server was killed or ended before it answered the last verb.
    cut_off: bool,
}

/// Runs until the world stops.
pub fn run(world: &World, slot: &Slot, rng: Rng) {
    let mut hand = Hand::new(world, slot, rng);
    while !world.stopped() {
        hand.one();
        slot.end();
    }
}

fn is_bare(disk: &Disk) -> bool {
    !disk.cut
}

impl<'a> Hand<'a> {
    pub fn new(world: &'a World, slot: &'a Slot, rng: Rng) -> Self {
        Self { world, slot, rng, cut_off: false }
    }
}

impl Hand<'_> {
    /// Some verb.
    pub fn one(&mut self) {
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
            _ => self.look(),
        }
    }

    /// Asks, and judges a refusal. `None` where there is no result.
    pub fn ask(&mut self, method: &str, params: &Value) -> Option<Value> {
        self.ask_of(method, params, None)
    }

    /// The same of a verb that may fail because of this device: its limit or its store is small.
    fn ask_of(&mut self, method: &str, params: &Value, disk: Option<&Disk>) -> Option<Value> {
        self.slot.begin(format!("{method} {params}"), VERB_MAX);
        let world = self.world;
        let answer = control::ask(&world.control(), method, params);
        self.slot.moved();
        self.cut_off = matches!(answer, Err(No::Ended(_)));
        if !self.cut_off {
            world.answers.add();
        }
        let outcome = match &answer {
            Ok(_) => "ok".to_owned(),
            Err(no) => format!("{no:?}"),
        };
        self.world.note(format!("{method} {params}: {outcome}"));
        match answer {
            Ok(result) => {
                self.world.counts.add("verbs", format!("{method} ok"), 1);
                return Some(result);
            }
            Err(No::Refused { code, errno, message }) => {
                self.world.counts.add("verbs", format!("{method} {errno}"), 1);
                let known = matches!(code, -32000 | -32602);
                // Each verb has an error of its own for a server that ends.
                let ends = self.world.dying();
                // Recompression does not wait until something is spilled.
                let tight = |disk: &Disk| disk.is_tight() || method == "recompress" && disk.spills;
                let full = errno == "ENOSPC" && disk.is_some_and(tight)
                    // What it stands on is lost where its store of copies was too small.
                    || errno == "EIO" && disk.is_some_and(Disk::may_fail);
                if !ends && !full && (!known || refusals::reason(method, &errno).is_none()) {
                    self.world.fail(format!("{method} {params}: no reason for {code} {errno}: {message}"));
                }
            }
            Err(No::Ended(why)) if !self.world.dying() => {
                self.world.fail(format!("{method} {params}: the server ended the connection: {why}"));
            }
            Err(No::Ended(_)) => {}
            Err(No::Wrong(why)) => self.world.fail(format!("{method} {params}: {why}")),
        }
        None
    }

    fn some(&mut self, fits: impl Fn(&Disk) -> bool) -> Option<Arc<Disk>> {
        let disks = self.world.disks(fits);
        let at = self.rng.below(disks.len() as u64) as usize;
        disks.get(at).cloned()
    }

    fn is_full(&self) -> bool {
        self.world.disks(|disk| !disk.from_start).len() >= MADE_MAX
    }

    fn name(&self, letter: char) -> String {
        format!("{letter}-{}", self.world.number())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.world.dir().join(name)
    }

    /// A new device that a verb made; it is published where it is not yet.
    fn made(&mut self, disk: Disk) {
        let disk = self.world.add(disk);
        if disk.addresses().is_empty() && self.rng.chance(80) {
            self.publish_one(&disk);
        }
    }

    /// New devices that a verb made, or would have made.
    fn made_all(&mut self, disks: Vec<Disk>) {
        if self.cut_off {
            return self.world.in_flight(Flight::Makes(disks));
        }
        for disk in disks {
            self.made(disk);
        }
    }

    fn publish_one(&mut self, disk: &Arc<Disk>) {
        let (mut params, mut places) = (json!({ "name": disk.name }), Vec::new());
        // A template is shown to NBD clients only.
        let which = if disk.kind == Kind::Template { 0 } else { self.rng.below(6) };
        if matches!(which, 0..2 | 4) {
            let at = self.path(&format!("p{}", self.world.number()));
            params["nbd"] = json!(format!("unix:{}", at.display()));
            places.push(Place::Nbd(at));
        }
        if matches!(which, 2..=4) || which == 5 && !self.world.has_ublk {
            let at = self.path(&format!("p{}", self.world.number()));
            params["vhost_user"] = json!(format!("unix:{}", at.display()));
            places.push(Place::Machine(at));
        }
        if which >= 4 && self.world.has_ublk {
            params["ublk"] = json!(true);
        }
        let _alone = disk.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(told) = self.ask("publish", &params) {
            places.extend(told["ublk"].as_str().map(|path| Place::Block(path.into())));
            for place in places {
                disk.publish(place);
            }
            disk.learn(|known| known.withheld = false);
        } else if self.cut_off {
            self.world.in_flight(Flight::Shows(Arc::clone(disk), places));
        }
    }

    /// Somebody says that a device may be seen, though its content was lost.
    fn show_lost(&mut self) {
        let Some(disk) = self.some(|disk| disk.is_withheld() && !disk.is_merging()) else { return };
        let _alone = disk.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        if !disk.is_withheld() {
            return;
        }
        if self.ask("publish", &json!({ "name": disk.name })).is_some() {
            disk.learn(|known| known.withheld = false);
        }
    }

    fn snapshot(&mut self) {
        let origins = |disk: &Disk| matches!(disk.kind, Kind::Ram | Kind::Fork | Kind::File) && is_bare(disk);
        let Some(origin) = self.some(origins) else { return };
        if self.is_full()
            || self.world.disks(|d| d.of.as_ref().is_some_and(|of| Arc::ptr_eq(of, &origin))).len() > 4
        {
            return;
        }
        let mut all = vec![origin];
        if self.rng.chance(25)
            && let Some(other) =
                self.some(|disk| matches!(disk.kind, Kind::Ram | Kind::Fork) && is_bare(disk))
            && !Arc::ptr_eq(&all[0], &other)
        {
            all.push(other);
        }
        let mut new = Vec::new();
        for origin in &all {
            let name = self.name('s');
            let mut asked = json!({ "origin": origin.name, "name": name });
            let mut disk =
                Disk::new(&name, Kind::Frozen, Oracle::new(&name, 0, Durability::Answered), Vec::new());
            if origin.kind == Kind::File {
                disk = self.cow(&name, origin, &mut asked, disk);
            } else if origin.keeps && self.rng.chance(60) {
                asked["keep"] = json!(true);
                disk.keeps = true;
            }
            disk.fails(origin.may_fail() || disk.may_fail());
            disk.of = Some(Arc::clone(origin));
            disk.spills = origin.spills;
            disk.block = origin.block;
            new.push((asked, disk));
        }
        let since: Vec<ReadToken> = all.iter().map(|origin| origin.oracle().begin_read()).collect();
        let asked: Vec<Value> = new.iter().map(|(asked, _)| asked.clone()).collect();
        // It is flushed first.
        let fails = all.iter().find(|origin| origin.may_fail()).map(Arc::as_ref);
        let done = self.ask_of("snapshot", &json!({ "snapshots": asked }), fails).is_some();
        let mut made = Vec::new();
        for ((origin, since), (asked, mut disk)) in all.iter().zip(since).zip(new) {
            if !done && !self.cut_off {
                origin.oracle().abandon(since);
                continue;
            }
            let oracle = origin.taken(since, &disk.name);
            disk.oracle = std::sync::Mutex::new(oracle);
            disk.made_by = asked.to_string();
            made.push(disk);
        }
        self.made_all(made);
    }

    /// A snapshot of a file: with a store in memory, in a file, or in a file that is too small.
    fn cow(&mut self, name: &str, origin: &Disk, asked: &mut Value, disk: Disk) -> Disk {
        let chunk = format!("{}K", 4 << self.rng.below(5));
        asked["chunk_size"] = json!(chunk);
        if self.rng.chance(30) {
            return Disk { kind: Kind::Cow, writable: false, ..disk };
        }
        let small = self.rng.chance(15);
        let store = ["P", "PO", "N"][self.rng.below(3) as usize];
        let readonly = self.rng.chance(30);
        let size = if small { "256K" } else { plan::ROOMY_COW };
        asked["cow"] = json!(format!("./{name}.cow"));
        asked["cow_size"] = json!(size);
        asked["store"] = json!(store);
        asked["readonly"] = json!(readonly);
        // A transient store is worth nothing to the next server. One that was too small is not asked
        // for again where nobody but words says what there is.
        let is_lost = store == "N";
        let kept = !is_lost && (!small || self.world.has_state);
        let words = (kept && !small).then(|| {
            let origin = &origin.name;
            format!("{name}=snapshot,origin={origin},cow=./{name}.cow,store={store},readonly={readonly}")
        });
        disk.fails(small);
        disk.tight(small);
        Disk { kind: Kind::Cow, writable: !readonly, kept, is_lost, words, ..disk }
    }

    fn fork(&mut self) {
        let bases = |disk: &Disk| match disk.kind {
            Kind::Base | Kind::Image | Kind::Frozen => true,
            // One that is merged shows what its origin shows.
            Kind::Cow => !disk.writable && !disk.is_merging(),
            _ => false,
        };
        let Some(base) = self.some(bases) else { return };
        if self.is_full() {
            return;
        }
        let template = self.rng.chance(15);
        let count = if template { 1 } else { 1 + self.rng.below(2) };
        let own = self.rng.chance(30);
        let name = self.name(if template { 't' } else { 'k' });
        let mut asked = json!({ "base": base.name, "name": name });
        let own = own.then(|| 64 << self.rng.below(4));
        if let Some(limit) = own {
            asked["mem_limit"] = json!(format!("{limit}K"));
        }
        let serves_lost = self.world.has_state && self.rng.chance(40);
        if serves_lost {
            asked["on_lost"] = json!("empty");
        }
        let may_keep = !template && (matches!(base.kind, Kind::Base | Kind::Image) || base.keeps);
        let keeps = self.world.has_state && may_keep && self.rng.chance(50);
        if keeps {
            asked["keep"] = json!(true);
        }
        if template {
            asked["template"] = json!(true);
        }
        if count > 1 {
            asked["count"] = json!(count);
        }
        let at = self.rng.chance(70).then(|| self.path(&format!("p{}", self.world.number())));
        if let Some(at) = &at {
            asked["nbd"] = json!(format!("unix:{}", at.display()));
        }
        // With it the devices are there, whoever made them.
        if self.rng.chance(20) {
            asked["if_absent"] = json!(true);
        }
        if self.ask("fork", &asked).is_none() && !self.cut_off {
            return;
        }
        let mut made = Vec::new();
        for n in 0..count {
            let name = if count > 1 { format!("{name}-{n}") } else { name.clone() };
            let kind = if template { Kind::Template } else { Kind::Fork };
            let oracle = base.oracle().snapshot(&name, Durability::Answered);
            let disk = Disk {
                of: Some(Arc::clone(&base)),
                spills: base.spills,
                serves_lost,
                keeps,
                made_by: asked.to_string(),
                ..Disk::new(&name, kind, oracle, at.clone().map(Place::Nbd).into_iter().collect())
            };
            disk.tight(own.is_some() && !base.spills);
            disk.fails(base.may_fail());
            disk.learn(|known| known.limit = own.map(|limit| limit * KIB));
            made.push(disk);
        }
        self.made_all(made);
    }

    fn remove(&mut self) {
        let Some(disk) = self.some(|disk| !disk.from_start) else { return };
        let force = self.rng.chance(75);
        // Who kills the server waits: a store that was closed must not be opened again. A server with
        // a state sees to that itself.
        let world = self.world;
        let _steady = (!world.has_state).then(|| world.steady.read().unwrap_or_else(PoisonError::into_inner));
        disk.ends();
        let done = self.ask("remove", &json!({ "name": disk.name, "force": force })).is_some();
        if done {
            self.world.forget(&disk);
        } else if self.cut_off {
            self.world.in_flight(Flight::Removes(Arc::clone(&disk)));
        }
        disk.ended();
    }

    fn rewind_or_reset(&mut self) {
        let Some(disk) = self.some(|disk| matches!(disk.kind, Kind::Fork | Kind::Ram | Kind::Null)) else {
            return;
        };
        let verb = if disk.kind == Kind::Fork && self.rng.chance(70) { "rewind" } else { "reset" };
        let force = self.rng.chance(75);
        let below = match &disk.of {
            Some(base) if disk.kind == Kind::Fork => {
                // It may have grown beyond its base.
                let mut below = base.oracle().snapshot(&disk.name, Durability::Answered);
                below.grow(disk.oracle().size());
                below
            }
            _ => Oracle::new(&disk.name, disk.oracle().size(), Durability::Answered),
        };
        let since = disk.turns();
        let done = self.ask(verb, &json!({ "name": disk.name, "force": force })).is_some();
        self.turned(&disk, done, since, &below);
    }

    fn publish(&mut self) {
        if self.world.has_state && self.rng.chance(50) {
            return self.show_lost();
        }
        let Some(disk) = self.some(|disk| disk.addresses().len() < 3 && !disk.is_merging()) else { return };
        self.publish_one(&disk);
    }

    fn unpublish(&mut self) {
        let lost = self.rng.chance(30);
        let is_seen = |disk: &Disk| !disk.addresses().is_empty() || lost && disk.is_withheld();
        let Some(disk) = self.some(is_seen) else { return };
        let force = self.rng.chance(60);
        disk.ends();
        disk.close();
        let alone = disk.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        if self.ask("unpublish", &json!({ "name": disk.name, "force": force })).is_some() {
            disk.unpublish();
        } else if self.cut_off {
            self.world.in_flight(Flight::Hides(Arc::clone(&disk)));
        }
        drop(alone);
        disk.open();
        disk.ended();
        if disk.addresses().is_empty() && !disk.is_merging() && !self.world.dying() {
            self.publish_one(&disk);
        }
    }

    fn set(&mut self) {
        let Some(disk) = self.some(|disk| matches!(disk.kind, Kind::Ram | Kind::Fork | Kind::Null)) else {
            return;
        };
        let mut attrs = json!({});
        // Of two at once nobody could say which is the last one.
        let world = self.world;
        let _alone = world.has_state.then(|| disk.publishing.lock().unwrap_or_else(PoisonError::into_inner));
        let (mut limit, mut size) = (None, None);
        if disk.faults && self.rng.chance(60) {
            let rules = if self.rng.chance(40) { "none".into() } else { plan::faults(&mut self.rng) };
            attrs["faults"] = json!(rules);
        } else if disk.kind == Kind::Null {
            return;
        } else if self.rng.chance(40) {
            let kib = (disk.oracle().size() * SECTOR / KIB).next_multiple_of(4) + 4 * self.rng.below(64);
            // Who connects once it has grown may meet it before the answer is here.
            disk.oracle().grow(kib * KIB / SECTOR);
            attrs["disksize"] = json!(format!("{kib}K"));
            size = Some(kib * KIB);
        } else {
            let kib = if disk.spills { 256 << self.rng.below(4) } else { 64 << self.rng.below(6) };
            if !disk.spills {
                // All of a family share its memory.
                let top = root(&disk).unwrap_or_else(|| Arc::clone(&disk));
                for other in self.world.disks(|_| true) {
                    let theirs = root(&other).unwrap_or_else(|| Arc::clone(&other));
                    if Arc::ptr_eq(&top, &theirs) {
                        other.tight(true);
                    }
                }
            }
            attrs["mem_limit"] = json!(format!("{kib}K"));
            limit = Some(kib * KIB);
        }
        if self.ask("set", &json!({ "name": disk.name, "attrs": attrs })).is_some() {
            disk.learn(|known| (known.limit, known.size) = (limit.or(known.limit), size.or(known.size)));
        } else if self.cut_off {
            let flight = match (limit, size) {
                (Some(bytes), _) => Flight::Limits(Arc::clone(&disk), bytes),
                (_, Some(bytes)) => Flight::Grows(Arc::clone(&disk), bytes),
                _ => return,
            };
            world.in_flight(flight);
        }
    }

    /// The device holds what `new` holds, if it was `done`.
    fn turned(&self, disk: &Disk, done: bool, since: ReadToken, new: &Oracle) {
        let judged = disk.turned(|oracle| {
            // A server that was killed may have done it, but then nobody reads it any more.
            if done { oracle.turn_into(since, new, false) } else { oracle.abandon(since) }
        });
        if let Err(why) = judged
            && !self.world.dying()
        {
            self.world.fail(format!("{why}\n  {}", disk.story()));
        }
    }

    fn power_cut(&mut self) {
        let Some(disk) = self.some(|disk| disk.cut) else { return };
        disk.close();
        disk.ends();
        let done = self.ask_of("power-cut", &json!({ "name": disk.name }), Some(&disk)).is_some();
        // Clients see it, and tell the oracle what they do not know.
        self.slot.begin(format!("{}: its clients leave", disk.name), VERB_MAX);
        let alone = disk.gate.write().unwrap_or_else(PoisonError::into_inner);
        if done || self.cut_off || disk.is_tight() {
            // Where there is no room for what is kept, it fails half done; and nobody knows of one
            // that was not answered.
            disk.oracle().crash();
        }
        disk.ended();
        disk.open();
        drop(alone);
    }

    fn merge(&mut self) {
        // Nobody knows whether a merge that was begun before is through, so nobody knows whether
        // another one would begin.
        let stored = |disk: &Disk| {
            disk.kind == Kind::Cow && disk.words.is_some() && !disk.from_start && !disk.merged_before
        };
        let Some(snapshot) = self.some(stored) else { return };
        let Some(origin) = snapshot.of.clone() else { return };
        // From the beginning on both show the same; only the origin is looked at then.
        snapshot.close();
        self.slot.begin(format!("{}: its clients leave", snapshot.name), VERB_MAX);
        drop(snapshot.gate.write().unwrap_or_else(PoisonError::into_inner));
        let _alone = snapshot.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        let below = snapshot.oracle().snapshot(&origin.name, Durability::Answered);
        let again = snapshot.is_merging();
        let params = json!({ "name": snapshot.name, "into_origin": true, "force": true, "background": true });
        // Who kills the server waits: that it has begun must be known.
        let world = self.world;
        let _steady = world.steady.read().unwrap_or_else(PoisonError::into_inner);
        let since = origin.turns();
        let begun = self.ask("merge", &params).is_some() && !again;
        if begun {
            snapshot.merging();
        } else {
            snapshot.open();
        }
        self.turned(&origin, begun, since, &below);
    }

    fn create(&mut self) {
        if self.is_full() {
            return;
        }
        let name = self.name('r');
        let bytes = KIB * 4 * (64 + self.rng.below(512));
        let (keys, spills) = match self.rng.below(3) {
            0 => (plan::spilling(&name, &mut self.rng), true),
            _ => (String::new(), false),
        };
        let serves_lost = self.world.has_state && self.rng.chance(50);
        let on_lost = if serves_lost { ",on_lost=empty" } else { "" };
        let keeps = self.world.has_state && self.rng.chance(40);
        let keep = if keeps { ",keep=yes" } else { "" };
        let device = format!("{name}=ram,disksize={}K,publish=yes{keys}{on_lost}{keep}", bytes / KIB);
        if self.ask("create", &json!({ "device": device })).is_some() || self.cut_off {
            let oracle = Oracle::new(&name, bytes / SECTOR, Durability::Answered);
            let at = vec![Place::Nbd(self.path(super::server::NBD))];
            let limit = plan::limit_of(&device);
            let disk = Disk {
                spills,
                serves_lost,
                keeps,
                made_by: device,
                ..Disk::new(&name, Kind::Ram, oracle, at)
            };
            disk.learn(|known| (known.limit, known.size) = (limit, Some(bytes)));
            self.made_all(vec![disk]);
        }
    }

    fn look(&mut self) {
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
                let Some(disk) = self.some(|_| true) else { return };
                let verb = if n == 2 { "stat" } else { "get" };
                let told = self.ask(verb, &json!({ "name": disk.name }));
                if let Some(uuid) = told.as_ref().and_then(|told| told["uuid"].as_str()) {
                    let known = disk.known().uuid;
                    if known.as_ref().is_some_and(|known| known != uuid) {
                        self.world.fail(format!("{}: has UUID {uuid}, had {known:?}", disk.name));
                    }
                    disk.learn(|known| known.uuid = Some(uuid.to_owned()));
                }
            }
        }
    }
}

/// What a device stands on in the end.
fn root(disk: &Arc<Disk>) -> Option<Arc<Disk>> {
    let mut at = disk.of.clone()?;
    while let Some(of) = at.of.clone() {
        at = of;
    }
    Some(at)
}
