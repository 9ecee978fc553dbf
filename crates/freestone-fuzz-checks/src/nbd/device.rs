//! The device that the NBD checks serve.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

use freestone::device::{Op, Request};
use freestone_nbd::MAX_IN_FLIGHT;
use freestone_testkit::{Manner, TestDevice};

use crate::device::{CheckDevice, Order};

/// Logical block size in bytes, and the unit of the device's extents.
pub const BLOCK: u64 = 512;

#[derive(Debug, Clone, Copy)]
pub struct DeviceConfig {
    /// Size of the device in bytes.
    pub size: u64,
    pub manner: Manner,
    /// True if held requests complete when later requests arrive, at the latest at a flush. Otherwise the
    /// check completes them.
    pub late: bool,
    /// True if the device reports zones, so large writes must not be split.
    pub zoned: bool,
    /// Offset of a bad byte: requests that contain it fail. `None` if no byte is bad.
    pub bad: Option<u64>,
    /// Seed of the random order of completions.
    pub seed: u64,
    /// True if some submitted requests are dropped without completion.
    pub forgets: bool,
    /// Number of flushes. At the last of them, all held requests complete, and later requests complete at
    /// once.
    pub flushes: usize,
}

pub type Memory = CheckDevice;

/// Creates a device of zeroes that reports changes, like a fork.
pub fn memory(config: DeviceConfig) -> Memory {
    let device = if config.zoned { TestDevice::zoned(config.size) } else { TestDevice::new(config.size) };
    device.forked.store(true, Ordering::SeqCst);
    let flushes = AtomicUsize::new(0);
    let on_submitted = move |device: &TestDevice, request: &Request, order: &Order| {
        let held = device.held().len();
        assert!(held <= MAX_IN_FLIGHT + 1, "{held} requests are held");
        if !config.late {
            return order.notify();
        }
        let flush = usize::from(request.op == Op::Flush);
        if flushes.fetch_add(flush, Ordering::SeqCst) + flush >= config.flushes {
            device.set(Manner::Submitted);
        }
        // Hold only few and small requests. If the connection waited for held requests before it sent more,
        // nobody would complete them.
        let all = request.op == Op::Flush || config.size > 1 << 20;
        let mut rng = order.rng.lock().unwrap_or_else(PoisonError::into_inner);
        let remaining = if all { 0 } else { rng.below(MAX_IN_FLIGHT as u64 / 8) as usize };
        drop(rng);
        for _ in remaining..held {
            order.release(device);
        }
    };
    let device = Arc::into_inner(device).expect("not shared yet");
    let device = device.with_manner(config.manner).with_bad_byte(config.bad);
    CheckDevice::new(device, config.seed, config.forgets, on_submitted)
}
