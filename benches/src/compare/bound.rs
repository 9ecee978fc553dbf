//! What the machine can give where a request pays our null export and the bare codec, and nothing
//! else.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use freestone::PAGE_BYTES;
use freestone::device::IoBuf;

use crate::bare::{Ours, Store};
use crate::codec::{bare_reads, bare_writes};
use crate::data::{Data, Order};
use crate::fio_nbd::Direction;
use crate::machine;
use crate::measure::thread_clock;

/// How long the codec is measured for each slice.
const TIME: Duration = Duration::from_millis(150);
/// Pages between two looks at the clock.
const BATCH: u64 = 32;

/// A machine that is modelled, with nothing in the model but CPU time.
const MODELLED_CPUS: f64 = 16.0;

/// What a request takes beside the codec, in microseconds of CPU time, measured with our null.
#[derive(Debug, Clone, Copy)]
pub struct Rest {
    pub connections: u32,
    pub server_us: f64,
    /// Of the server and the client.
    pub all_us: f64,
}

/// Requests a second.
#[derive(Debug, Clone, Copy)]
pub struct Possible {
    /// With the CPUs of this machine.
    pub here: f64,
    /// With 16.
    pub modelled: f64,
    /// CPUs that have the codec to do then.
    pub codec_cpus: f64,
}

/// The bare codec on the data of a run.
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

    /// What all CPUs give together, where a request of so many pages takes so much CPU time beside
    /// the codec.
    pub fn of(&self, direction: Direction, pages: u64, rest: Rest, round: u32) -> Result<Possible> {
        let codec_us = pages as f64 * self.page_us(direction, round)?;
        let on = |cpus: f64| cpus * 1e6 / (rest.all_us + codec_us);
        // However many CPUs there are, a connection's thread and its client's are one each.
        let client_us = rest.all_us - rest.server_us;
        let serial = f64::from(rest.connections) * 1e6 / rest.server_us.max(client_us);
        let modelled = on(MODELLED_CPUS).min(serial);
        Ok(Possible { here: on(self.cpus.len() as f64), modelled, codec_cpus: modelled * codec_us / 1e6 })
    }

    /// CPU time of a page, with all CPUs at it.
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
        let mut codec = Ours::new()?;
        let (begun, before) = (Instant::now(), thread_clock());
        let mut done = 0;
        while begun.elapsed() < TIME {
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
