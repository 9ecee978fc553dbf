//! Runs the device conformance suite through the queues of the fake driver.

use std::sync::Arc;

use freestone_core::budget::Budget;
use freestone_core::device::{Device, Error, Flags, IoBuf, Op, Request, Result};
use freestone_drive::null::{Config, Memory};
use freestone_ram::ram::{self, Ram};
use freestone_testkit::{DeferPolicy, DeferringDevice, ExportClient, ExportedDevice, conformance};

use crate::device_thread::START_DEADLINE;
use crate::export::{Export, Options};
use crate::fake::Driver;
use crate::kernel::abi::{attr, op, op_flag};

const SIZE: u64 = 16 << 20;
const QUEUES: u16 = 2;
const CLIENTS: usize = 2;
const SECTOR_BYTES: u64 = 512;
const NOT_SUPPORTED: i32 = -95;

/// A client that submits requests to a queue of the fake driver, as the block layer does.
struct Client {
    driver: Driver,
    lane: usize,
}

impl Client {
    fn max_discard_bytes(&self) -> u64 {
        let state = self.driver.state();
        let sectors = state.params.expect("the export has started").discard.max_discard_sectors;
        u64::from(sectors) * SECTOR_BYTES
    }

    fn run(&self, op_flags: u32, offset: u64, len: u64, data: &[u8]) -> Result<Vec<u8>> {
        let (sector, sectors) = (offset / SECTOR_BYTES, (len / SECTOR_BYTES) as u32);
        let ticket = self.driver.submit(self.lane, op_flags, sector, sectors, data);
        match self.driver.wait(self.lane, ticket) {
            (0.., read) => Ok(read),
            (NOT_SUPPORTED, _) => Err(Error::Unsupported),
            _ => Err(Error::Media),
        }
    }
}

impl ExportClient for Client {
    fn run_request(&mut self, request: &Request, data: &mut IoBuf) -> Result<()> {
        let (at, len) = (request.offset, request.len);
        let has_fua = self.driver.state().params.is_some_and(|told| told.basic.attrs & attr::FUA != 0);
        // The block layer drops FUA for a device without a volatile cache.
        let fua = if has_fua && request.flags.contains(Flags::FUA) { op_flag::FUA } else { 0 };
        match request.op {
            Op::Read => {
                let read = self.run(op::READ.into(), at, len, &[])?;
                data.copy_from_slice(&read);
            }
            Op::Write => drop(self.run(u32::from(op::WRITE) | fua, at, len, data)?),
            Op::Flush => drop(self.run(op::FLUSH.into(), 0, 0, &[])?),
            // Discard is a hint, which the block layer drops for a device without discard.
            Op::Discard if self.max_discard_bytes() == 0 => {}
            Op::Discard => {
                let max = self.max_discard_bytes();
                for from in (at..at + len).step_by(max as usize) {
                    self.run(op::DISCARD.into(), from, max.min(at + len - from), &[])?;
                }
            }
            Op::WriteZeroes => {
                let keep = if request.flags.contains(Flags::MAY_FREE) { 0 } else { op_flag::NOUNMAP };
                self.run(u32::from(op::WRITE_ZEROES) | keep | fua, at, len, &[])?;
            }
        }
        Ok(())
    }
}

fn through(inner: Arc<dyn Device>) -> Arc<dyn Device> {
    let driver = Driver::default();
    let options = Options { queues: QUEUES, ..Options::new(Budget::new(0)) };
    let export =
        Export::with(Arc::new(driver.clone()), START_DEADLINE, "disk", Arc::clone(&inner), options).unwrap();
    let clients = (0..usize::from(QUEUES) * CLIENTS).map(|n| {
        let client = Client { driver: driver.clone(), lane: n % usize::from(QUEUES) };
        Box::new(client) as Box<dyn ExportClient>
    });
    Arc::new(ExportedDevice::new(inner, clients.collect(), Box::new(export)))
}

fn check(name: &str, make: &dyn Fn() -> Arc<dyn Device>) {
    let options = conformance::Options {
        max_io: 256 << 10,
        rounds: 100,
        thread_rounds: 100,
        // The kernel writes single sectors, which are smaller than the pages of these devices.
        atomic_bytes: SECTOR_BYTES,
        ..conformance::Options::default()
    };
    conformance::check(name, &|| through(make()), options);
}

fn memory() -> Arc<dyn Device> {
    Arc::new(Memory::new(Config::plain(SIZE, 512)).unwrap())
}

#[test]
fn ram_disk() {
    check("ram", &|| Arc::new(Ram::new(ram::Config { disksize: SIZE, ..ram::Config::default() }).unwrap()));
}

#[test]
fn null_memory() {
    check("memory", &memory);
}

#[test]
fn out_of_order_device() {
    check("deferred", &|| Arc::new(DeferringDevice::new(memory(), DeferPolicy::Sometimes(50), 7)));
}
