//! Memory of forks of related images, in one family.

use std::time::Duration;

use anyhow::Result;
use freestone::PAGE_BYTES;
use freestone::device::{Blocking, Flags};
use freestone::ram::{Family, ForkConfig, Ram};
use freestone_report::{Report, Row, Summary, mib};

use super::contenders::{self, Contender, PLAIN, Work};
use crate::data::{Data, Random};

const IMAGES: u64 = 4;
const FORKS_OF_IMAGE: u64 = 4;
/// Divisors of an image's pages: the part in which an image differs from the others, and the part that each fork
/// writes. Half of what a fork writes is the same in all forks.
const CHANGED_PART: u64 = 10;
const WRITTEN_PART: u64 = 8;
/// Changes are as long as small files, in pages.
const RUN_PAGES: u64 = 16;
/// Divisor of the data's pages: the size of an image. The rest is the content of changes.
const IMAGE_PART: u64 = 4;

pub fn run(data: &Data, idle: Duration, quick: bool) -> Result<Report> {
    let image_pages = data.pages / IMAGE_PART / RUN_PAGES * RUN_PAGES;
    let (mut rows, mut plain, mut stored) = (Vec::new(), None, 0);
    for contender in contenders::all(idle) {
        // A verb works on one disk, not on a family.
        if matches!(contender.work, Work::Verb(_)) {
            continue;
        }
        let (bytes, cpu);
        (stored, bytes, cpu) = measure(&contender, data, image_pages, quick)?;
        let plain = *plain.get_or_insert(bytes);
        let of = |part: u64, whole: u64| Summary::one(part as f64 / whole as f64);
        let row = Row::ratio(format!("memory a stored byte: {}", contender.name), of(bytes, stored));
        rows.push(row.part("MiB", mib(bytes)).part("CPU s", cpu));
        if contender.name != PLAIN {
            rows.push(Row::ratio(format!("memory: {} / {PLAIN}", contender.name), of(bytes, plain)));
        }
    }
    Ok(Report::new("density: forks", data.description.clone(), stored, "each its own")
        .note(format!(
            "{} forks of {IMAGES} RAM disks of {} MiB in one family. The disks have the data's first pages; one in \
             {CHANGED_PART} of each disk, in runs of {RUN_PAGES} pages, is from other places of the data. A fork writes \
             one in {WRITTEN_PART} of its pages: half with the content and at the place of all forks, half with content \
             of its own. Stored bytes: those of the disks, and those that forks have written.",
            IMAGES * FORKS_OF_IMAGE,
            (image_pages * PAGE_BYTES as u64) >> 20
        ))
        .rows(rows))
}

/// Returns the bytes that were stored, the memory when the background work is done, and its CPU seconds.
fn measure(contender: &Contender, data: &Data, image_pages: u64, quick: bool) -> Result<(u64, u64, f64)> {
    let family = Family::new(contender.config.clone())?;
    // Content that is not in the images, and is taken from there only once.
    let mut fresh = image_pages;
    let mut devices = Vec::new();
    let shared = Changes { seed: 100, part: 2 * WRITTEN_PART, from: fresh };
    fresh += image_pages / shared.part;
    for image in 0..IMAGES {
        let disk = family.ram(image_pages * PAGE_BYTES as u64)?;
        for page in (0..image_pages).step_by(RUN_PAGES as usize) {
            copy(&disk, data, page, page)?;
        }
        Changes { seed: image, part: CHANGED_PART, from: fresh }.write(&disk, data, image_pages)?;
        fresh += image_pages / CHANGED_PART;
        let snapshot = disk.snapshot()?;
        for fork in 0..FORKS_OF_IMAGE {
            let written = snapshot.fork(&ForkConfig::default())?;
            shared.write(&written, data, image_pages)?;
            let seed = 200 + image * FORKS_OF_IMAGE + fork;
            Changes { seed, part: 2 * WRITTEN_PART, from: fresh }.write(&written, data, image_pages)?;
            fresh += image_pages / (2 * WRITTEN_PART);
            devices.push(written);
        }
        devices.extend([snapshot, disk]);
    }
    let (_, cpu) = contender.settle(&devices[0], quick)?;
    let stored = devices.iter().map(|device| device.over_stat().own_bytes).sum();
    Ok((stored, contenders::memory(&devices[0]), cpu))
}

/// Pages that are replaced, in runs: one in `part`, with the data from page `from` on.
struct Changes {
    seed: u64,
    part: u64,
    from: u64,
}

impl Changes {
    fn write(&self, ram: &Ram, data: &Data, image_pages: u64) -> Result<()> {
        let places = Random::new(self.seed).permutation(image_pages / RUN_PAGES);
        let count = places.len() / self.part as usize;
        for (number, place) in (0..).zip(&places[..count]) {
            copy(ram, data, self.from + number * RUN_PAGES, u64::from(*place) * RUN_PAGES)?;
        }
        Ok(())
    }
}

/// Writes a run of pages from page `from` of the data on to page `to` on.
fn copy(ram: &Ram, data: &Data, from: u64, to: u64) -> Result<()> {
    let mut run = vec![0; RUN_PAGES as usize * PAGE_BYTES];
    data.read(from, &mut run)?;
    Ok(ram.write_at(to * PAGE_BYTES as u64, &run, Flags::empty())?)
}
