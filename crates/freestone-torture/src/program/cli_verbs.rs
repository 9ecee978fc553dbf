//! Verbs by the program's command line, at the same time as all others: some read, some set, some
//! must be refused.

use freestone_testkit::Rng;
use serde_json::Value;

use super::control::{self, VerbError};
use super::watch::{Slot, VERB_MAX};
use super::world::{Disk, Kind, World};

/// Runs verbs until the world stops.
pub fn run(world: &World, slot: &Slot, mut rng: Rng) {
    while !world.stopped() {
        let disks = world.disks(|disk| disk.from_start);
        let Some(disk) = disks.get(rng.below(disks.len() as u64) as usize) else { return };
        run_command(world, slot, disk, &mut rng);
        slot.end();
    }
}

fn run_command(world: &World, slot: &Slot, disk: &Disk, rng: &mut Rng) {
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
            if !meant && !busy && !world.server_ending() {
                world.fail(format!("freestone {words:?}: {message}"));
            }
            world.counts.add("verbs by the program", "refused", 1);
        }
        Err(_) if world.server_ending() => {}
        Err(error) => world.fail(format!("freestone {words:?}: {error:?}")),
    }
}
