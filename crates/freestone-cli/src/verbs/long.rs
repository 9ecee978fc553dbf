//! The client's part of verbs that take long: how far they are is shown, and they end with the
//! program, or go on in the background.

use std::io::{self, IsTerminal as _, Write as _};
use std::process::{self, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use freestone_spec::refusal::Errno;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use signal_hook::consts::SIGINT;
use signal_hook::flag;

use super::bar::Bar;
use super::jobs::{AllJobs, Reply};
use super::{Common, Verb, cancel, print_json, show};
use crate::control::client::Client;
use crate::control::protocol::Fault;
use crate::error::{self, Stdout};
use crate::job::{Shown, WAITING, Watched};
use crate::until::{self, STATUS_OF_SIGNAL_0};

/// So long nothing takes: what ends a verb is the work, a cancel, or a bound of its own.
pub const TIME_MAX: Duration = Duration::from_secs(366 * 24 * 3600);
/// How often it is looked how far a verb is.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// What verbs that take long have besides their parameters.
#[derive(Debug, Args)]
pub struct Long {
    /// Answer when it has begun, or, where 64 others run, waits for its turn; `freestone jobs` shows how
    /// far it is, `freestone wait --job` waits for its end, `freestone cancel` ends it
    #[arg(long, conflicts_with = "progress")]
    background: bool,
    /// Show on stderr how far it is: a bar, where that is a terminal, or a line of JSON whenever that
    /// has changed [default: bar]
    #[arg(long, value_enum, value_name = "bar|json|none", hide_possible_values = true)]
    progress: Option<Progress>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Progress {
    Bar,
    Json,
    None,
}

/// A verb with what it and all others take.
#[derive(Debug, Args)]
pub struct LongCall<A: Args> {
    /// Its parameters.
    #[command(flatten)]
    pub args: A,
    /// `--background`, `--progress`.
    #[command(flatten)]
    pub long: Long,
    /// `--json`, `--control`.
    #[command(flatten)]
    pub common: Common,
}

/// How far a verb is that this program does itself.
pub struct Here {
    name: String,
    shown: Mutex<HereShown>,
    interrupted: Arc<AtomicBool>,
}

enum HereShown {
    Bar(Bar),
    Json { verb: &'static str, at: (u64, u64) },
    Nothing,
}

impl Here {
    /// From now on the first SIGINT cancels it.
    pub fn new(long: &Long, name: &str, verb: &'static str) -> Result<Self> {
        let shown = match long.how() {
            Progress::Bar => HereShown::Bar(Bar::of(name, verb)),
            Progress::Json => HereShown::Json { verb, at: (0, 0) },
            Progress::None => HereShown::Nothing,
        };
        Ok(Self { name: name.to_owned(), shown: Mutex::new(shown), interrupted: catch_interrupt()? })
    }

    /// What it came to, or the exit status where it was cancelled.
    ///
    /// # Errors
    /// It failed by itself.
    pub fn end<T>(self, outcome: Result<T>) -> Result<Result<T, ExitCode>> {
        let interrupted = self.is_over();
        // The bar goes first.
        drop(self);
        match outcome {
            Ok(done) => Ok(Ok(done)),
            Err(error) if interrupted && is(&error, Errno::ECANCELED) => {
                error::tell(&error);
                Ok(Err(ExitCode::from(STATUS_INTERRUPTED)))
            }
            Err(error) => Err(error),
        }
    }

    /// What is shown from now on is another verb, which is a part of it.
    pub fn go_on(&self, next: &'static str) {
        match &mut *self.shown.lock().unwrap_or_else(PoisonError::into_inner) {
            HereShown::Bar(bar) => *bar = Bar::of(&self.name, next),
            HereShown::Json { verb, at } => (*verb, *at) = (next, (0, 0)),
            HereShown::Nothing => {}
        }
    }
}

impl Watched for Here {
    fn is_over(&self) -> bool {
        self.interrupted.load(Ordering::SeqCst)
    }

    fn note(&self, done: u64, total: u64) {
        match &mut *self.shown.lock().unwrap_or_else(PoisonError::into_inner) {
            HereShown::Bar(bar) => bar.at(done, total, self.is_over()),
            HereShown::Json { verb, at } if *at != (done, total) => {
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
    /// Whether it is to go on without the program.
    pub fn is_background(&self) -> bool {
        self.background
    }

    fn how(&self) -> Progress {
        match self.progress.unwrap_or(Progress::Bar) {
            Progress::Bar if !io::stderr().is_terminal() => Progress::None,
            how => how,
        }
    }

    /// Shows an answer.
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

/// One in the background whose turn has not come.
fn show_waiting(told: &Map<String, Value>, out: &mut dyn io::Write) -> io::Result<()> {
    let text = |key: &str| told.get(key).and_then(Value::as_str).unwrap_or_default();
    let job = told.get("job").unwrap_or_default();
    writeln!(out, "{}: {} waits for its turn in the background, as job {job}", text("name"), text("verb"))
}

/// Asks for a verb that takes long, and shows the answer.
pub fn ask_long<V: Verb>(params: &V::Params, long: &Long, common: &Common) -> Result<ExitCode> {
    let mut client = Client::connect(common.control.as_deref())?;
    let asker = Asker::new(long, common)?;
    match asker.ask::<V>(&mut client, params) {
        Ok(answer) => long.show::<V>(params, &answer, common).map(|()| ExitCode::SUCCESS),
        Err(error) if asker.is_interrupted() && is(&error, Errno::ECANCELED) => {
            error::tell(&error);
            Ok(ExitCode::from(STATUS_INTERRUPTED))
        }
        Err(error) => Err(error),
    }
}

/// Asks for verbs that take long, one after the other.
pub struct Asker<'a> {
    long: &'a Long,
    common: &'a Common,
    interrupted: Arc<AtomicBool>,
}

impl<'a> Asker<'a> {
    /// From now on the first SIGINT cancels what runs in the foreground.
    pub fn new(long: &'a Long, common: &'a Common) -> Result<Self> {
        let interrupted = if long.background { Arc::default() } else { catch_interrupt()? };
        Ok(Self { long, common, interrupted })
    }

    fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::SeqCst)
    }

    /// Asks, and shows how far the verb is until that is answered.
    pub fn ask<V: Verb>(&self, client: &mut Client, params: &V::Params) -> Result<Box<RawValue>> {
        let now = UNIX_EPOCH.elapsed().unwrap_or_default();
        // Nobody else has it: how this verb is found among those that run.
        let tag = format!("freestone-{}-{}", process::id(), now.as_nanos());
        let mut request = serde_json::to_value(params).context("cannot write the request")?;
        if let Value::Object(request) = &mut request {
            request.insert("background".into(), self.long.background.into());
            request.insert("tag".into(), tag.as_str().into());
        }
        if self.long.background {
            return client.call(V::METHOD, &request);
        }
        let how = self.long.how();
        let watcher = Watcher { common: self.common, tag: &tag, how, interrupted: &self.interrupted };
        let (ended, end) = mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || watcher.watch(&end));
            let answer = client.call(V::METHOD, &request);
            drop(ended);
            answer
        })
    }
}

const STATUS_INTERRUPTED: u8 = (STATUS_OF_SIGNAL_0 + SIGINT) as u8;

fn is(error: &anyhow::Error, errno: Errno) -> bool {
    error.downcast_ref::<Fault>().is_some_and(|fault| fault.is(errno))
}

/// The first SIGINT is noted, a second one ends the program. Where a shell has it ignored it stays
/// so.
fn catch_interrupt() -> Result<Arc<AtomicBool>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    if !until::is_ignored(SIGINT) {
        // In this order: the first finds that there was none before.
        flag::register_conditional_default(SIGINT, Arc::clone(&interrupted))
            .and_then(|_| flag::register(SIGINT, Arc::clone(&interrupted)))
            .context("cannot take over SIGINT")?;
    }
    Ok(interrupted)
}

/// Looks after a verb that runs, on a connection of its own. Whatever fails here, the verb goes on.
struct Watcher<'a> {
    common: &'a Common,
    tag: &'a str,
    how: Progress,
    interrupted: &'a AtomicBool,
}

impl Watcher<'_> {
    /// Until the verb has ended.
    fn watch(&self, end: &mpsc::Receiver<()>) {
        let (mut client, mut shown, mut is_told, mut bar) = (None, None, false, None);
        while matches!(end.recv_timeout(LOOK_EVERY), Err(RecvTimeoutError::Timeout)) {
            if !is_told && self.interrupted.load(Ordering::SeqCst) {
                is_told = self.cancel(&mut client);
            }
            if self.how == Progress::None {
                continue;
            }
            let Some(now) =
                self.ask(&mut client, AllJobs::METHOD).ok().and_then(|jobs| jobs.into_iter().next())
            else {
                continue;
            };
            match self.how {
                Progress::Bar => bar.get_or_insert_with(|| Bar::new(&now)).show(&now, is_told),
                _ if shown.as_ref().is_some_and(|before| is_same(before, &now)) => {}
                _ => drop(writeln!(io::stderr(), "{}", json!({ "progress": now }))),
            }
            shown = Some(now);
        }
    }

    /// Has the verb end; whether it was there to be told. One that cannot end early goes on without
    /// the program.
    fn cancel(&self, client: &mut Option<Client>) -> bool {
        match self.ask(client, cancel::Cancel::METHOD) {
            Ok(told) => !told.is_empty(),
            Err(error) => {
                if is(&error, Errno::EOPNOTSUPP) {
                    error::tell(&error);
                    process::exit(STATUS_INTERRUPTED.into());
                }
                false
            }
        }
    }

    fn ask(&self, client: &mut Option<Client>, method: &str) -> Result<Vec<Shown>> {
        let mut asked = match client.take() {
            Some(client) => client,
            None => Client::connect(self.common.control.as_deref())?,
        };
        let answer = asked.call(method, &json!({ "tag": self.tag }))?;
        *client = Some(asked);
        let Reply { jobs } = serde_json::from_str(answer.get()).context("the answer is not understood")?;
        Ok(jobs)
    }
}

fn is_same(before: &Shown, now: &Shown) -> bool {
    (before.done_bytes, before.total_bytes) == (now.done_bytes, now.total_bytes)
}
