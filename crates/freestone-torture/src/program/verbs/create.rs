//! Verbs that create devices: snapshots, forks, and RAM disks.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{KIB, SECTOR, VerbThread, has_no_volatile_cache};
use crate::oracle::{Durability, Oracle, ReadToken};
use crate::program::server;
use crate::program::setup;
use crate::program::transport::Address;
use crate::program::world::{Disk, Kind};

impl VerbThread<'_> {
    pub(super) fn snapshot(&mut self) {
        let origins = |disk: &Disk| {
            matches!(disk.kind, Kind::Ram | Kind::Fork | Kind::File) && has_no_volatile_cache(disk)
        };
        let Some(origin) = self.choose(origins) else { return };
        if self.is_full()
            || self.world.disks(|d| d.parent.as_ref().is_some_and(|of| Arc::ptr_eq(of, &origin))).len() > 4
        {
            return;
        }
        let mut all = vec![origin];
        if self.rng.chance(25)
            && let Some(other) =
                self.choose(|disk| matches!(disk.kind, Kind::Ram | Kind::Fork) && has_no_volatile_cache(disk))
            && !Arc::ptr_eq(&all[0], &other)
        {
            all.push(other);
        }
        let mut new = Vec::new();
        for origin in &all {
            let name = self.name('s');
            let mut params = json!({ "origin": origin.name, "name": name });
            let mut disk =
                Disk::new(&name, Kind::Frozen, Oracle::new(&name, 0, Durability::Completed), Vec::new());
            if origin.kind == Kind::File {
                disk = self.cow(&name, origin, &mut params, disk);
            } else if origin.keeps && self.rng.chance(60) {
                params["keep"] = json!(true);
                disk.keeps = true;
            }
            disk.set_may_fail(origin.may_fail() || disk.may_fail());
            disk.parent = Some(Arc::clone(origin));
            disk.spills = origin.spills;
            disk.block = origin.block;
            new.push((params, disk));
        }
        let since: Vec<ReadToken> = all.iter().map(|origin| origin.oracle().begin_read()).collect();
        let params: Vec<Value> = new.iter().map(|(params, _)| params.clone()).collect();
        // Taking a snapshot flushes the origin first, so faults of the origin may make it fail.
        let fails = all.iter().find(|origin| origin.may_fail()).map(Arc::as_ref);
        let done = self.ask_about("snapshot", &json!({ "snapshots": params }), fails).is_some();
        let mut created = Vec::new();
        for ((origin, since), (params, mut disk)) in all.iter().zip(since).zip(new) {
            if !done && !self.interrupted {
                origin.oracle().abandon(since);
                continue;
            }
            let oracle = origin.snapshot_since(since, &disk.name);
            disk.oracle = std::sync::Mutex::new(oracle);
            disk.created_by = params.to_string();
            created.push(disk);
        }
        self.add_all_created(created);
    }

    /// Chooses the COW device of a snapshot of a file: memory, a file, or a file that is too small.
    fn cow(&mut self, name: &str, origin: &Disk, params: &mut Value, disk: Disk) -> Disk {
        let chunk = format!("{}K", 4 << self.rng.below(5));
        params["chunk_size"] = json!(chunk);
        if self.rng.chance(30) {
            return Disk { kind: Kind::Cow, writable: false, ..disk };
        }
        let small = self.rng.chance(15);
        let store = ["P", "PO", "N"][self.rng.below(3) as usize];
        let readonly = self.rng.chance(30);
        let size = if small { "256K" } else { setup::ROOMY_COW };
        params["cow"] = json!(format!("./{name}.cow"));
        params["cow_size"] = json!(size);
        params["store"] = json!(store);
        params["readonly"] = json!(readonly);
        // A later server cannot use a transient exception store. Without a state directory, it also does not open a COW
        // device that was too small.
        let is_lost = store == "N";
        let kept = !is_lost && (!small || self.world.has_state);
        let device_args = (kept && !small).then(|| {
            let origin = &origin.name;
            format!("{name}=snapshot,origin={origin},cow=./{name}.cow,store={store},readonly={readonly}")
        });
        disk.set_may_fail(small);
        disk.set_tight(small);
        Disk { kind: Kind::Cow, writable: !readonly, survives_restart: kept, is_lost, device_args, ..disk }
    }

    pub(super) fn fork(&mut self) {
        let bases = |disk: &Disk| match disk.kind {
            Kind::Base | Kind::Image | Kind::Frozen => true,
            // Exclude a merging snapshot: it has the changing content of its origin.
            Kind::Cow => !disk.writable && !disk.is_merging(),
            _ => false,
        };
        let Some(base) = self.choose(bases) else { return };
        if self.is_full() {
            return;
        }
        let template = self.rng.chance(15);
        let count = if template { 1 } else { 1 + self.rng.below(2) };
        let own = self.rng.chance(30);
        let name = self.name(if template { 't' } else { 'k' });
        let mut params = json!({ "base": base.name, "name": name });
        let own = own.then(|| 64 << self.rng.below(4));
        if let Some(limit) = own {
            params["mem_limit"] = json!(format!("{limit}K"));
        }
        let serves_lost = self.world.has_state && self.rng.chance(40);
        if serves_lost {
            params["on_data_loss"] = json!("empty");
        }
        let may_keep = !template && (matches!(base.kind, Kind::Base | Kind::Image) || base.keeps);
        let keeps = self.world.has_state && may_keep && self.rng.chance(50);
        if keeps {
            params["keep"] = json!(true);
        }
        if template {
            params["template"] = json!(true);
        }
        if count > 1 {
            params["count"] = json!(count);
        }
        let at = self.rng.chance(70).then(|| self.path(&format!("p{}", self.world.next_number())));
        if let Some(at) = &at {
            params["nbd"] = json!(format!("unix:{}", at.display()));
        }
        // With `if_absent` the verb also succeeds if the device already exists.
        if self.rng.chance(20) {
            params["if_absent"] = json!(true);
        }
        if self.ask("fork", &params).is_none() && !self.interrupted {
            return;
        }
        let mut created = Vec::new();
        for n in 0..count {
            let name = if count > 1 { format!("{name}-{n}") } else { name.clone() };
            let kind = if template { Kind::Template } else { Kind::Fork };
            let oracle = base.oracle().snapshot(&name, Durability::Completed);
            let disk = Disk {
                parent: Some(Arc::clone(&base)),
                spills: base.spills,
                serves_lost,
                keeps,
                created_by: params.to_string(),
                ..Disk::new(&name, kind, oracle, at.clone().map(Address::Nbd).into_iter().collect())
            };
            disk.set_tight(own.is_some() && !base.spills);
            disk.set_may_fail(base.may_fail());
            disk.update_known(|known| known.limit = own.map(|limit| limit * KIB));
            created.push(disk);
        }
        self.add_all_created(created);
    }

    pub(super) fn create(&mut self) {
        if self.is_full() {
            return;
        }
        let name = self.name('r');
        let bytes = KIB * 4 * (64 + self.rng.below(512));
        let (keys, spills) = match self.rng.below(3) {
            0 => (setup::spilling(&name, &mut self.rng), true),
            _ => (String::new(), false),
        };
        let serves_lost = self.world.has_state && self.rng.chance(50);
        let on_data_loss = if serves_lost { ",on_data_loss=empty" } else { "" };
        let keeps = self.world.has_state && self.rng.chance(40);
        let keep = if keeps { ",keep=yes" } else { "" };
        let device = format!("{name}=ram,disksize={}K,publish=yes{keys}{on_data_loss}{keep}", bytes / KIB);
        if self.ask("create", &json!({ "device": device })).is_some() || self.interrupted {
            let oracle = Oracle::new(&name, bytes / SECTOR, Durability::Completed);
            let at = vec![Address::Nbd(self.path(server::NBD))];
            let limit = setup::limit_of(&device);
            let disk = Disk {
                spills,
                serves_lost,
                keeps,
                created_by: device,
                ..Disk::new(&name, Kind::Ram, oracle, at)
            };
            disk.update_known(|known| (known.limit, known.size) = (limit, Some(bytes)));
            self.add_all_created(vec![disk]);
        }
    }
}
