//! `power-cut NAME`: simulates a power loss of a device, now or after a number of writes, or replays the
//! device's write log up to a point.
//!
//! A power cut of a snapshot with a COW device affects the origin and all its snapshots, see `stack_cut.rs`.

use std::io::{self, Write};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread;

use clap::Args;
use freestone::power::{CutReport, Point, Power, RecordError, VisitReport, log};
use freestone_control::protocol::RpcError;
use freestone_spec::kinds::{Entry, KindSpec};
use freestone_spec::layers::{CutError, parse_after};
use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};

use crate::jobs::JobKind;
use crate::service::Service;
use crate::verbs::drives::stack_cut::{self, Drive, Snapshot, StackCut};
use crate::verbs::{Verb, errno_of};

/// Hint for the user after a power cut of a device that had no unflushed writes.
const NOTHING_UNFLUSHED: &str = "no write was unflushed; if the device is mounted, the page cache may still hold the \
                                 writes: run `sync -f` on the mount before the cut, while the program still writes";

pub struct PowerCut;

/// Parameters of the verb `power-cut`, from a JSON request or the command line.
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

/// Result of the verb `power-cut`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// Seed that selected the lost writes; None if no power was cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    /// Number of unflushed blocks that the power cut kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kept_blocks: Option<u64>,
    /// Number of unflushed blocks that the power cut lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lost_blocks: Option<u64>,
    /// After a replay: number of log entries that the content of the device includes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    entries: Option<u64>,
    /// Event that will trigger an armed power cut, or `none` if it was cancelled. None if the cut happened at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    after: Option<String>,
    /// Number of client connections that were closed.
    connections_ended: usize,
    /// For a snapshot: the origin and the COW devices that were cut.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    drives: Vec<Drive>,
    /// For a snapshot: the state of all snapshots of its origin after the cut.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    snapshots: Vec<Snapshot>,
}

/// Returns the power layer of a device, or an error if the power of the device cannot be cut.
fn power_of(entry: &Entry) -> Result<&Arc<Power>, RpcError> {
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
        rpc_error!(EOPNOTSUPP, "{name}: its power cannot be cut: {why}")
    })
}

/// Parses a point of the write log: a number of entries, or otherwise the text of a mark.
fn parse_point(at: &str) -> Point {
    at.parse().map_or_else(|_| Point::Mark(at.to_owned()), Point::Entry)
}

impl Verb for PowerCut {
    const METHOD: &'static str = "power-cut";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let Params { name, seed, at, after } = params;
        if service.find(&name)?.kind.cow().is_some() {
            if at.or(after).is_some() {
                refuse!(
                    EOPNOTSUPP,
                    "{name}: power-cut: at and after are for a drive: its log, or what it is asked for"
                );
            }
            return cut_stack(service, name, seed);
        }
        let _claim = service.claim(Self::METHOD, &name)?;
        let entry = service.find(&name)?;
        if let Some(after) = after {
            if at.is_some() {
                refuse!(invalid, "{name}: power-cut: either at or after");
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
        // After a replay, the hint does not apply: the page cache of a client does not affect the log.
        if unflushed == 0 && entries.is_none() {
            writeln!(out, "{name}: {NOTHING_UNFLUSHED}")?;
        }
        snapshots.iter().try_for_each(|Snapshot { name, status, lost }| match lost {
            None => writeln!(out, "{name}: was opened again; status {status}"),
            Some(why) => writeln!(out, "{name}: is lost: {why}"),
        })
    }
}

/// Cuts the power of the origin of a snapshot, of its snapshots and of their COW devices.
fn cut_stack(service: &Service, name: String, seed: Option<u64>) -> Result<Reply, RpcError> {
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

/// Cuts the power of a device now, or replays its write log to a point. The caller has claimed the device.
fn cut_now(
    service: &Service,
    entry: &Arc<Entry>,
    at: Option<&str>,
    seed: Option<u64>,
) -> Result<Reply, RpcError> {
    let name = entry.name().to_owned();
    let power = power_of(entry)?;
    if let Some(snapshot) = stack_cut::find_snapshot_on(service, entry) {
        return Err(stack_cut::single_cut_fault(entry, &snapshot));
    }
    service.registry.check_unused(entry, "cut off")?;
    if at.is_some() {
        check_visit(entry)?;
    } else if power.is_partly_restored() {
        let why = "it is off, as a return to a point of its log failed half way";
        refuse!(EIO, "{name}: power-cut: {why}; go to a point again (--at), or reset it");
    }
    let _job = service.jobs.begin(&name, "power-cut", JobKind::EXCLUSIVE_UNCANCELLABLE)?;
    let layers = &entry.layers;
    let cut_seed = seed.unwrap_or_else(|| layers.next_seed());
    // Requests that wait for space would delay the restart of the exports. Requests that wait for a rate
    // limit belong to the old content. Therefore both fail.
    let _now = service.exports.fail_waiting(entry);
    let (connections_ended, outcome) = service.exports.restart(&name, || match at {
        None => layers.cut(power, cut_seed).map(Outcome::Cut),
        Some(at) => {
            entry.rewinds.fetch_add(1, Ordering::SeqCst);
            if let Some(origin) = &entry.cow_origin {
                origin.mark_changed();
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
        Outcome::Cut(CutReport { seed, kept_blocks, lost_blocks }) => Reply {
            seed: Some(seed),
            kept_blocks: Some(kept_blocks),
            lost_blocks: Some(lost_blocks),
            ..reply
        },
        Outcome::Visited(VisitReport { entries, cut }) => Reply {
            seed,
            kept_blocks: cut.map(|cut| cut.kept_blocks),
            lost_blocks: cut.map(|cut| cut.lost_blocks),
            entries: Some(entries),
            ..reply
        },
    })
}

/// Arms a power cut after a number of writes or flushes, or cancels an armed cut. The caller has claimed the device.
fn arm_cut(service: &Service, entry: &Arc<Entry>, after: &str, seed: Option<u64>) -> Result<Reply, RpcError> {
    let name = entry.name();
    let power = power_of(entry)?;
    // Dependent snapshots with a COW device are cut together with this device.
    if stack_cut::find_snapshot_on(service, entry).is_none() {
        service.registry.check_unused(entry, "cut off")?;
    }
    let invalid = |why| rpc_error!(invalid, "{name}: power-cut: after={after}: {why}");
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
        power.cancel_cut();
        return Ok(reply);
    };
    let seed = seed.unwrap_or_else(|| entry.layers.next_seed());
    let (off, went_off) = mpsc::channel();
    let (weak, device) = (service.weak(), Arc::downgrade(entry));
    // The thread also ends if the cut is cancelled or the device is removed, because both drop the sender.
    let wait = move || {
        if went_off.recv().is_ok()
            && let (Some(service), Some(entry)) = (weak.upgrade(), device.upgrade())
        {
            run_armed_cut(&service, &entry, seed);
        }
    };
    let thread = thread::Builder::new().name("power-cut".into()).spawn(wait);
    thread.map_err(|e| refusal!(ENOMEM, "{name}: power-cut: no thread: {e}"))?;
    let armed = entry.layers.cut_after(power, after, seed, move || {
        // The receiver may be gone when the server shuts down.
        let _ = off.send(());
    });
    armed.map_err(|_| rpc_error!(EBUSY, "{name}: power-cut: the power is going off now"))?;
    (reply.seed, reply.after) = (Some(seed), Some(after.to_string()));
    Ok(reply)
}

/// Completes an armed power cut, after the power layer has stopped serving requests.
fn run_armed_cut(service: &Service, entry: &Arc<Entry>, seed: u64) {
    if let Some(snapshot) = stack_cut::find_snapshot_on(service, entry) {
        if let Err(fault) = cut_stack(service, snapshot.name().to_owned(), Some(seed)) {
            abandon_armed_cut(entry, &fault);
        }
        return;
    }
    let cut = service.claim(PowerCut::METHOD, entry.name()).and_then(|_claim| {
        let current = service.registry.find(entry.name());
        // If the device was removed meanwhile, there is nothing to cut.
        if current.is_none_or(|current| !Arc::ptr_eq(&current, entry)) {
            return Ok(());
        }
        cut_now(service, entry, None, Some(seed)).map(drop)
    });
    if let Err(fault) = cut {
        abandon_armed_cut(entry, &fault);
    }
}

/// Logs the failure of an armed power cut, and lets the held requests continue.
fn abandon_armed_cut(entry: &Entry, fault: &RpcError) {
    tracing::warn!("the power did not go off by itself: {}", fault.message);
    if let Some(power) = &entry.layers.power {
        power.cancel_cut();
    }
}

enum Outcome {
    Cut(CutReport),
    Visited(VisitReport),
}

/// Fails if the device cannot be replayed to a point of its write log, because it has no log or no
/// reproducible initial state.
fn check_visit(entry: &Entry) -> Result<(), RpcError> {
    let name = entry.name();
    let refuse = |why: &str| Err(rpc_error!(EOPNOTSUPP, "{name}: power-cut: at: {why}"));
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

fn cut_fault(name: &str, at: Option<&str>, error: &CutError) -> RpcError {
    let errno = match error {
        CutError::Busy => Errno::EBUSY,
        CutError::Device(error) | CutError::Record(RecordError::Device(error)) => errno_of(*error),
        CutError::Record(RecordError::Log(log::Error::NoEntry { .. } | log::Error::NoMark { .. })) => {
            Errno::ERANGE
        }
        CutError::Record(_) => Errno::EIO,
    };
    let at = at.map(|at| format!("at={at}: ")).unwrap_or_default();
    RpcError::failed(errno, format!("{name}: power-cut: {at}{error}"))
}
