//! Runs a verb that waits for a hanging disk, and other verbs on unrelated devices at the same
//! time. The other verbs must complete while the first one waits. The disk is released only
//! afterwards, so the check does not depend on speed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use freestone_testkit::Rng;
use serde_json::{Value, json};

use crate::program::server::control::{self, VerbError};
use crate::program::watch::{VERB_MAX, WatchedThread};
use crate::program::world::World;

/// Poll interval until the verb waits for the hanging disk.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Pause between two verbs that wait for a hanging disk.
const PAUSE: Duration = Duration::from_millis(500);

/// Repeats the check with a verb that waits for a hanging disk, until the world stops.
pub fn run(world: &World, slot: &WatchedThread, mut rng: Rng) {
    while !world.is_stopped() {
        Stall { world, slot, number: world.next_number() }.run_once(&mut rng);
        slot.end();
        thread::sleep(PAUSE);
    }
}

/// A check with its number. The device names contain the number, so no other thread uses these
/// devices.
struct Stall<'a> {
    world: &'a World,
    slot: &'a WatchedThread,
    number: u64,
}

impl Stall<'_> {
    fn run_once(&self, rng: &mut Rng) {
        let (origin, cow, snapshot) = (self.name("wo"), self.name("wc"), self.name("ws"));
        let made = self.create(&format!("{origin}=file,path=./{origin}.img,size=1M")).is_some()
            && self.create(&format!("{cow}=ram,disksize=8M,faults=writes hang times=1")).is_some();
        if !made {
            return;
        }
        let waits = format!("{snapshot}=snapshot,origin={origin},cow={cow},force=yes");
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let answer = control::ask(&self.world.control(), "create", &json!({ "device": waits }));
                is_over.store(true, Ordering::SeqCst);
                answer
            });
            let over = || is_over.load(Ordering::SeqCst);
            self.slot.begin(format!("{waits} waits for {cow}"), VERB_MAX);
            while !over() && !self.hangs(&cow) {
                thread::sleep(POLL_INTERVAL);
            }
            for _ in 0..=rng.below(3) {
                self.run_unrelated_verbs(rng);
            }
            if over() && !self.world.is_server_ending() {
                self.world.fail(format!("{waits} completed while {cow} hung"));
            }
            while !over() {
                self.ask("release", &json!({ "name": cow }));
                thread::sleep(POLL_INTERVAL);
            }
            match waiter.join() {
                Ok(answer) => self.judge("create", &json!({ "device": waits }), answer),
                Err(_) => None,
            }
        });
        for name in [&snapshot, &cow, &origin] {
            self.ask("remove", &json!({ "name": name }));
        }
        let _ = std::fs::remove_file(self.world.dir().join(format!("{origin}.img")));
    }

    fn run_unrelated_verbs(&self, rng: &mut Rng) {
        let name = self.name("wr");
        if self.create(&format!("{name}=ram,disksize=1M")).is_none() {
            return;
        }
        self.ask("set", &json!({ "name": name, "attrs": { "mem_limit": "512K" } }));
        if rng.chance(50) {
            let snapshot = self.name("wf");
            self.ask("snapshot", &json!({ "snapshots": [{ "origin": name, "name": snapshot }] }));
            self.ask("remove", &json!({ "name": snapshot }));
        }
        self.ask("remove", &json!({ "name": name }));
    }

    fn name(&self, letters: &str) -> String {
        format!("{letters}-{}", self.number)
    }

    fn hangs(&self, name: &str) -> bool {
        self.ask("stat", &json!({ "name": name })).is_none_or(|stat| stat["faults"]["hanging"] != 0)
    }

    fn create(&self, device: &str) -> Option<Value> {
        self.ask("create", &json!({ "device": device }))
    }

    fn ask(&self, method: &str, params: &Value) -> Option<Value> {
        self.slot.begin(format!("{method} {params}"), VERB_MAX);
        let answer = control::ask(&self.world.control(), method, params);
        self.judge(method, params, answer)
    }

    /// Judges the answer to a verb, which must not be refused as long as the server lives. Returns
    /// the result, or `None`.
    fn judge(&self, method: &str, params: &Value, answer: Result<Value, VerbError>) -> Option<Value> {
        let error = match answer {
            Ok(result) => {
                self.world.counts.add("verbs", format!("{method} ok"), 1);
                return Some(result);
            }
            Err(error) => error,
        };
        if !self.world.is_server_ending() {
            self.world.note(format!("{method} {params}: {error:?}"));
            self.world.fail(format!("{method} {params}: on unshared devices: {error:?}"));
        }
        None
    }
}
