//! `top`: rates of the busiest devices since the last call.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use freestone::device::OpStats;
use freestone_control::protocol::RpcError;
use freestone_spec::size::human;
use serde::{Deserialize, Serialize};

use crate::devices::rates::{Device, Sample, SortKey};
use crate::process_memory;
use crate::service::Service;
use crate::verbs::Verb;
use crate::verbs::status::stat::duration;
use crate::verbs::text::table::write_table;

pub struct Top;

/// Maximum number of devices in a response.
pub const COUNT_MAX: u32 = 1000;
/// Default number of devices in a response. On a terminal, the default is the number of devices that fit.
pub const COUNT_DEFAULT: u32 = 20;
/// Sort order of the devices, largest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Sorted {
    /// Requests per second
    #[default]
    Requests,
    /// Bytes per second
    Bytes,
    /// 99th percentile of the latency
    Latency,
}

impl From<Sorted> for SortKey {
    fn from(sorted: Sorted) -> Self {
        match sorted {
            Sorted::Requests => Self::Requests,
            Sorted::Bytes => Self::Bytes,
            Sorted::Latency => Self::Latency,
        }
    }
}

/// Parameters of the verb `top` in a JSON request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// Sort order of the devices.
    #[serde(default)]
    pub by: Sorted,
    /// Maximum number of devices in the response.
    #[serde(default = "default_count")]
    pub count: u32,
}

const fn default_count() -> u32 {
    COUNT_DEFAULT
}

/// Result of the verb `top`: the busiest devices, and the sum of all devices.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    /// Length of the measured interval in seconds; 0 in the first response, which has no earlier sample.
    seconds: f64,
    /// Totals of the server.
    server: Server,
    /// Sum of the rates of all devices.
    total: Row,
    /// The busiest devices, in sort order.
    devices: Vec<Row>,
}

/// Numbers about the whole server.
#[derive(Debug, Serialize, Deserialize)]
struct Server {
    version: String,
    devices: usize,
    /// Number of forks, which are also counted in `devices`.
    forks: usize,
    connections: u64,
    process_rss_bytes: u64,
}

/// Request rates of a device, or the sum of several devices.
#[derive(Debug, Serialize, Deserialize)]
pub struct Row {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    name: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    kind: String,
    /// Name of the base, if the device is a fork.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base: Option<String>,
    reads_per_second: f64,
    writes_per_second: f64,
    /// Rate of discards, write zeroes, flushes and zone appends together.
    others_per_second: f64,
    read_bytes_per_second: f64,
    written_bytes_per_second: f64,
    errors_per_second: f64,
    in_flight: u64,
    /// 50th and 99th percentile of the latency in nanoseconds; omitted if no request was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    p50_ns: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    p99_ns: Option<u64>,
}

impl Row {
    /// Returns the rates for the requests counted in an interval of `seconds`. Name and kind are empty.
    pub fn new(counted: &OpStats, seconds: f64) -> Self {
        let per_second = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        Self {
            name: String::new(),
            kind: String::new(),
            base: None,
            reads_per_second: per_second(counted.reads),
            writes_per_second: per_second(counted.writes),
            others_per_second: per_second(
                counted.discards + counted.zeroes + counted.flushes + counted.appends,
            ),
            read_bytes_per_second: per_second(counted.read_bytes),
            written_bytes_per_second: per_second(counted.written_bytes),
            errors_per_second: per_second(counted.errors),
            in_flight: counted.in_flight,
            p50_ns: None,
            p99_ns: None,
        }
    }

    /// Returns the rates of a device in an interval of `seconds`.
    pub fn of(device: &Device, seconds: f64) -> Self {
        let percentile = |thousandths| device.recent.latency.quantile(thousandths);
        let nanoseconds = |took: Duration| took.as_nanos() as u64;
        Self {
            name: device.name.clone(),
            kind: device.kind.to_owned(),
            base: device.fork_of.clone(),
            p50_ns: percentile(500).map(nanoseconds),
            p99_ns: percentile(990).map(nanoseconds),
            ..Self::new(&device.recent.counted, seconds)
        }
    }
}

impl Verb for Top {
    const METHOD: &'static str = "top";
    const READ_ONLY: bool = true;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let Params { by, count } = params;
        if !(1..=COUNT_MAX).contains(&count) {
            refuse!(invalid, "top: count={count}: must be 1 to {COUNT_MAX}");
        }
        let sample: Arc<Sample> = service.rates.sample(&service.registry);
        let seconds = sample.since.as_secs_f64();
        let mut sum = OpStats::default();
        for device in &sample.devices {
            sum.add(&device.recent.counted);
        }
        let busiest = sample.busiest(count as usize, by.into(), |_| true);
        let process = process_memory::process_memory().map_err(|e| RpcError::internal(format!("{e:#}")))?;
        Ok(Reply {
            seconds,
            server: Server {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                devices: sample.devices.len(),
                forks: sample.devices.iter().filter(|device| device.fork_of.is_some()).count(),
                connections: service.exports.nbd.stats().connections,
                process_rss_bytes: process.rss_bytes,
            },
            total: Row::new(&sum, seconds),
            devices: busiest.into_iter().map(|device| Row::of(device, seconds)).collect(),
        })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{}", headline(reply))?;
        write_devices(reply, out)
    }
}

/// Writes a table with the sum of all devices in the first row, followed by each device.
pub fn write_devices(reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
    let rows: Vec<_> = std::iter::once(&reply.total).chain(&reply.devices).map(cells).collect();
    write_table(TITLES, &TEXTS, &rows, out)
}

pub const TITLES: [&str; 12] = [
    "NAME", "KIND", "BASE", "READ/S", "WRITE/S", "OTHER/S", "READ", "WRITTEN", "ERRORS/S", "WAITING", "P50",
    "P99",
];
/// Columns aligned to the left. The other columns are numbers, aligned to the right.
const TEXTS: [&str; 3] = ["NAME", "KIND", "BASE"];

/// Returns the line about the server, which is printed above the table.
pub fn headline(reply: &Reply) -> String {
    let Server { version, devices, forks, connections, process_rss_bytes } = &reply.server;
    let memory = human(*process_rss_bytes);
    format!(
        "freestone {version}: devices {devices}, forks {forks}, NBD connections {connections}, memory {memory}; in \
         {:.1} s:",
        reply.seconds
    )
}

fn cells(row: &Row) -> [String; TITLES.len()] {
    let rate =
        |rate: f64| if rate > 0.0 && rate < 10.0 { format!("{rate:.1}") } else { format!("{rate:.0}") };
    let bytes = |rate: f64| human(rate as u64);
    let took = |ns: Option<u64>| ns.map_or_else(|| "-".to_owned(), duration);
    let text = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    [
        if row.name.is_empty() { "(all)".to_owned() } else { row.name.clone() },
        text(&row.kind),
        text(row.base.as_deref().unwrap_or_default()),
        rate(row.reads_per_second),
        rate(row.writes_per_second),
        rate(row.others_per_second),
        bytes(row.read_bytes_per_second),
        bytes(row.written_bytes_per_second),
        rate(row.errors_per_second),
        row.in_flight.to_string(),
        took(row.p50_ns),
        took(row.p99_ns),
    ]
}
