//! Checks the geometry, the refusal of invalid requests, and requests in flight when a device is
//! dropped.

use std::sync::{Arc, mpsc};

use freestone_core::device::{self, Completion, Device, Error, Flags, IoBuf, Op, Request};

use super::driver::{Data, Driver, SubmitMode};
use super::{CheckResult, Options, ensure};

/// Number of requests in flight when the device is dropped.
const ABANDONED: u64 = 64;

/// Checks that the geometry of a device is valid and does not change.
pub fn check_geometry(device: &dyn Device) -> CheckResult {
    const CHECK: &str = "geometry";
    let geometry = device.geometry();
    let block = geometry.logical_block;
    ensure!(
        block.is_power_of_two() && (512..=4096).contains(&block),
        CHECK,
        "the logical block is {block}, not a power of two from 512 to 4096"
    );
    ensure!(
        geometry.size > 0 && geometry.size.is_multiple_of(u64::from(block)),
        CHECK,
        "the size is {}, not a multiple of the logical block {block}",
        geometry.size
    );
    let sizes = [
        ("physical_block", geometry.physical_block),
        ("io_min", geometry.io_min),
        ("io_opt", geometry.io_opt),
        ("discard_granularity", geometry.discard_granularity),
    ];
    for (name, value) in sizes {
        let absent = name == "discard_granularity" && value == 0;
        ensure!(
            absent || (value >= block && value.is_multiple_of(block)),
            CHECK,
            "{name} is {value}, not a multiple of the logical block {block}"
        );
    }
    ensure!(
        geometry.physical_block.is_power_of_two(),
        CHECK,
        "physical_block is {}, not a power of two",
        geometry.physical_block
    );
    ensure!(
        geometry.zones.is_some() == device.zoned().is_some(),
        CHECK,
        "zones in the geometry and zone operations do not go together"
    );
    let again = device.geometry();
    ensure!(
        again.size >= geometry.size && again == device::Geometry { size: again.size, ..geometry },
        CHECK,
        "changed from {geometry:?} to {again:?}; only the size may, and only upwards"
    );
    Ok(())
}

/// Checks that invalid requests fail with the error that the contract's order of checks requires,
/// by try and submit alike, and without effect. Also checks that the first and last blocks are
/// accessible.
pub fn check_errors(device: &dyn Device, options: &Options) -> CheckResult {
    let mut driver = Driver::new(device, options, "errors", 1);
    let geometry = device.geometry();
    let block = u64::from(geometry.logical_block);
    let size = geometry.size;
    let edge = size.min(8 * block);
    if options.stores_data && !geometry.read_only && geometry.zones.is_none() {
        // Write other bytes than zero, so that accidental zeroing is detected.
        for (offset, byte) in [(0, 0x11), (size - edge, 0x22)] {
            let data = vec![byte; edge as usize];
            driver.run_ok(SubmitMode::Try, Request::write(offset, edge), Data::Out(&data))?;
        }
    }
    let head = driver.read(SubmitMode::Try, 0, edge)?;
    let tail = driver.read(SubmitMode::Submit, size - edge, edge)?;

    // Offset, length, and the error that a writable device must return.
    let far = u64::MAX - block + 1;
    let cases = [
        (0, 0, Error::Misaligned),
        (size, 0, Error::Misaligned),
        (0, 1, Error::Misaligned),
        (1, block, Error::Misaligned),
        (0, block - 1, Error::Misaligned),
        (0, block + 1, Error::Misaligned),
        (block / 2, block, Error::Misaligned),
        (block, block / 2, Error::Misaligned),
        // The range is misaligned and out of range: alignment is checked first.
        (size + 1, block, Error::Misaligned),
        (size, block + 1, Error::Misaligned),
        (u64::MAX, 1, Error::Misaligned),
        // The range is out of range, slightly or by far.
        (size, block, Error::OutOfRange),
        (size - block, 2 * block, Error::OutOfRange),
        (size + block, block, Error::OutOfRange),
        // The end of the range overflows 64 bits.
        (far, block, Error::OutOfRange),
        (far, 4 * block, Error::OutOfRange),
    ];
    // Requests without data may have any length.
    let huge = [
        (0, far, Error::OutOfRange),
        (block, far, Error::OutOfRange),
        (far, far, Error::OutOfRange),
        (0, u64::MAX, Error::Misaligned),
    ];
    for op in [Op::Read, Op::Write, Op::Discard, Op::WriteZeroes] {
        let with_data = matches!(op, Op::Read | Op::Write);
        let more = if with_data { &[][..] } else { &huge[..] };
        for &(offset, len, expected) in cases.iter().chain(more) {
            for flags in [Flags::empty(), Flags::FUA, Flags::FUA | Flags::MAY_FREE] {
                refuses(&mut driver, Request::new(op, offset, len).with(flags), expected)?;
            }
        }
        if geometry.read_only && op != Op::Read {
            for (offset, len) in [(0, block), (size - block, block), (0, edge)] {
                refuses(&mut driver, Request::new(op, offset, len), Error::ReadOnly)?;
            }
        }
    }
    for (offset, len) in [(0, block), (block, 0), (block, block), (1, 0), (0, 1), (u64::MAX, u64::MAX)] {
        refuses(&mut driver, Request::new(Op::Flush, offset, len), Error::Misaligned)?;
    }
    for mode in SubmitMode::ALL {
        driver.run_ok(mode, Request::flush(), Data::None)?;
        driver.compare(mode, 0, &head, "requests that were refused")?;
        driver.compare(mode, size - edge, &tail, "requests that were refused")?;
        driver.read(mode, 0, block)?;
        driver.read(mode, size - block, block)?;
    }
    Ok(())
}

fn refuses(driver: &mut Driver<'_>, request: Request, expected: Error) -> CheckResult {
    let len = match request.op {
        Op::Read | Op::Write => request.len as usize,
        _ => 0,
    };
    let mut memory = vec![0x5a; len];
    for mode in [SubmitMode::Try, SubmitMode::Submit] {
        let data = match request.op {
            Op::Read => Data::In(&mut memory),
            Op::Write => Data::Out(&memory),
            _ => Data::None,
        };
        let answer = driver.run(mode, request, data)?;
        ensure!(
            answer == Err(expected),
            driver.check,
            "{request:?} by {mode:?} returned {answer:?}, expected error: {expected}"
        );
    }
    Ok(())
}

/// Submits requests and drops the device at once: each request must complete exactly once.
pub fn check_abandoned(device: Arc<dyn Device>, options: &Options) -> CheckResult {
    const CHECK: &str = "abandoned";
    let geometry = device.geometry();
    let block = u64::from(geometry.logical_block);
    let (tx, answers) = mpsc::channel();
    for i in 0..ABANDONED {
        let op = match i % 4 {
            0 => Op::Read,
            _ if geometry.read_only || geometry.zones.is_some() => Op::Read,
            1 => Op::Write,
            2 => Op::WriteZeroes,
            _ => Op::Flush,
        };
        let (request, buffer) = match op {
            Op::Flush => (Request::flush(), Ok(IoBuf::empty())),
            Op::WriteZeroes => (Request::new(op, i * block % geometry.size, block), Ok(IoBuf::empty())),
            _ => (Request::new(op, i * block % geometry.size, block), IoBuf::zeroed(block as usize)),
        };
        let buffer = buffer.map_err(|error| super::Violation {
            check: CHECK,
            message: format!("the suite itself: {error}"),
        })?;
        let tx = tx.clone();
        let done = Completion::new(move |outcome, _| {
            let _ = tx.send((request, outcome));
        });
        device.submit(request, buffer, done);
    }
    drop(tx);
    drop(device);
    for answered in 0..ABANDONED {
        let Ok((request, outcome)) = answers.recv_timeout(options.timeout) else {
            return Err(super::Violation {
                check: CHECK,
                message: format!("{} of {ABANDONED} requests did not complete", ABANDONED - answered),
            });
        };
        ensure!(
            matches!(outcome, Ok(()) | Err(Error::Gone)),
            CHECK,
            "{request:?} of a dropped device returned {outcome:?}"
        );
    }
    Ok(())
}
