//! `block-state NAME`: reports the state of each page of a ram device, in the format of zram's
//! `block_state`.
//!
//! A long report is split into several responses, so that neither server nor client holds the whole report in memory.

use std::io::{self, Write};

use clap::Args;
use freestone::PAGE_BYTES;
use freestone_control::protocol::RpcError;
use freestone_spec::layers::{format_offset, parse_offset};
use serde::{Deserialize, Serialize};

use crate::service::Service;
use crate::verbs::Verb;

/// Maximum number of pages in a response; longer reports are continued in the next one.
const ROWS_MAX: usize = 8192;

pub struct BlockState;

/// Parameters of the verb `block-state`, from a JSON request or the command line.
#[derive(Debug, Clone, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// A ram device, a fork, or a snapshot of one
    name: String,
    /// Offset of the first page, with a unit
    #[arg(long, value_name = "OFFSET", default_value = "0", value_parser = parse_offset)]
    #[serde(default)]
    offset: u64,
    /// Length of the range, with a unit [default: to the end]
    #[arg(long, value_name = "LENGTH", value_parser = parse_offset)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    length: Option<u64>,
}

/// Result of the verb `block-state`: the states of pages.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    pages: Vec<Row>,
    /// Offset in bytes at which the next request must start, if the report is not complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    next: Option<u64>,
}

/// State of a page that has content. Other pages are not reported.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    index: u64,
    /// Time of the last access, in milliseconds since the boot of the machine; None if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    accessed_ms: Option<u64>,
    /// The flags `swhirn` of zram, with a dot for each flag that is not set.
    flags: String,
}

impl Params {
    /// Returns the parameters for the part that follows `reply`, or `None` if that was the last part.
    pub fn next(&self, reply: &Reply) -> Option<Self> {
        let next = reply.next?;
        let length = self.length.map(|length| (self.offset.saturating_add(length)).saturating_sub(next));
        Some(Self { name: self.name.clone(), offset: next, length })
    }
}

impl Verb for BlockState {
    const METHOD: &'static str = "block-state";
    const READ_ONLY: bool = true;
    type Params = Params;
    type Reply = Reply;

    // The device is not claimed (locked against other verbs), and not referenced while the response is written.
    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let Params { name, offset, length } = params;
        let ram = service.find_ram(&name, "has a block-state")?;
        let size = ram.config().disksize;
        if offset >= size {
            let why = format!("offset={}: behind the end of the device", format_offset(offset));
            refuse!(invalid, "{name}: block-state: {why}");
        }
        let end = length.map_or(size, |length| offset.saturating_add(length).min(size));
        if end == offset {
            refuse!(invalid, "{name}: block-state: length=0: must be more than 0");
        }
        let page = PAGE_BYTES as u64;
        let mut pages = Vec::new();
        let last = end.div_ceil(page);
        let next = ram.block_state(offset / page, last, &mut |state| {
            let accessed_ms = state.accessed.map(|at| u64::try_from(at.as_millis()).unwrap_or(u64::MAX));
            pages.push(Row { index: state.index, accessed_ms, flags: state.flags() });
            pages.len() < ROWS_MAX
        });
        Ok(Reply { name, pages, next: (next < last).then_some(next * page) })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        reply.pages.iter().try_for_each(|Row { index, accessed_ms, flags }| {
            let ms = accessed_ms.unwrap_or(0);
            writeln!(out, "{index:12} {:12}.{:06} {flags}", ms / 1000, ms % 1000 * 1000)
        })
    }
}
