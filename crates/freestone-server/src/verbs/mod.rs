//! The verbs: commands that the server runs for clients of the control socket.
//!
//! Each file contains one verb: its parameters for the command line and for JSON, the part that runs in the server, and
//! the client's text output. This module dispatches methods by name.

pub mod content;
pub mod devices;
pub mod drives;
pub mod jobs;
pub mod status;
pub mod text;

use std::fmt::Display;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use freestone::{device, replace};
use freestone_control::caller::Caller;
use freestone_control::protocol::RpcError;
use freestone_control::server::Handler;
use freestone_spec::kinds::Entry;
use freestone_spec::refusal::Errno;
use serde::de::{self, DeserializeOwned};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};

use crate::jobs::JobRequest;
use crate::service::Service;

/// A verb of the control socket.
pub trait Verb {
    /// Name of the JSON-RPC method and of the subcommand.
    const METHOD: &'static str;
    /// None if the verb ends quickly. For a long verb: the function that returns the name of the device, or
    /// the file of a restore. Long verbs also have the parameters `background` and `tag`.
    const LONG: Option<fn(&Self::Params) -> String> = None;
    /// True if the verb never changes anything, claims (locks) no device and ends quickly. The read-only
    /// control socket offers only these verbs.
    const READ_ONLY: bool;
    /// Named parameters of the request. Unknown parameters are refused.
    type Params: Serialize + DeserializeOwned;
    /// Result of the verb.
    type Reply: Serialize + DeserializeOwned;

    /// Runs the verb in the server.
    fn run(service: &Service, params: Self::Params) -> Result<Self::Reply, RpcError>;

    /// Writes the result as text, on the client.
    fn show(params: &Self::Params, reply: &Self::Reply, out: &mut dyn Write) -> io::Result<()>;

    /// Writes, as text, the first response of a background job: the job has started.
    fn show_begun(begun: &Map<String, Value>, out: &mut dyn Write) -> io::Result<()> {
        let text = |key: &str| begun.get(key).and_then(Value::as_str).unwrap_or_default();
        let job = begun.get("job").unwrap_or_default();
        writeln!(out, "{}: {} runs as background job {job}", text("name"), text("verb"))
    }
}

/// Fails if direct access to the data of a device would bypass its zones, unflushed writes or a merge. `done`
/// is the refused action for the message, as a participle.
pub fn check_bare(entry: &Entry, done: &str) -> Result<(), RpcError> {
    match entry.bypass_obstacle() {
        None => Ok(()),
        Some(why) => {
            let name = entry.name();
            Err(rpc_error!(EINVAL, "{name}: cannot be {done}: {why}"))
        }
    }
}

/// Returns the error number for a failure to write a file.
pub fn errno_of_write(error: &io::Error) -> Errno {
    match error.kind() {
        io::ErrorKind::ResourceBusy => Errno::EBUSY,
        io::ErrorKind::AlreadyExists => Errno::EEXIST,
        _ => Errno::of_file(error),
    }
}

/// Returns a hint for the user after a failure to write a file, or an empty text.
pub fn hint_of_write(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ResourceBusy => "; name another file",
        io::ErrorKind::AlreadyExists => "; --force replaces it",
        _ => "",
    }
}

/// Returns the unfinished files that an interrupted save left beside `file`, and logs each.
pub fn left_behind(file: &Path) -> Vec<PathBuf> {
    let files = replace::find_stale_files(file);
    for path in &files {
        tracing::warn!("{}: was left by an interrupted save; it can be removed", path.display());
    }
    files
}

/// Writes a line about each unfinished file that an interrupted save left.
pub fn show_left_behind(files: &[PathBuf], out: &mut dyn Write) -> io::Result<()> {
    files.iter().try_for_each(|path| {
        writeln!(out, "{}: was left by an interrupted save; it can be removed", path.display())
    })
}

/// Returns the error number for an error of a device.
pub fn errno_of(error: device::Error) -> Errno {
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

/// Timeout that is never reached (a year): a verb ends when its work is done, it is cancelled, or its own
/// limit is reached.
pub const TIME_MAX: Duration = Duration::from_secs(366 * 24 * 3600);

/// Maximum length of the tag of a job, in bytes.
const TAG_BYTES_MAX: usize = 64;

/// A function that parses the parameters of a verb, runs the verb, and returns its result as JSON.
type Run = fn(&Service, Option<Value>) -> Result<Box<RawValue>, RpcError>;

/// A verb in [`VERBS`], the table of methods.
struct VerbEntry {
    method: &'static str,
    is_read_only: bool,
    run: Run,
}

const VERBS: [VerbEntry; 38] = [
    entry::<status::list::List>(),
    entry::<status::stat::Stat>(),
    entry::<status::top::Top>(),
    entry::<devices::get::Get>(),
    entry::<devices::set::Set>(),
    entry::<devices::create::Create>(),
    entry::<devices::fork::Fork>(),
    entry::<devices::snapshot::Snapshot>(),
    entry::<devices::rewind::Rewind>(),
    entry::<devices::merge::Merge>(),
    entry::<content::delta::Show>(),
    entry::<content::delta::Save>(),
    entry::<content::delta::Apply>(),
    entry::<content::save::Save>(),
    entry::<content::restore::Restore>(),
    entry::<devices::remove::Remove>(),
    entry::<devices::reset::Reset>(),
    entry::<content::compact::Compact>(),
    entry::<content::idle::Idle>(),
    entry::<content::writeback::Writeback>(),
    entry::<content::recompress::Recompress>(),
    entry::<devices::publish::Publish>(),
    entry::<content::push::Push>(),
    entry::<content::pull::Pull>(),
    entry::<content::trace::Trace>(),
    entry::<devices::unpublish::Unpublish>(),
    entry::<content::block_state::BlockState>(),
    entry::<drives::zones::Zones>(),
    entry::<drives::power_cut::PowerCut>(),
    entry::<drives::mark::Mark>(),
    entry::<drives::release::Release>(),
    entry::<jobs::jobs::AllJobs>(),
    entry::<jobs::cancel::Cancel>(),
    entry::<devices::dump::Dump>(),
    entry::<devices::apply::Apply>(),
    entry::<jobs::shutdown::Shutdown>(),
    entry::<jobs::upgrade::Upgrade>(),
    entry::<jobs::upgrade::Outcome>(),
];

const fn entry<V: Verb>() -> VerbEntry {
    const { assert!(!V::READ_ONLY || V::LONG.is_none(), "a long verb is not read-only") };
    VerbEntry { method: V::METHOD, is_read_only: V::READ_ONLY, run: run::<V> }
}

fn run<V: Verb>(service: &Service, params: Option<Value>) -> Result<Box<RawValue>, RpcError> {
    let params = params.unwrap_or_else(|| Value::Object(Map::new()));
    let Value::Object(mut params) = params else {
        refuse!(invalid, "{}: parameters go by name, in an object", V::METHOD);
    };
    let invalid = |e| rpc_error!(invalid, "{}: {e}", V::METHOD);
    let options = if V::LONG.is_some() {
        RunOptions::take(&mut params).map_err(invalid)?
    } else {
        RunOptions::default()
    };
    let params = serde_json::from_value(Value::Object(params)).map_err(invalid)?;
    if let (Some(name), true) = (V::LONG, options.background) {
        return run_in_background::<V>(service, name(&params), &params, options.tag);
    }
    Caller::set_tag(options.tag);
    run_to_json::<V>(service, params)
}

fn run_to_json<V: Verb>(service: &Service, params: V::Params) -> Result<Box<RawValue>, RpcError> {
    let reply = V::run(service, params)?;
    to_raw_value(&reply).map_err(|e| RpcError::internal(format!("{}: {e}", V::METHOD)))
}

/// Options of a request that every long verb has, beside its own parameters.
#[derive(Default, Deserialize)]
struct RunOptions {
    /// If true, the server responds once the verb has started, and the verb continues without the client.
    #[serde(default)]
    background: bool,
    /// Text by which the client finds the job of the verb in the list of jobs.
    #[serde(default)]
    tag: Option<String>,
}

impl RunOptions {
    /// Removes the options from the parameters of a request, and returns them.
    fn take(params: &mut Map<String, Value>) -> Result<Self, serde_json::Error> {
        let taken = ["background", "tag"].iter().filter_map(|key| params.remove_entry(*key)).collect();
        let options: Self = serde_json::from_value(Value::Object(taken))?;
        if options.tag.as_ref().is_some_and(|tag| tag.len() > TAG_BYTES_MAX) {
            return Err(de::Error::custom(format!("tag: at most {TAG_BYTES_MAX} bytes")));
        }
        Ok(options)
    }
}

/// Starts a verb as a background job, or queues it. A queued job keeps its parameters only as JSON text.
fn run_in_background<V: Verb>(
    service: &Service,
    name: String,
    params: &V::Params,
    tag: Option<String>,
) -> Result<Box<RawValue>, RpcError> {
    let broken = |why: &dyn Display| RpcError::internal(format!("{}: {why}", V::METHOD));
    let params = to_raw_value(params).map_err(|e| broken(&e))?;
    let (bytes, weak) = (params.get().len(), service.weak());
    let run = Box::new(move || {
        let service = weak.upgrade().ok_or_else(|| broken(&"the server has ended"))?;
        let params = serde_json::from_str(params.get()).map_err(|e| broken(&e))?;
        run_to_json::<V>(&service, params)
    });
    service.jobs.run(JobRequest { name, verb: V::METHOD.replace('.', " "), tag, bytes, run })
}

impl Handler for Service {
    fn call(&self, method: &str, params: Option<Value>) -> Result<Box<RawValue>, RpcError> {
        freestone_core::trail::step!();
        (find_verb(method)?.run)(self, params)
    }
}

fn find_verb(method: &str) -> Result<&'static VerbEntry, RpcError> {
    let found = VERBS.iter().find(|verb| verb.method == method);
    found.ok_or_else(|| RpcError::no_method(method, &VERBS.each_ref().map(|verb| verb.method)))
}

/// Handler of the read-only control socket, which runs only verbs that change nothing.
pub struct ReadOnly(pub Arc<Service>);

impl Handler for ReadOnly {
    fn call(&self, method: &str, params: Option<Value>) -> Result<Box<RawValue>, RpcError> {
        let verb = find_verb(method)?;
        if !verb.is_read_only {
            let at = self
                .0
                .control_read_only
                .get()
                .map_or_else(|| "this socket".into(), |at| at.display().to_string());
            let allowed: Vec<_> =
                VERBS.iter().filter(|verb| verb.is_read_only).map(|verb| verb.method).collect();
            refuse!(EPERM, "{method}: not at {at}, which is read-only: it answers {}", allowed.join(", "));
        }
        (verb.run)(&self.0, params)
    }
}
