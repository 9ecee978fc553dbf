//! Runs on zoned devices: random operations on zones, with faults and crashes. The state of the
//! zones is on a disk of its own, beside the data disk.
//!
//! # Judgement
//! The content of a zone is a generation, which increases with each reset, and the number of blocks
//! written. Each block names its generation and position, so a zone report and a read together show
//! the state of the zone. For each zone the run records the states possible now, and those possible
//! after a crash: the durable state, and any state since. A failed operation leaves several
//! possible states; the next report shows which one holds. A write pointer must never lie above
//! blocks of different generations.

mod step;

use std::fmt;

use freestone::device::zoned::{ZoneCondition, ZoneOp, Zoned};
use freestone::device::{Blocking, Error, Flags};
use freestone::zone::{Config, StateLocation, Zones};
pub use step::{Step, draw};

use crate::disk::{DiskConfig, DiskControl, SimDisk};
use crate::rt::sync::Arc;

const BLOCK: u64 = 512;
const BLOCKS: u32 = 32;
const ZONE: u64 = BLOCK * BLOCKS as u64;
const ZONES: u32 = 6;
/// Number of blocks that can be written in a zone.
const CAPACITY: u32 = 24;
/// Size in bytes of the persistent state of fewer than 511 zones.
const STATE_BYTES: u64 = 3 * 4096;

/// A possible content of a zone: the blocks below `written` are of this generation. A prefix of the
/// blocks from `written` to `written_max` may be of this generation as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ZoneContent {
    generation: u64,
    written: u32,
    written_max: u32,
    full: bool,
}

#[derive(Debug, Clone)]
struct ZoneState {
    generation: u64,
    now: Vec<ZoneContent>,
    /// Contents that a crash may restore, in addition to those in `now`.
    before: Vec<ZoneContent>,
}

/// The failure of a run on zones: the number of the step and the violation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    step: usize,
    what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {} on zones: {}", self.step, self.what)
    }
}

struct Run {
    data: DiskControl,
    state: DiskControl,
    zones: Option<Zones>,
    expected: Vec<ZoneState>,
}

fn content(zone: u32, generation: u64, block: u32) -> [u8; BLOCK as usize] {
    let mut bytes = [0; BLOCK as usize];
    let word = u64::from(zone + 1) << 48 | generation << 16 | u64::from(block);
    for part in bytes.chunks_mut(8) {
        part.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Runs these steps on a new zoned device. Returns the number of steps executed.
pub fn run(seed: u64, steps: &[Step]) -> Result<u64, Failure> {
    let disk = |size| DiskConfig { size, overlap: true, ..DiskConfig::default() };
    let data = SimDisk::new(disk(ZONE * u64::from(ZONES)), seed);
    let state = SimDisk::new(disk(STATE_BYTES), seed ^ 1);
    let empty = ZoneContent { generation: 0, written: 0, written_max: 0, full: false };
    let expected = ZoneState { generation: 0, now: vec![empty], before: Vec::new() };
    let mut run = Run {
        data: data.control(),
        state: state.control(),
        zones: None,
        expected: vec![expected; ZONES as usize],
    };
    let at = |step| move |what| Failure { step, what };
    run.open(data, state).map_err(at(0))?;
    for (number, step) in steps.iter().enumerate() {
        run.step(step).map_err(at(number))?;
    }
    run.end(seed).map_err(at(steps.len()))?;
    Ok(steps.len() as u64)
}

impl Run {
    fn open(&mut self, data: SimDisk, state: SimDisk) -> Result<(), String> {
        (self.data, self.state) = (data.control(), state.control());
        let config =
            Config { zone_size: ZONE, zone_capacity: BLOCK * u64::from(CAPACITY), ..Config::default() };
        let zones = Zones::new(Arc::new(data), config, StateLocation::Device(Arc::new(state)), None);
        self.zones = Some(zones.map_err(|error| format!("opening: {error}"))?);
        Ok(())
    }

    fn zones(&self) -> &Zones {
        self.zones.as_ref().expect("they are opened again after each crash")
    }

    fn faults(&self) -> u64 {
        self.data.fault_counts().errors() + self.state.fault_counts().errors()
    }

    fn heal(&self) {
        self.data.heal();
        self.state.heal();
    }

    fn step(&mut self, step: &Step) -> Result<(), String> {
        let of = |zone: u8| u32::from(zone) % ZONES;
        match *step {
            Step::Write { zone, blocks, fua } => self.write(of(zone), u32::from(blocks), fua, false),
            Step::Append { zone, blocks, fua } => self.write(of(zone), u32::from(blocks), fua, true),
            Step::Reset { zone } => self.reset(of(zone)),
            Step::Finish { zone } => self.finish(of(zone)),
            Step::Open { zone } => self.change_condition(of(zone), ZoneOp::Open),
            Step::Close { zone } => self.change_condition(of(zone), ZoneOp::Close),
            Step::Flush => self.flush(),
            Step::Check { zone } => self.check(of(zone)),
            Step::Plan { state, plan } => {
                if state {
                    self.state.set_plan(plan);
                } else {
                    self.data.set_plan(plan);
                }
                Ok(())
            }
            Step::Heal => {
                self.heal();
                Ok(())
            }
            Step::Crash { power, seed } => self.crash(power, seed),
        }
    }

    // ---- operations -----------------------------------------------------------------------------

    /// Returns the write pointer of a zone, in blocks from its start, and its condition.
    fn report(&self, zone: u32) -> Result<(u32, ZoneCondition), String> {
        let (mut pointer, mut condition) = (0, ZoneCondition::Offline);
        let reported = self.zones().report(u64::from(zone) * ZONE, &mut |row| {
            pointer = ((row.write_pointer - row.start) / BLOCK) as u32;
            condition = row.condition;
            false
        });
        reported.map_err(|error| format!("a report: {error}"))?;
        Ok((pointer, condition))
    }

    /// Returns the content of the zone. After a failed operation the zone report shows which of the
    /// possible contents holds.
    fn settle(&mut self, zone: u32) -> Result<ZoneContent, String> {
        let (pointer, condition) = self.report(zone)?;
        let full = condition == ZoneCondition::Full;
        let expected = &mut self.expected[zone as usize];
        let fits = |possible: &&ZoneContent| possible.full == full && (full || possible.written == pointer);
        let Some(&possible) = expected.now.iter().find(fits) else {
            return Err(format!(
                "zone {zone} is {condition:?} at block {pointer}, but may only be {:?}",
                expected.now
            ));
        };
        // If several contents match the report, they differ only in the blocks written before the
        // zone became full.
        expected.now.retain(|possible| fits(&possible));
        Ok(possible)
    }

    /// Records the completion of an operation that changes the content of a zone from `now` to
    /// `next`. `done`: the operation succeeded. `durable`: a crash does not restore older content.
    fn record_outcome(&mut self, zone: u32, now: ZoneContent, next: ZoneContent, done: bool, durable: bool) {
        let expected = &mut self.expected[zone as usize];
        if durable {
            expected.before.clear();
        } else {
            // After a crash, any prefix of the write may have survived.
            expected.before.push(now);
            if next.generation == now.generation {
                expected.before.push(ZoneContent { written: now.written, ..next });
                expected.before.push(ZoneContent {
                    written: now.written,
                    written_max: next.written_max,
                    ..now
                });
            }
            expected.before.dedup();
        }
        if done {
            expected.now = vec![next];
        } else {
            // The report may show the old state although the state disk holds the new one.
            expected.before.push(next);
            expected.now.push(next);
        }
    }

    /// Checks that an error is a media error and that a disk has injected a fault since the count
    /// was `faults`.
    fn check_error(&self, what: &str, error: Error, faults: u64) -> Result<(), String> {
        if error == Error::Media && self.faults() > faults { Ok(()) } else { Err(format!("{what}: {error}")) }
    }

    fn write(&mut self, zone: u32, blocks: u32, fua: bool, append: bool) -> Result<(), String> {
        let now = self.settle(zone)?;
        let faults = self.faults();
        let full = now.full || now.written == CAPACITY;
        let from = if full { 0 } else { now.written };
        let data: Vec<u8> =
            (from..from + blocks).flat_map(|block| content(zone, now.generation, block)).collect();
        let start = u64::from(zone) * ZONE;
        let flags = if fua { Flags::FUA } else { Flags::empty() };
        let answer = if append {
            let (sender, receiver) = crate::rt::sync::mpsc::sync_channel(1);
            let buffer = freestone::device::IoBuf::copy_of(&data).map_err(|error| error.to_string())?;
            let done = Box::new(move |answer| {
                let _ = sender.send(answer);
            });
            self.zones().submit_append(start, buffer, flags, done);
            match receiver.recv() {
                Ok(Ok(at)) if at == start + u64::from(from) * BLOCK => Ok(()),
                Ok(Ok(at)) => return Err(format!("an append to zone {zone} went to {at}")),
                Ok(Err(error)) => Err(error),
                Err(_) => return Err("an append was not answered".into()),
            }
        } else {
            self.zones().write_at(start + u64::from(from) * BLOCK, &data, flags)
        };
        let fits = !full && now.written + blocks <= CAPACITY;
        match answer {
            Ok(()) if !fits => Err(format!("{blocks} blocks were written to zone {zone}, which is {now:?}")),
            Err(Error::ZoneCondition | Error::ZoneWritePointer | Error::ZoneBoundary | Error::OutOfRange)
                if !fits =>
            {
                Ok(())
            }
            answer => {
                let written = now.written + blocks;
                let next = ZoneContent { written, written_max: written, full: written == CAPACITY, ..now };
                if let Err(error) = answer {
                    self.check_error("a write", error, faults)?;
                }
                self.record_outcome(zone, now, next, answer.is_ok(), answer.is_ok() && fua);
                Ok(())
            }
        }
    }

    fn reset(&mut self, zone: u32) -> Result<(), String> {
        let now = self.settle(zone)?;
        let faults = self.faults();
        let answer = self.zones().zone_op(ZoneOp::Reset, u64::from(zone) * ZONE);
        if let Err(error) = answer {
            self.check_error("a reset", error, faults)?;
        }
        let expected = &mut self.expected[zone as usize];
        expected.generation += 1;
        let next = ZoneContent { generation: expected.generation, written: 0, written_max: 0, full: false };
        if now.written == 0 && !now.full {
            // The zone was empty before and still is, whether the reset failed or not.
            expected.now = vec![next];
            expected.before.push(now);
            return Ok(());
        }
        self.record_outcome(zone, now, next, answer.is_ok(), false);
        Ok(())
    }

    fn finish(&mut self, zone: u32) -> Result<(), String> {
        let now = self.settle(zone)?;
        let faults = self.faults();
        let answer = self.zones().zone_op(ZoneOp::Finish, u64::from(zone) * ZONE);
        if let Err(error) = answer {
            self.check_error("a finish", error, faults)?;
        }
        self.record_outcome(zone, now, ZoneContent { full: true, ..now }, answer.is_ok(), false);
        Ok(())
    }

    /// Executes a zone operation that changes the condition of a zone but not the content.
    fn change_condition(&mut self, zone: u32, op: ZoneOp) -> Result<(), String> {
        let now = self.settle(zone)?;
        let faults = self.faults();
        match self.zones().zone_op(op, u64::from(zone) * ZONE) {
            Ok(()) => Ok(()),
            Err(Error::ZoneCondition) if now.full || now.written == 0 => Ok(()),
            Err(error) => self.check_error("a zone operation", error, faults),
        }
    }

    fn flush(&mut self) -> Result<(), String> {
        for zone in 0..ZONES {
            self.settle(zone)?;
        }
        let faults = self.faults();
        match self.zones().flush() {
            Ok(()) => {
                self.expected.iter_mut().for_each(|expected| expected.before.clear());
                Ok(())
            }
            Err(error) => self.check_error("a flush", error, faults),
        }
    }

    /// Ends all faults, flushes, and checks the content of all zones before and after a crash.
    fn end(&mut self, seed: u64) -> Result<(), String> {
        self.heal();
        self.flush()?;
        (0..ZONES).try_for_each(|zone| self.check(zone))?;
        self.crash(true, seed)?;
        (0..ZONES).try_for_each(|zone| self.check(zone))
    }

    // ---- checks ---------------------------------------------------------------------------------

    fn check(&mut self, zone: u32) -> Result<(), String> {
        self.settle(zone)?;
        let allowed = self.expected[zone as usize].now.clone();
        let found = self.match_content(zone, &allowed)?;
        if let Some(found) = found {
            self.expected[zone as usize].now = vec![found];
        }
        Ok(())
    }

    /// Returns the content among `allowed` that the zone's blocks match, or `None` if a fault
    /// prevented the read.
    fn match_content(&self, zone: u32, allowed: &[ZoneContent]) -> Result<Option<ZoneContent>, String> {
        let mut bytes = vec![0; ZONE as usize];
        let faults = self.faults();
        if let Err(error) = self.zones().read_at(u64::from(zone) * ZONE, &mut bytes) {
            return self.check_error("a read", error, faults).map(|()| None);
        }
        let blocks: Vec<&[u8]> = bytes.chunks(BLOCK as usize).collect();
        for possible in allowed {
            let is_of = |block: u32| blocks[block as usize] == content(zone, possible.generation, block);
            let written = (0..CAPACITY).take_while(|&block| is_of(block)).count() as u32;
            // Blocks above the write pointer read as ones; unwritten blocks of a finished zone read
            // as zeroes.
            let filled = |(block, bytes): (u32, &&[u8])| {
                let is = |byte| bytes.iter().all(|&b| b == byte);
                if block >= CAPACITY { is(0) || is(0xff) } else { is(if possible.full { 0 } else { 0xff }) }
            };
            let rest = (written..).zip(&blocks[written as usize..]).all(filled);
            if rest && (possible.written..=possible.written_max).contains(&written) {
                return Ok(Some(ZoneContent { written, written_max: written, ..*possible }));
            }
        }
        let words: Vec<String> = blocks
            .iter()
            .map(|block| {
                let word = u64::from_le_bytes(block[..8].try_into().expect("8 bytes"));
                format!("{}.{}.{}", word >> 48, word >> 16 & 0xffff_ffff, word & 0xffff)
            })
            .collect();
        Err(format!(
            "zone {zone} holds (zone + 1, generation, block) {words:?}, but may only hold {allowed:?} after {faults} faults"
        ))
    }

    fn crash(&mut self, power: bool, seed: u64) -> Result<(), String> {
        for zone in 0..ZONES {
            self.settle(zone)?;
        }
        DiskControl::kill_all(&[self.data.clone(), self.state.clone()], seed, power);
        self.zones = None;
        let (data, state) = (self.data.reopen(seed ^ 2), self.state.reopen(seed ^ 3));
        self.open(data, state)?;
        for zone in 0..ZONES {
            let (pointer, condition) = self.report(zone)?;
            let full = condition == ZoneCondition::Full;
            let expected = &self.expected[zone as usize];
            let fits = |possible: &&ZoneContent| {
                let reaches = (possible.written..=possible.written_max).contains(&pointer);
                possible.full == full && (full || reaches)
            };
            let allowed: Vec<ZoneContent> =
                expected.now.iter().chain(&expected.before).filter(fits).copied().collect();
            // Below the write pointer all blocks are of one generation, whichever content survived.
            let exact = allowed.iter().map(|possible| {
                if full {
                    *possible
                } else {
                    ZoneContent { written: pointer, written_max: pointer, ..*possible }
                }
            });
            let found = self.match_content(zone, &exact.collect::<Vec<_>>()).map_err(|what| {
                format!("after a crash, {condition:?} at block {pointer}: {what}; before it {expected:?}")
            })?;
            let found = found.ok_or("a read after a crash failed")?;
            let expected = &mut self.expected[zone as usize];
            (expected.now, expected.before) = (vec![found], Vec::new());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeded_zone_runs_pass() {
        for seed in 0..30 {
            let steps = draw(seed, 200);
            if let Err(failure) = run(seed, &steps) {
                panic!("seed {seed}: {failure}");
            }
        }
    }
}
