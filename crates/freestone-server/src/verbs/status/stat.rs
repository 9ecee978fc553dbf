//! `stat [NAME...]`: statistics of one device, of several devices, or of all devices and the server.

use std::collections::HashSet;
use std::io::{self, Write};
use std::sync::Arc;

use freestone::device::{IoStats, StatSource as _};
use freestone::file;
use freestone_control::protocol::RpcError;
use freestone_spec::family::family_stat;
use freestone_spec::kinds::Entry;
use freestone_spec::size::human;
use freestone_spec::{aliases, attrs, kinds, layers};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value, json};

use crate::process_memory;
use crate::service::Service;
use crate::settings::allow;
use crate::verbs::Verb;
use crate::verbs::status::list::{Changed, LOOK_MAX};
use crate::verbs::text::pattern::Pattern;

pub struct Stat;

/// Maximum number of patterns in a request. Each pattern is compared with every device.
const PATTERNS_MAX: usize = 64;

/// Parameters of the verb `stat` in a JSON request.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// Name of one device. The result contains all sections of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Names and patterns. Sections that devices of a family (a base and its forks, which share memory) share
    /// appear only once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub names: Option<Vec<String>>,
}

impl Params {
    /// Returns the parameters for all sections of the device `name`.
    pub fn of(name: &str) -> Self {
        Self { name: Some(name.to_owned()), names: None }
    }
}

/// Result for one device: `{"name":, "kind":, "disksize":, "uuid":, "generation":, "withheld":,
/// "keep": {..}, "content_of":, "limits": {..}, "base":, "mm_stat": {..}, "io_stat": {..},
/// "bd_stat": {..}, "debug_stat": {..}, "io": {..}, "latency": {..}, "backing": {..},
/// "auto_recompress": {..}, "groups": {..}, "dedup": {..}, "over_stat": {..}, "ops": {..}, "failed": {..},
/// "full": {..}, "zones": {..}, "power": {..}, "faults": {..}, "family": {..}, "memory": {..}, "exports": [..]}`.
/// Sections that the kind does not have are omitted. Result for all devices:
/// `{"server": {..}, "devices": [..]}`. Sizes are in bytes.
pub type Reply = Box<RawValue>;

/// Statistics of a device, or one section of the statistics.
type Section = Map<String, Value>;

/// Statistics of several devices. Each device is serialized at once, because a tree of all values would be slow.
#[derive(Serialize)]
struct StatList {
    #[serde(skip_serializing_if = "Option::is_none")]
    server: Option<Value>,
    devices: Vec<Box<RawValue>>,
    /// Names and patterns that match no device.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    missing: Vec<String>,
}

impl Verb for Stat {
    const METHOD: &'static str = "stat";
    const READ_ONLY: bool = true;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        file::check_now(LOOK_MAX);
        let process = process_memory::process_memory().map_err(|e| RpcError::internal(format!("{e:#}")))?;
        if let Some(name) = params.name {
            // While a restore is running, its progress is found under the path of its file.
            if service.registry.find(&name).is_none()
                && let Some(progress) = service.jobs.progress_of(&name)
            {
                return to_json(&json!({ "name": name, "progress": progress }));
            }
            return to_json(&device_section(service, &*service.find(&name)?, Some(process))?);
        }
        if let Some(words) = &params.names {
            return stat_named(service, words);
        }
        let devices: Result<Vec<_>, _> = service
            .registry
            .all()
            .iter()
            .map(|entry| to_json(&device_section(service, entry, None)?))
            .collect();
        let addresses: Vec<_> = service.exports.nbd.addresses().iter().map(ToString::to_string).collect();
        let server = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "addresses": addresses,
            "allow": service.exports.server_allow_list().as_ref().map(allow::words),
            "denied": service.exports.nbd.denials().count(),
            "process_rss_bytes": process.rss_bytes,
            "process_pss_bytes": process.pss_bytes,
            "metrics": service.metrics_url.get(),
            "http": service.http_url.get(),
        });
        to_json(&StatList { server: Some(server), devices: devices?, missing: Vec::new() })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        let reply: Section = serde_json::from_str(reply.get())?;
        let Some(Value::Array(devices)) = reply.get("devices") else { return show_device(&reply, out) };
        if let Some(Value::Object(server)) = reply.get("server") {
            writeln!(out, "server")?;
            show_section(server, "  ", out)?;
        }
        let has_server = reply.get("server").is_some();
        for (number, device) in devices.iter().filter_map(Value::as_object).enumerate() {
            if number > 0 || has_server {
                writeln!(out)?;
            }
            show_device(device, out)?;
        }
        Ok(())
    }
}

/// Returns the statistics of the devices that the names and patterns select, each once.
fn stat_named(service: &Service, words: &[String]) -> Result<Reply, RpcError> {
    if words.iter().filter(|word| Pattern::is_pattern(word)).count() > PATTERNS_MAX {
        refuse!(invalid, "stat: names: at most {PATTERNS_MAX} patterns");
    }
    let all = service.registry.all();
    let (mut devices, mut missing, mut added) = (Vec::new(), Vec::new(), HashSet::new());
    for word in words {
        let found: Vec<Arc<Entry>> = match service.registry.find(word) {
            Some(entry) => vec![entry],
            None if Pattern::is_pattern(word) => {
                let pattern = Pattern::new(word);
                all.iter().filter(|entry| pattern.matches(entry.name())).cloned().collect()
            }
            None => Vec::new(),
        };
        if found.is_empty() {
            missing.push(word.clone());
        }
        for entry in found.iter().filter(|entry| added.insert(entry.name().to_owned())) {
            devices.push(to_json(&device_section(service, entry, None)?)?);
        }
    }
    to_json(&StatList { server: None, devices, missing })
}

/// Returns the sections of a device. `process` is the memory of the server, given only if the request names
/// this one device.
fn device_section(
    service: &Service,
    entry: &Entry,
    process: Option<process_memory::ProcessMemory>,
) -> Result<Section, RpcError> {
    let mut reply = object(json!({
        "name": entry.name(),
        "kind": entry.kind.name(),
        "disksize": entry.size(),
        "uuid": entry.identity.uuid.to_string(),
        "generation": entry.identity.generation,
    }));
    let mut insert = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            reply.insert(key.to_owned(), value);
        }
    };
    insert("base", entry.spec.kind.parent_name().map(Into::into));
    insert("template", entry.template.clone().map(Into::into));
    insert("changed", Changed::of(service, entry).map(|changed| json!(changed)));
    insert("limits", entry.limits().stat());
    insert("withheld", service.exports.withheld(entry.name()).map(|_| true.into()));
    insert("keep", service.saves.stat(entry));
    insert("content_of", service.saves.stale_since(entry.name()).map(Into::into));
    insert("progress", service.jobs.progress_of(entry.name()).map(|progress| json!(progress)));
    if let Some(snapshot) = entry.kind.cow() {
        insert("status", Some(snapshot.status().to_string().into()));
        insert("merge", kinds::merge(&snapshot.merge_status()));
        insert("missed_writes", Some(kinds::missed_writes(snapshot)));
        insert("cow_stat", Some(kinds::cow_stat(snapshot)));
    }
    let failed: Map<_, _> =
        entry.failures.counts().map(|(error, count)| (error.name().to_owned(), json!(count))).collect();
    if !failed.is_empty() {
        reply.insert("failed".into(), Value::Object(failed));
    }
    for (key, value) in layer_sections(entry) {
        reply.insert(key.to_owned(), value);
    }
    let is_single = process.is_some();
    let mut memory = Map::new();
    if let Some(ram) = entry.ram_data() {
        reply.insert("comp_algorithm".into(), attrs::get(entry, "comp_algorithm")?);
        reply.insert("mm_stat".into(), kinds::mm_stat(ram));
        reply.insert("io_stat".into(), kinds::io_stat(ram));
        reply.insert("bd_stat".into(), kinds::bd_stat(ram));
        reply.insert("debug_stat".into(), kinds::debug_stat(ram));
        if let Some(backing) = kinds::backing(ram) {
            reply.insert("backing".into(), backing);
        }
        if let Some(done) = kinds::auto_recompressed(ram) {
            reply.insert("auto_recompress".into(), done);
        }
        if let Some(groups) = kinds::groups(ram) {
            reply.insert("groups".into(), groups);
        }
        if let Some(dedup) = kinds::dedup(ram) {
            reply.insert("dedup".into(), dedup);
        }
        reply.insert("over_stat".into(), kinds::over_stat(ram));
        reply.insert("full".into(), kinds::full_stat(ram));
    }
    if let Some(account) = entry.account() {
        reply.insert("io".into(), layers::request_stat(&account.ops));
        reply.insert("latency".into(), layers::latency_stat(&account));
    }
    // In a list, the statistics of a family are reported only once: by its RAM disk, or by the base of its forks.
    let reports_family = entry.kind.own_family().is_some() || entry.is_outer_base();
    if let Some(family) = entry.existing_family().filter(|_| is_single || reports_family) {
        reply.insert("family".into(), family_stat(&family));
    }
    if let Some(ram) = entry.ram_data().filter(|_| is_single || reports_family) {
        let m = ram.memory_overhead();
        memory = object(json!({
            "leaves_bytes": m.leaves_bytes,
            "backrefs_bytes": m.backrefs_bytes,
            "pool_slack_bytes": m.pool_slack_bytes,
            "metadata_bytes": m.metadata_bytes,
            "streams_bytes": m.streams_bytes,
        }));
    }
    if let Some(process) = process {
        memory.insert("process_rss_bytes".into(), json!(process.rss_bytes));
        memory.insert("process_pss_bytes".into(), json!(process.pss_bytes));
    }
    if !memory.is_empty() {
        reply.insert("memory".into(), Value::Object(memory));
    }
    reply.insert("exports".into(), exports(service, entry));
    Ok(reply)
}

/// Returns the exports of a device with their request counts. An export of a template has no counts, because
/// each connection has a fork with its own counts.
fn exports(service: &Service, entry: &Entry) -> Value {
    let tallies = entry.access_path_tallies();
    let exports = service.exports.of(entry.name()).into_iter().map(|export| {
        let mut account = IoStats::default();
        for tally in tallies.iter().filter(|tally| tally.address() == Some(&export.address)) {
            account.add(&tally.stats());
        }
        let mut section = object(json!(export));
        if !export.template {
            section.insert("io".into(), layers::request_stat(&account.ops));
            section.insert("latency".into(), layers::latency_stat(&account));
        }
        Value::Object(section)
    });
    Value::Array(exports.collect())
}

/// Returns the statistics of the layers over the data of a device, such as zones, power and faults.
fn layer_sections(entry: &Entry) -> Vec<(&'static str, Value)> {
    let mut sections = Vec::new();
    if let Some(quiesce) = &entry.layers.quiesce {
        sections.push(("ops", layers::operation_stat(&quiesce.counts())));
    }
    sections.extend(entry.kind.stat());
    if let Some(zones) = &entry.layers.zones {
        sections.push(("zones", layers::zone_stat(zones)));
    }
    if let Some(power) = &entry.layers.power {
        sections.push(("power", layers::power_stat(power, &entry.layers)));
    }
    if let Some(faults) = &entry.layers.faults {
        sections.push(("faults", layers::fault_stat(faults)));
    }
    sections
}

fn to_json<T: Serialize>(value: &T) -> Result<Box<RawValue>, RpcError> {
    to_raw_value(value).map_err(|e| RpcError::internal(format!("stat: {e}")))
}

fn object(value: Value) -> Section {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

fn show_device(device: &Section, out: &mut dyn Write) -> io::Result<()> {
    let text = |key: &str| device.get(key).and_then(Value::as_str).unwrap_or_default();
    let size = device.get("disksize").and_then(Value::as_u64).unwrap_or_default();
    let head = format!("{}: {} {} {}", text("name"), text("kind"), human(size), text("comp_algorithm"));
    writeln!(out, "{}", head.trim_end())?;
    for key in ["base", "template", "status", "merge"] {
        if let Some(text) = device.get(key).and_then(Value::as_str) {
            writeln!(out, "  {key}: {text}")?;
        }
    }
    for (key, value) in device {
        match value {
            Value::Object(section) => {
                writeln!(out, "  {key}")?;
                show_section(section, "    ", out)?;
            }
            Value::Array(exports) if !exports.is_empty() => {
                writeln!(out, "  {key}")?;
                for export in exports {
                    let uri = export["uri"].as_str().unwrap_or_default();
                    let mode = if export["read_only"] == json!(true) { "read-only, " } else { "" };
                    writeln!(out, "    {uri} ({mode}{} connected)", export["connections"])?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

fn show_section(section: &Map<String, Value>, indent: &str, out: &mut dyn Write) -> io::Result<()> {
    let present = || section.iter().filter(|(key, _)| !aliases::is_former_device_key(key));
    let width = present().map(|(key, _)| key.len()).max().unwrap_or_default();
    for (key, value) in present() {
        let line = match value {
            Value::Number(n) if is_bytes(key) => {
                let bytes = n.as_u64().unwrap_or_default();
                if bytes < 1024 { bytes.to_string() } else { format!("{bytes} ({})", human(bytes)) }
            }
            Value::String(text) => text.clone(),
            // The list contains the rules of injected faults.
            Value::Array(list) if list.iter().any(Value::is_object) => {
                let rule = |r: &Value| {
                    let text = r["rule"].as_str().unwrap_or_default();
                    format!("{text}: matched {}, fired {}", r["matched"], r["fired"])
                };
                let below = format!("\n{indent}{:width$}  ", "");
                list.iter().map(rule).collect::<Vec<_>>().join(&below)
            }
            Value::Array(list) => list.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" "),
            Value::Object(latency) if latency.contains_key("p50_ns") => {
                let took = |key: &str| duration(latency[key].as_u64().unwrap_or_default());
                let requests = latency.get("requests").unwrap_or_default();
                let (half, most, nearly) = (took("p50_ns"), took("p99_ns"), took("p999_ns"));
                let mean = took("mean_ns");
                format!(
                    "{requests} requests, mean {mean}, 50 % in {half}, 99 % in {most}, 99.9 % in {nearly}"
                )
            }
            other => other.to_string(),
        };
        writeln!(out, "{indent}{key:width$}  {line}")?;
    }
    Ok(())
}

/// Formats a duration with a unit, for example `2.6us`.
pub fn duration(nanoseconds: u64) -> String {
    let of = |unit: f64| nanoseconds as f64 / unit;
    match nanoseconds {
        0..1_000 => format!("{nanoseconds}ns"),
        1_000..1_000_000 => format!("{:.1}us", of(1e3)),
        1_000_000..1_000_000_000 => format!("{:.1}ms", of(1e6)),
        _ => format!("{:.1}s", of(1e9)),
    }
}

/// Returns true if the value of `key` is a number of bytes, which is also printed with a unit.
fn is_bytes(key: &str) -> bool {
    key.ends_with("_bytes") || key.ends_with("_size") || key.starts_with("mem_")
}
