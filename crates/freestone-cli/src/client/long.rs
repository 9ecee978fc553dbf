//! The client of long verbs: shows the progress, cancels the verb on SIGINT, or starts the verb in the background.
//!
//! A verb in the server is watched over a second connection ([`Watcher`]). A verb that the program runs
//! itself reports its progress to [`LocalProgress`].

use std::io::{self, IsTerminal as _, Write as _};
use std::process::{self, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use freestone_control::protocol::RpcError;
use freestone_core::sync::Mutex;
use freestone_server::jobs::{JobInfo, ProgressSink, WAITING};
use freestone_server::verbs::Verb;
use freestone_server::verbs::jobs::cancel;
use freestone_server::verbs::jobs::jobs::{AllJobs, Reply};
use freestone_spec::refusal::Errno;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use signal_hook::consts::SIGINT;
use signal_hook::flag;

use crate::client::bar::Bar;
use crate::client::connection::Client;
use crate::client::{Common, print_json, show};
use crate::error::{self, Stdout};
use crate::serve::events::{self, STATUS_OF_SIGNAL_0};

/// Interval at which the client polls the progress of a verb.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Command-line options of long verbs.
#[derive(Debug, Args)]
pub struct Long {
    /// Run as a background job (64 at once, others queue); see `freestone jobs`, `wait --job` and `cancel`
    #[arg(long, conflicts_with = "progress")]
    background: bool,
    /// Progress on stderr: a bar if stderr is a terminal, or JSON lines [default: bar]
    #[arg(long, value_enum, value_name = "bar|json|none", hide_possible_values = true)]
    progress: Option<Progress>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Progress {
    Bar,
    Json,
    None,
}

/// Command line of a long verb: its arguments and options.
#[derive(Debug, Args)]
pub struct LongCall<A: Args> {
    #[command(flatten)]
    pub args: A,
    /// The options `--background` and `--progress`.
    #[command(flatten)]
    pub long: Long,
    /// The options `--json` and `--control`.
    #[command(flatten)]
    pub common: Common,
}

/// Progress and cancellation of a verb that the program runs itself, without a server.
pub struct LocalProgress {
    name: String,
    output: Mutex<ProgressOutput>,
    interrupted: Arc<AtomicBool>,
}

enum ProgressOutput {
    Bar(Bar),
    Json { verb: &'static str, at: (u64, u64) },
    Nothing,
}

impl LocalProgress {
    /// Starts to show the progress. From then on, the first SIGINT cancels the verb.
    pub fn new(long: &Long, name: &str, verb: &'static str) -> Result<Self> {
        let output = match long.progress() {
            Progress::Bar => ProgressOutput::Bar(Bar::of(name, verb)),
            Progress::Json => ProgressOutput::Json { verb, at: (0, 0) },
            Progress::None => ProgressOutput::Nothing,
        };
        Ok(Self { name: name.to_owned(), output: Mutex::new(output), interrupted: catch_interrupt()? })
    }

    /// Removes the progress bar. Returns the result of the verb, or the exit status if SIGINT cancelled the verb.
    ///
    /// # Errors
    /// The error of the verb, if it was not cancelled.
    pub fn end<T>(self, outcome: Result<T>) -> Result<Result<T, ExitCode>> {
        let interrupted = self.should_stop();
        // Removes the progress bar before the error is printed.
        drop(self);
        match outcome {
            Ok(done) => Ok(Ok(done)),
            Err(error) if interrupted && has_errno(&error, Errno::ECANCELED) => {
                error::print_error(&error);
                Ok(Err(ExitCode::from(STATUS_INTERRUPTED)))
            }
            Err(error) => Err(error),
        }
    }

    /// Shows the progress of the next part of the work, under the name `next`.
    pub fn begin_next(&self, next: &'static str) {
        match &mut *self.output.lock() {
            ProgressOutput::Bar(bar) => *bar = Bar::of(&self.name, next),
            ProgressOutput::Json { verb, at } => (*verb, *at) = (next, (0, 0)),
            ProgressOutput::Nothing => {}
        }
    }
}

impl ProgressSink for LocalProgress {
    fn should_stop(&self) -> bool {
        self.interrupted.load(Ordering::SeqCst)
    }

    fn report(&self, done: u64, total: u64) {
        match &mut *self.output.lock() {
            ProgressOutput::Bar(bar) => bar.update(done, total, self.should_stop()),
            ProgressOutput::Json { verb, at } if *at != (done, total) => {
                *at = (done, total);
                let progress =
                    json!({ "name": self.name, "verb": verb, "done_bytes": done, "total_bytes": total });
                let _ = writeln!(io::stderr(), "{}", json!({ "progress": progress }));
            }
            _ => {}
        }
    }
}

impl Long {
    /// Returns true if the verb continues as a background job without the client.
    pub fn is_background(&self) -> bool {
        self.background
    }

    /// Returns how the progress is shown. A bar is shown only if stderr is a terminal.
    fn progress(&self) -> Progress {
        match self.progress.unwrap_or(Progress::Bar) {
            Progress::Bar if !io::stderr().is_terminal() => Progress::None,
            progress => progress,
        }
    }

    /// Prints the result, or for a background job that it has started or is queued.
    pub fn show<V: Verb>(&self, params: &V::Params, answer: &RawValue, common: &Common) -> Result<()> {
        if !self.background {
            return show::<V>(params, answer, common);
        }
        if common.json {
            return print_json(answer.get());
        }
        let begun: Map<_, _> = serde_json::from_str(answer.get())
            .with_context(|| format!("{}: the server's answer is not understood", V::METHOD))?;
        let mut out = io::stdout().lock();
        let shown = match begun.get("state").and_then(Value::as_str) {
            Some(WAITING) => show_waiting(&begun, &mut out),
            _ => V::show_begun(&begun, &mut out),
        };
        shown.and_then(|()| out.flush()).map_err(Stdout::from)?;
        Ok(())
    }
}

/// Writes that a background job is queued.
fn show_waiting(response: &Map<String, Value>, out: &mut dyn io::Write) -> io::Result<()> {
    let text = |key: &str| response.get(key).and_then(Value::as_str).unwrap_or_default();
    let job = response.get("job").unwrap_or_default();
    writeln!(out, "{}: {} is queued as background job {job}", text("name"), text("verb"))
}

/// Calls a long verb, shows its progress, and prints the result. Returns the exit status.
pub fn ask_long<V: Verb>(params: &V::Params, long: &Long, common: &Common) -> Result<ExitCode> {
    let mut client = Client::connect(common.control.as_deref())?;
    let runner = LongRunner::new(long, common)?;
    match runner.call::<V>(&mut client, params) {
        Ok(answer) => long.show::<V>(params, &answer, common).map(|()| ExitCode::SUCCESS),
        Err(error) if runner.is_interrupted() && has_errno(&error, Errno::ECANCELED) => {
            error::print_error(&error);
            Ok(ExitCode::from(STATUS_INTERRUPTED))
        }
        Err(error) => Err(error),
    }
}

/// Calls long verbs one after the other, and shows the progress of each.
pub struct LongRunner<'a> {
    long: &'a Long,
    common: &'a Common,
    interrupted: Arc<AtomicBool>,
}

impl<'a> LongRunner<'a> {
    /// Creates a runner. From then on, the first SIGINT cancels the verb that is running in the foreground.
    pub fn new(long: &'a Long, common: &'a Common) -> Result<Self> {
        let interrupted = if long.background { Arc::default() } else { catch_interrupt()? };
        Ok(Self { long, common, interrupted })
    }

    fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::SeqCst)
    }

    /// Calls a verb, and shows its progress until the server responds.
    pub fn call<V: Verb>(&self, client: &mut Client, params: &V::Params) -> Result<Box<RawValue>> {
        let now = UNIX_EPOCH.elapsed().unwrap_or_default();
        // A unique tag, by which the watcher finds the job of this call.
        let tag = format!("freestone-{}-{}", process::id(), now.as_nanos());
        let mut request = serde_json::to_value(params).context("cannot write the request")?;
        if let Value::Object(request) = &mut request {
            request.insert("background".into(), self.long.background.into());
            request.insert("tag".into(), tag.as_str().into());
        }
        if self.long.background {
            return client.call(V::METHOD, &request);
        }
        let progress = self.long.progress();
        let watcher = Watcher { common: self.common, tag: &tag, progress, interrupted: &self.interrupted };
        let (ended, end) = mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || watcher.watch(&end));
            let answer = client.call(V::METHOD, &request);
            drop(ended);
            answer
        })
    }
}

/// Exit status of a verb that SIGINT has ended.
pub const STATUS_INTERRUPTED: u8 = (STATUS_OF_SIGNAL_0 + SIGINT) as u8;

fn has_errno(error: &anyhow::Error, errno: Errno) -> bool {
    error.downcast_ref::<RpcError>().is_some_and(|fault| fault.has_errno(errno))
}

/// Returns a flag that the first SIGINT sets; a second SIGINT ends the program. If SIGINT is ignored, it stays ignored.
pub fn catch_interrupt() -> Result<Arc<AtomicBool>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    if !events::is_ignored(SIGINT) {
        // The order matters: handlers run in this order, so the conditional default, which ends the program,
        // acts only on the second SIGINT.
        flag::register_conditional_default(SIGINT, Arc::clone(&interrupted))
            .and_then(|_| flag::register(SIGINT, Arc::clone(&interrupted)))
            .context("cannot take over SIGINT")?;
    }
    Ok(interrupted)
}

/// Watches a running verb over a second connection. A failure of the watcher does not affect the verb.
struct Watcher<'a> {
    common: &'a Common,
    tag: &'a str,
    progress: Progress,
    interrupted: &'a AtomicBool,
}

impl Watcher<'_> {
    /// Polls the job of the verb, and shows its progress, until the verb has ended.
    fn watch(&self, end: &mpsc::Receiver<()>) {
        let (mut client, mut shown, mut is_cancelling, mut bar) = (None, None, false, None);
        while matches!(end.recv_timeout(POLL_INTERVAL), Err(RecvTimeoutError::Timeout)) {
            if !is_cancelling && self.interrupted.load(Ordering::SeqCst) {
                is_cancelling = self.cancel(&mut client);
            }
            if self.progress == Progress::None {
                continue;
            }
            let Some(now) =
                self.call(&mut client, AllJobs::METHOD).ok().and_then(|jobs| jobs.into_iter().next())
            else {
                continue;
            };
            match self.progress {
                Progress::Bar => bar.get_or_insert_with(|| Bar::new(&now)).show(&now, is_cancelling),
                _ if shown.as_ref().is_some_and(|before| is_same(before, &now)) => {}
                _ => drop(writeln!(io::stderr(), "{}", json!({ "progress": now }))),
            }
            shown = Some(now);
        }
    }

    /// Cancels the verb. Returns false if its job was not found. If the verb cannot be cancelled, ends the
    /// program; the verb continues in the server.
    fn cancel(&self, client: &mut Option<Client>) -> bool {
        match self.call(client, cancel::Cancel::METHOD) {
            Ok(cancelled) => !cancelled.is_empty(),
            Err(error) => {
                if has_errno(&error, Errno::EOPNOTSUPP) {
                    error::print_error(&error);
                    process::exit(STATUS_INTERRUPTED.into());
                }
                false
            }
        }
    }

    /// Calls a method on the job of the verb. The connection is kept in `client` if the call succeeds.
    fn call(&self, client: &mut Option<Client>, method: &str) -> Result<Vec<JobInfo>> {
        let mut connected = match client.take() {
            Some(client) => client,
            None => Client::connect(self.common.control.as_deref())?,
        };
        let answer = connected.call(method, &json!({ "tag": self.tag }))?;
        *client = Some(connected);
        let Reply { jobs } = serde_json::from_str(answer.get()).context("the answer is not understood")?;
        Ok(jobs)
    }
}

fn is_same(before: &JobInfo, now: &JobInfo) -> bool {
    (before.done_bytes, before.total_bytes) == (now.done_bytes, now.total_bytes)
}
