//! `power-cut NAME`: simulates a power loss of a device, now or after a number of writes, or replays its log to a
//! point.
//!
//! A cut of a snapshot with a COW device affects the whole stack: [`stack_cut`].

use std::io::{self, Write};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread;

use clap::Args;
use freestone::power::{Cut, Point, Power, RecordError, Visited, log};
use freestone_spec::kinds::{Entry, KindSpec};
use freestone_spec::layers::{CutError, parse_after};
use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};

use super::stack_cut::{self, Drive, Snapshot, StackCut};
use super::{Verb, errno_of};
use crate::control::protocol::Fault;
use crate::job::JobKind;
use crate::service::Service;

/// Hint after a cut without unflushed writes.
const NOTHING_UNFLUSHED: &str = "no write was unflushed; if the device is mounted, the page cache may still hold the \
                                 writes: run `sync -f` on the mount before the cut, while the program still writes";

pub struct PowerCut;

/// Parameters of the request, also the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    #[arg(
        help = "A device with power_cut=yes, a null device with cache_size, or a snapshot with a COW device \
                (cuts origin and COW device at one moment); its connections end"
    )]
    name: String,
    /// Seed that selects the lost writes [default: random, printed]
    #[arg(long, value_name = "SEED")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    /// Replay the log of record=FILE to this point: after N entries, marks included, or at a mark; with
    /// --seed, cut the power there
    #[arg(long, value_name = "N|MARK")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    at: Option<String>,
    /// Cut the power later, after this many writes (including write zeroes and discards) or flushes, as in
    /// 1000writes or 3flushes; none: cancel
    #[arg(long, value_name = "COUNT", conflicts_with = "at")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    after: Option<String>,
}

/// Result of the verb.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// Seed that selects the lost writes; omitted without a cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    /// Number of unflushed blocks that were kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kept_blocks: Option<u64>,
    /// Number of unflushed blocks that were lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lost_blocks: Option<u64>,
    /// Number of log entries that the content of the device includes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    entries: Option<u64>,
    /// Event that will trigger the cut, or `none`. No cut has happened yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    after: Option<String>,
    /// Number of connections that were closed.
    connections_ended: usize,
    /// For a snapshot: the devices that were cut with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    drives: Vec<Drive>,
    /// For a snapshot: the state of all snapshots of its origin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    snapshots: Vec<Snapshot>,
}

/// Returns the power layer of a device, or fails if its power cannot be cut.
fn power_of(entry: &Entry) -> Result<&Arc<Power>, Fault> {
    let name = entry.name();
    let power = entry.layers.power.as_ref().filter(|_| entry.layers.can_cut);
    power.ok_or_else(|| {
        let why = if matches!(entry.spec.kind, KindSpec::Null(_)) {
            "create it with memory_backed=1 and power_cut=yes or cache_size=SIZE"
        } else if entry.kind.check_origin().is_ok() && !entry.is_read_only() {
            "create it with power_cut=yes"
        } else {
            "only a ram, null or file device that can be written and a fork have that, with power_cut=yes"
        };
        Fault::failed(Errno::EOPNOTSUPP, format!("{name}: its power cannot be cut: {why}"))
    })
}

/// Parses a point of the log: a number of entries, or the text of a mark.
fn parse_point(at: &str) -> Point {
    at.parse().map_or_else(|_| Point::Mark(at.to_owned()), Point::Entry)
}

impl Verb for PowerCut {
    const METHOD: &'static str = "power-cut";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let Params { name, seed, at, after } = params;
        if service.find(&name)?.kind.cow().is_some() {
            if at.or(after).is_some() {
                let why = "at and after are for a drive: its log, or what it is asked for";
                return Err(Fault::failed(Errno::EOPNOTSUPP, format!("{name}: power-cut: {why}")));
            }
            return cut_stack(service, name, seed);
        }
        let _claim = service.claim(Self::METHOD, &name)?;
        let entry = service.find(&name)?;
        if let Some(after) = after {
            if at.is_some() {
                return Err(Fault::invalid(format!("{name}: power-cut: either at or after")));
            }
            return arm_cut(service, &entry, &after, seed);
        }
        cut_now(service, &entry, at.as_deref(), seed)
    }

    fn show(params: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        let Reply {
            name,
            seed,
            kept_blocks,
            lost_blocks,
            entries,
            after,
            connections_ended,
            drives,
            snapshots,
        } = reply;
        match (after.as_deref(), seed) {
            (Some(after), Some(seed)) => {
                return writeln!(out, "{name}: the power goes off after {after}, seed {seed}");
            }
            (Some(_), None) => return writeln!(out, "{name}: the power does not go off by itself"),
            (None, _) => {}
        }
        match connections_ended {
            0 => {}
            1 => writeln!(out, "{name}: a connection ended")?,
            n => writeln!(out, "{name}: {n} connections ended")?,
        }
        if let Some(entries) = entries {
            let at = params.at.as_deref().unwrap_or_default();
            writeln!(out, "{name}: is as at {at}, after {entries} entries of the log")?;
        }
        let Some(seed) = seed else { return Ok(()) };
        let own = kept_blocks.zip(*lost_blocks).map(|(kept, lost)| (name, kept, lost));
        let others = drives.iter().map(|drive| (&drive.name, drive.kept_blocks, drive.lost_blocks));
        let mut unflushed = 0;
        for (name, kept, lost) in own.into_iter().chain(others) {
            unflushed += kept + lost;
            writeln!(
                out,
                "{name}: power cut, seed {seed}: of the unflushed blocks {kept} were kept and {lost} lost"
            )?;
        }
        // The hint is not for a point of the log: there, the page cache of a client is not involved.
        if unflushed == 0 && entries.is_none() {
            writeln!(out, "{name}: {NOTHING_UNFLUSHED}")?;
        }
        snapshots.iter().try_for_each(|Snapshot { name, status, lost }| match lost {
            None => writeln!(out, "{name}: was opened again; status {status}"),
            Some(why) => writeln!(out, "{name}: is lost: {why}"),
        })
    }
}

/// Cuts the power of the stack of a snapshot.
fn cut_stack(service: &Service, name: String, seed: Option<u64>) -> Result<Reply, Fault> {
    let failed = |drive: &str, error| cut_fault(drive, None, &error);
    let done = stack_cut::cut(service, &name, seed, &failed)?;
    let StackCut { seed, drives, snapshots, connections_ended } = done;
    Ok(Reply {
        name,
        seed: Some(seed),
        kept_blocks: None,
        lost_blocks: None,
        entries: None,
        after: None,
        connections_ended,
        drives,
        snapshots,
    })
}

/// Cuts the power now, or replays the log to a point. The caller has claimed the device.
fn cut_now(
    service: &Service,
    entry: &Arc<Entry>,
    at: Option<&str>,
    seed: Option<u64>,
) -> Result<Reply, Fault> {
    let name = entry.name().to_owned();
    let power = power_of(entry)?;
    if let Some(snapshot) = stack_cut::find_snapshot_on(service, entry) {
        return Err(stack_cut::single_cut_fault(entry, &snapshot));
    }
    service.registry.check_unused(entry, "cut off")?;
    if at.is_some() {
        check_visit(entry)?;
    } else if power.is_half_set_back() {
        let why = "it is off, as a return to a point of its log failed half way; go to a point again (--at), or reset it";
        return Err(Fault::failed(Errno::EIO, format!("{name}: power-cut: {why}")));
    }
    let _job = service.jobs.begin(&name, "power-cut", JobKind::EXCLUSIVE_UNCANCELLABLE)?;
    let layers = &entry.layers;
    let cut_seed = seed.unwrap_or_else(|| layers.next_seed());
    // Requests that wait for space would delay the restart, and requests that wait for a rate limit belong to the
    // old content: both fail.
    let _now = service.exports.end_waiting(entry);
    let (connections_ended, outcome) = service.exports.restart(&name, || match at {
        None => layers.cut(power, cut_seed).map(Outcome::Cut),
        Some(at) => {
            entry.rewinds.fetch_add(1, Ordering::SeqCst);
            if let Some(origin) = &entry.cow_origin {
                origin.was_changed();
            }
            let below = || entry.kind.wipe(false);
            layers.visit(power, &parse_point(at), seed, &below).map(Outcome::Visited)
        }
    });
    let outcome = outcome.map_err(|error| cut_fault(&name, at, &error))?;
    let reply = Reply {
        name,
        seed: None,
        kept_blocks: None,
        lost_blocks: None,
        entries: None,
        after: None,
        connections_ended,
        drives: Vec::new(),
        snapshots: Vec::new(),
    };
    Ok(match outcome {
        Outcome::Cut(Cut { seed, kept_blocks, lost_blocks }) => Reply {
            seed: Some(seed),
            kept_blocks: Some(kept_blocks),
            lost_blocks: Some(lost_blocks),
            ..reply
        },
        Outcome::Visited(Visited { entries, cut }) => Reply {
            seed,
            kept_blocks: cut.map(|cut| cut.kept_blocks),
            lost_blocks: cut.map(|cut| cut.lost_blocks),
            entries: Some(entries),
            ..reply
        },
    })
}

/// Arms a cut after a number of writes or flushes, or cancels it. The caller has claimed the device.
fn arm_cut(service: &Service, entry: &Arc<Entry>, after: &str, seed: Option<u64>) -> Result<Reply, Fault> {
    let name = entry.name();
    let power = power_of(entry)?;
    // Dependent snapshots with a COW device are cut with this device.
    if stack_cut::find_snapshot_on(service, entry).is_none() {
        service.registry.check_unused(entry, "cut off")?;
    }
    let invalid = |why| Fault::invalid(format!("{name}: power-cut: after={after}: {why}"));
    let trigger = parse_after(after).map_err(invalid)?;
    let mut reply = Reply {
        name: name.to_owned(),
        seed: None,
        kept_blocks: None,
        lost_blocks: None,
        entries: None,
        after: Some("none".to_owned()),
        connections_ended: 0,
        drives: Vec::new(),
        snapshots: Vec::new(),
    };
    let Some(after) = trigger else {
        power.keep_on();
        return Ok(reply);
    };
    let seed = seed.unwrap_or_else(|| entry.layers.next_seed());
    let (off, went_off) = mpsc::channel();
    let (weak, device) = (service.weak(), Arc::downgrade(entry));
    // The thread also ends if the cut is cancelled or the device is removed: both drop the sender.
    let wait = move || {
        if went_off.recv().is_ok()
            && let (Some(service), Some(entry)) = (weak.upgrade(), device.upgrade())
        {
            run_armed_cut(&service, &entry, seed);
        }
    };
    let thread = thread::Builder::new().name("power-cut".into()).spawn(wait);
    thread.map_err(|e| Fault::failed(Errno::ENOMEM, format!("{name}: power-cut: no thread: {e}")))?;
    let armed = entry.layers.cut_after(power, after, seed, move || {
        // The receiver may be gone when the server ends.
        let _ = off.send(());
    });
    armed
        .map_err(|_| Fault::failed(Errno::EBUSY, format!("{name}: power-cut: the power is going off now")))?;
    (reply.seed, reply.after) = (Some(seed), Some(after.to_string()));
    Ok(reply)
}

/// Finishes an armed cut after the power layer has gone off.
fn run_armed_cut(service: &Service, entry: &Arc<Entry>, seed: u64) {
    if let Some(snapshot) = stack_cut::find_snapshot_on(service, entry) {
        if let Err(fault) = cut_stack(service, snapshot.name().to_owned(), Some(seed)) {
            abandon_armed_cut(entry, &fault);
        }
        return;
    }
    let cut = service.claim(PowerCut::METHOD, entry.name()).and_then(|_claim| {
        let current = service.registry.find(entry.name());
        // Nothing to do if the device was removed meanwhile.
        if current.is_none_or(|current| !Arc::ptr_eq(&current, entry)) {
            return Ok(());
        }
        cut_now(service, entry, None, Some(seed)).map(drop)
    });
    if let Err(fault) = cut {
        abandon_armed_cut(entry, &fault);
    }
}

/// Logs the failure of an armed cut, and lets held requests continue.
fn abandon_armed_cut(entry: &Entry, fault: &Fault) {
    tracing::warn!("the power did not go off by itself: {}", fault.message);
    if let Some(power) = &entry.layers.power {
        power.keep_on();
    }
}

enum Outcome {
    Cut(Cut),
    Visited(Visited),
}

/// Fails if the device cannot be replayed to a point of its log: that needs a log, and an initial state.
fn check_visit(entry: &Entry) -> Result<(), Fault> {
    let name = entry.name();
    let refuse = |why: &str| Err(Fault::failed(Errno::EOPNOTSUPP, format!("{name}: power-cut: at: {why}")));
    if entry.spec.layers.record.is_none() {
        return refuse("there is no log; create the device with record=FILE");
    }
    if entry.layers.zones.is_some() {
        return refuse("the log has no conditions of zones, so a zoned device cannot go back");
    }
    if entry.kind.can_wipe() {
        return Ok(());
    }
    refuse(
        "a file does not go back to what it was when the recording began; make the file readonly=yes and record a fork of it",
    )
}

fn cut_fault(name: &str, at: Option<&str>, error: &CutError) -> Fault {
    let errno = match error {
        CutError::Busy => Errno::EBUSY,
        CutError::Device(error) | CutError::Record(RecordError::Device(error)) => errno_of(*error),
        CutError::Record(RecordError::Log(log::Error::NoEntry { .. } | log::Error::NoMark { .. })) => {
            Errno::ERANGE
        }
        CutError::Record(_) => Errno::EIO,
    };
    let at = at.map(|at| format!("at={at}: ")).unwrap_or_default();
    Fault::failed(errno, format!("{name}: power-cut: {at}{error}"))
}
