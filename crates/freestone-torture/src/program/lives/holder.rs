//! The process that holds the memory of a recoverable server (`freestone hold`).

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use freestone_testkit::process::{families_of, holder_of};
use rustix::process::{Pid, Signal, kill_process};

use crate::program::server::{self, Server};
use crate::program::world::World;

/// Longest wait for the start or the end of a holder.
const WAIT_MAX: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Returns the holder of the servers in `dir`, or `None` if there is none.
fn find(dir: &Path) -> Option<Pid> {
    holder_of(&dir.join(server::STATE))
}

/// Kills the holder, and waits until another one has the memory of all families of the server.
pub fn replace(world: &World, server: &Server) -> Result<(), String> {
    let dir = world.dir();
    let former = find(&dir).ok_or("no process holds the memory of the server")?;
    world.note("the holder is killed".into());
    let _ = kill_process(former, Signal::KILL);
    world.counts.add("ends", "holder, kill -9", 1);
    let is_replaced = || {
        let next = find(&dir).filter(|next| *next != former);
        // The families of the server are listed first: it may remove some meanwhile, and has new ones held at once.
        next.is_some_and(|next| families_of(server.pid).is_subset(&families_of(next)))
    };
    wait_until(|| world.is_stopped() || is_replaced(), "no other process holds the memory of the server")
}

/// Waits until no holder is left after an orderly end of the server.
pub fn wait_ended(dir: &Path) -> Result<(), String> {
    wait_until(|| find(dir).is_none(), "the holder is left after an orderly end of the server")
}

/// Kills the holder of a failed run, whose directory is kept.
pub fn kill(dir: &Path) {
    if let Some(holder) = find(dir) {
        let _ = kill_process(holder, Signal::KILL);
    }
}

fn wait_until(is_done: impl Fn() -> bool, failure: &str) -> Result<(), String> {
    let start = Instant::now();
    while !is_done() {
        if start.elapsed() > WAIT_MAX {
            return Err(format!("{failure} after {} s", WAIT_MAX.as_secs()));
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}
