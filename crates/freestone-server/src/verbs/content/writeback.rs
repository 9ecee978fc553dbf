//! `writeback NAME WORDS`: writes pages of a RAM disk to its backing device. The words are those of zram's
//! attribute `writeback`.

use std::io::{self, Write};
use std::ops::RangeInclusive;

use clap::Args;
use freestone::{PAGE_BYTES, ram};
use freestone_control::protocol::RpcError;
use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};

use crate::jobs::JobKind;
use crate::service::Service;
use crate::usage::Usage;
use crate::verbs::Verb;

pub struct Writeback;

/// Command line of the verb `writeback`.
#[derive(Debug, Args)]
pub struct Line {
    /// The ram device
    name: String,
    #[arg(required = true, value_name = "WORD")]
    #[arg(help = "idle, huge, huge_idle or incompressible (also as type=idle); or page_index=N and \
                page_indexes=LO-HI, counted in 4 KiB pages")]
    words: Vec<String>,
}

/// Parameters of the verb `writeback` in a JSON request: either `type`, or page numbers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    name: String,
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    kind: Option<Type>,
    /// Numbers of single pages.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    page_index: Vec<u64>,
    /// Ranges of page numbers, each as `"LO-HI"`; both ends are included.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    page_indexes: Vec<String>,
}

/// Type of the pages to write back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Type {
    Idle,
    Huge,
    HugeIdle,
    Incompressible,
}

const TYPES: [(&str, Type); 4] = [
    ("idle", Type::Idle),
    ("huge", Type::Huge),
    ("huge_idle", Type::HugeIdle),
    ("incompressible", Type::Incompressible),
];
const ALLOWED: &str =
    "allowed are idle, huge, huge_idle, incompressible, page_index=N and page_indexes=LO-HI";
const RANGE: &str = "must be two numbers of pages, LO-HI";

impl TryFrom<Line> for Params {
    type Error = Usage;

    fn try_from(line: Line) -> Result<Self, Usage> {
        let name = line.name;
        let refuse = |word: &str, why: &str| Usage(format!("{name}: writeback: {word}: {why}"));
        let (mut kind, mut page_index, mut page_indexes) = (None, Vec::new(), Vec::new());
        for word in line.words.iter().flat_map(|words| words.split_whitespace()) {
            // A word without `=` is a type.
            match word.split_once('=').unwrap_or(("type", word)) {
                ("type", text) => {
                    let found = TYPES.iter().find(|(name, _)| *name == text);
                    let (_, found) = found.ok_or_else(|| refuse(word, &format!("unknown; {ALLOWED}")))?;
                    if kind.replace(*found).is_some() {
                        return Err(refuse(word, "one type at a time"));
                    }
                }
                ("page_index", number) => page_index.push(
                    number.parse().map_err(|_| refuse(word, "must be the number of a page, from 0 on"))?,
                ),
                ("page_indexes", range) => {
                    parse_range(range).ok_or_else(|| refuse(word, RANGE))?;
                    page_indexes.push(range.to_owned());
                }
                _ => return Err(refuse(word, &format!("unknown; {ALLOWED}"))),
            }
        }
        Ok(Self { name, kind, page_index, page_indexes })
    }
}

/// Result of the verb `writeback`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// Number of pages that were written back and removed from memory.
    pages: u64,
    /// Number of blocks of 4 KiB that were written to the backing device.
    blocks: u64,
}

impl Verb for Writeback {
    const METHOD: &'static str = "writeback";
    const READ_ONLY: bool = false;
    const LONG: Option<fn(&Self::Params) -> String> = Some(|params| params.name.clone());
    type Params = Params;
    type Reply = Reply;

    // The device is not claimed (locked against other verbs), because it may be in use and a slow disk would
    // block these verbs.
    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let name = params.name.clone();
        let ram = service.find_ram(&name, "writes its pages back")?;
        if ram.config().backing.is_none() {
            return Err(failed(&name, (ram::WritebackReport::default(), ram::WritebackError::NoBacking)));
        }
        let selection = params.selection(ram.config().disksize.div_ceil(PAGE_BYTES as u64))?;
        let job = service.jobs.begin(&name, Self::METHOD, JobKind::CONCURRENT)?;
        let done = ram.writeback_with_progress(&selection, &mut |done, total| job.advance(done, total));
        let done = done.map_err(|(done, error)| match error {
            ram::WritebackError::Cancelled => counted(job.cancelled(&written(done)), done),
            error => failed(&name, (done, error)),
        })?;
        Ok(Reply { name, pages: done.pages, blocks: done.blocks })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{}: {} pages written, in {} blocks", reply.name, reply.pages, reply.blocks)
    }
}

fn failed(name: &str, (done, error): (ram::WritebackReport, ram::WritebackError)) -> RpcError {
    let errno = match error {
        ram::WritebackError::NoBacking => {
            return rpc_error!(ENODEV, "{name}: {error}");
        }
        ram::WritebackError::Range { .. } => Errno::ERANGE,
        ram::WritebackError::NoSpace => Errno::ENOSPC,
        ram::WritebackError::Cancelled => Errno::ECANCELED,
        ram::WritebackError::Limit | ram::WritebackError::Device(_) => Errno::EIO,
    };
    counted(RpcError::failed(errno, format!("{name}: writeback: {error}; {}", written(done))), done)
}

fn written(ram::WritebackReport { pages, blocks }: ram::WritebackReport) -> String {
    format!("{pages} pages were written before, in {blocks} blocks")
}

fn counted(fault: RpcError, ram::WritebackReport { pages, blocks }: ram::WritebackReport) -> RpcError {
    fault.with("pages", pages).with("blocks", blocks)
}

impl Params {
    /// Returns the pages that the parameters select. `pages` is the number of pages of the RAM disk.
    fn selection(self, pages: u64) -> Result<ram::Writeback, RpcError> {
        let Self { name, kind, page_index, page_indexes } = self;
        let invalid = |why: &str| rpc_error!(invalid, "{name}: writeback: {why}");
        let listed = !(page_index.is_empty() && page_indexes.is_empty());
        match kind {
            Some(_) if listed => return Err(invalid("a type, or page_index and page_indexes, but not both")),
            None if !listed => return Err(invalid(&format!("no pages selected; {ALLOWED}"))),
            Some(Type::Idle) => return Ok(ram::Writeback::Idle),
            Some(Type::Huge) => return Ok(ram::Writeback::Huge),
            Some(Type::HugeIdle) => return Ok(ram::Writeback::HugeIdle),
            Some(Type::Incompressible) => return Ok(ram::Writeback::Incompressible),
            None => {}
        }
        let outside = |word: String, why: &str| {
            let last = pages.saturating_sub(1);
            rpc_error!(ERANGE, "{name}: writeback: {word}: {why}; the pages are 0 to {last}")
        };
        let mut ranges = Vec::with_capacity(page_index.len() + page_indexes.len());
        for index in page_index {
            if index >= pages {
                return Err(outside(format!("page_index={index}"), "there is no such page"));
            }
            ranges.push(index..=index);
        }
        for text in page_indexes {
            let word = format!("page_indexes={text}");
            let range = parse_range(&text).ok_or_else(|| invalid(&format!("{word}: {RANGE}")))?;
            if range.is_empty() {
                return Err(outside(word, "the first page is behind the last"));
            }
            if *range.end() >= pages {
                return Err(outside(word, "beyond the end"));
            }
            ranges.push(range);
        }
        Ok(ram::Writeback::Pages(merged(ranges)))
    }
}

/// Parses `LO-HI` without checking that LO is not greater than HI. Returns None for other texts.
fn parse_range(text: &str) -> Option<RangeInclusive<u64>> {
    let (low, high) = text.split_once('-')?;
    Some(low.parse().ok()?..=high.parse().ok()?)
}

/// Merges overlapping and adjacent ranges. Each page is then selected once, so the work is bounded by the
/// size of the RAM disk.
fn merged(mut ranges: Vec<RangeInclusive<u64>>) -> Vec<RangeInclusive<u64>> {
    ranges.sort_unstable_by_key(|range| *range.start());
    let mut merged: Vec<RangeInclusive<u64>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if *range.start() <= last.end().saturating_add(1) => {
                *last = *last.start()..=*last.end().max(range.end());
            }
            _ => merged.push(range),
        }
    }
    merged
}
