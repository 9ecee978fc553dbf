//! Unmounting the file system of a record.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tracing::warn;

use super::helper::{Outcome, Running, STEP_MAX, command};
use super::holders;
use super::mount_table::MountTable;
use super::record::{LockedRecord, Record};
use super::server::{ServerState, hang_message};
use super::via::{sources, wait_unused};

/// Interval at which the state of the server is checked while umount(8) runs.
const SLICE: Duration = Duration::from_secs(5);
/// Longest time for umount(8) to write dirty blocks.
const WRITE_MAX: Duration = Duration::from_secs(300);
/// Longest time to retry if the mount is busy: `pg_ctl stop` and others return before their last process has ended.
const BUSY_MAX: Duration = Duration::from_millis(500);
/// Pause between two retries if the mount is busy.
const BUSY_PAUSE: Duration = Duration::from_millis(20);
/// Longest wait of a lazy umount(8) for a hanging server, before nbd-client or nbdfuse is ended.
const LAZY_MAX: Duration = Duration::from_secs(1);

/// State of the server that made a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    Responds,
    /// The server has ended, or another server has taken its place.
    Dead,
    Hangs,
}

impl Liveness {
    /// Returns the state of the server that made the mount. `state` is the state of the server that now listens at the
    /// control socket.
    pub fn of(record: &Record, state: &ServerState) -> Self {
        match state {
            ServerState::Responds(server) if server.process == record.server => Self::Responds,
            ServerState::Hangs(process) if *process == record.server => Self::Hangs,
            _ => Self::Dead,
        }
    }
}

fn in_use(locked: &LockedRecord, why: &str) -> anyhow::Error {
    let (name, dir) = (&locked.record.name, locked.record.dir.display());
    rpc_error!(EBUSY, "{name}: {dir} is in use by {why}").into()
}

/// Unmounts the file system, and waits until its last block is written and its device is unused. Does nothing if the
/// file system is not mounted. Returns the running umount(8) if it has not ended yet, which only happens with `force`.
///
/// # Errors
/// Fails if the file system is in use, and still mounted; or if umount(8) takes too long, and continues to run.
pub fn unmount(locked: &LockedRecord, liveness: Liveness, force: bool) -> Result<Option<Running>> {
    let record = &locked.record;
    let (name, dir) = (&record.name, record.dir.display());
    let table = MountTable::read()?;
    let sources = sources(locked, &table);
    let elsewhere = table.of(&sources).find(|mount| mount.dir != record.dir);
    let is_here = table.of(&sources).any(|mount| mount.dir == record.dir);
    // If the server is dead, the number of its block device may have been reused by another device.
    if let Some(other) = elsewhere.filter(|_| is_here || liveness == Liveness::Responds) {
        let what = format!("another mount of it at {}; unmount that first", other.dir.display());
        return Err(in_use(locked, &what));
    }
    if !is_here {
        return Ok(None);
    }
    if let Some(above) = table.top_at(&record.dir).filter(|top| !sources.contains(&top.source)) {
        let what = format!("another mount over it, of {}; unmount that first", above.source.display());
        return Err(in_use(locked, &what));
    }
    let lazy = force && liveness != Liveness::Responds;
    if liveness == Liveness::Hangs && !lazy {
        let hangs = hang_message(&record.control, record.server);
        let hint =
            "continue or end the server, or give up what is not written with `freestone umount --force`";
        return Err(rpc_error!(
            ETIMEDOUT,
            "{name}: {dir} stays mounted, as unmounting writes and {hangs}; {hint}"
        )
        .into());
    }
    let mut umount = command("umount")?;
    if lazy {
        umount.arg("-l");
    }
    umount.arg(&record.dir);
    let mut running = Running::start(&mut umount, None)?;
    let end = if lazy { LAZY_MAX } else { WRITE_MAX };
    let mut waited = Duration::ZERO;
    let busy_until = Instant::now() + BUSY_MAX;
    loop {
        let slice = SLICE.min(end);
        match running.wait(slice)? {
            Outcome::Done => break,
            Outcome::Failed(why) if why.contains("busy") && Instant::now() < busy_until => {
                sleep(BUSY_PAUSE);
                running = Running::start(&mut umount, None)?;
                continue;
            }
            Outcome::Failed(why) if why.contains("busy") => {
                return Err(in_use(locked, &holders::describe(&record.dir)));
            }
            Outcome::Failed(why) => bail!("{name}: umount {dir}: {why}"),
            Outcome::TimedOut if lazy => return Ok(Some(running)),
            Outcome::TimedOut => waited += slice,
        }
        if waited >= end {
            bail!(
                "{name}: umount {dir} has written for {} s and goes on; umount again later",
                waited.as_secs()
            );
        }
        let state = ServerState::of(&record.control, name);
        if Liveness::of(record, &state) == Liveness::Hangs {
            let hint =
                "umount goes on if the server does, `freestone umount --force` gives up what is not written";
            let hangs = hang_message(&record.control, record.server);
            return Err(rpc_error!(ETIMEDOUT, "{name}: umount {dir} waits, as {hangs}; {hint}").into());
        }
        warn!("{name}: umount {dir} has been writing for {} s", waited.as_secs());
    }
    if !lazy && !wait_unused(locked) {
        let what =
            "another mount namespace, or a program that has its block device; `lsns -t mnt` lists namespaces";
        return Err(in_use(locked, what));
    }
    Ok(None)
}

/// Returns true if the file system of a record is mounted at its directory.
pub fn is_mounted(locked: &LockedRecord) -> bool {
    MountTable::read().is_ok_and(|table| {
        let sources = sources(locked, &table);
        table.of(&sources).any(|mount| mount.dir == locked.record.dir)
    })
}

/// Waits for the end of a lazy umount(8), after nbd-client or nbdfuse, for which it waited, has ended.
pub fn finish(locked: &LockedRecord, running: Option<Running>) -> Result<()> {
    let Some(mut running) = running else { return Ok(()) };
    let (name, dir) = (&locked.record.name, locked.record.dir.display());
    match running.wait(STEP_MAX)? {
        Outcome::Done => Ok(()),
        Outcome::Failed(why) => bail!("{name}: umount -l {dir}: {why}"),
        Outcome::TimedOut => {
            let who =
                locked.record.server.map_or_else(String::new, |server| format!(" (pid {})", server.pid));
            bail!(
                "{name}: umount {dir} waits for requests that the server{who} holds; end it, then umount again"
            )
        }
    }
}
