//! Checks that reported extents are ordered, complete and correct.

use freestone_core::device::{Device, Error, Extent, ExtentKind, Op, Request};

use super::driver::{Data, Driver, SubmitMode};
use super::{CheckResult, Options, ensure};

const CHECK: &str = "extents";
/// Maximum number of `extents` calls per range. A device that makes tiny progress exceeds it and
/// violates the contract.
const MAX_CALLS: u32 = 1_000_000;

/// Checks the extents that a device reports. If the device is writable, first writes data, zeroes
/// and holes.
pub fn check_extents(device: &dyn Device, options: &Options) -> CheckResult {
    let mut driver = Driver::new(device, options, CHECK, 4);
    let geometry = device.geometry();
    let block = u64::from(geometry.logical_block);
    let len = options.window.min(geometry.size);
    for base in [0, geometry.size - len] {
        if !geometry.read_only && geometry.zones.is_none() {
            fill_mixed(&mut driver, base, len)?;
        }
        walk(&mut driver, base, len)?;
        for _ in 0..options.rounds / 4 {
            let start = driver.rng.below(len / block) * block;
            let blocks = 1 + driver.rng.below((len - start) / block);
            walk(&mut driver, base + start, (blocks * block).min(64 * block))?;
            check_stop(&mut driver, base + start, blocks * block)?;
        }
    }
    let far = u64::MAX - block + 1;
    let size = geometry.size;
    for (offset, len) in
        [(size, block), (size - block, 2 * block), (0, size + block), (far, block), (block, far)]
    {
        let answer = device.extents(offset, len, &mut |_| true);
        ensure!(
            answer == Err(Error::OutOfRange),
            CHECK,
            "({offset}, {len}) of {size} bytes is out of range but returned {answer:?}"
        );
    }
    Ok(())
}

/// Writes data, zeroes and discards to adjacent ranges.
fn fill_mixed(driver: &mut Driver<'_>, base: u64, len: u64) -> CheckResult {
    let block = u64::from(driver.device.geometry().logical_block);
    let step = (len / 32 / block).max(1) * block;
    for (i, at) in (0..len).step_by(step as usize).enumerate() {
        let part = step.min(len - at);
        let mut data = vec![0; part as usize];
        driver.rng.fill(&mut data);
        driver.run_ok(SubmitMode::Try, Request::write(base + at, part), Data::Out(&data))?;
        let op = if i % 4 == 1 { Op::Discard } else { Op::WriteZeroes };
        if i % 2 == 1 {
            // Leave a block of data on each side if the part is large enough.
            let inset = if part > 4 * block { block } else { 0 };
            driver.run_ok(
                SubmitMode::Try,
                Request::new(op, base + at + inset, part - 2 * inset),
                Data::None,
            )?;
        }
    }
    Ok(())
}

/// Queries the extents of a range in several calls, like an export, and compares the rows with the
/// content.
fn walk(driver: &mut Driver<'_>, offset: u64, len: u64) -> CheckResult {
    let content = driver.read(SubmitMode::Try, offset, len)?;
    let mut at = offset;
    let end = offset + len;
    for _ in 0..MAX_CALLS {
        if at == end {
            return Ok(());
        }
        let mut rows = Vec::new();
        let described = driver.device.extents(at, end - at, &mut |row| {
            rows.push(row);
            true
        });
        let described = match described {
            Ok(described) => described,
            Err(error) => return Err(driver.violation(format!("({at}, {}) failed: {error}", end - at))),
        };
        check_order(driver, at, end, &rows, described)?;
        for row in &rows {
            let found = &content[(row.offset - offset) as usize..(row.offset + row.len - offset) as usize];
            ensure!(
                row.kind == ExtentKind::Data || found.iter().all(|&b| b == 0),
                CHECK,
                "{row:?} reads as something else than zeroes"
            );
        }
        at += described;
    }
    Err(driver.violation(format!("({offset}, {len}) took more than {MAX_CALLS} calls")))
}

/// Checks that rows are ordered, without gaps, within the range and block-aligned. The call must
/// have returned the sum of their lengths.
fn check_order(driver: &Driver<'_>, from: u64, end: u64, rows: &[Extent], described: u64) -> CheckResult {
    let block = u64::from(driver.device.geometry().logical_block);
    let mut at = from;
    ensure!(!rows.is_empty(), CHECK, "no row for ({from}, {}), expected at least one", end - from);
    for row in rows {
        ensure!(
            row.offset == at && row.len > 0 && row.len <= end - at && row.len.is_multiple_of(block),
            CHECK,
            "{row:?}, expected a row from byte {at} to at most {end} in blocks of {block}"
        );
        at += row.len;
    }
    ensure!(
        described == at - from,
        CHECK,
        "{described} bytes were said to be described, the rows have {}",
        at - from
    );
    Ok(())
}

/// Checks that an `extents` call ends as soon as the callback returns false.
fn check_stop(driver: &mut Driver<'_>, offset: u64, len: u64) -> CheckResult {
    let wanted = 1 + driver.rng.below(3) as usize;
    let mut rows = Vec::new();
    let described = driver.device.extents(offset, len, &mut |row| {
        rows.push(row);
        rows.len() < wanted
    });
    let described = match described {
        Ok(described) => described,
        Err(error) => return Err(driver.violation(format!("({offset}, {len}) failed: {error}"))),
    };
    ensure!(rows.len() <= wanted, CHECK, "{} rows were given, the caller stopped at {wanted}", rows.len());
    check_order(driver, offset, offset + len, &rows, described)
}
