//! Figures of the sources, which are published experiments with the kernel.

/// A row of a source's table.
#[derive(Debug, Clone, Copy)]
pub struct Figures<const COLUMNS: usize> {
    pub what: &'static str,
    pub threads: usize,
    /// Figures in the order of the table's columns.
    pub by_column: [f64; COLUMNS],
}

impl<const COLUMNS: usize> Figures<COLUMNS> {
    /// Returns the figures as [`crate::results::Table::add`] expects them.
    pub fn published(&self) -> Vec<Option<f64>> {
        self.by_column.into_iter().map(Some).collect()
    }
}

const fn row<const COLUMNS: usize>(
    threads: usize,
    what: &'static str,
    by_column: [f64; COLUMNS],
) -> Figures<COLUMNS> {
    Figures { what, threads, by_column }
}

/// Experiment 1: zram's table under one lock and under locks per entry.
pub mod locks {
    use super::{Figures, row};

    pub const SOURCE: &str = "4 cores, LZO, 1 GB zram with ext4; iozone -t 4 -R -r 16K -s 200M -I, KB/s; and fio on the raw 10 MB device, \
                              blocks of 32k, 4 jobs, 3000 loops, fixed seed";
    /// Columns of the table. The first is the old lock, the last the one that the source chose.
    pub const COLUMNS: [&str; 5] = ["one rwlock", "CAS", "spinlock", "rwlock", "bit spinlock"];

    /// Figures of iozone's tests in KB/s.
    pub const IOZONE: [Figures<5>; 11] = [
        row(4, "initial write", [1381094.0, 1425435.0, 1422860.0, 1423075.0, 1421521.0]),
        row(4, "rewrite", [1529479.0, 1641199.0, 1668762.0, 1672855.0, 1654910.0]),
        row(4, "read", [8468009.0, 11324979.0, 11305569.0, 11117273.0, 10997202.0]),
        row(4, "re-read", [8467476.0, 11260914.0, 11248059.0, 11145336.0, 10906486.0]),
        row(4, "reverse read", [6821393.0, 8106334.0, 8282174.0, 8279195.0, 8109186.0]),
        row(4, "stride read", [7191093.0, 8994306.0, 9153982.0, 8961224.0, 9004434.0]),
        row(4, "random read", [7156353.0, 8957932.0, 9167098.0, 8980465.0, 8940476.0]),
        row(4, "mixed", [4172747.0, 5680814.0, 5927825.0, 5489578.0, 5972253.0]),
        row(4, "random write", [1483044.0, 1605588.0, 1594329.0, 1600453.0, 1596010.0]),
        row(4, "pwrite", [1276644.0, 1303108.0, 1311612.0, 1314228.0, 1300960.0]),
        row(4, "pread", [4324337.0, 4632869.0, 4618386.0, 4457870.0, 4500166.0]),
    ];

    /// Figures of fio's jobs in KB/s.
    pub const FIO: [Figures<5>; 4] = [
        row(4, "seq-write", [933789.0, 999357.0, 1003298.0, 995961.0, 1001958.0]),
        row(4, "seq-read", [5634130.0, 6577930.0, 6380861.0, 6243912.0, 6230006.0]),
        row(4, "seq-rw", [1405687.0, 1638117.0, 1640256.0, 1633903.0, 1634459.0]),
        row(4, "rand-rw", [1386119.0, 1614664.0, 1617211.0, 1609267.0, 1612471.0]),
    ];
}

/// Experiment 2: zram's compression streams.
pub mod streams {
    use super::{Figures, row};

    pub const SOURCE: &str = "4 CPUs, LZO, 3 GB zram with ext4; iozone with 1 to 10 threads, records of 8K x threads, the files nearly fill the \
                              device, KB/s";
    /// Number of threads with which the source's size column is 0: the files were empty, so the
    /// figures say nothing about streams.
    pub const NO_SIZE_THREADS: usize = 10;
    /// Columns of the table. The last is the one that the source chose.
    pub const COLUMNS: [&str; 3] = ["list of 4", "list of 8", "one per CPU"];

    /// Figures of iozone with as many threads as CPUs, in KB/s.
    pub const FOUR_THREADS: [Figures<3>; 7] = [
        row(4, "initial write", [3841475.0, 3859280.0, 5309989.0]),
        row(4, "rewrite", [3905526.0, 3917310.0, 6814801.0]),
        row(4, "read", [16233055.0, 14843560.0, 16352284.0]),
        row(4, "random write", [3990586.0, 4004757.0, 6722089.0]),
        row(4, "mixed", [9058852.0, 9180651.0, 10815918.0]),
        row(4, "pwrite", [3318836.0, 3468978.0, 4244748.0]),
        row(4, "fwrite", [2227354.0, 2186688.0, 2386975.0]),
    ];

    /// Figures of iozone with more threads than CPUs, in KB/s.
    pub const PAST_THE_CPUS: [Figures<3>; 3] = [
        row(5, "read", [14947361.0, 16698824.0, 10155334.0]),
        row(7, "read", [18901600.0, 10088919.0, 6699593.0]),
        row(10, "rewrite", [3066956.0, 2693820.0, 332672.0]),
    ];
}

/// Experiment 3: zram's writeback, one page at a time and in batches.
pub mod writeback {
    use super::{Figures, row};

    pub const SOURCE: &str = "4 GiB of idle pages written back to an NVMe drive, one synchronous request at a time, of a page or of up to 32 \
                              pages, seconds";
    pub const COLUMNS: [&str; 2] = ["a page at a time", "128 KiB at a time"];

    pub const SECONDS: [Figures<2>; 2] =
        [row(1, "elapsed", [68.648, 15.496]), row(1, "system time", [24.899, 7.789])];
}

/// Experiment 4: dm-snapshot's exception tables.
pub mod snapshots {
    use super::{Figures, row};

    pub const SOURCE: &str = "dm-snapshot over null_blk, random 4 KiB writes by 1, 2, 4 and 8 workers";
    pub const COLUMNS: [&str; 2] = ["one lock", "locks by bucket"];

    pub const ORIGIN_IOPS: [Figures<2>; 4] = [
        row(1, "origin", [57708.0, 66421.0]),
        row(2, "origin", [63415.0, 77589.0]),
        row(4, "origin", [67276.0, 98839.0]),
        row(8, "origin", [60564.0, 109258.0]),
    ];
    /// Latencies of writes to the origin, in microseconds.
    pub const ORIGIN_LATENCY: [Figures<2>; 4] = [
        row(1, "origin", [16.25, 13.27]),
        row(2, "origin", [31.65, 25.08]),
        row(4, "origin", [55.28, 41.08]),
        row(8, "origin", [121.47, 74.44]),
    ];
    pub const SNAPSHOT_IOPS: [Figures<2>; 4] = [
        row(1, "snapshot", [72593.0, 84938.0]),
        row(2, "snapshot", [97379.0, 134973.0]),
        row(4, "snapshot", [90610.0, 143077.0]),
        row(8, "snapshot", [90537.0, 180085.0]),
    ];
    /// Latencies of writes to the snapshot, in microseconds.
    pub const SNAPSHOT_LATENCY: [Figures<2>; 4] = [
        row(1, "snapshot", [12.53, 10.6]),
        row(2, "snapshot", [19.78, 14.89]),
        row(4, "snapshot", [40.37, 23.47]),
        row(8, "snapshot", [89.32, 48.48]),
    ];
}

/// Experiment 5: `null_blk`'s zones.
pub mod zones {
    use super::{Figures, row};

    pub const SOURCE: &str = "null_blk on 48 cores, zonemode=zbd, random 4 KiB, no scheduler, no memory backing; writes by 96 psync jobs, reads \
                              by 96 libaio jobs of depth 8, KIOPS";
    pub const COLUMNS: [&str; 2] = ["one lock", "a lock a zone"];

    pub const KIOPS: [Figures<2>; 2] =
        [row(96, "writes", [465.0, 456.0]), row(96, "reads", [1361.0, 4096.0])];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_match_gains_stated_by_sources() {
        let gain = |figures: &[f64]| figures[figures.len() - 1] / figures[0];
        assert!((gain(&zones::KIOPS[1].by_column) - 3.01).abs() < 0.01);
        assert!((1.0 / gain(&writeback::SECONDS[0].by_column) - 4.43).abs() < 0.01);
        assert!(gain(&snapshots::SNAPSHOT_IOPS[3].by_column) > 1.98);
        assert!(locks::IOZONE.iter().chain(&locks::FIO).all(|row| gain(&row.by_column) > 1.0));
        let no_size = streams::PAST_THE_CPUS[2];
        assert_eq!(no_size.threads, streams::NO_SIZE_THREADS);
        assert!(gain(&no_size.by_column) < 0.11, "gain with empty files");
    }
}
