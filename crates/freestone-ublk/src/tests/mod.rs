//! Tests of complete exports over the fake driver.

mod conformance;
mod life;
mod serving;
mod unprivileged;
mod zones;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use freestone_core::budget::Budget;
use freestone_core::device::{
    Buffer, Completion, Device, Extent, Geometry, IoBuf, Request, Result, TryResult,
};
use freestone_ram::ram::{Config, Ram};
use rustix::io::Errno;

use crate::device_thread::{START_DEADLINE, StartError};
use crate::export::{Export, Options};
use crate::fake::{Driver, ID, PATIENCE};
use crate::kernel::abi::{control, feature, op, op_flag, state};
use crate::kernel::control::mark;
use crate::stale_devices;

const READ: u32 = op::READ as u32;
const WRITE: u32 = op::WRITE as u32;
const EIO: i32 = -5;
const SIZE: u64 = 64 << 20;

fn ram() -> Arc<Ram> {
    Arc::new(Ram::new(Config { disksize: SIZE, ..Config::default() }).unwrap())
}

fn options() -> Options {
    Options { queues: 1, ..Options::new(Budget::new(0)) }
}

fn start(driver: &Driver, device: Arc<dyn Device>, options: Options) -> Export {
    Export::with(Arc::new(driver.clone()), START_DEADLINE, "disk", device, options).unwrap()
}

fn export(device: Arc<dyn Device>) -> (Driver, Export) {
    let driver = Driver::default();
    let export = start(&driver, device, options());
    (driver, export)
}

/// The function that a test device calls for each submitted request.
type SubmitFn = Box<dyn Fn(&Arc<Ram>, Request, IoBuf, Completion) + Send + Sync>;

/// A device that tries `inline_bytes` bytes inline and passes the rest to `submit`.
struct PartialDevice {
    ram: Arc<Ram>,
    inline_bytes: u64,
    submit: SubmitFn,
}

impl PartialDevice {
    fn new(
        inline_bytes: u64,
        submit: impl Fn(&Arc<Ram>, Request, IoBuf, Completion) + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { ram: ram(), inline_bytes, submit: Box::new(submit) })
    }

    /// Returns a device that completes submitted requests on another thread after a delay.
    fn delayed(inline_bytes: u64) -> Arc<Self> {
        Self::new(inline_bytes, |ram, request, buffer, done| {
            let ram = Arc::clone(ram);
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(5));
                ram.submit(request, buffer, done);
            });
        })
    }
}

impl Device for PartialDevice {
    fn geometry(&self) -> Geometry {
        Geometry { volatile_cache: true, ..self.ram.geometry() }
    }
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry())?;
        let n = self.inline_bytes;
        if n == 0 || request.len <= n || !request.offset.is_multiple_of(2 * n) {
            return Ok(TryResult::WouldBlock);
        }
        let (part, bytes) = (Request { len: n, ..*request }, n as usize);
        let tried = match buffer {
            Buffer::Read(out) => self.ram.try_io(&part, Buffer::Read(&mut out[..bytes]))?,
            Buffer::Write(data) => self.ram.try_io(&part, Buffer::Write(&data[..bytes]))?,
            Buffer::None => self.ram.try_io(&part, Buffer::None)?,
        };
        assert_eq!(tried, TryResult::Done);
        Ok(TryResult::Partly(n))
    }
    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        (self.submit)(&self.ram, request, buffer, done);
    }
    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.ram.extents(offset, len, row)
    }
}

/// Requests that a device has received and not completed.
type HeldRequests = Arc<Mutex<Vec<(IoBuf, Completion)>>>;

/// Returns a device that never completes requests, and the requests it has received.
fn silent() -> (Arc<PartialDevice>, HeldRequests) {
    let held_requests = HeldRequests::default();
    let keep = Arc::clone(&held_requests);
    (
        PartialDevice::new(0, move |_, _, buffer, done| keep.lock().unwrap().push((buffer, done))),
        held_requests,
    )
}

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 512) as u8 ^ (at % 251) as u8 ^ seed).collect()
}

fn wait_until(condition: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "timed out waiting for a condition");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn round_trip(driver: &Driver) {
    for (seed, sectors) in [(1, 8), (2, 1), (3, 1024), (4, 7)] {
        let data = pattern(seed, sectors * 512);
        assert_eq!(driver.io(WRITE, 16, sectors as u32, &data).0, data.len() as i32);
        assert_eq!(driver.io(READ, 16, sectors as u32, &[]), (data.len() as i32, data));
    }
    let data = pattern(5, 8192);
    assert_eq!(driver.io(WRITE | op_flag::FUA, 0, 16, &data).0, 8192);
    assert_eq!(driver.io(op::FLUSH.into(), 0, 0, &[]).0, 0);
    assert_eq!(driver.io(op::WRITE_ZEROES.into(), 0, 8, &[]).0, 0);
    assert_eq!(driver.io(READ, 0, 8, &[]), (4096, vec![0; 4096]));
    assert_eq!(driver.io(READ, 8, 8, &[]), (4096, data[4096..].to_vec()));
    assert_eq!(driver.io(op::DISCARD.into(), 8, 8, &[]).0, 0);
}
