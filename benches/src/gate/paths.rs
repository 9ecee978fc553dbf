//! Hot paths: each prepares a device and runs a fixed number of requests.

use std::hint::black_box;
use std::sync::Arc;

use anyhow::{Result, ensure};
use clap::ValueEnum;
use freestone::PAGE_BYTES;
use freestone::codec::Algorithm;
use freestone::cow::Origin;
use freestone::device::zoned::Zoned;
use freestone::device::{Blocking, Buffer, Counting, Device, Flags, IoBuf, Request, TryResult};
use freestone::null::{self, Memory, Null};
use freestone::ram::{self, ForkConfig, Ram};
use freestone::zone::{self, StateLocation, Zones};

use super::server::{RequestKind, Transport};
use crate::data::{Order, Random, fio_page};

const PAGES: u32 = 4096;
const PAGE: u64 = PAGE_BYTES as u64;
pub const DISK_BYTES: u64 = PAGES as u64 * PAGE;
const ZONES: u64 = 16;
/// Number of counted requests. First writes and appends access each page once, so there are as many
/// as pages.
pub const REQUESTS: u64 = PAGES as u64;
/// Callgrind pattern that matches the name of [`counted`], mangled or not.
pub const COUNTED: &str = "*gate*paths*counted*";

/// A hot path. The name identifies it in the baseline and on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum HotPath {
    RamRead,
    RamWrite,
    RamReadSame,
    RamWriteSame,
    RamReadStored,
    RamWriteStored,
    ForkReadThrough,
    ForkFirstWrite,
    ForkFirstWriteStored,
    ForkRewrite,
    OriginFirstWriteStored,
    SnapshotReadStored,
    ZoneAppend,
    ZoneRead,
    NullWrite,
    LayersRead,
    LayersWrite,
    NbdRead,
    NbdWrite,
    NbdCountedRead,
    NbdCountedWrite,
    VhostUserRead,
    VhostUserWrite,
}

/// Arguments of the process that callgrind counts.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Loop {
    /// Path to run; paths with a client are counted in a server instead
    #[arg(value_enum)]
    path: HotPath,
    /// Number of requests
    #[arg(value_parser = clap::value_parser!(u64).range(1..=REQUESTS))]
    count: u64,
}

/// Content of the pages.
#[derive(Clone, Copy)]
enum Content {
    Compressible,
    /// A 32-bit pattern, a different one in every page.
    Same,
}

impl HotPath {
    /// Returns the name in the baseline and on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned())
    }

    pub fn about(self) -> &'static str {
        match self {
            Self::RamRead => "read of a page in memory",
            Self::RamWrite => "write over a page",
            Self::RamReadSame => "read of a same-filled page",
            Self::RamWriteSame => "same-filled write over another",
            // Compression dominates the cost of other paths. Without a codec, a change of the
            // engine alone is visible.
            Self::RamReadStored => "read of a page that is kept without a codec",
            Self::RamWriteStored => "write over a page, without a codec",
            Self::ForkReadThrough => "read of a page that only the snapshot below has",
            Self::ForkFirstWrite => "first write of a page that the snapshot has",
            Self::ForkFirstWriteStored => "first write of a page that the snapshot has, without a codec",
            Self::ForkRewrite => "write over a page of its own",
            // The old page moves to the snapshot. Without compression, the cost of the chain of
            // layers is visible.
            Self::OriginFirstWriteStored => "first write of a page that a snapshot needs, without a codec",
            Self::SnapshotReadStored => "read of a snapshot's page that its origin has, without a codec",
            Self::ZoneAppend => "append to a zone with memory",
            Self::ZoneRead => "read of a zone with memory",
            Self::NullWrite => "write that is forgotten: the contract alone",
            Self::LayersRead => "read of a null device, with the layers that the program puts over each",
            Self::LayersWrite => "write that is forgotten, with these layers",
            Self::NbdRead | Self::NbdWrite => "request to a null export, the server's side",
            Self::NbdCountedRead | Self::NbdCountedWrite => {
                "the same with the metrics that the program has of each export"
            }
            Self::VhostUserRead | Self::VhostUserWrite => {
                "request to a null export, through a virtual machine's queue"
            }
        }
    }

    /// Returns transport and request kind of a path that is counted in a server, or None for other
    /// paths.
    pub fn client_request(self) -> Option<(Transport, RequestKind)> {
        match self {
            Self::NbdRead => Some((Transport::Nbd, RequestKind::Read)),
            Self::NbdWrite => Some((Transport::Nbd, RequestKind::Write)),
            Self::NbdCountedRead => Some((Transport::NbdCounted, RequestKind::Read)),
            Self::NbdCountedWrite => Some((Transport::NbdCounted, RequestKind::Write)),
            Self::VhostUserRead => Some((Transport::VhostUser, RequestKind::Read)),
            Self::VhostUserWrite => Some((Transport::VhostUser, RequestKind::Write)),
            _ => None,
        }
    }
}

impl Loop {
    /// Prepares the device and runs the requests of the path.
    pub fn run(self) -> Result<()> {
        let Self { path, count } = self;
        let compressible = || pages(Content::Compressible);
        match path {
            HotPath::RamRead => reads(&filled(&compressible()?)?, count),
            HotPath::RamWrite => {
                let pages = compressible()?;
                writes(&filled(&pages)?, &pages, count)
            }
            HotPath::RamReadStored => reads(&filled_with(Algorithm::Store, &compressible()?)?, count),
            HotPath::RamWriteStored => {
                let pages = compressible()?;
                writes(&filled_with(Algorithm::Store, &pages)?, &pages, count)
            }
            HotPath::RamReadSame => reads(&filled(&pages(Content::Same)?)?, count),
            HotPath::RamWriteSame => {
                let pages = pages(Content::Same)?;
                writes(&filled(&pages)?, &pages, count)
            }
            HotPath::ForkReadThrough => {
                let snapshot = filled(&compressible()?)?.snapshot()?;
                reads(&snapshot.fork(&ForkConfig::default())?, count)
            }
            HotPath::ForkFirstWrite | HotPath::ForkFirstWriteStored => {
                let pages = compressible()?;
                let stored = path == HotPath::ForkFirstWriteStored;
                let algorithm = if stored { Algorithm::Store } else { Algorithm::Lz4 };
                let snapshot = filled_with(algorithm, &pages)?.snapshot()?;
                first_writes(&snapshot.fork(&ForkConfig::default())?, &pages, count)
            }
            HotPath::ForkRewrite => {
                let pages = compressible()?;
                let fork = filled(&pages)?.snapshot()?.fork(&ForkConfig::default())?;
                fill(&fork, &pages)?;
                writes(&fork, &pages, count)
            }
            HotPath::OriginFirstWriteStored => {
                let pages = compressible()?;
                let origin = filled_with(Algorithm::Store, &pages)?;
                let _snapshot = origin.snapshot()?;
                first_writes(&origin, &pages, count)
            }
            HotPath::SnapshotReadStored => {
                let origin = filled_with(Algorithm::Store, &compressible()?)?;
                reads(&origin.snapshot()?, count)
            }
            HotPath::ZoneAppend => appends(&zones()?, &compressible()?, count),
            HotPath::ZoneRead => reads(&full_zones(&compressible()?)?, count),
            HotPath::NullWrite => {
                let null = Null::new(null::Config::plain(DISK_BYTES, 512))?;
                writes(&null, &compressible()?, count)
            }
            HotPath::LayersRead => reads(&layers()?, count),
            HotPath::LayersWrite => writes(&layers()?, &compressible()?, count),
            HotPath::NbdRead
            | HotPath::NbdWrite
            | HotPath::NbdCountedRead
            | HotPath::NbdCountedWrite
            | HotPath::VhostUserRead
            | HotPath::VhostUserWrite => {
                anyhow::bail!("{} is counted in a server", path.name())
            }
        }
    }
}

fn pages(content: Content) -> Result<IoBuf> {
    let mut pages = IoBuf::zeroed(DISK_BYTES as usize)?;
    for (number, page) in (0_u32..).zip(pages.chunks_exact_mut(PAGE_BYTES)) {
        match content {
            Content::Compressible => fio_page(u64::from(number), page),
            // Pattern zero is avoided, because zero pages are special.
            Content::Same => page.as_chunks_mut().0.fill((number + 1).to_ne_bytes()),
        }
    }
    Ok(pages)
}

fn filled(pages: &[u8]) -> Result<Ram> {
    filled_with(Algorithm::Lz4, pages)
}

fn filled_with(comp_algorithm: Algorithm, pages: &[u8]) -> Result<Ram> {
    let ram = Ram::new(ram::Config { disksize: DISK_BYTES, comp_algorithm, ..ram::Config::default() })?;
    fill(&ram, pages)?;
    Ok(ram)
}

fn fill(ram: &Ram, pages: &[u8]) -> Result<()> {
    for (number, page) in (0_u64..).zip(pages.chunks_exact(PAGE_BYTES)) {
        ram.write_at(number * PAGE, page, Flags::empty())?;
    }
    Ok(())
}

/// Returns a null device under the layers that the program adds: snapshots and request counters.
fn layers() -> Result<Counting> {
    let null = Arc::new(Null::new(null::Config::plain(DISK_BYTES, 512))?);
    Ok(Counting::new("null", Arc::new(Origin::new(null))))
}

/// Returns an empty zoned device with memory.
fn zones() -> Result<Zones> {
    let memory = Memory::new(null::Config::plain(DISK_BYTES, 4096))?;
    let config = zone::Config { zone_size: DISK_BYTES / ZONES, ..zone::Config::default() };
    Ok(Zones::new(Arc::new(memory), config, StateLocation::Volatile, None)?)
}

/// Runs `requests`. Callgrind counts only the instructions in this function and on this thread,
/// because the work of a device's other threads depends on timing.
#[inline(never)]
fn counted(requests: impl FnOnce() -> Result<()>) -> Result<()> {
    black_box(requests())
}

/// Reads random pages with `try_io`, as an export does.
fn reads(device: &dyn Device, count: u64) -> Result<()> {
    let mut into = IoBuf::zeroed(PAGE_BYTES)?;
    counted(|| {
        for page in Order::new(3, 0, PAGES).choices(0, count) {
            let request = Request::read(u64::from(page) * PAGE, PAGE);
            let tried = device.try_io(&request, Buffer::Read(black_box(&mut into)))?;
            ensure!(tried == TryResult::Done, "a read had to wait");
        }
        Ok(())
    })
}

/// Overwrites random pages of the device with random pages of `pages`.
fn writes(device: &dyn Device, pages: &[u8], count: u64) -> Result<()> {
    let (slots, contents) = (Order::new(3, 0, PAGES), Order::new(4, 0, PAGES));
    let mut both = slots.choices(0, count).zip(contents.choices(0, count));
    counted(|| both.try_for_each(|(slot, content)| write(device, slot, pages, content)))
}

/// Writes pages in random order, each once.
fn first_writes(device: &dyn Device, pages: &[u8], count: u64) -> Result<()> {
    let slots = Random::new(5).permutation(u64::from(PAGES));
    let mut both = slots.into_iter().zip(Order::new(4, 0, PAGES).choices(0, count));
    counted(|| both.try_for_each(|(slot, content)| write(device, slot, pages, content)))
}

fn write(device: &dyn Device, slot: u32, pages: &[u8], content: u32) -> Result<()> {
    let data = &pages[content as usize * PAGE_BYTES..][..PAGE_BYTES];
    let request = Request::write(u64::from(slot) * PAGE, PAGE);
    let tried = device.try_io(&request, Buffer::Write(black_box(data)))?;
    ensure!(tried == TryResult::Done, "a write had to wait");
    Ok(())
}

/// Appends pages to the zones, one zone after the other.
fn appends(zones: &dyn Zoned, pages: &[u8], count: u64) -> Result<()> {
    counted(|| {
        for (number, page) in (0..count).zip(pages.chunks_exact(PAGE_BYTES)) {
            let zone = number * PAGE / (DISK_BYTES / ZONES) * (DISK_BYTES / ZONES);
            let offset = zones.try_append(zone, black_box(page), Flags::empty())?;
            ensure!(
                offset == Some(number * PAGE),
                "an append to zone {zone} had to wait or went to {offset:?}"
            );
        }
        Ok(())
    })
}

/// Returns a zoned device with memory, filled with the pages.
fn full_zones(pages: &[u8]) -> Result<Zones> {
    let zones = zones()?;
    for (number, page) in (0_u64..).zip(pages.chunks_exact(PAGE_BYTES)) {
        zones.write_at(number * PAGE, page, Flags::empty())?;
    }
    Ok(zones)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_runs_or_needs_a_server() {
        for &path in HotPath::value_variants() {
            let done = Loop { path, count: 20 }.run();
            assert_eq!(done.is_ok(), path.client_request().is_none(), "{path:?}: {done:?}");
        }
    }
}
