//! A second server, whose exports are devices of the one that is tortured. It is killed now and then and is
//! there again at once: its files have all that it had answered.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use freestone_testkit::Rng;
use rustix::process::Signal;

use super::server::{self, Server};
use super::world::World;

/// Its directory in that of the run.
pub const FAR: &str = "far";
/// How long it may take to be gone.
const END_MAX: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long it lives at least, and at most so much longer.
const LIFE_MIN: Duration = Duration::from_secs(1);
const LIFE_MORE_MS: u64 = 5000;

/// Where a device of it is.
pub fn uri(dir: &Path, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", dir.join(FAR).join(server::NBD).display())
}

/// The server.
pub struct Far {
    dir: PathBuf,
    program: PathBuf,
    devices: Vec<String>,
    server: Server,
}

impl Far {
    /// Starts one with these devices.
    pub fn start(program: &Path, dir: &Path, devices: Vec<String>) -> Result<Self, String> {
        let dir = dir.join(FAR);
        fs::create_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let server = Server::start(program, &dir, &devices, false)?;
        Ok(Self { dir, program: program.to_owned(), devices, server })
    }

    /// Kills it and starts it again, until the world stops.
    pub fn run(&mut self, world: &World, mut rng: Rng) {
        loop {
            let until = Instant::now() + LIFE_MIN + Duration::from_millis(rng.below(LIFE_MORE_MS));
            while Instant::now() < until {
                if world.stopped() {
                    return;
                }
                thread::sleep(LOOK_EVERY);
            }
            if let Err(why) = self.again(world) {
                return world.fail(why);
            }
        }
    }

    /// Kills it and starts it again.
    pub fn again(&mut self, world: &World) -> Result<(), String> {
        self.server.signal(Signal::KILL);
        if self.server.wait(END_MAX).is_none() {
            return Err("the far server does not end".into());
        }
        self.server = Server::start(&self.program, &self.dir, &self.devices, false)
            .map_err(|why| format!("the far server: {why}"))?;
        world.counts.add("ends", "the far server, killed", 1);
        Ok(())
    }
}
