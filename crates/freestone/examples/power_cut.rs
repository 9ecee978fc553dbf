//! Tests a small log against the loss of power, as a unit test would: after a cut, each acknowledged record exists.
//!
//! `cargo run -p freestone --example power_cut`

use std::error::Error;
use std::sync::Arc;

use freestone::device::{self, Blocking as _, Device, Flags};
use freestone::power::{self, Power};
use freestone::ram::{Config, Ram};

/// Length of a record, in bytes. A power cut keeps or loses it as a whole.
const RECORD: usize = 4096;

/// The program to test: a log of records on a device. Appending a record acknowledges it.
pub struct Log {
    disk: Arc<dyn Device>,
    records: u8,
    /// False for a faulty log, which acknowledges a record that a power cut can lose.
    flushes: bool,
}

impl Log {
    /// Opens the log on a disk: the records end before the first empty one.
    pub fn open(disk: Arc<dyn Device>, flushes: bool) -> device::Result<Self> {
        let (mut records, mut record) = (0, [0; RECORD]);
        loop {
            disk.read_at(u64::from(records) * RECORD as u64, &mut record)?;
            if record[0] == 0 {
                return Ok(Self { disk, records, flushes });
            }
            records += 1;
        }
    }

    /// Returns the number of records.
    pub fn records(&self) -> u8 {
        self.records
    }

    /// Appends a record, which is durable when this function returns.
    pub fn append(&mut self) -> device::Result<()> {
        let record = [self.records + 1; RECORD];
        self.disk.write_at(u64::from(self.records) * RECORD as u64, &record, Flags::empty())?;
        if self.flushes {
            self.disk.flush()?;
        }
        self.records += 1;
        Ok(())
    }
}

/// Appends eight records, cuts the power, and returns the number of records that are left. A seed always loses the
/// same writes.
pub fn records_after_cut(flushes: bool, seed: u64) -> Result<u8, Box<dyn Error>> {
    let ram = Ram::new(Config { disksize: 1 << 20, ..Config::default() })?;
    let disk = Arc::new(Power::new(Arc::new(ram), power::Config::default())?);
    let mut log = Log::open(disk.clone(), flushes)?;
    for _ in 0..8 {
        log.append()?;
    }
    disk.cut(seed)?;
    Ok(Log::open(disk, flushes)?.records())
}

/// Runs the example: the correct log keeps all records, whatever the cut loses, and the faulty one does not.
pub fn main() -> Result<(), Box<dyn Error>> {
    for flushes in [true, false] {
        let left = (0..20).map(|seed| records_after_cut(flushes, seed)).collect::<Result<Vec<_>, _>>()?;
        println!("with flushes: {flushes}: records after each of 20 power cuts: {left:?}");
    }
    Ok(())
}
