//! In which order a thread reads and writes the records of its area: the tests of iozone and the
//! jobs of fio.

use anyhow::{Result, bail};
use freestone_benches::data::Random;

/// iozone's stride, in records.
const STRIDE: u64 = 17;

/// A test of iozone, or a job of fio.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// In order, to places that hold nothing. It ends with the area; all others go on from its
    /// beginning.
    InitialWrite,
    /// In order, over what is there. Also iozone's rewrite and pwrite.
    Write,
    /// As `Write`, through a buffer of the C library's size.
    BufferedWrite,
    /// In order. Also iozone's re-read and pread.
    Read,
    /// As `Read`, through a buffer of the C library's size.
    BufferedRead,
    /// From the end.
    ReverseRead,
    /// Every 17th record, and in the next turn those beside them.
    StrideRead,
    RandomRead,
    RandomWrite,
    /// Random reads by every other thread, beginning with the first, and random writes by the
    /// others: iozone's mixed workload.
    ReadersAndWriters,
    /// Reads and writes in order, each with a place of its own, in turns that are drawn: fio's
    /// `rw`.
    SequentialMix,
    /// Random reads and writes that are drawn: fio's `randrw`.
    RandomMix,
}

/// What a thread does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    pub record: u64,
    pub is_write: bool,
}

/// What a thread does in an area of so many records. The same seed gives the same steps.
pub struct Steps {
    pattern: Pattern,
    records: u64,
    thread: usize,
    /// Steps so far that read, and that wrote.
    reads: u64,
    writes: u64,
    random: Random,
}

impl Pattern {
    /// What a test of iozone or a job of fio does.
    ///
    /// # Errors
    /// There is none of that name.
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
            _ => bail!("nobody knows how to run \"{what}\""),
        })
    }

    /// The steps of one thread.
    pub fn steps(self, records: u64, thread: usize, seed: u64) -> Steps {
        let random = Random::new(seed << 8 | thread as u64);
        Steps { pattern: self, records, thread, reads: 0, writes: 0, random }
    }

    /// Whether nothing else than reads comes.
    pub fn is_read(self) -> bool {
        matches!(
            self,
            Self::Read | Self::BufferedRead | Self::ReverseRead | Self::StrideRead | Self::RandomRead
        )
    }

    /// Threads below which it is not what it says.
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
                // What a turn has is every 17th record, rounded up; the next one begins one
                // further.
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
    fn a_name_that_nobody_knows_is_no_pattern() {
        assert_eq!(Pattern::named("fread").unwrap(), Pattern::BufferedRead);
        assert!(Pattern::named("pwritev").is_err());
    }

    #[test]
    fn orders_are_those_of_their_names() {
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
    fn seeds_and_threads_have_orders_of_their_own() {
        let random =
            |thread, seed| Pattern::RandomRead.steps(1 << 40, thread, seed).take(4).collect::<Vec<_>>();
        assert_eq!(random(1, 1), random(1, 1));
        assert_ne!(random(1, 1), random(2, 1));
        assert_ne!(random(1, 1), random(1, 2));
    }

    #[test]
    fn mixes_have_both() {
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
