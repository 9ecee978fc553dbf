//! `power-cut NAME`: what a device is like after its power was lost, by a seed or at a point of its
//! log.

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
use crate::job::Kind;
use crate::service::Service;

/// The verb.
pub struct PowerCut;

/// Its parameters, and the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// The device.
    #[arg(
        help = "A device with power_cut=yes, or a null device with cache_size; its connections end. Or a \
                  snapshot with copies: origin and COW devices, all at one moment"
    )]
    name: String,
    /// Decides what is lost [default: another one each time, which is told]
    #[arg(long, value_name = "SEED")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    /// Go to a point of the log of record=FILE: after so many entries, or at a mark; with --seed,
    /// cut there
    #[arg(long, value_name = "N|MARK")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    at: Option<String>,
    /// Not now, but by itself after so many more writes (with zeroes and discards) or flushes, as in
    /// 1000writes or 3flushes; none: not any more
    #[arg(long, value_name = "COUNT", conflicts_with = "at")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    after: Option<String>,
}

/// What was done.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// What decided; absent where nothing was left to decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    /// Unflushed blocks that arrived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kept_blocks: Option<u64>,
    /// Unflushed blocks that did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lost_blocks: Option<u64>,
    /// Entries of the log that the device now shows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    entries: Option<u64>,
    /// When it will go off by itself; nothing is done yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    after: Option<String>,
    /// How many connections that ended.
    connections_ended: usize,
    /// Of a snapshot: what was cut with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    drives: Vec<Drive>,
    /// Of a snapshot: what became of it and of the others of its origin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    snapshots: Vec<Snapshot>,
}

/// The power switch of a device that has one.
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

/// A number counts entries, other words are a mark.
fn point(at: &str) -> Point {
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
            return of_stack(service, name, seed);
        }
        let _claim = service.claim(Self::METHOD, &name)?;
        let entry = service.find(&name)?;
        if let Some(after) = after {
            if at.is_some() {
                return Err(Fault::invalid(format!("{name}: power-cut: either at or after")));
            }
            return later(service, &entry, &after, seed);
        }
        now(service, &entry, at.as_deref(), seed)
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
        for (name, kept, lost) in own.into_iter().chain(others) {
            writeln!(
                out,
                "{name}: power cut, seed {seed}: of the unflushed blocks {kept} were kept and {lost} lost"
            )?;
        }
        snapshots.iter().try_for_each(|Snapshot { name, status, lost }| match lost {
            None => writeln!(out, "{name}: was opened again; status {status}"),
            Some(why) => writeln!(out, "{name}: is lost: {why}"),
        })
    }
}

/// Cuts the power of all that a snapshot is part of.
fn of_stack(service: &Service, name: String, seed: Option<u64>) -> Result<Reply, Fault> {
    let failed = |drive: &str, error| refused(drive, None, &error);
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

/// Cuts the power, or goes to a point of the log. The device is claimed.
fn now(service: &Service, entry: &Arc<Entry>, at: Option<&str>, seed: Option<u64>) -> Result<Reply, Fault> {
    let name = entry.name().to_owned();
    let power = power_of(entry)?;
    if let Some(snapshot) = stack_cut::standing_on(service, entry) {
        return Err(stack_cut::alone(entry, &snapshot));
    }
    service.registry.check_unused(entry, "cut off")?;
    if at.is_some() {
        check_visit(entry)?;
    } else if power.is_half_set_back() {
        let why = "it is off, as a return to a point of its log failed half way; go to a point again (--at), or reset it";
        return Err(Fault::failed(Errno::EIO, format!("{name}: power-cut: {why}")));
    }
    let _job = service.jobs.begin(&name, "power-cut", Kind::WHOLE)?;
    let layers = &entry.layers;
    let seed_of_cut = seed.unwrap_or_else(|| layers.next_seed());
    // What waits for room would be waited for, and what waits for its turn is lost.
    let _now = service.exports.end_waiting(entry);
    let (connections_ended, outcome) = service.exports.restart(&name, || match at {
        None => layers.cut(power, seed_of_cut).map(Outcome::Cut),
        Some(at) => {
            entry.rewinds.fetch_add(1, Ordering::SeqCst);
            if let Some(origin) = &entry.cow_origin {
                origin.was_changed();
            }
            let below = || entry.kind.wipe(false);
            layers.visit(power, &point(at), seed, &below).map(Outcome::Visited)
        }
    });
    let outcome = outcome.map_err(|error| refused(&name, at, &error))?;
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

/// Has the power go off by itself, or not any more. The device is claimed.
fn later(service: &Service, entry: &Arc<Entry>, after: &str, seed: Option<u64>) -> Result<Reply, Fault> {
    let name = entry.name();
    let power = power_of(entry)?;
    // A snapshot with copies loses its power with it.
    if stack_cut::standing_on(service, entry).is_none() {
        service.registry.check_unused(entry, "cut off")?;
    }
    let refused = |why| Fault::invalid(format!("{name}: power-cut: after={after}: {why}"));
    let asked = parse_after(after).map_err(refused)?;
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
    let Some(after) = asked else {
        power.keep_on();
        return Ok(reply);
    };
    let seed = seed.unwrap_or_else(|| entry.layers.next_seed());
    let (off, went_off) = mpsc::channel();
    let (weak, device) = (service.weak(), Arc::downgrade(entry));
    // It ends as well where the count ends, or the device.
    let wait = move || {
        if went_off.recv().is_ok()
            && let (Some(service), Some(entry)) = (weak.upgrade(), device.upgrade())
        {
            by_itself(&service, &entry, seed);
        }
    };
    let thread = thread::Builder::new().name("power-cut".into()).spawn(wait);
    thread.map_err(|e| Fault::failed(Errno::ENOMEM, format!("{name}: power-cut: no thread: {e}")))?;
    let armed = entry.layers.cut_after(power, after, seed, move || {
        // Nobody waits where the server ends.
        let _ = off.send(());
    });
    armed.map_err(|_| Fault::failed(Errno::EBUSY, format!("{name}: power-cut: it is just going off")))?;
    (reply.seed, reply.after) = (Some(seed), Some(after.to_string()));
    Ok(reply)
}

/// The power has gone off: what is left is what [`now`] does.
fn by_itself(service: &Service, entry: &Arc<Entry>, seed: u64) {
    if let Some(snapshot) = stack_cut::standing_on(service, entry) {
        if let Err(fault) = of_stack(service, snapshot.name().to_owned(), Some(seed)) {
            not_gone_off(entry, &fault);
        }
        return;
    }
    let cut = service.claim(PowerCut::METHOD, entry.name()).and_then(|_claim| {
        let there = service.registry.find(entry.name());
        // One that was removed meanwhile ends as every other.
        if there.is_none_or(|there| !Arc::ptr_eq(&there, entry)) {
            return Ok(());
        }
        now(service, entry, None, Some(seed)).map(drop)
    });
    if let Err(fault) = cut {
        not_gone_off(entry, &fault);
    }
}

fn not_gone_off(entry: &Entry, fault: &Fault) {
    tracing::warn!("the power did not go off by itself: {}", fault.message);
    if let Some(power) = &entry.layers.power {
        power.keep_on();
    }
}

enum Outcome {
    Cut(Cut),
    Visited(Visited),
}

/// Going back needs a beginning.
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

fn refused(name: &str, at: Option<&str>, error: &CutError) -> Fault {
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
