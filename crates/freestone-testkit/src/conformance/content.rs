//! Checks the content of a device against a byte vector: random operations, one by one and in
//! batches.

use freestone_core::device::{Device, Flags, IoBuf, Op, Request};
use freestone_core::plug::Plug;

use super::driver::{Data, Driver, SubmitMode};
use super::{CheckResult, Options, ensure};

const CHECK: &str = "content";
/// Number of requests in a batch, which do not overlap.
const BATCH: u64 = 16;

/// A range of the device and its expected content.
struct Window {
    base: u64,
    block: u64,
    bytes: Vec<u8>,
    /// False if the device discards writes, so that its content never changes.
    stores: bool,
}

/// Runs random operations in every submit mode at the start and the end of the device, and compares
/// the content with a byte vector. Only reads from a read-only device.
pub fn check_content(device: &dyn Device, options: &Options) -> CheckResult {
    let size = device.geometry().size;
    let len = options.window.min(size);
    let mut driver = Driver::new(device, options, CHECK, 2);
    let mut bases = vec![0];
    if size > len {
        bases.push(size - len);
    }
    for base in bases {
        let bytes = driver.read(SubmitMode::Submit, base, len)?;
        let block = u64::from(device.geometry().logical_block);
        let mut window = Window { base, block, bytes, stores: options.stores_data };
        ensure!(
            options.stores_data || window.bytes.iter().all(|&b| b == 0),
            CHECK,
            "a device that discards writes does not read as zeroes"
        );
        if device.geometry().read_only {
            window.reads(&mut driver, options.rounds)?;
            continue;
        }
        for mode in SubmitMode::ALL {
            window.edges(&mut driver, mode)?;
            for _ in 0..options.rounds {
                window.step(&mut driver, mode)?;
            }
            window.compare(&mut driver, "all of them")?;
        }
    }
    Ok(())
}

/// Checks that a device keeps its content when `grow` enlarges it, and that the new part reads as
/// zeroes and stores data.
pub fn check_grown(device: &dyn Device, options: &Options, grow: &dyn Fn()) -> CheckResult {
    let mut driver = Driver::new(device, options, "grown", 3);
    let old = device.geometry();
    let edge = options.window.min(old.size);
    let mut data = vec![0; edge as usize];
    driver.rng.fill(&mut data);
    for from in (0..edge).step_by(options.max_io as usize) {
        let part = &data[from as usize..(from + options.max_io).min(edge) as usize];
        let request = Request::write(old.size - edge + from, part.len() as u64);
        driver.run_ok(SubmitMode::Try, request, Data::Out(part))?;
    }
    grow();
    let new = device.geometry();
    ensure!(new.size > old.size, "grown", "the size is {} and was {}", new.size, old.size);
    let added = options.window.min(new.size - old.size);
    driver.compare(SubmitMode::Try, old.size - edge, &data, "growing")?;
    driver.compare(SubmitMode::Try, old.size, &vec![0; added as usize], "growing")?;
    let block = new.logical_block as usize;
    for mode in SubmitMode::ALL {
        let mut last = vec![0; block];
        driver.rng.fill(&mut last);
        driver.run_ok(mode, Request::write(new.size - block as u64, block as u64), Data::Out(&last))?;
        driver.compare(mode, new.size - block as u64, &last, "writing to the last block")?;
    }
    Ok(())
}

impl Window {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Returns the offset and length of a random aligned range. Short ranges are more likely.
    fn range(&self, driver: &mut Driver<'_>) -> (u64, u64) {
        let most = match driver.rng.below(20) {
            0..6 => self.block,
            6..14 => 16 * self.block,
            14..19 => 256 << 10,
            _ => driver.options.max_io,
        };
        let blocks = 1 + driver.rng.below(most.min(self.len()).min(driver.options.max_io) / self.block);
        let start = driver.rng.below(self.len() / self.block - blocks + 1);
        (start * self.block, blocks * self.block)
    }

    fn reads(&self, driver: &mut Driver<'_>, rounds: u32) -> CheckResult {
        for _ in 0..rounds {
            for mode in SubmitMode::ALL {
                let (at, len) = self.range(driver);
                self.matches(driver, mode, at, len, "reading only")?;
            }
        }
        Ok(())
    }

    /// Runs operations on the first and the last block, and long operations at both ends of the
    /// window.
    fn edges(&mut self, driver: &mut Driver<'_>, mode: SubmitMode) -> CheckResult {
        let (block, len) = (self.block, self.len());
        let long = driver.options.max_io.min(len);
        for (at, len) in [(0, block), (len - block, block), (0, long), (len - long, long), (0, block)] {
            self.write(driver, mode, at, len, Flags::empty())?;
        }
        self.write_zeroes(driver, mode, 0, long, Flags::MAY_FREE)?;
        self.write_zeroes(driver, mode, len - block, block, Flags::empty())?;
        self.discard(driver, mode, len - long, long)?;
        self.compare(driver, "operations at the edges")
    }

    fn step(&mut self, driver: &mut Driver<'_>, mode: SubmitMode) -> CheckResult {
        let (at, len) = self.range(driver);
        let mut flags = Flags::empty();
        flags.set(Flags::FUA, driver.rng.chance(10));
        match driver.rng.below(100) {
            0..40 => self.write(driver, mode, at, len, flags),
            40..65 => self.matches(driver, mode, at, len, "earlier operations"),
            65..77 => {
                flags.set(Flags::MAY_FREE, driver.rng.chance(50));
                self.write_zeroes(driver, mode, at, len, flags)
            }
            77..88 => self.discard(driver, mode, at, len),
            88..92 => driver.run_ok(mode, Request::flush(), Data::None),
            92..94 => self.drop_after_try(driver),
            _ => self.batch(driver),
        }
    }

    fn write(
        &mut self,
        driver: &mut Driver<'_>,
        mode: SubmitMode,
        at: u64,
        len: u64,
        flags: Flags,
    ) -> CheckResult {
        let mut data = vec![0; len as usize];
        driver.rng.content(&mut data);
        let request = Request::write(self.base + at, len).with(flags);
        driver.run_ok(mode, request, Data::Out(&data))?;
        self.store(at, &data);
        self.compare_around(driver, mode, at, len, &format!("{request:?} by {mode:?}"))
    }

    fn write_zeroes(
        &mut self,
        driver: &mut Driver<'_>,
        mode: SubmitMode,
        at: u64,
        len: u64,
        flags: Flags,
    ) -> CheckResult {
        let request = Request::new(Op::WriteZeroes, self.base + at, len).with(flags);
        driver.run_ok(mode, request, Data::None)?;
        self.bytes[at as usize..(at + len) as usize].fill(0);
        self.compare_around(driver, mode, at, len, &format!("{request:?} by {mode:?}"))
    }

    /// Discards a range. Afterwards each block must contain its old content or zeroes, and must not
    /// change again.
    fn discard(&mut self, driver: &mut Driver<'_>, mode: SubmitMode, at: u64, len: u64) -> CheckResult {
        let request = Request::new(Op::Discard, self.base + at, len);
        driver.run_ok(mode, request, Data::None)?;
        let found = driver.read(mode, self.base + at, len)?;
        let old = &mut self.bytes[at as usize..(at + len) as usize];
        for (i, (found, old)) in
            found.chunks(self.block as usize).zip(old.chunks_mut(self.block as usize)).enumerate()
        {
            ensure!(
                found == old || found.iter().all(|&b| b == 0),
                CHECK,
                "after {request:?}: block {i} of it holds neither the old data nor zeroes"
            );
            old.copy_from_slice(found);
        }
        self.compare_around(driver, SubmitMode::Submit, at, len, &format!("{request:?} by {mode:?}"))
    }

    /// Tries a write once and does not continue it. Only the part that was not reported as done may
    /// still have the old content.
    fn drop_after_try(&mut self, driver: &mut Driver<'_>) -> CheckResult {
        let (at, len) = self.range(driver);
        let mut data = vec![0; len as usize];
        driver.rng.content(&mut data);
        let request = Request::write(self.base + at, len);
        let done = match driver.device.try_io(&request, freestone_core::device::Buffer::Write(&data)) {
            Ok(freestone_core::device::TryResult::Done) => len,
            Ok(freestone_core::device::TryResult::Partly(n)) => n.min(len),
            Ok(freestone_core::device::TryResult::WouldBlock) => 0,
            Err(error) => return Err(driver.violation(format!("{request:?} tried failed: {error}"))),
        };
        self.store(at, &data[..done as usize]);
        self.compare_around(
            driver,
            SubmitMode::Try,
            at,
            len,
            &format!("{request:?} tried, {done} bytes of it done"),
        )
    }

    /// Runs non-overlapping requests concurrently, and checks the content afterwards.
    fn batch(&mut self, driver: &mut Driver<'_>) -> CheckResult {
        let share = self.len() / self.block / BATCH * self.block;
        if share == 0 {
            return Ok(());
        }
        let mut pending = Vec::new();
        // Submit about half of the batches under a plug.
        let plug = driver.rng.chance(50).then(Plug::start);
        for i in 0..BATCH {
            let blocks = 1 + driver.rng.below((share / self.block).min(64));
            let start = i * share + driver.rng.below(share / self.block - blocks + 1) * self.block;
            let range = start as usize..(start + blocks * self.block) as usize;
            let (op, buffer) = match driver.rng.below(4) {
                0 => (Op::Read, driver.memory(range.len())?),
                1 => (Op::WriteZeroes, IoBuf::empty()),
                _ => {
                    let mut data = driver.memory(range.len())?;
                    driver.rng.content(&mut data);
                    (Op::Write, data)
                }
            };
            match op {
                Op::WriteZeroes => self.bytes[range.clone()].fill(0),
                Op::Write => self.store(start, &buffer),
                _ => {}
            }
            let request = Request::new(op, self.base + start, range.len() as u64);
            pending.push((request, range, driver.submit(request, buffer)));
        }
        drop(plug);
        for (request, range, pending) in pending {
            match driver.wait(&pending)? {
                Ok(buffer) => ensure!(
                    request.op != Op::Read || *buffer == self.bytes[range],
                    CHECK,
                    "{request:?} in a batch returned the wrong data"
                ),
                Err(error) => {
                    return Err(driver.violation(format!("{request:?} in a batch failed: {error}")));
                }
            }
        }
        Ok(())
    }

    fn store(&mut self, at: u64, data: &[u8]) {
        if self.stores {
            self.bytes[at as usize..at as usize + data.len()].copy_from_slice(data);
        }
    }

    fn matches(
        &self,
        driver: &mut Driver<'_>,
        mode: SubmitMode,
        at: u64,
        len: u64,
        after: &str,
    ) -> CheckResult {
        driver.compare(mode, self.base + at, &self.bytes[at as usize..(at + len) as usize], after)
    }

    /// Compares a range, and one block on each side of it, with the expected content.
    fn compare_around(
        &self,
        driver: &mut Driver<'_>,
        mode: SubmitMode,
        at: u64,
        len: u64,
        after: &str,
    ) -> CheckResult {
        let from = at.saturating_sub(self.block);
        let to = (at + len + self.block).min(self.len());
        self.matches(driver, mode, from, to - from, after)
    }

    fn compare(&self, driver: &mut Driver<'_>, after: &str) -> CheckResult {
        self.matches(driver, SubmitMode::Try, 0, self.len(), after)
    }
}
