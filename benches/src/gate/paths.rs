//! The hot paths: each one a device, made and filled the same way whatever is counted, and a number
//! of requests.

use std::hint::black_box;
use std::sync::Arc;

use anyhow::{Result, ensure};
use clap::ValueEnum;
use freestone::PAGE_BYTES;
use freestone::codec::Algorithm;
use freestone::cow::Origin;
use freestone::device::zoned::Zoned;
use freestone::device::{Blocking, Buffer, Counting, Device, Flags, IoBuf, Request, Tried};
use freestone::null::{self, Memory, Null};
use freestone::ram::{self, ForkConfig, Ram};
use freestone::zone::{self, State, Zones};

use super::server::{Asked, Over};
use crate::data::{Order, Random, fio_page};

/// Pages of a disk.
const PAGES: u32 = 4096;
const PAGE: u64 = PAGE_BYTES as u64;
/// Bytes of a disk.
pub const DISK_BYTES: u64 = PAGES as u64 * PAGE;
/// Zones of the zoned drive.
const ZONES: u64 = 16;
/// Requests that are counted. First writes and appends do each page once.
pub const REQUESTS: u64 = PAGES as u64;
/// Callgrind's pattern of [`counted`], mangled or not.
pub const COUNTED: &str = "*gate*paths*counted*";

/// A hot path; its name is what the baseline and the command line know it by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Hot {
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

/// What the counted process does.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Loop {
    /// The path; those with a client have a server.
    #[arg(value_enum)]
    path: Hot,
    /// How many requests.
    #[arg(value_parser = clap::value_parser!(u64).range(1..=REQUESTS))]
    count: u64,
}

/// What pages hold.
#[derive(Clone, Copy)]
enum Content {
    Compressible,
    /// One 32-bit pattern, another one in every page.
    Same,
}

impl Hot {
    /// As it is typed.
    pub fn name(self) -> String {
        self.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned())
    }

    /// For people.
    pub fn about(self) -> &'static str {
        match self {
            Self::RamRead => "read of a page in memory",
            Self::RamWrite => "write over a page",
            Self::RamReadSame => "read of a same-filled page",
            Self::RamWriteSame => "same-filled write over another",
            // Most of what a codec's page takes is the codec; here a change of the engine alone is
            // seen.
            Self::RamReadStored => "read of a page that is kept without a codec",
            Self::RamWriteStored => "write over a page, without a codec",
            Self::ForkReadThrough => "read of a page that only the snapshot below has",
            Self::ForkFirstWrite => "first write of a page that the snapshot has",
            Self::ForkFirstWriteStored => "first write of a page that the snapshot has, without a codec",
            Self::ForkRewrite => "write over a page of its own",
            // The old page moves to the snapshot: no codec, so that the chain is what is seen.
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

    /// What a client asks a server for, and how.
    pub fn served(self) -> Option<(Over, Asked)> {
        match self {
            Self::NbdRead => Some((Over::Nbd, Asked::Read)),
            Self::NbdWrite => Some((Over::Nbd, Asked::Write)),
            Self::NbdCountedRead => Some((Over::NbdCounted, Asked::Read)),
            Self::NbdCountedWrite => Some((Over::NbdCounted, Asked::Write)),
            Self::VhostUserRead => Some((Over::VhostUser, Asked::Read)),
            Self::VhostUserWrite => Some((Over::VhostUser, Asked::Write)),
            _ => None,
        }
    }
}

impl Loop {
    /// Runs it.
    pub fn run(self) -> Result<()> {
        let Self { path, count } = self;
        let compressible = || pages(Content::Compressible);
        match path {
            Hot::RamRead => reads(&filled(&compressible()?)?, count),
            Hot::RamWrite => {
                let pages = compressible()?;
                writes(&filled(&pages)?, &pages, count)
            }
            Hot::RamReadStored => reads(&filled_with(Algorithm::Store, &compressible()?)?, count),
            Hot::RamWriteStored => {
                let pages = compressible()?;
                writes(&filled_with(Algorithm::Store, &pages)?, &pages, count)
            }
            Hot::RamReadSame => reads(&filled(&pages(Content::Same)?)?, count),
            Hot::RamWriteSame => {
                let pages = pages(Content::Same)?;
                writes(&filled(&pages)?, &pages, count)
            }
            Hot::ForkReadThrough => {
                let snapshot = filled(&compressible()?)?.snapshot()?;
                reads(&snapshot.fork(&ForkConfig::default())?, count)
            }
            Hot::ForkFirstWrite | Hot::ForkFirstWriteStored => {
                let pages = compressible()?;
                let stored = path == Hot::ForkFirstWriteStored;
                let algorithm = if stored { Algorithm::Store } else { Algorithm::Lz4 };
                let snapshot = filled_with(algorithm, &pages)?.snapshot()?;
                first_writes(&snapshot.fork(&ForkConfig::default())?, &pages, count)
            }
            Hot::ForkRewrite => {
                let pages = compressible()?;
                let fork = filled(&pages)?.snapshot()?.fork(&ForkConfig::default())?;
                fill(&fork, &pages)?;
                writes(&fork, &pages, count)
            }
            Hot::OriginFirstWriteStored => {
                let pages = compressible()?;
                let origin = filled_with(Algorithm::Store, &pages)?;
                let _snapshot = origin.snapshot()?;
                first_writes(&origin, &pages, count)
            }
            Hot::SnapshotReadStored => {
                let origin = filled_with(Algorithm::Store, &compressible()?)?;
                reads(&origin.snapshot()?, count)
            }
            Hot::ZoneAppend => appends(&zones()?, &compressible()?, count),
            Hot::ZoneRead => reads(&full_zones(&compressible()?)?, count),
            Hot::NullWrite => {
                let null = Null::new(null::Config::plain(DISK_BYTES, 512))?;
                writes(&null, &compressible()?, count)
            }
            Hot::LayersRead => reads(&layers()?, count),
            Hot::LayersWrite => writes(&layers()?, &compressible()?, count),
            Hot::NbdRead
            | Hot::NbdWrite
            | Hot::NbdCountedRead
            | Hot::NbdCountedWrite
            | Hot::VhostUserRead
            | Hot::VhostUserWrite => {
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
            // No pattern is zero.
            Content::Same => page.as_chunks_mut().0.fill((number + 1).to_ne_bytes()),
        }
    }
    Ok(pages)
}

/// A RAM disk with those pages.
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

/// A null device that snapshots can be taken of, and whose requests are counted.
fn layers() -> Result<Counting> {
    let null = Arc::new(Null::new(null::Config::plain(DISK_BYTES, 512))?);
    Ok(Counting::new("null", Arc::new(Origin::new(null))))
}

/// An empty zoned drive with memory.
fn zones() -> Result<Zones> {
    let memory = Memory::new(null::Config::plain(DISK_BYTES, 4096))?;
    let config = zone::Config { zone_size: DISK_BYTES / ZONES, ..zone::Config::default() };
    Ok(Zones::new(Arc::new(memory), config, State::Volatile, None)?)
}

/// Callgrind counts in here, and on this thread only: what threads of a device do beside it is a
/// matter of time.
#[inline(never)]
fn counted(requests: impl FnOnce() -> Result<()>) -> Result<()> {
    black_box(requests())
}

/// Reads of random pages, as an export tries them.
fn reads(device: &dyn Device, count: u64) -> Result<()> {
    let mut into = IoBuf::zeroed(PAGE_BYTES)?;
    counted(|| {
        for page in Order::new(3, 0, PAGES).choices(0, count) {
            let request = Request::read(u64::from(page) * PAGE, PAGE);
            let tried = device.try_io(&request, Buffer::Read(black_box(&mut into)))?;
            ensure!(tried == Tried::Done, "a read had to wait");
        }
        Ok(())
    })
}

/// Writes of random pages over random others.
fn writes(device: &dyn Device, pages: &[u8], count: u64) -> Result<()> {
    let (places, contents) = (Order::new(3, 0, PAGES), Order::new(4, 0, PAGES));
    let mut both = places.choices(0, count).zip(contents.choices(0, count));
    counted(|| both.try_for_each(|(place, content)| write(device, place, pages, content)))
}

/// Writes of pages in random order, each once.
fn first_writes(device: &dyn Device, pages: &[u8], count: u64) -> Result<()> {
    let places = Random::new(5).permutation(u64::from(PAGES));
    let mut both = places.into_iter().zip(Order::new(4, 0, PAGES).choices(0, count));
    counted(|| both.try_for_each(|(place, content)| write(device, place, pages, content)))
}

fn write(device: &dyn Device, place: u32, pages: &[u8], content: u32) -> Result<()> {
    let data = &pages[content as usize * PAGE_BYTES..][..PAGE_BYTES];
    let request = Request::write(u64::from(place) * PAGE, PAGE);
    let tried = device.try_io(&request, Buffer::Write(black_box(data)))?;
    ensure!(tried == Tried::Done, "a write had to wait");
    Ok(())
}

/// Appends, zone after zone.
fn appends(zones: &dyn Zoned, pages: &[u8], count: u64) -> Result<()> {
    counted(|| {
        for (number, page) in (0..count).zip(pages.chunks_exact(PAGE_BYTES)) {
            let zone = number * PAGE / (DISK_BYTES / ZONES) * (DISK_BYTES / ZONES);
            let place = zones.try_append(zone, black_box(page), Flags::empty())?;
            ensure!(
                place == Some(number * PAGE),
                "an append to zone {zone} had to wait or went to {place:?}"
            );
        }
        Ok(())
    })
}

/// A zoned drive that is full.
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
    fn every_path_runs_or_is_a_servers() {
        for &path in Hot::value_variants() {
            let done = Loop { path, count: 20 }.run();
            assert_eq!(done.is_ok(), path.served().is_none(), "{path:?}: {done:?}");
        }
    }
}
