//! `dump`: writes the running devices and settings as a configuration file for `serve --config` and
//! `apply`.

use std::io::{self, Write};

use clap::Args;
use freestone_control::protocol::RpcError;
use freestone_nbd::{Address, Limits};
use freestone_spec::entries::Entries;
use freestone_spec::kinds::{Entry, Spec};
use freestone_spec::{path_text, size};
use freestone_state::Export;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::exports::export_spec::ExportSpec;
use crate::persistence::records::export_record;
use crate::service::Service;
use crate::settings::paths::address_text;
use crate::settings::{allow, handshake};
use crate::verbs::Verb;

pub struct Dump;

/// The request has no parameters.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {}

/// Result of the verb `dump`: the text of the configuration file.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    toml: String,
}

impl Verb for Dump {
    const METHOD: &'static str = "dump";
    const READ_ONLY: bool = true;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, _: Params) -> Result<Reply, RpcError> {
        let mut file = server_table(service);
        let (mut devices, mut omitted) = (Vec::new(), Vec::new());
        // Forks of templates are omitted, because they are removed when their connections end.
        for entry in service.registry.all().iter().filter(|entry| entry.template.is_none()) {
            let words = entry.words.current(&entry.spec);
            match Spec::from_entries(words.clone()) {
                Ok(_) => devices.push(Value::Table(device_table(service, entry, words))),
                Err(_) => omitted.push(entry.name().to_owned()),
            }
        }
        if !devices.is_empty() {
            file.insert("device".into(), Value::Array(devices));
        }
        let comment = |name| format!("\n# {name}: was restored from a file, and cannot be declared\n");
        let toml = file.to_string() + &omitted.into_iter().map(comment).collect::<String>();
        Ok(Reply { toml })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(reply.toml.as_bytes())
    }
}

/// Returns the settings of the server. Limits with their default value are omitted.
fn server_table(service: &Service) -> Table {
    let mut file = Table::new();
    let mut home = service.exports.server_addresses();
    home.retain(|address| *address != Address::Stdin);
    file.insert("nbd".into(), home.iter().map(address_text).collect::<Vec<_>>().into());
    if let Some(list) = service.exports.server_allow_list() {
        file.insert("allow".into(), allow::words(&list).into());
    }
    for (key, control) in [("control", &service.control), ("control_read_only", &service.control_read_only)] {
        if let Some(control) = control.get() {
            file.insert(key.into(), path_text::text(control).into());
        }
    }
    if let Some(state) = service.records.state() {
        file.insert("state".into(), path_text::text(state.dir()).into());
    }
    if service.recovery.get().is_some() {
        file.insert("recoverable".into(), true.into());
    }
    for (key, value) in service.saves.keys() {
        file.insert(key.into(), value.into());
    }
    for (prefix, who) in service.access.each() {
        file.extend(who.words.keys(prefix).into_iter().map(|(key, value)| (key, value.into())));
    }
    for (key, value) in service.exports.tls.words.texts() {
        match value {
            Some(value) if key == "allow_plaintext" => {
                file.insert(key.into(), (value == "yes").into());
            }
            Some(value) => {
                file.insert(key.into(), value.into());
            }
            None => {}
        }
    }
    let (limits, defaults) = (&service.limits, Limits::default());
    if limits.max_connections != defaults.max_connections {
        file.insert("max_connections".into(), (limits.max_connections as i64).into());
    }
    if limits.max_memory_in_flight != defaults.max_memory_in_flight {
        file.insert("max_memory_in_flight".into(), size::exact(limits.max_memory_in_flight).into());
    }
    for ((key, value), (_, default)) in handshake::keys(limits).into_iter().zip(handshake::keys(&defaults)) {
        if value != default {
            // Numbers are written without quotes.
            file.insert(key.into(), value.parse::<i64>().map_or(Value::String(value), Value::Integer));
        }
    }
    file
}

fn device_table(service: &Service, entry: &Entry, words: Entries) -> Table {
    let mut device = Table::new();
    device.insert("name".into(), words.name.into());
    device.insert("kind".into(), words.kind.into());
    for (key, value) in words.pairs.into_iter().filter(|(key, _)| key != "publish") {
        device.insert(key, value.into());
    }
    let export_set = service.exports.export_set(entry.name());
    if !export_set.at_server_addresses {
        device.insert("publish".into(), false.into());
    }
    let exports: Vec<_> = export_set.exports.iter().map(export_table).collect();
    if !exports.is_empty() {
        device.insert("export".into(), Value::Array(exports));
    }
    device
}

fn export_table(wanted: &ExportSpec) -> Value {
    let Export { nbd, vhost_user, ublk, read_only, allow, .. } = export_record(wanted);
    let mut export = Table::new();
    let mut insert = |key: &str, value: Option<Value>| export.extend(value.map(|value| (key.into(), value)));
    insert("nbd", nbd.map(Value::String));
    insert("vhost_user", vhost_user.map(Value::String));
    insert("ublk", ublk.map(|_| true.into()));
    insert("queues", ublk.map(|queues| i64::from(queues).into()));
    insert("read_only", read_only.then(|| true.into()));
    insert("allow", (!allow.is_empty()).then(|| allow.into()));
    for (key, text) in wanted.limits.words() {
        insert(key, Some(text.parse::<i64>().map_or_else(|_| text.into(), Value::from)));
    }
    Value::Table(export)
}
