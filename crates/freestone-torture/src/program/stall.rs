//! A verb that waits for a disk which does not answer, and others beside it, on devices that have
//! nothing to do with it: those are answered while it waits. The disk is let go only after that, so
//! it does not matter how fast anything is.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use freestone_testkit::Rng;
use serde_json::{Value, json};

use super::control::{self, No};
use super::watch::{Slot, VERB_MAX};
use super::world::World;

/// How often one looks whether the verb waits already.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Between two such verbs.
const PAUSE: Duration = Duration::from_millis(500);

/// Runs until the world stops.
pub fn run(world: &World, slot: &Slot, mut rng: Rng) {
    while !world.stopped() {
        Stall { world, slot, number: world.number() }.one(&mut rng);
        slot.end();
        thread::sleep(PAUSE);
    }
}

/// All names have the number, so nobody else asks for these devices.
struct Stall<'a> {
    world: &'a World,
    slot: &'a Slot,
    number: u64,
}

impl Stall<'_> {
    fn one(&self, rng: &mut Rng) {
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
                thread::sleep(LOOK_EVERY);
            }
            for _ in 0..=rng.below(3) {
                self.others(rng);
            }
            if over() && !self.world.dying() {
                self.world.fail(format!("{waits}: was answered while {cow} hung"));
            }
            while !over() {
                self.ask("release", &json!({ "name": cow }));
                thread::sleep(LOOK_EVERY);
            }
            match waiter.join() {
                Ok(answer) => self.judged("create", &json!({ "device": waits }), answer),
                Err(_) => None,
            }
        });
        for name in [&snapshot, &cow, &origin] {
            self.ask("remove", &json!({ "name": name }));
        }
        let _ = std::fs::remove_file(self.world.dir().join(format!("{origin}.img")));
    }

    /// Verbs that need nothing of what waits.
    fn others(&self, rng: &mut Rng) {
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
        self.judged(method, params, answer)
    }

    /// Nothing is refused here, as long as the server lives.
    fn judged(&self, method: &str, params: &Value, answer: Result<Value, No>) -> Option<Value> {
        let no = match answer {
            Ok(result) => {
                self.world.counts.add("verbs", format!("{method} ok"), 1);
                return Some(result);
            }
            Err(no) => no,
        };
        if !self.world.dying() {
            self.world.note(format!("{method} {params}: {no:?}"));
            self.world.fail(format!("{method} {params}: of devices that are nobody else's: {no:?}"));
        }
        None
    }
}
