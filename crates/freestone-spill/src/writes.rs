//! Writes of whole runs of blocks to the backing device. See [`store`](super::store).

use std::sync::Arc;
use std::time::Duration;

use super::budget::Charge;
use super::space::{BLOCK_BYTES, Run};
use super::store::{Store, counter};
use freestone_core::clock::now_ms;
use freestone_core::device::{Completion, Error, IoBuf, Request, Result};
use freestone_core::sync::{Condvar, Mutex, Ordering};

/// Reasons why no blocks can be allocated on the backing device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    Limit,
    Full,
}

/// A write in flight to the backing device.
pub struct Write {
    run: Run,
    charge: Charge,
    submitted_ms: u64,
    answer: Arc<WriteCompletion>,
}

struct WriteCompletion {
    state: Mutex<WriteState>,
    completed: Condvar,
}

enum WriteState {
    InFlight,
    Completed(Result<()>, IoBuf),
    /// The waiting thread has stopped waiting: the completion must free the blocks.
    Abandoned,
}

/// Result of a write to the backing device.
pub enum WriteOutcome {
    /// The blocks are written; the buffer can be reused.
    Done(IoBuf),
    /// The device completed the write with an error.
    Failed(Error),
    /// The write timed out. The device may still write the blocks, so they are not reused until the
    /// device completes the write.
    TimedOut,
}

impl Store {
    /// Allocates up to `wanted` contiguous blocks if more than `reserve` blocks are free and the
    /// write budget permits. Returns the run and what was charged to the budget.
    pub fn open_run(&self, wanted: u32, reserve: u64) -> std::result::Result<(Run, Charge), Refused> {
        let free = self.space.free();
        if free <= reserve {
            return Err(Refused::Full);
        }
        let wanted = u64::from(wanted).min(free - reserve) as u32;
        let (granted, charge) = self.budget.take(wanted);
        if granted == 0 {
            return Err(Refused::Limit);
        }
        let Some(run) = self.space.take(granted) else {
            self.budget.refund(granted, charge);
            return Err(Refused::Full);
        };
        self.budget.refund(granted - run.blocks, charge);
        self.blocks.open(run);
        Ok((run, charge))
    }

    /// Frees the blocks after the first `used` blocks of a run. Returns the remaining run.
    pub fn trim_run(&self, run: Run, charge: Charge, used: u32) -> Run {
        if used < run.blocks {
            let rest = run.blocks - used;
            self.free_run(Run { start: run.start + u64::from(used), blocks: rest });
            self.budget.refund(rest, charge);
        }
        Run { start: run.start, blocks: used }
    }

    /// Frees blocks to which no slot refers.
    fn free_run(&self, run: Run) {
        self.blocks.drop_unwritten(run);
        self.space.free_run(run.start, run.blocks);
    }

    /// Records an object of `stored` bytes at unit `unit`, which is in an open run.
    pub fn place(&self, unit: u64, stored: usize) {
        self.blocks.place(unit, self.units(stored));
    }

    /// Submits a write of a whole run. `buffer` must have the size of the run.
    pub fn write(self: &Arc<Self>, run: Run, charge: Charge, buffer: IoBuf) -> Write {
        debug_assert_eq!(buffer.len(), run.blocks as usize * BLOCK_BYTES);
        let answer =
            Arc::new(WriteCompletion { state: Mutex::new(WriteState::InFlight), completed: Condvar::new() });
        let done = {
            let (store, answer) = (Arc::clone(self), Arc::clone(&answer));
            Completion::new(move |outcome, buffer| {
                store.deadline.record_completion();
                let mut state = answer.state.lock();
                if matches!(*state, WriteState::Abandoned) {
                    drop(state);
                    store.free_run(run);
                    // Relaxed: a count that is polled.
                    store.abandoned.fetch_sub(1, Ordering::Relaxed);
                } else {
                    *state = WriteState::Completed(outcome, buffer);
                    answer.completed.notify_one();
                }
            })
        };
        let len = u64::from(run.blocks) * BLOCK_BYTES as u64;
        let submitted_ms = now_ms();
        let request = Request::write(run.start * BLOCK_BYTES as u64, len).with(self.write_flags);
        self.device.submit(request, buffer, done);
        Write { run, charge, submitted_ms, answer }
    }

    /// Waits for a write. If the write failed, frees the blocks and refunds the budget.
    pub fn finish(&self, write: Write) -> WriteOutcome {
        let Write { run, charge, submitted_ms, answer } = write;
        let mut state = answer.state.lock();
        loop {
            match std::mem::replace(&mut *state, WriteState::Abandoned) {
                WriteState::Completed(Ok(()), buffer) => {
                    self.counters.add(counter::WRITES, i64::from(run.blocks));
                    return WriteOutcome::Done(buffer);
                }
                WriteState::Completed(Err(error), _) => {
                    drop(state);
                    self.counters.add(counter::FAILED_WRITES, 1);
                    self.free_run(run);
                    self.budget.refund(run.blocks, charge);
                    return WriteOutcome::Failed(error);
                }
                WriteState::InFlight | WriteState::Abandoned => {
                    // Other completions of the device extend the deadline, so compute it again
                    // after each wait.
                    let left = self.deadline.due_ms(submitted_ms).saturating_sub(now_ms());
                    if left == 0 {
                        self.counters.add(counter::FAILED_WRITES, 1);
                        // Relaxed: a count that is polled.
                        self.abandoned.fetch_add(1, Ordering::Relaxed);
                        return WriteOutcome::TimedOut;
                    }
                    *state = WriteState::InFlight;
                    state = answer.completed.wait_timeout(state, Duration::from_millis(left)).0;
                }
            }
        }
    }
}
