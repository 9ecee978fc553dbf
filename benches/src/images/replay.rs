//! Recorded reads of a guest's boot, and their replay: one read at a time, with the guest's own pauses.

use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::options::Options;

/// Trace of a guest's boot, written by `lab/record-boot.sh`.
const TRACE: &str = include_str!("../../data/boot.trace");
/// Longest pause of a smoke run.
const PAUSE_QUICK: Duration = Duration::from_millis(1);

#[derive(Debug, Clone, Copy)]
pub struct Read {
    pub offset: u64,
    pub len: usize,
    pub pause: Duration,
}

/// Returns the recorded reads that lie within a disk of `bytes` bytes.
pub fn reads(options: &Options, bytes: u64) -> Result<Vec<Read>> {
    let mut reads = Vec::new();
    for line in TRACE.lines().filter(|line| !line.starts_with('#')) {
        let mut numbers = line.split(' ').map(str::parse::<u64>);
        let mut next = || numbers.next().and_then(Result::ok).with_context(|| format!("{line}: not a read"));
        let (offset, len, pause) = (next()?, next()? as usize, Duration::from_micros(next()?));
        let pause = if options.quick { pause.min(PAUSE_QUICK) } else { pause };
        if offset + len as u64 <= bytes {
            reads.push(Read { offset, len, pause });
        }
    }
    ensure!(!reads.is_empty(), "the data set is too small: no recorded read lies within it");
    Ok(reads)
}

/// Replays the reads by calls of `read` with offset and length. `pauses` divides the guest's pauses between
/// reads; None omits them.
pub fn replay(
    reads: &[Read],
    pauses: Option<u32>,
    mut read: impl FnMut(u64, usize) -> Result<()>,
) -> Result<()> {
    for Read { offset, len, pause } in reads {
        if let Some(by) = pauses {
            thread::sleep(*pause / by);
        }
        read(*offset, *len)?;
    }
    Ok(())
}
