//! What a guest read while it started, and reading it again as it did: one read after the other, with the
//! guest's own pauses between.

use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::options::Options;

/// As `lab/record-boot.sh` writes it.
const TRACE: &str = include_str!("../../data/boot.trace");
/// The longest pause of a smoke run.
const PAUSE_QUICK: Duration = Duration::from_millis(1);

/// One read.
#[derive(Debug, Clone, Copy)]
pub struct Read {
    pub offset: u64,
    pub len: usize,
    pub pause: Duration,
}

/// The reads that lie on a disk of that size.
pub fn reads(options: &Options, bytes: u64) -> Result<Vec<Read>> {
    let mut reads = Vec::new();
    for line in TRACE.lines().filter(|line| !line.starts_with('#')) {
        let mut numbers = line.split(' ').map(str::parse::<u64>);
        let mut next = || numbers.next().and_then(Result::ok).with_context(|| format!("{line}: no read"));
        let (offset, len, pause) = (next()?, next()? as usize, Duration::from_micros(next()?));
        let pause = if options.quick { pause.min(PAUSE_QUICK) } else { pause };
        if offset + len as u64 <= bytes {
            reads.push(Read { offset, len, pause });
        }
    }
    ensure!(!reads.is_empty(), "the data is smaller than any read lies");
    Ok(reads)
}

/// All reads, after their pauses, if there are such: divided by a number.
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
