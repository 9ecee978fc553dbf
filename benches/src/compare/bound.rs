//! Upper bound of a server's speed on this machine: the speed if a request costs only the CPU time of
//! Freestone's null export and of the bare codec.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use freestone::PAGE_BYTES;
use freestone::device::IoBuf;

use crate::data::{Data, Order};
use crate::engine::bare::{LibraryCodec, Store};
use crate::engine::codec::{bare_reads, bare_writes};
use crate::measure::machine;
use crate::measure::thread_clock;
use crate::transport::fio_nbd::Direction;

const CODEC_TIME: Duration = Duration::from_millis(150);
/// Number of pages that the codec processes between two readings of the clock.
const BATCH: u64 = 32;

/// Number of CPUs of the modelled machine, whose speed is computed from CPU times alone.
const MODELLED_CPUS: f64 = 16.0;

/// CPU time of a request apart from the codec, in microseconds, measured with Freestone's null
/// export.
#[derive(Debug, Clone, Copy)]
pub struct RequestCost {
    pub connections: u32,
    pub server_us: f64,
    /// CPU time of server and client together.
    pub all_us: f64,
}

/// Upper bounds in requests per second.
#[derive(Debug, Clone, Copy)]
pub struct UpperBound {
    pub here: f64,
    /// Upper bound on a machine with [`MODELLED_CPUS`] CPUs.
    pub modelled: f64,
    /// Number of CPUs that the codec keeps busy on the modelled machine.
    pub codec_cpus: f64,
}

/// Bare codec and the data of a run, from which upper bounds are measured.
pub struct Bound {
    store: Store,
    pages: IoBuf,
    cpus: Vec<usize>,
}

impl Bound {
    pub fn new(data: &Data) -> Result<Self> {
        let pages = data.load()?;
        let (store, _) = Store::build(&pages)?;
        Ok(Self { store, pages, cpus: machine::allowed_cpus()? })
    }

    /// Returns the upper bound for requests of `pages` pages that cost `request_cost` in addition to the CPU
    /// time of the codec.
    pub fn of(
        &self,
        direction: Direction,
        pages: u64,
        request_cost: RequestCost,
        round: u32,
    ) -> Result<UpperBound> {
        let codec_us = pages as f64 * self.page_us(direction, round)?;
        let with_cpus = |cpus: f64| cpus * 1e6 / (request_cost.all_us + codec_us);
        // Each connection has one thread in the server and one in the client. The slower one limits the
        // speed, however many CPUs the machine has.
        let client_us = request_cost.all_us - request_cost.server_us;
        let serial = f64::from(request_cost.connections) * 1e6 / request_cost.server_us.max(client_us);
        let modelled = with_cpus(MODELLED_CPUS).min(serial);
        Ok(UpperBound {
            here: with_cpus(self.cpus.len() as f64),
            modelled,
            codec_cpus: modelled * codec_us / 1e6,
        })
    }

    /// Returns the codec's mean CPU time per page, in microseconds, while all CPUs compress or decompress at
    /// once.
    pub fn page_us(&self, direction: Direction, round: u32) -> Result<f64> {
        let all = Barrier::new(self.cpus.len());
        let spent: Vec<f64> = std::thread::scope(|scope| {
            let threads: Vec<_> = (self.cpus.iter().enumerate())
                .map(|(number, &cpu)| {
                    let all = &all;
                    scope.spawn(move || {
                        let pinned = machine::pin_to(cpu);
                        all.wait();
                        pinned?;
                        self.loop_us(direction, u64::from(round) << 8 | number as u64)
                    })
                })
                .collect();
            let joined =
                threads.into_iter().map(|thread| thread.join().ok().context("the codec panicked")?);
            joined.collect::<Result<_>>()
        })?;
        Ok(spent.iter().sum::<f64>() / spent.len() as f64)
    }

    fn loop_us(&self, direction: Direction, seed: u64) -> Result<f64> {
        let count = (self.pages.len() / PAGE_BYTES) as u32;
        let order = Order::new(seed, 0, count);
        let mut codec = LibraryCodec::new()?;
        let (start, before) = (Instant::now(), thread_clock());
        let mut done = 0;
        while start.elapsed() < CODEC_TIME {
            let choices = order.choices(done, BATCH);
            match direction {
                Direction::Read => bare_reads(&self.store, &codec, choices),
                Direction::Write => bare_writes(&self.store, &mut codec, &self.pages, choices),
            }
            done += BATCH;
        }
        Ok(thread_clock().saturating_sub(before).as_secs_f64() * 1e6 / done as f64)
    }
}
