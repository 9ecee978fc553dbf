//! `zones NAME [report|open|close|finish|reset]`: reports or changes the zones of a device. Reports have the
//! format of util-linux's `blkzone report`.

use std::io::{self, Write};

use clap::{Args, ValueEnum};
use freestone::device::Error;
use freestone::device::zoned::{Zone, ZoneCondition, ZoneOp, ZoneType, Zoned};
use freestone_control::protocol::RpcError;
use freestone_spec::keys::SECTOR_BYTES;
use freestone_spec::layers::{format_offset, parse_offset};
use serde::{Deserialize, Serialize};

use crate::service::Service;
use crate::verbs::{Verb, errno_of};

/// Maximum number of zones in a response.
const ROWS_MAX: u64 = 65_536;

pub struct Zones;

/// Parameters of the verb `zones`, from a JSON request or the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// A device with zoned=1
    name: String,
    /// Action on the zones
    #[arg(value_enum, default_value_t = Action::Report)]
    #[serde(default)]
    action: Action,
    /// Offset of the first zone, with a unit
    #[arg(long, value_name = "OFFSET", default_value = "0", value_parser = parse_offset)]
    #[serde(default)]
    offset: u64,
    /// Number of zones [default: to the end]
    #[arg(long, value_name = "N")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    count: Option<u64>,
}

/// Action on the zones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Action {
    /// Report the zones
    #[default]
    Report,
    /// Open the zones explicitly
    Open,
    /// Close the zones
    Close,
    /// Finish the zones: make them full
    Finish,
    /// Reset the zones: make them empty
    Reset,
}

impl Action {
    /// Returns the zone operation of the action, and its participle for messages. Returns `None` for a report.
    const fn op(self) -> Option<(ZoneOp, &'static str)> {
        match self {
            Self::Report => None,
            Self::Open => Some((ZoneOp::Open, "opened")),
            Self::Close => Some((ZoneOp::Close, "closed")),
            Self::Finish => Some((ZoneOp::Finish, "finished")),
            Self::Reset => Some((ZoneOp::Reset, "reset")),
        }
    }
}

/// Result of the verb `zones`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// Number of zones that were reported or changed.
    count: u64,
    /// The zones of a report; None after other actions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    zones: Option<Vec<Row>>,
    /// Offset in bytes of the next zone, if the report was too long for one response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    next: Option<u64>,
}

/// A zone in a report. Offsets and lengths are in bytes.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    start: u64,
    len: u64,
    capacity: u64,
    /// Absolute offset of the write pointer; the end of the zone if the zone has no write pointer.
    write_pointer: u64,
    /// Name of the zone type in the kernel.
    r#type: String,
    /// Name of the zone condition in the kernel, as in its trace points.
    condition: String,
}

/// Zone conditions, with the number and name in the kernel's `blk_zone_cond`, and the name in `blkzone`.
const CONDITIONS: [(ZoneCondition, u8, &str, &str); 8] = [
    (ZoneCondition::NotWritePointer, 0x0, "NOT_WP", "nw"),
    (ZoneCondition::Empty, 0x1, "EMPTY", "em"),
    (ZoneCondition::ImplicitOpen, 0x2, "IMP_OPEN", "oi"),
    (ZoneCondition::ExplicitOpen, 0x3, "EXP_OPEN", "oe"),
    (ZoneCondition::Closed, 0x4, "CLOSED", "cl"),
    (ZoneCondition::ReadOnly, 0xd, "READONLY", "ro"),
    (ZoneCondition::Full, 0xe, "FULL", "fu"),
    (ZoneCondition::Offline, 0xf, "OFFLINE", "of"),
];
/// Zone types, with their numbers and names in the kernel.
const TYPES: [(ZoneType, u8, &str); 2] =
    [(ZoneType::Conventional, 1, "CONVENTIONAL"), (ZoneType::SequentialRequired, 2, "SEQ_WRITE_REQUIRED")];

/// Returns the name of a zone condition in the kernel.
pub fn condition_word(condition: ZoneCondition) -> &'static str {
    let row = CONDITIONS.iter().find(|(known, ..)| *known == condition);
    row.map(|(_, _, name, _)| *name).unwrap_or_default()
}

impl Row {
    fn of(zone: &Zone) -> Self {
        let kind = TYPES.iter().find(|(kind, ..)| *kind == zone.kind);
        Self {
            start: zone.start,
            len: zone.len,
            capacity: zone.capacity,
            write_pointer: zone.write_pointer,
            r#type: kind.map(|(_, _, name)| *name).unwrap_or_default().to_owned(),
            condition: condition_word(zone.condition).to_owned(),
        }
    }

    /// Returns the zone as a line of `blkzone report`, with numbers in sectors. The flags `reset` and
    /// `non-seq` are always 0, because the device has no such states.
    fn line(&self) -> String {
        let condition = CONDITIONS.iter().find(|(_, _, name, _)| *name == self.condition);
        let (number, short) = condition.map_or((0, "?"), |(_, number, _, short)| (*number, *short));
        let (kind, name) =
            TYPES.iter().find(|(.., name)| *name == self.r#type).map_or((0, "?"), |(_, n, name)| (*n, *name));
        let pointer = if kind == 1 { 0 } else { self.write_pointer.saturating_sub(self.start) };
        let sectors = |bytes: u64| bytes / SECTOR_BYTES;
        format!(
            "  start: 0x{:09x}, len 0x{:06x}, cap 0x{:06x}, wptr 0x{:06x} reset:0 non-seq:0, zcond:{number:2}({short}) \
             [type: {kind}({name})]",
            sectors(self.start),
            sectors(self.len),
            sectors(self.capacity),
            sectors(pointer),
        )
    }
}

impl Verb for Zones {
    const METHOD: &'static str = "zones";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    // The device is not claimed (locked against other verbs), because the verb waits for writes in flight.
    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let Params { name, action, offset, count } = params;
        let entry = service.find(&name)?;
        let zoned = entry.device().and_then(|device| device.zoned());
        let zoned = zoned.ok_or_else(|| {
            rpc_error!(EOPNOTSUPP, "{name}: has no zones; a ram, null or file device gets them with zoned=1")
        })?;
        if count == Some(0) {
            refuse!(invalid, "{name}: zones: count=0: must be 1 at least");
        }
        match action.op() {
            None => report(&name, zoned, offset, count),
            Some((op, done)) => operate(&name, zoned, (op, done), offset, count),
        }
    }

    fn show(params: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        let Reply { name, count, zones, next } = reply;
        if let Some((_, done)) = params.action.op() {
            let zones = if *count == 1 { "zone" } else { "zones" };
            return writeln!(out, "{name}: {count} {zones} {done}");
        }
        for row in zones.iter().flatten() {
            writeln!(out, "{}", row.line())?;
        }
        match next {
            Some(next) => {
                writeln!(out, "({count} zones; the next ones with --offset {})", format_offset(*next))
            }
            None => Ok(()),
        }
    }
}

fn report(name: &str, zoned: &dyn Zoned, offset: u64, count: Option<u64>) -> Result<Reply, RpcError> {
    let most = count.unwrap_or(u64::MAX);
    let (mut rows, mut next) = (Vec::new(), None);
    zoned
        .report(offset, &mut |zone| {
            let reported = rows.len() as u64;
            if reported < most && reported == ROWS_MAX {
                next = Some(zone.start);
            }
            if reported < most.min(ROWS_MAX) {
                rows.push(Row::of(&zone));
            }
            (rows.len() as u64) < most && next.is_none()
        })
        .map_err(|error| range_fault(name, offset, error))?;
    Ok(Reply { name: name.to_owned(), count: rows.len() as u64, zones: Some(rows), next })
}

/// Applies an operation to the zones one after the other. Stops at the first failure.
fn operate(
    name: &str,
    zoned: &dyn Zoned,
    (op, done): (ZoneOp, &str),
    offset: u64,
    count: Option<u64>,
) -> Result<Reply, RpcError> {
    let Some(geometry) = zoned.geometry().zones else {
        return Err(RpcError::internal(format!("{name}: zones without a geometry")));
    };
    let size = zoned.geometry().size;
    if offset >= size {
        return Err(range_fault(name, offset, Error::OutOfRange));
    }
    let first = offset / geometry.zone_size;
    let left = u64::from(geometry.nr_zones) - first;
    let count = match count {
        Some(count) if count > left => {
            let why = format!("count={count}: from {} on there are {left} zones", format_offset(offset));
            refuse!(invalid, "{name}: zones: {why}");
        }
        other => other.unwrap_or(left),
    };
    let reply = |count| Reply { name: name.to_owned(), count, zones: None, next: None };
    if op == ZoneOp::Reset && count == u64::from(geometry.nr_zones) {
        // As in the kernel, a reset of all zones skips the zones that cannot be reset.
        let all = zoned.reset_all();
        all.map_err(|error| RpcError::failed(errno_of(error), format!("{name}: zones: {error}")))?;
        return Ok(reply(count));
    }
    for zone in first..first + count {
        let at = zone * geometry.zone_size;
        if let Err(error) = zoned.zone_op(op, at) {
            let before = zone - first;
            let why = format!("{name}: the zone at {} is not {done}: {error}", format_offset(at));
            let why = if before == 0 { why } else { format!("{why}; {before} before it were") };
            return Err(RpcError::failed(errno_of(error), why).with("zones_done", before));
        }
    }
    Ok(reply(count))
}

fn range_fault(name: &str, offset: u64, error: Error) -> RpcError {
    match error {
        Error::OutOfRange => {
            rpc_error!(
                invalid,
                "{name}: zones: offset={}: behind the end of the device",
                format_offset(offset)
            )
        }
        error => RpcError::failed(errno_of(error), format!("{name}: zones: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use freestone::device::zoned::{Zone, ZoneCondition, ZoneType};

    use super::Row;

    #[test]
    fn zone_line_equals_blkzone_report() {
        let zone = |start: u64, wp: u64, kind, condition| {
            let (len, capacity) = (256 << 20, 192 << 20);
            Row::of(&Zone { start, len, capacity, write_pointer: start + wp, kind, condition }).line()
        };
        let seq = ZoneType::SequentialRequired;
        assert_eq!(
            zone(0, 256 << 20, ZoneType::Conventional, ZoneCondition::NotWritePointer),
            "  start: 0x000000000, len 0x080000, cap 0x060000, wptr 0x000000 reset:0 non-seq:0, zcond: 0(nw) \
             [type: 1(CONVENTIONAL)]"
        );
        assert_eq!(
            zone(256 << 20, 4096, seq, ZoneCondition::ImplicitOpen),
            "  start: 0x000080000, len 0x080000, cap 0x060000, wptr 0x000008 reset:0 non-seq:0, zcond: 2(oi) \
             [type: 2(SEQ_WRITE_REQUIRED)]"
        );
        let full = zone(1 << 40, 256 << 20, seq, ZoneCondition::Full);
        assert!(
            full.starts_with("  start: 0x080000000, len 0x080000, cap 0x060000, wptr 0x080000 "),
            "{full}"
        );
        assert!(full.ends_with("zcond:14(fu) [type: 2(SEQ_WRITE_REQUIRED)]"), "{full}");
    }
}
