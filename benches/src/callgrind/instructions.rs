//! Loop of one kind of request, whose instructions callgrind counts. The loop uses only the part of
//! the library's API that the first version had, so that it can be built with any version.

use std::hint::black_box;

use anyhow::Result;
use clap::ValueEnum;
use freestone::PAGE_BYTES;
use freestone::device::{Blocking, Flags, IoBuf};
use freestone::ram::Ram;

use crate::data::{Order, fio_page};

const PAGES: u32 = 4096;
pub const DISK_BYTES: u64 = PAGES as u64 * PAGE_BYTES as u64;

/// Arguments of the loop.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Loop {
    /// Request type
    #[arg(value_enum)]
    pub request: RequestKind,
    /// Content of the pages
    #[arg(value_enum)]
    pub content: Content,
    /// Number of requests
    pub count: u64,
}

/// Type of the 4 KiB requests to random pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RequestKind {
    Read,
    /// Write that replaces a page by another one of the same kind.
    Write,
}

/// Content of the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Content {
    /// fio's 60 % compressible pages, which cost a codec least.
    Compressible,
    /// A 32-bit pattern, a different one in every page.
    Same,
}

/// Fills a disk of [`DISK_BYTES`] and runs the loop on it. The difference of two runs with
/// different counts excludes the setup.
pub fn run(ram: &Ram, Loop { request, content, count }: Loop) -> Result<()> {
    let mut pages = IoBuf::zeroed(DISK_BYTES as usize)?;
    for (number, page) in (0_u32..).zip(pages.chunks_exact_mut(PAGE_BYTES)) {
        match content {
            Content::Compressible => fio_page(u64::from(number), page),
            Content::Same => page.as_chunks_mut().0.fill(number.to_ne_bytes()),
        }
        ram.write_at(u64::from(number) * PAGE_BYTES as u64, page, Flags::empty())?;
    }
    let (slots, contents) = (Order::new(3, 0, PAGES), Order::new(4, 0, PAGES));
    let offset = |slot: u32| u64::from(slot) * PAGE_BYTES as u64;
    match request {
        RequestKind::Read => {
            let mut into = [0; PAGE_BYTES];
            for slot in slots.choices(0, count) {
                ram.read_at(offset(slot), black_box(&mut into))?;
            }
        }
        RequestKind::Write => {
            for (slot, content) in slots.choices(0, count).zip(contents.choices(0, count)) {
                let page = &pages[content as usize * PAGE_BYTES..][..PAGE_BYTES];
                ram.write_at(offset(slot), black_box(page), Flags::empty())?;
            }
        }
    }
    Ok(())
}
