//! The verbs. Each file holds one verb whole: its parameters (command line and JSON alike), what
//! the server does, and how the answer is shown to people.

pub mod block_state;
pub mod compact;
pub mod create;
pub mod delta;
mod foreground;
pub mod fork;
pub mod get;
pub mod idle;
mod indent;
pub mod keys;
pub mod list;
pub mod mark;
pub mod merge;
pub mod names;
mod pattern;
pub mod power_cut;
pub mod publish;
pub mod recompress;
pub mod release;
pub mod remove;
pub mod reset;
pub mod restore;
pub mod rewind;
pub mod save;
pub mod set;
pub mod snapshot;
pub mod stat;
pub mod unpublish;
pub mod wait;
mod words;
pub mod writeback;
pub mod zones;

use std::io::{self, IsTerminal as _, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use freestone::{device, replace};
use freestone_spec::kinds::Entry;
use freestone_spec::refusal::Errno;
use freestone_spec::size::human;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value, json};

use crate::control::client::Client;
use crate::control::protocol::Fault;
use crate::control::server::Handler;
use crate::error::Stdout;
use crate::service::Service;
use indent::indented;

/// A verb of the control socket.
pub trait Verb {
    /// The JSON-RPC method, which is also the subcommand.
    const METHOD: &'static str;
    /// Named parameters; unknown ones are refused.
    type Params: Serialize + DeserializeOwned;
    /// The result.
    type Reply: Serialize + DeserializeOwned;

    /// The server's part.
    fn run(service: &Service, params: Self::Params) -> Result<Self::Reply, Fault>;

    /// Shows the answer to a person.
    fn show(params: &Self::Params, reply: &Self::Reply, out: &mut dyn Write) -> io::Result<()>;
}

/// Refuses what would bypass zones or unflushed writes of a device.
fn check_bare(entry: &Entry, done: &str) -> Result<(), Fault> {
    match entry.layers.hide() {
        None => Ok(()),
        Some(why) => {
            let name = entry.name();
            Err(Fault::failed(Errno::EINVAL, format!("{name}: cannot be {done}: {why}")))
        }
    }
}

/// Why a file was not written, for programs.
fn errno_of_write(error: &io::Error) -> Errno {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Errno::ENOSPC,
        io::ErrorKind::ResourceBusy => Errno::EBUSY,
        io::ErrorKind::AlreadyExists => Errno::EEXIST,
        _ => Errno::EIO,
    }
}

/// What a person can do about that.
fn hint_of_write(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ResourceBusy => "; name another file",
        io::ErrorKind::AlreadyExists => "; --force replaces it",
        _ => "",
    }
}

/// Unfinished files that a crash left beside `file`. The log names them as well.
pub fn left_behind(file: &Path) -> Vec<PathBuf> {
    let left = replace::left_behind(file);
    for path in &left {
        tracing::warn!("{}: was left behind by a save that did not end; it can be removed", path.display());
    }
    left
}

/// Shows them.
fn show_left(left: &[PathBuf], out: &mut dyn Write) -> io::Result<()> {
    left.iter().try_for_each(|path| {
        writeln!(out, "{}: was left behind by a save that did not end; it can be removed", path.display())
    })
}

/// The answer of a device, as the control socket tells it.
fn errno_of(error: device::Error) -> Errno {
    match error {
        device::Error::OutOfRange | device::Error::Misaligned => Errno::EINVAL,
        device::Error::ReadOnly => Errno::EROFS,
        device::Error::NoSpace => Errno::ENOSPC,
        device::Error::NoMemory => Errno::ENOMEM,
        device::Error::Unsupported => Errno::EOPNOTSUPP,
        device::Error::ZoneTooManyOpen => Errno::ETOOMANYREFS,
        device::Error::ZoneTooManyActive => Errno::EOVERFLOW,
        device::Error::Media
        | device::Error::Gone
        | device::Error::ZoneWritePointer
        | device::Error::ZoneCondition
        | device::Error::ZoneBoundary => Errno::EIO,
    }
}

type Run = fn(&Service, Option<Value>) -> Result<Box<RawValue>, Fault>;

const VERBS: [(&str, Run); 27] = [
    entry::<list::List>(),
    entry::<stat::Stat>(),
    entry::<get::Get>(),
    entry::<set::Set>(),
    entry::<create::Create>(),
    entry::<fork::Fork>(),
    entry::<snapshot::Snapshot>(),
    entry::<rewind::Rewind>(),
    entry::<merge::Merge>(),
    entry::<delta::Show>(),
    entry::<delta::Save>(),
    entry::<delta::Apply>(),
    entry::<save::Save>(),
    entry::<restore::Restore>(),
    entry::<remove::Remove>(),
    entry::<reset::Reset>(),
    entry::<compact::Compact>(),
    entry::<idle::Idle>(),
    entry::<writeback::Writeback>(),
    entry::<recompress::Recompress>(),
    entry::<publish::Publish>(),
    entry::<unpublish::Unpublish>(),
    entry::<block_state::BlockState>(),
    entry::<zones::Zones>(),
    entry::<power_cut::PowerCut>(),
    entry::<mark::Mark>(),
    entry::<release::Release>(),
];

const fn entry<V: Verb>() -> (&'static str, Run) {
    (V::METHOD, run::<V>)
}

fn run<V: Verb>(service: &Service, params: Option<Value>) -> Result<Box<RawValue>, Fault> {
    let params = params.unwrap_or_else(|| Value::Object(Map::new()));
    if !params.is_object() {
        return Err(Fault::invalid(format!("{}: parameters go by name, in an object", V::METHOD)));
    }
    let params = serde_json::from_value(params).map_err(|e| Fault::invalid(format!("{}: {e}", V::METHOD)))?;
    let reply = V::run(service, params)?;
    to_raw_value(&reply).map_err(|e| Fault::internal(format!("{}: {e}", V::METHOD)))
}

impl Handler for Service {
    /// Runs the verb of that name.
    fn call(&self, method: &str, params: Option<Value>) -> Result<Box<RawValue>, Fault> {
        match VERBS.iter().find(|(name, _)| *name == method) {
            Some((_, run)) => run(self, params),
            None => Err(Fault::no_method(method, &VERBS.map(|(name, _)| name))),
        }
    }
}

const CONTROL_HELP: &str = "The control socket of the server [default: $FREESTONE_CONTROL, \
                            else $XDG_RUNTIME_DIR/freestone/control.sock, else /tmp/freestone-UID/control.sock]";

/// What every verb takes besides its parameters.
#[derive(Debug, Args)]
pub struct Common {
    /// Print the answer as JSON
    #[arg(long)]
    json: bool,
    /// The control socket of the server.
    #[arg(long, value_name = "PATH", help = CONTROL_HELP)]
    control: Option<PathBuf>,
}

/// A verb with what all verbs take.
#[derive(Debug, Args)]
pub struct Call<A: Args> {
    /// Its parameters.
    #[command(flatten)]
    pub args: A,
    /// `--json`, `--control`.
    #[command(flatten)]
    pub common: Common,
}

/// How often a client that waits looks how far it is.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The client's part of any verb: ask, and show the answer.
pub fn ask<V: Verb>(params: &V::Params, common: &Common) -> Result<()> {
    let answer = call::<V>(params, common)?;
    show::<V>(params, &answer, common)
}

/// The same for a verb whose answer comes in parts, each shown before the next is asked for: `next`
/// is what asks for what is behind an answer.
pub fn ask_in_parts<V: Verb>(
    mut params: V::Params,
    next: impl Fn(&V::Params, &V::Reply) -> Option<V::Params>,
    common: &Common,
) -> Result<()> {
    loop {
        let answer = call::<V>(&params, common)?;
        show::<V>(&params, &answer, common)?;
        let reply = serde_json::from_str(answer.get())
            .with_context(|| format!("{}: the server's answer is not understood", V::METHOD))?;
        match next(&params, &reply) {
            Some(then) => params = then,
            None => return Ok(()),
        }
    }
}

/// The same for a verb that takes long: a terminal is shown how far it is.
pub fn ask_long<V: Verb>(params: &V::Params, name: &str, common: &Common) -> Result<()> {
    if !io::stderr().is_terminal() {
        return ask::<V>(params, common);
    }
    let (ended, end) = mpsc::channel::<()>();
    let answer = thread::scope(|scope| {
        scope.spawn(move || watch(name, common, &end));
        let answer = call::<V>(params, common);
        drop(ended);
        answer
    })?;
    show::<V>(params, &answer, common)
}

fn call<V: Verb>(params: &V::Params, common: &Common) -> Result<Box<RawValue>> {
    let mut client = Client::connect(common.control.as_deref())?;
    let request = serde_json::to_value(params).context("cannot write the request")?;
    client.call(V::METHOD, &request)
}

fn show<V: Verb>(params: &V::Params, answer: &RawValue, common: &Common) -> Result<()> {
    if common.json { print_json(answer.get()) } else { print::<V>(params, answer, &mut io::stdout().lock()) }
}

/// Shows JSON that a server wrote.
fn print_json(json: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(&indented(json)).and_then(|()| out.flush()).map_err(Stdout::from)?;
    Ok(())
}

/// Shows an answer to a person.
fn print<V: Verb>(params: &V::Params, answer: &RawValue, out: &mut dyn Write) -> Result<()> {
    let reply = serde_json::from_str(answer.get())
        .with_context(|| format!("{}: the server's answer is not understood", V::METHOD))?;
    V::show(params, &reply, out).and_then(|()| out.flush()).map_err(Stdout::from)?;
    Ok(())
}

/// Shows on one line of stderr how far a verb is, until it ends. Whatever fails here, the verb goes
/// on.
fn watch(name: &str, common: &Common, end: &mpsc::Receiver<()>) {
    let mut shown = false;
    while matches!(end.recv_timeout(LOOK_EVERY), Err(mpsc::RecvTimeoutError::Timeout)) {
        let look = || {
            let mut client = Client::connect(common.control.as_deref()).ok()?;
            let stat = client.call(stat::Stat::METHOD, &json!({ "name": name })).ok()?;
            let stat: Value = serde_json::from_str(stat.get()).ok()?;
            let number = |key: &str| stat["progress"][key].as_u64();
            let (done, total) = (number("done_bytes")?, number("total_bytes")?);
            let verb = stat["progress"]["verb"].as_str()?;
            let part = done.saturating_mul(100) / total.max(1);
            let line = format!("{name}: {verb}: {} of {}, {part} %", human(done), human(total));
            write!(io::stderr(), "\r{line:<70}").ok()
        };
        shown |= look().is_some();
    }
    if shown {
        let _ = write!(io::stderr(), "\r{:<70}\r", "");
    }
}
