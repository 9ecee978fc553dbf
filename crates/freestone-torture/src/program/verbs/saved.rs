//! Verbs that save devices to files, and verbs that create devices from saved files.

use std::path::Path;
use std::sync::Arc;

use serde_json::json;

use super::{SECTOR, VerbThread, has_no_volatile_cache, root};
use crate::oracle::{Durability, Oracle};
use crate::program::world::interrupted_verb::InterruptedVerb;
use crate::program::world::{Disk, Kind};

impl VerbThread<'_> {
    pub(super) fn save_and_restore(&mut self) {
        let whole = |disk: &Disk| {
            matches!(disk.kind, Kind::Ram | Kind::Fork | Kind::Frozen) && has_no_volatile_cache(disk)
        };
        let Some(disk) = self.choose(whole) else { return };
        // Save also to a shared file, which other threads replace at the same time.
        let number = self.rng.below(3);
        let shared = self.path(&format!("{number}.saved"));
        if self.rng.chance(50) {
            self.ask_about("save", &json!({ "names": [disk.name], "file": shared }), Some(&disk));
            return;
        }
        // A saved file contains neither the origin of a snapshot nor the base of a fork of a
        // snapshot.
        if root(&disk).is_some_and(|root| root.kind == Kind::Image) {
            return;
        }
        let has_words = disk.kind == Kind::Ram || disk.kind == Kind::Fork && of_image(&disk);
        if self.is_full() || self.world.has_state && !has_words {
            return;
        }
        let name = self.name('b');
        let own = self.path(&format!("{name}.saved"));
        let since = disk.oracle().begin_read();
        if self.ask_about("save", &json!({ "names": [disk.name], "file": own }), Some(&disk)).is_none() {
            return disk.oracle().abandon(since);
        }
        let oracle = disk.snapshot_since(since, &name);
        let restored = self.ask_about("restore", &json!({ "file": own, "name": name }), Some(&disk));
        let _ = std::fs::remove_file(&own);
        let answer = restored.as_ref().and_then(|restored| restored["devices"][0]["kind"].as_str());
        let kind = match answer {
            None if !self.interrupted => return,
            None if disk.kind == Kind::Ram => Kind::Ram,
            Some("ram") => Kind::Ram,
            None | Some("fork") => Kind::Restored,
            Some("snapshot") => Kind::Frozen,
            Some(kind) => return self.world.fail(format!("restore of {}: a {kind}", disk.name)),
        };
        let parent = root(&disk).filter(|root| root.kind == Kind::Base && kind != Kind::Ram);
        let created_by = format!("restored, was {}", disk.describe());
        let new = Disk { parent, created_by, ..Disk::new(&name, kind, oracle, Vec::new()) };
        // A restored fork has its own memory limit, also after a restart of the server, but no backing device. The
        // limit may have changed after the save.
        if kind == Kind::Restored {
            new.set_tight(disk.known().limit.is_some() || disk.is_tight());
            let interrupted = self.interrupted;
            let reply = restored.and_then(|_| self.ask("get", &json!({ "name": name, "attr": "mem_limit" })));
            self.interrupted = interrupted;
            let limit = reply.and_then(|reply| reply["mem_limit"].as_u64());
            new.update_known(|known| match limit {
                Some(bytes) => known.limit = (bytes > 0).then_some(bytes),
                None => known.is_limit_unknown = true,
            });
        }
        self.add_all_created(vec![new]);
    }

    /// Saves the changes of a fork to a file, and applies them to another fork of the same base.
    pub(super) fn delta(&mut self) {
        let Some(fork) = self.choose(|d| d.kind == Kind::Fork && of_image(d) && has_no_volatile_cache(d))
        else {
            return;
        };
        if self.is_full() {
            return;
        }
        let file = self.path(&format!("{}.qcow2", self.world.next_number()));
        let since = fork.oracle().begin_read();
        if self.ask("delta.save", &json!({ "name": fork.name, "file": file })).is_none() {
            return fork.oracle().abandon(since);
        }
        let name = self.name('d');
        let oracle = fork.snapshot_since(since, &name);
        let base = fork.parent.clone().expect("a fork has a base");
        let size = oracle.size() * SECTOR;
        let same = size == base.oracle().size() * SECTOR;
        // Apply only a delta with the size of the base: the size of a fork that has grown is not
        // known for certain.
        if same {
            self.apply_delta(&base, &fork, &name, &file, oracle);
        }
        let _ = std::fs::remove_file(&file);
    }

    /// Creates a fork of `base`, and applies a saved delta to it.
    fn apply_delta(&mut self, base: &Arc<Disk>, fork: &Disk, name: &str, file: &Path, oracle: Oracle) {
        let (spills, created_by) = (base.spills, format!("delta of {}", fork.describe()));
        let parent = Some(Arc::clone(base));
        let disk = Disk { parent, spills, created_by, ..Disk::new(name, Kind::Fork, oracle, Vec::new()) };
        if self.ask("fork", &json!({ "base": base.name, "name": name })).is_none() {
            if self.interrupted {
                self.add_half_applied(base, disk);
            }
            return;
        }
        let params = json!({ "name": name, "file": file });
        if self.ask_about("delta.apply", &params, Some(base)).is_some() {
            return self.add_created(disk);
        }
        // Remove the device without judging its content: part of the delta may have been applied.
        if self.interrupted || self.ask("remove", &json!({ "name": name })).is_none() {
            self.add_half_applied(base, disk);
        }
    }

    /// Records that a fork may exist, with any part of its delta.
    fn add_half_applied(&self, base: &Disk, disk: Disk) {
        let below = base.oracle().snapshot(&disk.name, Durability::Completed);
        disk.oracle().replace_doubtfully(&below);
        self.world.add_interrupted(InterruptedVerb::Creates(vec![disk]));
    }
}

fn of_image(disk: &Disk) -> bool {
    disk.parent.as_ref().is_some_and(|of| of.kind == Kind::Base)
}
