//! Verbs that change nothing that clients can observe, such as writeback and compaction.

use serde_json::json;

use super::VerbThread;
use crate::program::world::Kind;

impl VerbThread<'_> {
    pub(super) fn upkeep(&mut self) {
        let Some(disk) = self.choose(|disk| matches!(disk.kind, Kind::Ram | Kind::Fork | Kind::Frozen))
        else {
            return;
        };
        let name = &disk.name;
        match self.rng.below(5) {
            0 => self.ask("idle", &json!({ "name": name, "which": "all" })),
            1 => {
                let kind = ["idle", "huge", "huge_idle", "incompressible"][self.rng.below(4) as usize];
                self.ask("writeback", &json!({ "name": name, "type": kind }))
            }
            2 => {
                let page = self.rng.below(300);
                let pages = format!("{page}-{}", page + self.rng.below(300));
                self.ask("writeback", &json!({ "name": name, "page_indexes": [pages] }))
            }
            3 => {
                let kind = ["idle", "huge", "huge_idle"][self.rng.below(3) as usize];
                self.ask_about("recompress", &json!({ "name": name, "type": kind }), Some(&disk))
            }
            _ => self.ask("compact", &json!({ "name": name })),
        };
    }
}
