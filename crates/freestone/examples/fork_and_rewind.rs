//! Gives each of several jobs a fork of one disk, and rewinds a fork for the next job, all in one process.
//!
//! `cargo run -p freestone --example fork_and_rewind`

use std::error::Error;

use freestone::device::{Blocking as _, Flags};
use freestone::ram::{Config, ForkConfig, Ram};

const PAGE: usize = 4096;

/// A base image and the forks of the jobs over it. All share one memory limit.
pub struct Disks {
    base: Ram,
}

impl Disks {
    /// Makes a base image of 64 MiB, whose pages have the number of the page as content.
    pub fn new() -> Result<Self, Box<dyn Error>> {
        let disk = Ram::new(Config { disksize: 64 << 20, mem_limit: 32 << 20, ..Config::default() })?;
        for page in 0..16_u8 {
            disk.write_at(u64::from(page) * PAGE as u64, &[page; PAGE], Flags::empty())?;
        }
        // A base must not change, so the forks read through to a snapshot. The snapshot keeps the disk's memory.
        Ok(Self { base: disk.snapshot()? })
    }

    /// Makes the disk of a job. Of the memory limit, 1 MiB is guaranteed to the job.
    pub fn fork(&self) -> Result<Ram, Box<dyn Error>> {
        Ok(self.base.fork(&ForkConfig { mem_min: 1 << 20, ..ForkConfig::default() })?)
    }
}

/// Reads a page of a disk.
pub fn page(disk: &Ram, number: u64) -> Result<[u8; PAGE], freestone::device::Error> {
    let mut page = [0; PAGE];
    disk.read_at(number * PAGE as u64, &mut page)?;
    Ok(page)
}

/// A job, which overwrites the third page of its disk.
pub fn run_job(disk: &Ram, job: u8) -> Result<(), freestone::device::Error> {
    disk.write_at(3 * PAGE as u64, &[job; PAGE], Flags::empty())
}

/// Runs the example.
pub fn main() -> Result<(), Box<dyn Error>> {
    let disks = Disks::new()?;
    let forks = [disks.fork()?, disks.fork()?];
    for (fork, job) in forks.iter().zip([101, 102]) {
        run_job(fork, job)?;
    }
    println!("after the jobs: {} and {}", page(&forks[0], 3)?[0], page(&forks[1], 3)?[0]);
    // The rewind takes constant time. The pages of the job are freed in the background.
    forks[0].rewind()?;
    println!("after the rewind: {} and {}", page(&forks[0], 3)?[0], page(&forks[1], 3)?[0]);
    Ok(())
}
