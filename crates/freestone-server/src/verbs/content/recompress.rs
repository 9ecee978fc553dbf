//! `recompress NAME [WORDS]`: recompresses pages of a RAM disk with a secondary algorithm. The words are
//! those of zram's attribute `recompress`.

use std::io::{self, Write};

use clap::Args;
use freestone::ram;
use freestone_control::protocol::RpcError;
use freestone_spec::keys::parse_algorithm;
use freestone_spec::refusal::Errno;
use freestone_spec::size::human;
use serde::{Deserialize, Serialize};

use crate::jobs::JobKind;
use crate::service::Service;
use crate::usage::Usage;
use crate::verbs::Verb;

pub struct Recompress;

/// Command line of the verb `recompress`.
#[derive(Debug, Args)]
pub struct Line {
    /// The ram device
    name: String,
    #[arg(value_name = "KEY=VALUE")]
    #[arg(
        help = "type=idle|huge|huge_idle, threshold=BYTES (only objects of at least this size), max_pages=N, \
                algo=NAME, priority=1..3, group=yes (compress neighbouring pages together), \
                dedup=yes (store pages of the family with the same content once) [default: all pages]"
    )]
    words: Vec<String>,
}

/// Parameters of the verb `recompress` in a JSON request, with the keys of zram.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    name: String,
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    kind: Option<Type>,
    /// Minimum size in bytes of a compressed page; smaller ones are skipped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    threshold: Option<u32>,
    /// Maximum number of pages to recompress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_pages: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    algo: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    priority: Option<u8>,
    /// Compresses neighbouring pages together, without `threshold`, `algo` and `priority`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    group: Option<bool>,
    /// Stores pages with the same content once, in all devices of the family, without `threshold`, `algo`, `priority`
    /// and `group`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dedup: Option<bool>,
}

/// Type of the pages to recompress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Type {
    Idle,
    Huge,
    HugeIdle,
}

const TYPES: [(&str, Type); 3] = [("idle", Type::Idle), ("huge", Type::Huge), ("huge_idle", Type::HugeIdle)];
const ALLOWED: &str = "allowed are type=idle|huge|huge_idle, threshold=BYTES, max_pages=N, algo=NAME, priority=1..3, group=yes and dedup=yes";

impl TryFrom<Line> for Params {
    type Error = Usage;

    fn try_from(line: Line) -> Result<Self, Usage> {
        let mut params = Self { name: line.name, ..Self::default() };
        let name = params.name.clone();
        for word in line.words.iter().flat_map(|words| words.split_whitespace()) {
            let refuse = |why: &str| Usage(format!("{name}: recompress: {word}: {why}"));
            let Some((key, value)) = word.split_once('=') else {
                return Err(refuse(&format!("a value is missing; {ALLOWED}")));
            };
            let twice = match key {
                "type" => {
                    let found = TYPES.iter().find(|(name, _)| *name == value).map(|(_, kind)| *kind);
                    let found = found.ok_or_else(|| refuse("must be idle, huge or huge_idle"))?;
                    params.kind.replace(found).is_some()
                }
                "threshold" => {
                    let bytes =
                        value.parse().map_err(|_| refuse("must be a number of bytes, without a unit"))?;
                    params.threshold.replace(bytes).is_some()
                }
                "max_pages" => {
                    let pages = value.parse().map_err(|_| refuse("must be a number of pages"))?;
                    params.max_pages.replace(pages).is_some()
                }
                "algo" => params.algo.replace(value.to_owned()).is_some(),
                "priority" => {
                    let priority = value.parse().map_err(|_| refuse("must be 1 to 3"))?;
                    params.priority.replace(priority).is_some()
                }
                "group" | "dedup" => {
                    let wanted = match value {
                        "yes" => true,
                        "no" => false,
                        _ => return Err(refuse("must be yes or no")),
                    };
                    let param = if key == "group" { &mut params.group } else { &mut params.dedup };
                    param.replace(wanted).is_some()
                }
                _ => return Err(refuse(&format!("unknown; {ALLOWED}"))),
            };
            if twice {
                return Err(refuse(&format!("{key} is given twice")));
            }
        }
        Ok(params)
    }
}

/// Result of the verb `recompress`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// Number of pages that were recompressed, whether they became smaller or not.
    tried: u64,
    /// Number of pages that became smaller.
    shrunk: u64,
    /// Number of pages that no algorithm makes smaller. These pages are skipped until they are written again.
    incompressible: u64,
    /// Memory saved, in bytes.
    saved_bytes: u64,
}

impl Verb for Recompress {
    const METHOD: &'static str = "recompress";
    const READ_ONLY: bool = false;
    const LONG: Option<fn(&Self::Params) -> String> = Some(|params| params.name.clone());
    type Params = Params;
    type Reply = Reply;

    // The device is not claimed (locked against other verbs), because it may be in use and the verb may take long.
    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let Params { name, kind, threshold, max_pages, algo, priority, group, dedup } = params;
        let ram = service.find_ram(&name, "is recompressed")?;
        let algo = algo.map(|text| {
            parse_algorithm(&text)
                .map_err(|why| rpc_error!(invalid, "{name}: recompress: algo={text}: {why}"))
        });
        let request = ram::RecompressOptions {
            kind: kind.map(|kind| match kind {
                Type::Idle => ram::RecompressKind::Idle,
                Type::Huge => ram::RecompressKind::Huge,
                Type::HugeIdle => ram::RecompressKind::HugeIdle,
            }),
            threshold: threshold.unwrap_or(0),
            max_pages,
            algo: algo.transpose()?,
            priority,
            group: group.unwrap_or(false),
            dedup: dedup.unwrap_or(false),
        };
        let job = service.jobs.begin(&name, Self::METHOD, JobKind::CONCURRENT)?;
        let done = ram.recompress_with_progress(&request, &mut |done, total| job.advance(done, total));
        let done = done.map_err(|(done, error)| match error {
            ram::RecompressError::Cancelled => counted(job.cancelled(&shrunk(done)), done),
            error => failed(&name, (done, error)),
        })?;
        let ram::RecompressReport { tried, shrunk, incompressible, saved_bytes } = done;
        Ok(Reply { name, tried, shrunk, incompressible, saved_bytes })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        let Reply { name, tried, shrunk, incompressible, saved_bytes } = reply;
        let saved = human(*saved_bytes);
        writeln!(
            out,
            "{name}: {tried} pages tried, {shrunk} smaller now, {incompressible} incompressible; {saved} saved"
        )
    }
}

fn failed(name: &str, (done, error): (ram::RecompressReport, ram::RecompressError)) -> RpcError {
    let errno = match error {
        ram::RecompressError::NoSpace => Errno::ENOSPC,
        ram::RecompressError::NoMemory => Errno::ENOMEM,
        ram::RecompressError::Media => Errno::EIO,
        ram::RecompressError::Cancelled => Errno::ECANCELED,
        // The other errors mean that the request does not match the configuration of the RAM disk.
        _ => return rpc_error!(invalid, "{name}: recompress: {error}"),
    };
    counted(RpcError::failed(errno, format!("{name}: recompress: {error}; {}", shrunk(done))), done)
}

fn shrunk(done: ram::RecompressReport) -> String {
    format!("{} pages were made smaller before, {} saved", done.shrunk, human(done.saved_bytes))
}

fn counted(fault: RpcError, done: ram::RecompressReport) -> RpcError {
    let ram::RecompressReport { tried, shrunk, incompressible, saved_bytes } = done;
    let fault = fault.with("tried", tried).with("shrunk", shrunk);
    fault.with("incompressible", incompressible).with("saved_bytes", saved_bytes)
}
