//! Implements [`ExportClient`](crate::ExportClient) for a virtqueue: one request at a time.

use std::time::Duration;

use freestone_core::device::zoned::{ZoneCondition, ZoneOp, ZoneType};
use freestone_core::device::{Error, Flags, IoBuf, Op, Request, Result, Zone};

use super::queue::{Data, Queue, QueueCompletion, QueueRequest};
use super::wire;
use crate::ExportClient;

const SECTOR_BYTES: u64 = 512;
const PATIENCE: Duration = Duration::from_secs(20);
/// Size in bytes of the header of a zone report, and of each zone descriptor.
const REPORT_BYTES: usize = 64;

impl Queue {
    /// Runs one request while no other is in flight.
    ///
    /// # Panics
    /// Panics if the request does not complete in time, or if another request completes.
    fn run_one(&mut self, kind: u32, offset: u64, data: Data<'_>) -> Result<Vec<u8>> {
        let slot = self.begin(QueueRequest { kind, offset, data, pieces: 3 }).expect("nothing is in flight");
        loop {
            if let Some(QueueCompletion { slot: of, status, data }) =
                self.take_completion().expect("an answer")
            {
                assert_eq!(of, slot, "another one is answered");
                return outcome(status).map(|()| data);
            }
            assert!(self.wait(PATIENCE).expect("an eventfd"), "no answer");
        }
    }
}

fn outcome(status: u8) -> Result<()> {
    Err(match status {
        wire::OK => return Ok(()),
        wire::UNSUPP => Error::Unsupported,
        wire::ZONE_INVALID => Error::ZoneCondition,
        wire::ZONE_WP => Error::ZoneWritePointer,
        wire::ZONE_OPENS => Error::ZoneTooManyOpen,
        wire::ZONE_ACTIVES => Error::ZoneTooManyActive,
        _ => Error::Media,
    })
}

fn zone(row: &[u8]) -> Zone {
    let bytes =
        |at: usize| SECTOR_BYTES * u64::from_le_bytes(row[at..at + 8].try_into().expect("eight bytes"));
    let condition = match row[25] {
        0 => ZoneCondition::NotWritePointer,
        1 => ZoneCondition::Empty,
        2 => ZoneCondition::ImplicitOpen,
        3 => ZoneCondition::ExplicitOpen,
        4 => ZoneCondition::Closed,
        13 => ZoneCondition::ReadOnly,
        14 => ZoneCondition::Full,
        15 => ZoneCondition::Offline,
        other => panic!("a zone in state {other}"),
    };
    let kind = match row[24] {
        1 => ZoneType::Conventional,
        2 => ZoneType::SequentialRequired,
        other => panic!("a zone of type {other}"),
    };
    Zone { start: bytes(8), len: 0, capacity: bytes(0), write_pointer: bytes(16), kind, condition }
}

impl ExportClient for Queue {
    fn run_request(&mut self, request: &Request, data: &mut IoBuf) -> Result<()> {
        let (at, len) = (request.offset, request.len);
        match request.op {
            Op::Read => {
                let read = self.run_one(wire::IN, at, Data::In(len as usize))?;
                data.copy_from_slice(&read);
                return Ok(());
            }
            Op::Write => self.run_one(wire::OUT, at, Data::Out(data))?,
            Op::Flush => self.run_one(wire::FLUSHES, 0, Data::None)?,
            Op::Discard => self.run_one(wire::DISCARD, 0, Data::Out(&wire::range(at, len, false)))?,
            Op::WriteZeroes => {
                let range = wire::range(at, len, request.flags.contains(Flags::MAY_FREE));
                self.run_one(wire::WRITE_ZEROES, 0, Data::Out(&range))?
            }
        };
        if request.flags.contains(Flags::FUA) {
            // virtio-blk has no FUA flag, so flush after the write.
            self.run_one(wire::FLUSHES, 0, Data::None)?;
        }
        Ok(())
    }

    fn report(&mut self, offset: u64, most: usize) -> Result<Vec<Zone>> {
        let report = self.run_one(wire::ZONE_REPORT, offset, Data::In(REPORT_BYTES * (1 + most)))?;
        let zones: Vec<_> = report[REPORT_BYTES..].chunks_exact(REPORT_BYTES).map(zone).collect();
        assert_eq!(report[..8], (zones.len() as u64).to_le_bytes(), "as many as it says");
        Ok(zones)
    }

    fn zone_op(&mut self, op: ZoneOp, offset: Option<u64>) -> Result<()> {
        let kind = match (op, offset) {
            (_, None) => wire::ZONE_RESET_ALL,
            (ZoneOp::Open, _) => wire::ZONE_OPEN,
            (ZoneOp::Close, _) => wire::ZONE_CLOSE,
            (ZoneOp::Finish, _) => wire::ZONE_FINISH,
            (ZoneOp::Reset, _) => wire::ZONE_RESET,
        };
        self.run_one(kind, offset.unwrap_or(0), Data::None).map(drop)
    }

    fn append(&mut self, zone: u64, data: &[u8]) -> Result<u64> {
        let sector = self.run_one(wire::ZONE_APPEND, zone, Data::Append(data))?;
        let sector = sector.try_into().expect("a sector has eight bytes");
        Ok(SECTOR_BYTES * u64::from_le_bytes(sector))
    }
}
