//! Devices that the tests serve.

use std::sync::Arc;

use freestone_core::device::{Device, Op, Request, TryResult};
use freestone_drive::null::{Config, Null};
pub use freestone_testkit::{Manner, SPOILT, TestDevice as MemDevice};

pub const PAGE: u64 = 4096;

/// A device of any size that reads as zeroes and ignores writes.
pub type Vast = MemDevice<Null>;

/// Creates a device that trims or zeroes at most `per_try` bytes in a `try_io` call. With 0, trims and write
/// zeroes must be submitted, and the test completes them.
pub fn vast(size: u64, per_try: u64) -> Arc<Vast> {
    let null = Arc::new(Null::new(Config::plain(size, 512)).unwrap());
    let device = Vast::over(null).on_try(move |null, request, buffer| match request.op {
        Op::Discard | Op::WriteZeroes if per_try == 0 => Ok(TryResult::WouldBlock),
        Op::Discard | Op::WriteZeroes if request.len > per_try => Ok(TryResult::Partly(per_try)),
        _ => null.try_io(request, buffer),
    });
    device.set(Manner::Held);
    Arc::new(device)
}

/// Returns the trims and write zeroes that were executed inline or submitted.
pub fn sweep_steps(device: &Vast) -> Vec<Request> {
    let is_sweep = |request: &&Request| matches!(request.op, Op::Discard | Op::WriteZeroes);
    device.log.lock().iter().filter(is_sweep).copied().collect()
}
