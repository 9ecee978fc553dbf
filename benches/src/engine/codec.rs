//! `codec` benchmark: compares a RAM disk with the bare codec. The difference is the cost of slots,
//! pool and accounting.

use std::hint::black_box;

use anyhow::Result;
use freestone::PAGE_BYTES;
use freestone::codec::{Page, Scratch};
use freestone::device::{Blocking, Flags};
use freestone::ram::Ram;
use freestone_report::{Report, Row, Summary, Target};

use super::bare::{Codec, Liblz4Codec, LibraryCodec, Store};
use super::setup::Setup;
use crate::data::page_at;
use crate::measure::machine;
use crate::measure::{Times, alternate};
use crate::options::{Options, Set};

/// Default data size, in bytes.
const BYTES: u64 = 512 << 20;

/// Runs the benchmark on every selected data set and returns a report for each.
pub fn run(options: &Options) -> Result<Vec<Report>> {
    let cpus = machine::allowed_cpus()?;
    machine::pin_to(cpus[cpus.len() - 1])?;
    let reports = options
        .sets(&[Set::Fio, Set::Real])
        .into_iter()
        .map(|set| run_set(&Setup::new(set, BYTES, options)?, options))
        .collect();
    machine::pin_to_any(&cpus)?;
    reports
}

fn run_set(setup: &Setup, options: &Options) -> Result<Report> {
    let Setup { ram, store, pages, .. } = setup;
    let (slots, contents) = setup.orders();
    let slices = options.slices();
    let ours = LibraryCodec::new()?;
    let plain = Liblz4Codec::new();
    let mut reads = alternate(
        slices,
        &mut [
            &mut |from, count| engine_reads(ram, slots.choices(from, count)),
            &mut |from, count| bare_reads(store, &ours, slots.choices(from, count)),
            &mut |from, count| bare_reads(store, &plain, slots.choices(from, count)),
        ],
    );
    let (mut ours, mut plain) = (ours, plain);
    let (mut storing, mut placed) = (LibraryCodec::new()?, store.clone());
    let mut writes = alternate(
        slices,
        &mut [
            &mut |from, count| {
                engine_writes(ram, pages, slots.choices(from, count).zip(contents.choices(from, count)));
            },
            &mut |from, count| bare_writes(store, &mut ours, pages, contents.choices(from, count)),
            &mut |from, count| bare_writes(store, &mut plain, pages, contents.choices(from, count)),
            &mut |from, count| {
                for (slot, content) in slots.choices(from, count).zip(contents.choices(from, count)) {
                    placed.write_to_place(&mut storing, slot, black_box(page_at(pages, content)));
                }
            },
        ],
    );
    let mut rows = Vec::new();
    rows.extend(compare("random 4 KiB reads", &mut reads, Target::AtLeast(0.90)));
    rows.extend(compare("random 4 KiB rewrites", &mut writes, Target::AtLeast(0.85)));
    rows.push(
        Row::ratio(
            "first fill, in order / bare codec",
            Summary::one(setup.first_fill_bare_ns / setup.first_fill_ns),
        )
        .part("ns a page", setup.first_fill_ns)
        .part("bare ns", setup.first_fill_bare_ns),
    );
    Ok(Report::new("codec", setup.data.description.clone(), setup.data.bytes(), "lz4")
        .note(setup.census_note())
        .note(
            "Ratios are speeds: above 1 is faster than the bare codec. Bare: freestone::codec over a \
             contiguous store of the same objects, in the same order. liblz4: its plain functions on the same \
             store.",
        )
        .note(
            "A rewrite writes the content of a random page to a random slot; no order repeats. One thread, \
             pinned to one CPU. The CPU rows exclude the time of other programs.",
        )
        .rows(rows)
        .print())
}

fn compare(what: &str, times: &mut [Times], target: Target) -> Vec<Row> {
    let [engine, ours, plain, more @ ..] = times else { return Vec::new() };
    let storing = more.iter().map(|placed| {
        Row::ratio_of(
            format!("{what} / bare codec and copying the object to its place"),
            &placed.wall,
            &engine.wall,
        )
        .part("ns", engine.median())
        .part("bare ns", placed.median())
    });
    let rows = [
        Row::ratio_of(format!("{what} / bare codec"), &ours.wall, &engine.wall)
            .target(target)
            .part("ns", engine.median())
            .part("bare ns", ours.median()),
        Row::ratio_of(format!("{what} / bare codec, CPU time"), &ours.cpu, &engine.cpu),
        Row::ratio_of(format!("{what} / plain liblz4"), &plain.wall, &engine.wall)
            .part("ns", engine.median())
            .part("liblz4 ns", plain.median()),
    ];
    rows.into_iter().chain(storing).collect()
}

/// Reads the pages `slots` through the RAM disk.
pub fn engine_reads(ram: &Ram, slots: impl Iterator<Item = u32>) {
    let mut into: Page = [0; PAGE_BYTES];
    for slot in slots {
        let done = ram.read_at(u64::from(slot) * PAGE_BYTES as u64, black_box(&mut into));
        assert!(done.is_ok(), "{done:?}");
        black_box(&into);
    }
}

/// Rewrites pages through the RAM disk. Each item has a slot and the number of the page of `pages`
/// to write there.
pub fn engine_writes(ram: &Ram, pages: &[u8], slots_and_contents: impl Iterator<Item = (u32, u32)>) {
    for (slot, content) in slots_and_contents {
        let page = black_box(page_at(pages, content));
        let done = ram.write_at(u64::from(slot) * PAGE_BYTES as u64, page, Flags::empty());
        assert!(done.is_ok(), "{done:?}");
    }
}

/// Reads the pages `slots` from `store` with the bare codec.
pub fn bare_reads(store: &Store, codec: &impl Codec, slots: impl Iterator<Item = u32>) {
    let mut into: Page = [0; PAGE_BYTES];
    for slot in slots {
        store.read(codec, slot, black_box(&mut into));
        black_box(&into);
    }
}

/// Compresses the pages with the numbers `contents` with the bare codec, as a rewrite does.
pub fn bare_writes(store: &Store, codec: &mut impl Codec, pages: &[u8], contents: impl Iterator<Item = u32>) {
    let mut scratch = Scratch::new();
    let mut copy: Page = [0; PAGE_BYTES];
    for content in contents {
        let page = black_box(page_at(pages, content));
        black_box(store.write(codec, content, page, &mut scratch, &mut copy));
        black_box((&scratch, &copy));
    }
}
