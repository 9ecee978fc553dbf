//! Converts zones to VIRTIO's format, defined since version 1.3, and runs zone operations.

use freestone_core::device::zoned::ZoneRequest;
use freestone_core::device::{Device, Error, Result, Zone};
use zerocopy::IntoBytes;

use crate::wire::{SECTOR_BYTES, ZoneDescriptor, ZoneReport};

/// Runs a zone request. Returns the reply, at most `room` bytes; empty for operations without a
/// report.
pub fn execute(device: &dyn Device, request: ZoneRequest, room: usize) -> Result<Vec<u8>> {
    let zones = device.zones()?;
    match request {
        ZoneRequest::Op(op, offset) => zones.zone_op(op, offset).map(|()| Vec::new()),
        ZoneRequest::ResetAll => zones.reset_all().map(|()| Vec::new()),
        ZoneRequest::Report(offset) => {
            let (head, entry) = (size_of::<ZoneReport>(), size_of::<ZoneDescriptor>());
            let most = room.checked_sub(head).ok_or(Error::Misaligned)? / entry;
            let mut reply = vec![0; head];
            let mut count = 0;
            if most > 0 {
                zones.report(offset, &mut |zone| {
                    reply.extend_from_slice(row(&zone).as_bytes());
                    count += 1;
                    count < most
                })?;
            }
            let report = ZoneReport { zones: (count as u64).into(), ..ZoneReport::default() };
            reply[..head].copy_from_slice(report.as_bytes());
            Ok(reply)
        }
    }
}

fn row(zone: &Zone) -> ZoneDescriptor {
    ZoneDescriptor {
        capacity: (zone.capacity / SECTOR_BYTES).into(),
        start: (zone.start / SECTOR_BYTES).into(),
        write_pointer: (zone.write_pointer / SECTOR_BYTES).into(),
        kind: zone.kind.number(),
        state: zone.condition.number(),
        ..ZoneDescriptor::default()
    }
}
