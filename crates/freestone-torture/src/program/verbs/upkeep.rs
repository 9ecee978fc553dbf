//! What changes nothing that a client sees.

use serde_json::json;

use super::super::world::Kind;
use super::Hand;

impl Hand<'_> {
    /// One of these.
    pub(super) fn upkeep(&mut self) {
        let Some(disk) = self.some(|disk| matches!(disk.kind, Kind::Ram | Kind::Fork | Kind::Frozen)) else {
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
                self.ask_of("recompress", &json!({ "name": name, "type": kind }), Some(&disk))
            }
            _ => self.ask("compact", &json!({ "name": name })),
        };
    }
}
