//! The far server: a second server whose exports are devices of the server under test. The far server is killed now and
//! then and restarted at once. The files of the far server keep all completed writes.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use freestone_testkit::Rng;
use rustix::process::Signal;

use crate::program::server::{self, Server};
use crate::program::world::World;

/// Name of the far server's directory, in the directory of the run.
pub const FAR_DIR: &str = "far";
/// Longest wait until a killed server has ended.
const END_MAX: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Shortest time between two kills, and the longest random addition to it in milliseconds.
const LIFE_MIN: Duration = Duration::from_secs(1);
const LIFE_MORE_MS: u64 = 5000;

/// Returns the NBD URI of a device of the far server. `dir` is the directory of the run.
pub fn uri(dir: &Path, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", dir.join(FAR_DIR).join(server::NBD).display())
}

/// The far server, and what is needed to restart it.
pub struct FarServer {
    dir: PathBuf,
    program: PathBuf,
    devices: Vec<String>,
    server: Server,
}

impl FarServer {
    /// Starts a far server that serves these devices.
    pub fn start(program: &Path, dir: &Path, devices: Vec<String>) -> Result<Self, String> {
        let dir = dir.join(FAR_DIR);
        fs::create_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let server = Server::start(program, &dir, &devices, false)?;
        Ok(Self { dir, program: program.to_owned(), devices, server })
    }

    /// Kills and restarts the far server repeatedly, until the world stops.
    pub fn run(&mut self, world: &World, mut rng: Rng) {
        loop {
            let until = Instant::now() + LIFE_MIN + Duration::from_millis(rng.below(LIFE_MORE_MS));
            while Instant::now() < until {
                if world.is_stopped() {
                    return;
                }
                thread::sleep(POLL_INTERVAL);
            }
            if let Err(why) = self.restart(world) {
                return world.fail(why);
            }
        }
    }

    pub fn restart(&mut self, world: &World) -> Result<(), String> {
        self.server.signal(Signal::KILL);
        if self.server.wait(END_MAX).is_none() {
            return Err("the far server did not end after SIGKILL".into());
        }
        self.server = Server::start(&self.program, &self.dir, &self.devices, false)
            .map_err(|why| format!("the far server: {why}"))?;
        world.counts.add("ends", "the far server, killed", 1);
        Ok(())
    }
}
