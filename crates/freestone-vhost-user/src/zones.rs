//! Zones, as VIRTIO has them since its version 1.3.

use freestone_core::device::zoned::{ZoneCondition, ZoneOp, ZoneType};
use freestone_core::device::{Device, Error, Result, Zone};
use zerocopy::IntoBytes;

use crate::wire::{SECTOR_BYTES, ZoneDescriptor, ZoneReport, zone_state, zone_type};

/// What is done with zones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZoneRequest {
    /// Tell of them, from the one that has this byte on.
    Report(u64),
    /// This, to the zone that begins at this byte.
    Op(ZoneOp, u64),
    /// Reset all.
    ResetAll,
}

/// Does it, and answers what the driver is told, in at most `room` bytes.
pub fn execute(device: &dyn Device, request: ZoneRequest, room: usize) -> Result<Vec<u8>> {
    let zones = device.zoned().ok_or(Error::Unsupported)?;
    match request {
        ZoneRequest::Op(op, offset) => zones.zone_op(op, offset).map(|()| Vec::new()),
        ZoneRequest::ResetAll => zones.reset_all().map(|()| Vec::new()),
        ZoneRequest::Report(offset) => {
            let (head, entry) = (size_of::<ZoneReport>(), size_of::<ZoneDescriptor>());
            let most = room.checked_sub(head).ok_or(Error::Misaligned)? / entry;
            let mut said = vec![0; head];
            let mut count = 0;
            if most > 0 {
                zones.report(offset, &mut |zone| {
                    said.extend_from_slice(row(&zone).as_bytes());
                    count += 1;
                    count < most
                })?;
            }
            let report = ZoneReport { zones: (count as u64).into(), ..ZoneReport::default() };
            said[..head].copy_from_slice(report.as_bytes());
            Ok(said)
        }
    }
}

fn row(zone: &Zone) -> ZoneDescriptor {
    let kind = match zone.kind {
        ZoneType::Conventional => zone_type::CONVENTIONAL,
        ZoneType::SequentialRequired => zone_type::SEQUENTIAL_REQUIRED,
    };
    let state = match zone.condition {
        ZoneCondition::NotWritePointer => zone_state::NOT_WRITE_POINTER,
        ZoneCondition::Empty => zone_state::EMPTY,
        ZoneCondition::ImplicitOpen => zone_state::IMPLICIT_OPEN,
        ZoneCondition::ExplicitOpen => zone_state::EXPLICIT_OPEN,
        ZoneCondition::Closed => zone_state::CLOSED,
        ZoneCondition::ReadOnly => zone_state::READ_ONLY,
        ZoneCondition::Full => zone_state::FULL,
        ZoneCondition::Offline => zone_state::OFFLINE,
    };
    ZoneDescriptor {
        capacity: (zone.capacity / SECTOR_BYTES).into(),
        start: (zone.start / SECTOR_BYTES).into(),
        write_pointer: (zone.write_pointer / SECTOR_BYTES).into(),
        kind,
        state,
        ..ZoneDescriptor::default()
    }
}
