//! Order in which a thread reads and writes the records of its area: iozone's tests and fio's jobs.

use anyhow::{Result, bail};
use freestone_benches::data::Random;

/// iozone's stride, in records.
const STRIDE: u64 = 17;

/// A test of iozone or a job of fio.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// Sequential writes to empty records. Ends after the last record; all other patterns start
    /// over.
    InitialWrite,
    /// Sequential overwrites. Also iozone's rewrite and pwrite.
    Write,
    /// Like `Write`, through a buffer of the C library's size.
    BufferedWrite,
    /// Sequential reads. Also iozone's re-read and pread.
    Read,
    /// Like `Read`, through a buffer of the C library's size.
    BufferedRead,
    /// Sequential reads from the end to the start.
    ReverseRead,
    /// Reads of every 17th record, then of the records after them.
    StrideRead,
    RandomRead,
    RandomWrite,
    /// Random reads by even threads (the first thread is 0) and random writes by odd threads:
    /// iozone's mixed workload.
    ReadersAndWriters,
    /// Sequential reads and sequential writes, each with its own position, in random turns: fio's
    /// `rw`.
    SequentialMix,
    /// Random reads and writes in random turns: fio's `randrw`.
    RandomMix,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    pub record: u64,
    pub is_write: bool,
}

/// Accesses of a thread to an area of `records` records. The same seed gives the same accesses.
pub struct Steps {
    pattern: Pattern,
    records: u64,
    thread: usize,
    /// Number of reads and of writes so far.
    reads: u64,
    writes: u64,
    random: Random,
}

impl Pattern {
    /// Returns the pattern of a test of iozone or a job of fio.
    ///
    /// # Errors
    /// Fails if no test or job has this name.
    pub fn named(what: &str) -> Result<Self> {
        Ok(match what {
            "initial write" => Self::InitialWrite,
            "rewrite" | "pwrite" | "seq-write" => Self::Write,
            "fwrite" => Self::BufferedWrite,
            "read" | "re-read" | "pread" | "seq-read" => Self::Read,
            "fread" => Self::BufferedRead,
            "reverse read" => Self::ReverseRead,
            "stride read" => Self::StrideRead,
            "random read" => Self::RandomRead,
            "random write" => Self::RandomWrite,
            "mixed" => Self::ReadersAndWriters,
            "seq-rw" => Self::SequentialMix,
            "rand-rw" => Self::RandomMix,
            _ => bail!("unknown test or job \"{what}\""),
        })
    }

    pub fn steps(self, records: u64, thread: usize, seed: u64) -> Steps {
        let random = Random::new(seed << 8 | thread as u64);
        Steps { pattern: self, records, thread, reads: 0, writes: 0, random }
    }

    pub fn is_read(self) -> bool {
        matches!(
            self,
            Self::Read | Self::BufferedRead | Self::ReverseRead | Self::StrideRead | Self::RandomRead
        )
    }

    pub fn threads_min(self) -> usize {
        if self == Self::ReadersAndWriters { 2 } else { 1 }
    }
}

impl Iterator for Steps {
    type Item = Step;

    #[inline]
    fn next(&mut self) -> Option<Step> {
        let records = self.records;
        let is_write = match self.pattern {
            Pattern::Read
            | Pattern::BufferedRead
            | Pattern::ReverseRead
            | Pattern::StrideRead
            | Pattern::RandomRead => false,
            Pattern::InitialWrite | Pattern::Write | Pattern::BufferedWrite | Pattern::RandomWrite => true,
            Pattern::ReadersAndWriters => self.thread % 2 == 1,
            Pattern::SequentialMix | Pattern::RandomMix => self.random.next_u64() >> 63 == 1,
        };
        let counter = if is_write { &mut self.writes } else { &mut self.reads };
        let at = *counter;
        *counter += 1;
        let record = match self.pattern {
            Pattern::InitialWrite if at >= records => return None,
            Pattern::InitialWrite
            | Pattern::Write
            | Pattern::BufferedWrite
            | Pattern::Read
            | Pattern::BufferedRead
            | Pattern::SequentialMix => at % records,
            Pattern::ReverseRead => records - 1 - at % records,
            Pattern::StrideRead => {
                // A pass has every 17th record, rounded up. The next pass starts one record later.
                let turn = records.div_ceil(STRIDE);
                (at % turn * STRIDE + at / turn % STRIDE) % records
            }
            Pattern::RandomRead | Pattern::RandomWrite | Pattern::ReadersAndWriters | Pattern::RandomMix => {
                self.random.next_u64() % records
            }
        };
        Some(Step { record, is_write })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(pattern: Pattern, count: usize) -> Vec<u64> {
        pattern.steps(100, 0, 1).take(count).map(|step| step.record).collect()
    }

    #[test]
    fn unknown_pattern_is_rejected() {
        assert_eq!(Pattern::named("fread").unwrap(), Pattern::BufferedRead);
        assert!(Pattern::named("pwritev").is_err());
    }

    #[test]
    fn steps_follow_pattern() {
        assert_eq!(records(Pattern::Write, 102)[98..], [98, 99, 0, 1]);
        assert_eq!(records(Pattern::InitialWrite, 1000), (0..100).collect::<Vec<_>>());
        assert_eq!(records(Pattern::ReverseRead, 101)[..2], [99, 98]);
        assert_eq!(records(Pattern::ReverseRead, 101)[99..], [0, 99]);
        assert_eq!(records(Pattern::StrideRead, 8), [0, 17, 34, 51, 68, 85, 1, 18]);
        let mut all = records(Pattern::StrideRead, 17 * 6);
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 100, "every record has its turn");
        for pattern in [Pattern::RandomRead, Pattern::RandomWrite] {
            let random = records(pattern, 2000);
            assert!(random.iter().all(|record| *record < 100));
            assert!((0..100).all(|record| random.contains(&record)));
            assert_ne!(random[..10], records(Pattern::Write, 10));
        }
    }

    #[test]
    fn random_steps_depend_on_thread_and_seed() {
        let random =
            |thread, seed| Pattern::RandomRead.steps(1 << 40, thread, seed).take(4).collect::<Vec<_>>();
        assert_eq!(random(1, 1), random(1, 1));
        assert_ne!(random(1, 1), random(2, 1));
        assert_ne!(random(1, 1), random(1, 2));
    }

    #[test]
    fn mixed_patterns_read_and_write() {
        let writes = |pattern: Pattern, thread| {
            pattern.steps(100, thread, 1).take(1000).filter(|step| step.is_write).count()
        };
        assert_eq!((writes(Pattern::ReadersAndWriters, 0), writes(Pattern::ReadersAndWriters, 1)), (0, 1000));
        for pattern in [Pattern::SequentialMix, Pattern::RandomMix] {
            assert!((400..600).contains(&writes(pattern, 0)));
        }
        for is_write in [false, true] {
            let all = Pattern::SequentialMix.steps(100, 0, 1).filter(|step| step.is_write == is_write);
            assert!(all.take(50).map(|step| step.record).eq(0..50), "each goes its own way in order");
        }
    }
}
