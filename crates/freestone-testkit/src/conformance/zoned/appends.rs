//! Zone appends, also from several threads.

use std::sync::mpsc;
use std::thread;

use freestone_core::device::zoned::ZoneOp;
use freestone_core::device::{self, Error, Flags, IoBuf};

use super::{CHECK, ZoneTest};
use crate::conformance::driver::SubmitMode;
use crate::conformance::{CheckResult, Violation, ensure};

/// Number of threads that append to one zone concurrently.
const APPENDERS: u64 = 4;

impl ZoneTest<'_> {
    /// Appends to a zone like an export: tries, then submits if the try would block. Returns the
    /// offset of the data.
    pub(super) fn append(&self, zone: u64, data: &[u8]) -> CheckResult<device::Result<u64>> {
        match self.zoned.try_append(zone, data, Flags::empty()) {
            Ok(Some(at)) => Ok(Ok(at)),
            Ok(None) => self.submit_append(zone, self.driver.copy(data)?),
            Err(error) => Ok(Err(error)),
        }
    }

    fn submit_append(&self, zone: u64, data: IoBuf) -> CheckResult<device::Result<u64>> {
        let (tx, rx) = mpsc::channel();
        let done = Box::new(move |outcome| {
            // The receiver is gone if the check has already failed.
            let _ = tx.send(outcome);
        });
        self.zoned.submit_append(zone, data, Flags::empty(), done);
        rx.recv_timeout(self.driver.options.timeout)
            .map_err(|_| self.driver.violation("an append was submitted but did not complete".into()))
    }

    pub(super) fn appends(&mut self) -> CheckResult {
        let (start, block) = (self.sequential[0], self.block);
        self.op(ZoneOp::Reset, start)?;
        let data = self.data(2);
        for (i, submit) in [false, true].into_iter().enumerate() {
            let answer = if submit {
                self.submit_append(start, self.driver.copy(&data)?)?
            } else {
                self.append(start, &data)?
            };
            let due = start + 2 * i as u64 * block;
            ensure!(answer == Ok(due), CHECK, "an append at pointer {due} returned {answer:?}");
            self.driver.compare(SubmitMode::Try, due, &data, "an append")?;
        }
        // An append that exceeds the remaining capacity must have no effect.
        let before = self.zone(start)?;
        let most = u64::from(self.geometry.max_append).min(before.capacity) / block;
        if most * block > before.capacity - 4 * block {
            let data = self.data(most);
            let answer = self.append(start, &data)?;
            ensure!(
                answer == Err(Error::ZoneWritePointer),
                CHECK,
                "an append past the zone's capacity returned {answer:?}"
            );
            ensure!(self.zone(start)? == before, CHECK, "a refused append changed {before:?}");
        }
        self.op(ZoneOp::Finish, start)?;
        let answer = self.append(start, &data)?;
        ensure!(answer == Err(Error::ZoneCondition), CHECK, "an append to a full zone returned {answer:?}");
        self.appends_at_once()
    }

    /// Checks that concurrent appends to one zone are placed without gaps or overlaps.
    fn appends_at_once(&mut self) -> CheckResult {
        let (start, block) = (self.sequential[0], self.block);
        self.op(ZoneOp::Reset, start)?;
        let each = (self.zone(start)?.capacity / block / APPENDERS).min(64);
        let placed: Vec<CheckResult<Vec<(u64, u8)>>> = thread::scope(|scope| {
            let threads: Vec<_> = (0..APPENDERS)
                .map(|me| {
                    let (device, options) = (self.driver.device, self.driver.options);
                    scope.spawn(move || {
                        let test = ZoneTest::new(device, options)?;
                        let mut placed = Vec::new();
                        for i in 0..each {
                            let mark = (1 + me * each + i) as u8;
                            let answer = test.append(start, &vec![mark; block as usize])?;
                            placed.push((test.ok(answer, "an append")?, mark));
                        }
                        Ok(placed)
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| {
                    thread.join().unwrap_or_else(|_| {
                        Err(Violation { check: CHECK, message: "a thread panicked in the device".into() })
                    })
                })
                .collect()
        });
        let mut placed: Vec<_> = placed.into_iter().collect::<CheckResult<Vec<_>>>()?.concat();
        placed.sort_unstable();
        for (i, (at, mark)) in placed.iter().enumerate() {
            let due = start + i as u64 * block;
            ensure!(*at == due, CHECK, "appends of several threads: one was put at {at}, {due} was free");
            self.driver.compare(
                SubmitMode::Try,
                *at,
                &vec![*mark; block as usize],
                "appends of several threads",
            )?;
        }
        Ok(())
    }
}
