//! Runs verbs by the program's command line, concurrently with all others: some query, some change
//! settings, some must be refused.

use freestone_testkit::Rng;
use serde_json::Value;

use crate::program::server::control::{self, VerbError};
use crate::program::watch::{VERB_MAX, WatchedThread};
use crate::program::world::{Disk, Kind, World};

pub fn run(world: &World, slot: &WatchedThread, mut rng: Rng) {
    while !world.is_stopped() {
        let disks = world.disks(|disk| disk.from_start);
        let Some(disk) = disks.get(rng.below(disks.len() as u64) as usize) else { return };
        run_command(world, slot, disk, &mut rng);
        slot.end();
    }
}

fn run_command(world: &World, slot: &WatchedThread, disk: &Disk, rng: &mut Rng) {
    let name = disk.name.as_str();
    let (words, right): (Vec<&str>, fn(&Value) -> bool) = match rng.below(7) {
        0 => (vec!["list"], |list| list["devices"].as_array().is_some_and(|rows| !rows.is_empty())),
        1 => (vec!["stat"], |stat| stat["server"]["pid"].is_u64()),
        2 => (vec!["stat", name], |stat| stat["disksize"].is_u64()),
        3 => (vec!["get", name], Value::is_object),
        4 if disk.kind == Kind::Ram => (vec!["set", name, "mem_used_max=0"], Value::is_object),
        5 => (vec!["remove", "nobody"], |_| false),
        _ => (vec!["set", name, "colour=red"], |_| false),
    };
    let words: Vec<String> = words.into_iter().map(str::to_owned).collect();
    slot.begin(format!("freestone {}", words.join(" ")), VERB_MAX);
    match control::ask_program(&world.program, &world.control(), &words) {
        Ok(result) if right(&result) => world.counts.add("verbs by the program", "ok", 1),
        Ok(result) => world.fail(format!("freestone {words:?}: {result}")),
        Err(VerbError::Refused { message, .. }) => {
            let meant = words.iter().any(|word| word == "nobody" || word.starts_with("colour"));
            let busy = message.contains("is running") || message.contains("under way");
            if !meant && !busy && !world.is_server_ending() {
                world.fail(format!("freestone {words:?}: {message}"));
            }
            world.counts.add("verbs by the program", "refused", 1);
        }
        Err(_) if world.is_server_ending() => {}
        Err(error) => world.fail(format!("freestone {words:?}: {error:?}")),
    }
}
