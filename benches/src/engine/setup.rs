//! A RAM disk that holds a data set, and the same pages for the bare codec.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, ensure};
use freestone::PAGE_BYTES;
use freestone::codec::Algorithm;
use freestone::device::{Blocking, Flags, IoBuf};
use freestone::ram::{Config, ForkConfig, Ram};

use super::bare::{self, Census, Liblz4Codec, LibraryCodec, Store};
use crate::data::{Data, Order, Random, page_at, whole_pages};
use crate::options::{Options, Set};

/// Data, RAM disk and reference of a comparison, warmed up and verified.
pub(crate) struct Setup {
    pub data: Data,
    pub pages: IoBuf,
    pub ram: Ram,
    pub store: Store,
    pub census: Census,
    /// Nanoseconds per page of the first, sequential fill, into memory that the pool has to
    /// allocate.
    pub first_fill_ns: f64,
    /// Nanoseconds per page of the same fill with the bare codec, just before.
    pub first_fill_bare_ns: f64,
}

pub fn new_ram(bytes: u64) -> Result<Ram> {
    Ok(Ram::new(config(bytes))?)
}

/// Creates an empty disk that compresses with `comp_algorithm`.
pub fn new_ram_with(bytes: u64, comp_algorithm: Algorithm) -> Result<Ram> {
    Ok(Ram::new(Config { comp_algorithm, ..config(bytes) })?)
}

/// Creates an empty disk with a backing device large enough for all its pages.
pub fn backed_ram(bytes: u64) -> Result<Ram> {
    let backing = new_ram(2 * bytes)?;
    Ok(Ram::new(config(bytes).backed_by(Arc::new(backing), true))?)
}

/// Creates a fork of a snapshot of an empty disk.
pub fn forked_ram(bytes: u64) -> Result<Ram> {
    Ok(new_ram(bytes)?.snapshot()?.fork(&ForkConfig::default())?)
}

fn config(bytes: u64) -> Config {
    Config { disksize: bytes, comp_algorithm: Algorithm::Lz4, ..Config::default() }
}

impl Setup {
    /// Loads the data and fills the disk. Then rewrites every page with other content in random
    /// order, to warm up and mix the pool, and writes all pages back. Verifies that all sides
    /// return the data.
    pub fn new(set: Set, usual_bytes: u64, options: &Options) -> Result<Self> {
        let data = Data::open(set, options.bytes(usual_bytes), options)?;
        let pages = data.load()?;
        let ram = new_ram(data.bytes())?;
        let start = Instant::now();
        let (store, census) = Store::build(&pages)?;
        let first_fill_bare_ns = start.elapsed().as_nanos() as f64 / data.pages as f64;
        let start = Instant::now();
        for (number, page) in whole_pages(&pages).enumerate() {
            write(&ram, number as u32, page)?;
        }
        let first_fill_ns = start.elapsed().as_nanos() as f64 / data.pages as f64;
        for (slot, content) in mixing(data.pages) {
            write(&ram, slot, page_at(&pages, content))?;
        }
        store.verify(&LibraryCodec::new()?, &pages)?;
        store.verify(&Liblz4Codec::new(), &pages)?;
        bare::check_plain(&pages)?;
        let mut back = [0; PAGE_BYTES];
        for (number, page) in whole_pages(&pages).enumerate() {
            ram.read_at((number * PAGE_BYTES) as u64, &mut back)?;
            ensure!(back == *page, "the disk changed page {number}");
        }
        Ok(Self { data, pages, ram, store, census, first_fill_ns, first_fill_bare_ns })
    }

    /// Returns a random sequence of slots, and a random sequence of contents to write to them.
    pub fn orders(&self) -> (Order, Order) {
        let pages = self.data.pages as u32;
        (Order::new(3, 0, pages), Order::new(4, 0, pages))
    }

    /// Returns the note of a report about the pages of the data set.
    pub fn census_note(&self) -> String {
        let Census { same, huge, compressed, bytes } = self.census;
        let part = |n: u64| 100.0 * n as f64 / self.data.pages as f64;
        format!(
            "pages: {} ({:.1} % same-filled, {:.1} % stored raw, {:.1} % compressed), {:.0} bytes a page on average",
            self.data.pages,
            part(same),
            part(huge),
            part(compressed),
            bytes as f64 / self.data.pages as f64
        )
    }
}

/// Returns slots and contents of the warm-up writes: all slots in random order with other content,
/// then all with their own.
pub fn mixing(pages: u64) -> impl Iterator<Item = (u32, u32)> {
    let slots = Random::new(1).permutation(pages);
    let contents = Random::new(2).permutation(pages);
    let back = contents.clone();
    slots.into_iter().zip(contents).chain(back.into_iter().map(|slot| (slot, slot)))
}

fn write(ram: &Ram, slot: u32, page: &[u8]) -> Result<()> {
    Ok(ram.write_at(u64::from(slot) * PAGE_BYTES as u64, page, Flags::empty())?)
}
