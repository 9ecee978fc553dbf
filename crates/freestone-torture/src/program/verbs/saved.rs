//! What is saved, and made of that again.

use std::path::Path;
use std::sync::Arc;

use serde_json::json;

use super::super::flight::Flight;
use super::super::world::{Disk, Kind};
use super::{Hand, SECTOR, is_bare, root};
use crate::oracle::Oracle;

impl Hand<'_> {
    pub(super) fn save_and_restore(&mut self) {
        let whole = |disk: &Disk| matches!(disk.kind, Kind::Ram | Kind::Fork | Kind::Frozen) && is_bare(disk);
        let Some(disk) = self.some(whole) else { return };
        // A file that others replace, too.
        let number = self.rng.below(3);
        let shared = self.path(&format!("{number}.saved"));
        if self.rng.chance(50) {
            self.ask_of("save", &json!({ "names": [disk.name], "file": shared }), Some(&disk));
            return;
        }
        // What a snapshot was taken of is not in a file, nor is what a fork of one stands on.
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
        if self.ask_of("save", &json!({ "names": [disk.name], "file": own }), Some(&disk)).is_none() {
            return disk.oracle().abandon(since);
        }
        let oracle = disk.taken(since, &name);
        let restored = self.ask_of("restore", &json!({ "file": own, "name": name }), Some(&disk));
        let _ = std::fs::remove_file(&own);
        let told = restored.as_ref().and_then(|restored| restored["devices"][0]["kind"].as_str());
        let kind = match told {
            None if !self.cut_off => return,
            None if disk.kind == Kind::Ram => Kind::Ram,
            Some("ram") => Kind::Ram,
            None | Some("fork") => Kind::Restored,
            Some("snapshot") => Kind::Frozen,
            Some(kind) => return self.world.fail(format!("restore of {}: a {kind}", disk.name)),
        };
        let of = root(&disk).filter(|root| root.kind == Kind::Base && kind != Kind::Ram);
        let made_by = format!("restored, was {}", disk.story());
        let new = Disk { of, made_by, ..Disk::new(&name, kind, oracle, Vec::new()) };
        self.made_all(vec![new]);
    }

    /// What a fork of the image holds goes to another one as an overlay.
    pub(super) fn delta(&mut self) {
        let Some(fork) = self.some(|d| d.kind == Kind::Fork && of_image(d) && is_bare(d)) else { return };
        if self.is_full() {
            return;
        }
        let file = self.path(&format!("{}.qcow2", self.world.number()));
        let since = fork.oracle().begin_read();
        if self.ask("delta.save", &json!({ "name": fork.name, "file": file })).is_none() {
            return fork.oracle().abandon(since);
        }
        let name = self.name('d');
        let oracle = fork.taken(since, &name);
        let base = fork.of.clone().expect("a fork has a base");
        let size = oracle.size() * SECTOR;
        let same = size == base.oracle().size() * SECTOR;
        // The size of the fork is not known for certain where it was grown; only one that is as its
        // base is applied.
        if same {
            self.applied(&base, &fork, &name, &file, oracle);
        }
        let _ = std::fs::remove_file(&file);
    }

    fn applied(&mut self, base: &Arc<Disk>, fork: &Disk, name: &str, file: &Path, oracle: Oracle) {
        let (spills, made_by) = (base.spills, format!("delta of {}", fork.story()));
        let of = Some(Arc::clone(base));
        let disk = Disk { of, spills, made_by, ..Disk::new(name, Kind::Fork, oracle, Vec::new()) };
        if self.ask("fork", &json!({ "base": base.name, "name": name })).is_none() {
            if self.cut_off {
                self.world.in_flight(Flight::Makes(vec![disk]));
            }
            return;
        }
        let asked = json!({ "name": name, "file": file });
        if self.ask_of("delta.apply", &asked, Some(base)).is_some() {
            return self.made(disk);
        }
        // Part of it may be there: nobody looks.
        if self.cut_off || self.ask("remove", &json!({ "name": name })).is_none() {
            self.world.in_flight(Flight::Makes(vec![disk]));
        }
    }
}

fn of_image(disk: &Disk) -> bool {
    disk.of.as_ref().is_some_and(|of| of.kind == Kind::Base)
}
