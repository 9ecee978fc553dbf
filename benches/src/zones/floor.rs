//! `floor` part: null device without backing, the minimum cost of the device contract.

use std::hint::black_box;

use anyhow::{Result, ensure};
use freestone::PAGE_BYTES;
use freestone::device::{Buffer, Device, Flags, IoBuf, Request, TryResult};
use freestone::null::{Config, Null};
use freestone_report::{Report, Row, Summary, Target, Unit};

use crate::measure::{Times, alternate};
use crate::options::Options;

const DEVICE_BYTES: u64 = 250 << 30;
/// Lowest speed of one thread that meets the target, in thousands of operations per second.
const TARGET_KIOPS: f64 = 20_000.0;

pub fn run(options: &Options) -> Result<Report> {
    let null = Null::new(Config::plain(DEVICE_BYTES, 512))?;
    // Requests use dynamic dispatch, as in an export.
    let device: &dyn Device = black_box(&null);
    let (mut buffer, mut unread, data) =
        (IoBuf::zeroed(PAGE_BYTES)?, IoBuf::zeroed(PAGE_BYTES)?, IoBuf::zeroed(PAGE_BYTES)?);
    let mut failed = [0_u64; 3];
    let [writes, unreads, reads] = &mut failed;
    let times = alternate(
        options.slices(),
        &mut [
            &mut |from, count| {
                *writes += count_failures(from, count, |at| {
                    device.try_io(&Request::write(at, PAGE_BYTES as u64), Buffer::Write(black_box(&data)))
                });
            },
            &mut |from, count| {
                *unreads += count_failures(from, count, |at| {
                    let request = Request::read(at, PAGE_BYTES as u64).with(Flags::UNREAD);
                    device.try_io(&request, Buffer::Read(black_box(&mut unread)))
                });
            },
            &mut |from, count| {
                *reads += count_failures(from, count, |at| {
                    device.try_io(&Request::read(at, PAGE_BYTES as u64), Buffer::Read(black_box(&mut buffer)))
                });
            },
        ],
    );
    ensure!(failed == [0; 3], "requests to the null device failed: {failed:?}");
    let speed = |what: &str, times: &Times| {
        let kiops = |nanos: &[f64]| Summary::of(nanos.iter().map(|nanos| 1e6 / nanos));
        Row::new(what, Unit::Kiops, kiops(&times.cpu))
            .part("ns", 1e6 / kiops(&times.cpu).median)
            .part("k/s on the wall clock", kiops(&times.wall).median)
    };
    let target = Target::AtLeast(TARGET_KIOPS);
    Ok(Report::new("zones: the floor", "none", DEVICE_BYTES, "none")
        .note(
            "4 KiB operations per second of one thread on a null device without backing, in CPU time of the \
             thread. A read that declares its buffer untouched has Flags::UNREAD.",
        )
        .rows(vec![
            speed("writes", &times[0]).target(target).withhold_if_unsteady(),
            speed("reads, buffer untouched", &times[1]).target(target).withhold_if_unsteady(),
            speed("reads", &times[2]).withhold_if_unsteady(),
        ]))
}

/// Runs `count` operations at wrapping offsets and returns the number of failures.
#[inline]
fn count_failures(
    from: u64,
    count: u64,
    mut operation: impl FnMut(u64) -> freestone::device::Result<TryResult>,
) -> u64 {
    let mut failed = 0;
    for n in from..from + count {
        let at = n.wrapping_mul(PAGE_BYTES as u64 * 7) % DEVICE_BYTES;
        failed += u64::from(operation(at) != Ok(TryResult::Done));
    }
    failed
}
