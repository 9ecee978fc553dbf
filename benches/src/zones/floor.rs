//! The null device without backing: the floor of the contract's own cost.

use std::hint::black_box;

use anyhow::{Result, ensure};
use freestone::PAGE_BYTES;
use freestone::device::{Buffer, Device, Flags, IoBuf, Request, Tried};
use freestone::null::{Config, Null};
use freestone_report::{Report, Row, Summary, Target, Unit};

use crate::measure::{Times, alternate};
use crate::options::Options;

const DEVICE_BYTES: u64 = 250 << 30;
/// What one thread is to reach, in thousands a second.
const TARGET_KIOPS: f64 = 20_000.0;

pub fn run(options: &Options) -> Result<Report> {
    let null = Null::new(Config::plain(DEVICE_BYTES, 512))?;
    // As an export sees it.
    let device: &dyn Device = black_box(&null);
    let (mut buffer, mut unread, data) =
        (IoBuf::zeroed(PAGE_BYTES)?, IoBuf::zeroed(PAGE_BYTES)?, IoBuf::zeroed(PAGE_BYTES)?);
    let mut fails = [0_u64; 3];
    let [writes, unreads, reads] = &mut fails;
    let times = alternate(
        options.slices(),
        &mut [
            &mut |from, count| {
                *writes += each(from, count, |at| {
                    device.try_io(&Request::write(at, PAGE_BYTES as u64), Buffer::Write(black_box(&data)))
                });
            },
            &mut |from, count| {
                *unreads += each(from, count, |at| {
                    let request = Request::read(at, PAGE_BYTES as u64).with(Flags::UNREAD);
                    device.try_io(&request, Buffer::Read(black_box(&mut unread)))
                });
            },
            &mut |from, count| {
                *reads += each(from, count, |at| {
                    device.try_io(&Request::read(at, PAGE_BYTES as u64), Buffer::Read(black_box(&mut buffer)))
                });
            },
        ],
    );
    ensure!(fails == [0; 3], "requests to the null device failed: {fails:?}");
    let speed = |what: &str, times: &Times| {
        let kiops = |nanos: &[f64]| Summary::of(nanos.iter().map(|nanos| 1e6 / nanos));
        Row::new(what, Unit::Kiops, kiops(&times.cpu))
            .part("ns", 1e6 / kiops(&times.cpu).median)
            .part("k/s on the wall clock", kiops(&times.wall).median)
    };
    let target = Target::AtLeast(TARGET_KIOPS);
    Ok(Report::new("zones: the floor", "none", DEVICE_BYTES, "none")
        .note(
            "4 KiB operations a second of one thread on a null device without backing, by the \
             thread's CPU time. A read that declares its buffer untouched is Flags::UNREAD.",
        )
        .rows(vec![
            speed("writes", &times[0]).target(target).steady(),
            speed("reads, buffer untouched", &times[1]).target(target).steady(),
            speed("reads", &times[2]).steady(),
        ]))
}

/// Runs `count` operations at places that go round; how many failed.
#[inline]
fn each(from: u64, count: u64, mut operation: impl FnMut(u64) -> freestone::device::Result<Tried>) -> u64 {
    let mut failed = 0;
    for n in from..from + count {
        let at = n.wrapping_mul(PAGE_BYTES as u64 * 7) % DEVICE_BYTES;
        failed += u64::from(operation(at) != Ok(Tried::Done));
    }
    failed
}
