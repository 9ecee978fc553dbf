//! The process that holds the memory of a recoverable server (`freestone hold`).

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::program::server::{self, Server};
use crate::program::world::World;

/// Longest wait for the start or the end of a holder.
const WAIT_MAX: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Name of the file with the records of a family, in the list of descriptors of a process.
const FAMILY: &str = "freestone-family";

/// Returns the holder of the servers in `dir`, or `None` if there is none.
fn find(dir: &Path) -> Option<Pid> {
    let path = dir.join(server::STATE).join("holder");
    let command = ["freestone".as_bytes(), b"hold", path.as_os_str().as_bytes(), b""];
    let found = fs::read_dir("/proc").ok()?.flatten().find(|process| {
        let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).eq(command)
    });
    Pid::from_raw(found?.file_name().to_str()?.parse().ok()?)
}

/// Returns the inodes of the families whose memory a process has.
fn families(process: Pid) -> BTreeSet<u64> {
    let open = fs::read_dir(format!("/proc/{}/fd", process.as_raw_nonzero()));
    let is_family =
        |path: &Path| fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains(FAMILY));
    let files = open.into_iter().flatten().flatten().map(|file| file.path());
    files.filter(|path| is_family(path)).filter_map(|path| Some(fs::metadata(path).ok()?.ino())).collect()
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
        next.is_some_and(|next| families(server.pid).is_subset(&families(next)))
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
