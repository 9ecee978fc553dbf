//! `mount` without arguments: the mounts and their states.

use std::collections::HashMap;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use freestone_server::verbs::text::table::write_table;
use serde::Serialize;

use super::mount_table::MountTable;
use super::record::{Record, Records};
use super::server::ServerState;
use crate::client::Common;
use crate::error::Stdout;

const HEADER: [&str; 6] = ["NAME", "DIR", "STATE", "VIA", "DEVICE", "CONTROL"];
/// Device name for server queries that need no device: it matches no device.
const NO_DEVICE: &str = "-";

/// State of a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Mounted,
    /// The mount was interrupted, or undone by hand.
    Stale,
    /// The server that made the mount does not respond, or was replaced.
    Dead,
}

/// A mount, and its state.
#[derive(Serialize)]
pub struct Row<'a> {
    #[serde(flatten)]
    record: &'a Record,
    state: State,
}

impl<'a> Row<'a> {
    /// Returns the row of a mount that was just made.
    pub fn mounted(record: &'a Record) -> Self {
        Self { record, state: State::Mounted }
    }
}

#[derive(Serialize)]
struct Rows<'a> {
    mounts: Vec<Row<'a>>,
}

/// Prints a value as JSON on standard output.
pub fn print_json(answer: &impl Serialize) -> Result<()> {
    let mut out = io::stdout().lock();
    let text = serde_json::to_string_pretty(answer).context("cannot write the answer")?;
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(Stdout::from)?;
    Ok(())
}

/// Prints all mounts with their states, as a table or as JSON.
pub fn list(records: &Records, common: &Common) -> Result<()> {
    let all = records.all()?;
    let table = MountTable::read()?;
    let mut servers: HashMap<&PathBuf, ServerState> = HashMap::new();
    let mut mounts = Vec::new();
    for record in &all {
        let server =
            servers.entry(&record.control).or_insert_with(|| ServerState::of(&record.control, NO_DEVICE));
        mounts.push(Row { record, state: state(record, server, &table) });
    }
    if common.json {
        return print_json(&Rows { mounts });
    }
    let mut out = io::stdout().lock();
    let rows: Vec<_> = mounts.iter().map(cells).collect();
    let written = write_table(HEADER, &HEADER, &rows, &mut out).and_then(|()| out.flush());
    Ok(written.map_err(Stdout::from)?)
}

fn state(record: &Record, server: &ServerState, table: &MountTable) -> State {
    let is_mounted = record
        .device
        .as_ref()
        .is_some_and(|device| table.of(std::slice::from_ref(device)).any(|mount| mount.dir == record.dir));
    match server {
        // Another server may now listen at the control socket.
        ServerState::Responds(server) if server.process == record.server => {
            if is_mounted {
                State::Mounted
            } else {
                State::Stale
            }
        }
        _ => State::Dead,
    }
}

fn cells(row: &Row) -> [String; HEADER.len()] {
    let path = |path: &Path| path.display().to_string();
    let Row { record, state } = row;
    let state = match state {
        State::Mounted => "mounted",
        State::Stale => "stale",
        State::Dead => "dead",
    };
    [
        record.name.clone(),
        path(&record.dir),
        state.to_owned(),
        record.via.map_or("-", super::record::Via::name).to_owned(),
        record.device.as_deref().map_or_else(|| "-".to_owned(), path),
        path(&record.control),
    ]
}
