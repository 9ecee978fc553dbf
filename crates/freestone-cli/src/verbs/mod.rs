//! The verbs. Each file holds one verb whole: its parameters (command line and JSON alike), what
//! the server does, and how the answer is shown to people.

pub mod apply;
mod bar;
pub mod block_state;
pub mod cancel;
pub mod compact;
pub mod create;
pub mod delta;
pub mod dump;
pub mod fork;
pub mod get;
pub mod idle;
pub mod images;
mod indent;
pub mod jobs;
pub mod keys;
pub mod list;
pub mod long;
pub mod mark;
pub mod merge;
pub mod names;
mod pattern;
pub mod power_cut;
pub mod publish;
pub mod pull;
pub mod push;
pub mod push_here;
pub mod recompress;
pub mod release;
pub mod remove;
pub mod reset;
pub mod restore;
pub mod rewind;
pub mod save;
pub mod set;
pub mod shutdown;
pub mod snapshot;
mod stack_cut;
pub mod stat;
mod table;
pub mod top;
pub mod trace;
pub mod unpublish;
pub mod wait;
mod words;
pub mod writeback;
pub mod zones;

use std::fmt::Display;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use clap::Args;
use freestone::{device, replace};
use freestone_spec::kinds::Entry;
use freestone_spec::refusal::Errno;
use serde::de::{self, DeserializeOwned};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};

use crate::control::caller::Caller;
use crate::control::client::Client;
use crate::control::protocol::Fault;
use crate::control::server::Handler;
use crate::error::Stdout;
use crate::job::Asked;
use crate::service::Service;
use indent::indented;

/// A verb of the control socket.
pub trait Verb {
    /// The JSON-RPC method, which is also the subcommand.
    const METHOD: &'static str;
    /// It may take long: it takes `background` and `tag` besides its parameters. What it is done to: a
    /// device, or of a restore a file.
    const LONG: Option<fn(&Self::Params) -> String> = None;
    /// It changes nothing whatever its parameters, takes nothing that others wait for, and ends soon: it
    /// is answered at the control socket that is read-only, too.
    const READ_ONLY: bool;
    /// Named parameters; unknown ones are refused.
    type Params: Serialize + DeserializeOwned;
    /// The result.
    type Reply: Serialize + DeserializeOwned;

    /// The server's part.
    fn run(service: &Service, params: Self::Params) -> Result<Self::Reply, Fault>;

    /// Shows the answer to a person.
    fn show(params: &Self::Params, reply: &Self::Reply, out: &mut dyn Write) -> io::Result<()>;

    /// The same for one that has begun in the background.
    fn show_begun(begun: &Map<String, Value>, out: &mut dyn Write) -> io::Result<()> {
        let text = |key: &str| begun.get(key).and_then(Value::as_str).unwrap_or_default();
        let job = begun.get("job").unwrap_or_default();
        writeln!(out, "{}: {} runs in the background, as job {job}", text("name"), text("verb"))
    }
}

/// Refuses what would bypass zones, unflushed writes or a merge into a device.
fn check_bare(entry: &Entry, done: &str) -> Result<(), Fault> {
    match entry.hides() {
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
        io::ErrorKind::ResourceBusy => Errno::EBUSY,
        io::ErrorKind::AlreadyExists => Errno::EEXIST,
        _ => Errno::of_file(error),
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

/// A verb as the server knows it.
struct Known {
    method: &'static str,
    is_read_only: bool,
    run: Run,
}

const VERBS: [Known; 36] = [
    entry::<list::List>(),
    entry::<stat::Stat>(),
    entry::<top::Top>(),
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
    entry::<push::Push>(),
    entry::<pull::Pull>(),
    entry::<trace::Trace>(),
    entry::<unpublish::Unpublish>(),
    entry::<block_state::BlockState>(),
    entry::<zones::Zones>(),
    entry::<power_cut::PowerCut>(),
    entry::<mark::Mark>(),
    entry::<release::Release>(),
    entry::<jobs::AllJobs>(),
    entry::<cancel::Cancel>(),
    entry::<dump::Dump>(),
    entry::<apply::Apply>(),
    entry::<shutdown::Shutdown>(),
];

const fn entry<V: Verb>() -> Known {
    const { assert!(!V::READ_ONLY || V::LONG.is_none(), "what takes long is no look") };
    Known { method: V::METHOD, is_read_only: V::READ_ONLY, run: run::<V> }
}

fn run<V: Verb>(service: &Service, params: Option<Value>) -> Result<Box<RawValue>, Fault> {
    let params = params.unwrap_or_else(|| Value::Object(Map::new()));
    let Value::Object(mut params) = params else {
        return Err(Fault::invalid(format!("{}: parameters go by name, in an object", V::METHOD)));
    };
    let invalid = |e| Fault::invalid(format!("{}: {e}", V::METHOD));
    let how = if V::LONG.is_some() { How::of(&mut params).map_err(invalid)? } else { How::default() };
    let params = serde_json::from_value(Value::Object(params)).map_err(invalid)?;
    if let (Some(name), true) = (V::LONG, how.background) {
        return run_in_background::<V>(service, name(&params), &params, how.tag);
    }
    Caller::tag_next(how.tag);
    answer::<V>(service, params)
}

fn answer<V: Verb>(service: &Service, params: V::Params) -> Result<Box<RawValue>, Fault> {
    let reply = V::run(service, params)?;
    to_raw_value(&reply).map_err(|e| Fault::internal(format!("{}: {e}", V::METHOD)))
}

/// How a verb is run that may take long.
#[derive(Default, Deserialize)]
struct How {
    /// It is answered when it has begun, and goes on without the client.
    #[serde(default)]
    background: bool,
    /// How the client calls it.
    #[serde(default)]
    tag: Option<String>,
}

impl How {
    /// Takes it out of the parameters.
    fn of(params: &mut Map<String, Value>) -> Result<Self, serde_json::Error> {
        let taken = ["background", "tag"].iter().filter_map(|key| params.remove_entry(*key)).collect();
        let how: Self = serde_json::from_value(Value::Object(taken))?;
        if how.tag.as_ref().is_some_and(|tag| tag.len() > TAG_BYTES_MAX) {
            return Err(de::Error::custom(format!("tag: at most {TAG_BYTES_MAX} bytes")));
        }
        Ok(how)
    }
}

/// Runs a verb in the background, as soon as it is its turn. Until then only the text of its
/// parameters is there.
fn run_in_background<V: Verb>(
    service: &Service,
    name: String,
    params: &V::Params,
    tag: Option<String>,
) -> Result<Box<RawValue>, Fault> {
    let broken = |why: &dyn Display| Fault::internal(format!("{}: {why}", V::METHOD));
    let params = to_raw_value(params).map_err(|e| broken(&e))?;
    let (bytes, weak) = (params.get().len(), service.weak());
    let run = Box::new(move || {
        let service = weak.upgrade().ok_or_else(|| broken(&"the server has ended"))?;
        let params = serde_json::from_str(params.get()).map_err(|e| broken(&e))?;
        answer::<V>(&service, params)
    });
    service.jobs.run(Asked { name, verb: V::METHOD.replace('.', " "), tag, bytes, run })
}

impl Handler for Service {
    /// Runs the verb of that name.
    fn call(&self, method: &str, params: Option<Value>) -> Result<Box<RawValue>, Fault> {
        (known(method)?.run)(self, params)
    }
}

fn known(method: &str) -> Result<&'static Known, Fault> {
    let found = VERBS.iter().find(|known| known.method == method);
    found.ok_or_else(|| Fault::no_method(method, &VERBS.each_ref().map(|known| known.method)))
}

/// Answers what changes nothing.
pub struct ReadOnly(pub Arc<Service>);

impl Handler for ReadOnly {
    fn call(&self, method: &str, params: Option<Value>) -> Result<Box<RawValue>, Fault> {
        let known = known(method)?;
        if !known.is_read_only {
            let at = self
                .0
                .control_read_only
                .get()
                .map_or_else(|| "this socket".into(), |at| at.display().to_string());
            let may: Vec<_> =
                VERBS.iter().filter(|known| known.is_read_only).map(|known| known.method).collect();
            let why = format!("{method}: not at {at}, which is read-only: it answers {}", may.join(", "));
            return Err(Fault::failed(Errno::EPERM, why));
        }
        (known.run)(&self.0, params)
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

/// Longest tag of a verb.
const TAG_BYTES_MAX: usize = 64;

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
