//! One life of a server: the steps of a script run against it, and the outcome of each is judged.

mod requests;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, PipeReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::fault::{Case, End, Extent, Site};
use super::limits::{self, LimitKind};
use super::model::{Lifetime, Model, Presence};
use super::trace::{Arm, TracedProcess};
use crate::program::server::control::{self, VerbError};
use crate::program::server::{self, Resources};
use crate::program::transport::nbd_client::NbdClient;

/// Read timeout of a client while calls keep failing, since the server may then not reply.
const PATIENCE: Duration = Duration::from_secs(3);
/// Longest wait until a due save has completed.
const SAVE_MAX: Duration = Duration::from_secs(5);
/// Additional threads allowed per failure: those of a file that could not use a ring, or of a pool.
const POOL_THREADS: usize = 4;
/// Longest wait until the threads and descriptors of removed devices are gone.
const HELD_MAX: Duration = Duration::from_secs(5);
const HELD_FOR: Duration = Duration::from_millis(500);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Number of failing calls in a short failure: afterwards, repeated requests and verbs must succeed.
const FAILURES_MAX: u32 = 2;
/// Smallest size of a pipe in bytes: one page.
const PIPE_BYTES: usize = 4096;

pub struct RunDir<'a> {
    pub program: &'a Path,
    pub dir: PathBuf,
}

pub struct Life<'a> {
    pub run_dir: &'a RunDir<'a>,
    pub model: &'a mut Model,
    pub server: TracedProcess,
    case: Option<&'a Case>,
    wires: BTreeMap<String, NbdClient>,
    pub findings: Vec<String>,
    /// Number of failed calls and all numbered calls of a program that ran besides the server.
    beside: (u32, Vec<Site>),
    /// Read end of the server's standard error, if the case leaves the log unread. Kept open.
    _log: Option<PipeReader>,
}

pub struct ServerExit {
    pub status: ExitStatus,
    pub is_killed: bool,
    /// Number of calls that failed.
    pub hits: u32,
    /// All numbered calls, in order.
    pub sites: Vec<Site>,
}

/// The outcome of a verb (a method of the control socket).
#[derive(Debug)]
pub enum Answer {
    Done(Value),
    Refused(String),
    /// The server ended, or did not reply while its calls failed.
    None,
}

impl<'a> Life<'a> {
    /// Starts a server. If that fails, the error contains the output and exit of the server.
    pub fn start(
        run_dir: &'a RunDir<'a>,
        model: &'a mut Model,
        words: &[&str],
        arm: Arm,
        case: Option<&'a Case>,
    ) -> Result<Self, (String, ServerExit)> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let fail = |why: String| {
            let status = std::os::unix::process::ExitStatusExt::from_raw(0);
            (why, ServerExit { status, is_killed: false, hits: 0, sites: Vec::new() })
        };
        let mut command = server::command(run_dir.program, &run_dir.dir, &words).map_err(fail)?;
        let mut log = None;
        if limits::limit_of(case) == Some(LimitKind::Log) {
            log = Some(undrained(&mut command).map_err(|error| fail(error.to_string()))?);
        }
        let mut server = TracedProcess::start(command, &run_dir.dir, arm, case)
            .map_err(|error| fail(error.to_string()))?;
        match server.wait_ready() {
            Ok(()) => Ok(Self {
                run_dir,
                model,
                server,
                case,
                wires: BTreeMap::new(),
                findings: Vec::new(),
                beside: (0, Vec::new()),
                _log: log,
            }),
            Err(said) => {
                let status = server.wait();
                let why = server.hung().map_or(said, |hung| format!("HANG: {hung}"));
                let (is_killed, hits, sites) = (server.is_killed(), server.hits(), server.sites());
                Err((why, ServerExit { status, is_killed, hits, sites }))
            }
        }
    }

    fn add_finding(&mut self, what: impl Into<String>) {
        // A server that the run has killed need not reply, so what it does is not a finding.
        if !self.server.is_killed() {
            self.findings.push(what.into());
        }
    }

    /// Returns true if at most two calls fail, so that repeated requests and verbs must succeed.
    fn is_failure_short(&self) -> bool {
        self.case.is_none_or(Case::is_short)
    }

    /// Returns true if writes to the state directory keep failing: verbs are then refused, see
    /// docs/reference/server.md.
    fn state_is_broken(&self) -> bool {
        !self.is_failure_short() && self.affects_state()
    }

    /// Returns true if the start may withhold kept content, because it cannot record that the content is in use
    /// (docs/reference/server.md). With more than one failure, the fallback for writing the state may fail as well.
    pub fn start_may_withhold(&self) -> bool {
        self.case.is_some_and(|case| case.extent != Extent::Once) && self.affects_state()
    }

    fn affects_state(&self) -> bool {
        self.case.is_some_and(|case| case.site.object.starts_with("state") || case.site.call == limits::LIMIT)
    }

    /// Returns true if the failure can last until a file is opened again: a flush failed, or a snapshot lost its COW
    /// device. See docs/explanation/testing.md.
    fn may_last(&self) -> bool {
        self.case.is_some_and(|case| case.site.call.starts_with("ring-") || case.site.object.contains(".cow"))
    }

    // ---- verbs ----------------------------------------------------------------------------------

    fn ask_once(&mut self, method: &str, params: &Value) -> Answer {
        if self.server.has_ended() {
            return Answer::None;
        }
        let text = verb_text(method, params);
        self.server.step(text.clone());
        match self.exchange(method, params) {
            Ok(answer) => Answer::Done(answer),
            Err(VerbError::Refused { message, .. }) => {
                if self.server.hits() == 0 {
                    self.add_finding(format!("{text} is refused although no call has failed: {message}"));
                }
                let is_sentence = !message.is_empty() && !message.contains(['\n', '{']);
                if !is_sentence {
                    self.add_finding(format!(
                        "{text} is refused with a message that is not one sentence: {message:?}"
                    ));
                }
                Answer::Refused(message)
            }
            Err(VerbError::Ended(why)) => {
                // The failing call may have been on the control connection itself.
                if self.server.hits() == 0 && !self.server.has_ended() {
                    self.add_finding(format!("{text} has no answer although no call has failed: {why}"));
                }
                Answer::None
            }
            Err(VerbError::Malformed(why)) => {
                self.add_finding(format!("{text}: {why}"));
                Answer::None
            }
        }
    }

    fn exchange(&self, method: &str, params: &Value) -> Result<Value, VerbError> {
        let ended = |error: std::io::Error| VerbError::Ended(error.to_string());
        let mut stream = UnixStream::connect(self.run_dir.dir.join(server::CONTROL)).map_err(ended)?;
        if !self.is_failure_short() {
            stream.set_read_timeout(Some(PATIENCE)).map_err(ended)?;
        }
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        stream.write_all(format!("{request}\n").as_bytes()).map_err(ended)?;
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).map_err(ended)?;
        if line.ends_with('\n') { control::answer(&line) } else { Err(VerbError::Ended("no answer".into())) }
    }

    /// Runs a verb, and repeats it while a short failure lasts. A verb that is refused although no call failed
    /// meanwhile is a finding.
    pub fn ask(&mut self, method: &str, params: &Value) -> Answer {
        let mut last = self.ask_once(method, params);
        for _ in 0..FAILURES_MAX {
            if !self.is_failure_short() || matches!(last, Answer::Done(_)) || self.server.has_ended() {
                break;
            }
            let hits = self.server.hits();
            let again = self.ask_once(method, params);
            match (&last, &again) {
                // If a call failed during the repetition, the verb may be refused again.
                (Answer::Refused(first), Answer::Refused(again))
                    if self.server.hits() == hits && !self.may_last() =>
                {
                    let text = verb_text(method, params);
                    self.add_finding(format!(
                        "{text} is refused although no call fails: {first:?}, then {again:?}"
                    ));
                }
                // A verb without an answer may have taken effect, so its repetition may be refused.
                (Answer::None, Answer::Refused(_)) => return last,
                _ => {}
            }
            last = again;
        }
        last
    }

    /// Runs a verb that creates a device of the model. Returns true if the verb succeeded.
    pub fn create_device(&mut self, name: &str, method: &str, params: &Value) -> bool {
        let presence = match self.ask(method, params) {
            Answer::Done(_) => Presence::Yes,
            Answer::Refused(_) | Answer::None => Presence::Unknown,
        };
        self.model.disk(name).presence = presence;
        presence == Presence::Yes
    }

    /// Removes a device, if it exists, and records whether it still may exist.
    pub fn remove(&mut self, name: &str) {
        if self.model.disk(name).presence != Presence::Yes {
            return;
        }
        self.wires.remove(name);
        // Force the removal: the server may not have noticed yet that the client has disconnected.
        let removed = self.ask("remove", &json!({ "name": name, "force": true }));
        self.model.disk(name).presence = match removed {
            Answer::Done(_) => Presence::No,
            Answer::Refused(_) | Answer::None => Presence::Unknown,
        };
    }

    /// Returns true if the server reports that a snapshot is no longer valid.
    pub fn is_invalid(&mut self, name: &str) -> bool {
        let stat = self.ask_once("stat", &json!({ "name": name }));
        matches!(stat, Answer::Done(stat) if matches!(stat["status"].as_str(), Some("Invalid" | "Overflow")))
    }

    /// Waits until the server reports that a device is saved completely, or until `SAVE_MAX`.
    pub fn wait_saved(&mut self, name: &str) {
        let began = Instant::now();
        while began.elapsed() < SAVE_MAX && !self.server.has_ended() {
            if let Answer::Done(stat) = self.ask_once("stat", &json!({ "name": name }))
                && stat["keep"]["unsaved_bytes"] == 0
                && stat["keep"]["saved"].is_string()
            {
                let oracle = &mut self.model.disk(name).oracle;
                let flush = oracle.begin_flush();
                return oracle.end_flush(flush, true);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the largest numbers of descriptors and threads within a short time, since those of a verb remain a
    /// moment longer.
    pub fn most_resources(&self) -> Resources {
        let (began, mut most) = (Instant::now(), Resources::default());
        while began.elapsed() < HELD_FOR {
            most.join(self.server.resources(&self.run_dir.dir));
            thread::sleep(POLL_INTERVAL);
        }
        most
    }

    /// Checks that the server has no more descriptors and threads than in a run without failures. Waits for those that
    /// are about to end.
    pub fn check_resources(&mut self, held: &Resources) {
        let began = Instant::now();
        let pools = POOL_THREADS * self.server.hits().max(1) as usize;
        loop {
            let now = self.server.resources(&self.run_dir.dir);
            let are_few = now.descriptors_without_rings() <= held.descriptors_without_rings()
                && now.threads.values().sum::<usize>() <= held.threads.values().sum::<usize>() + pools;
            if are_few || self.server.has_ended() {
                return;
            }
            if began.elapsed() > HELD_MAX {
                return self.add_finding(format!("LEAK: {now:?}, without the failure {held:?}"));
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    // ---- end ------------------------------------------------------------------------------------

    /// Ends the server, judges the exit, and records in the model what content survives.
    pub fn end(mut self, how: End) -> (ServerExit, Vec<String>) {
        self.server.end_script();
        self.server.step(format!("the end: {how:?}"));
        let hits = self.server.hits();
        let had_died = self.server.has_ended() && !self.server.is_killed();
        let is_killed = how == End::Killed && !had_died;
        self.server.signal(if how == End::Killed { Signal::KILL } else { Signal::TERM });
        let status = self.server.wait();
        let is_killed = is_killed || self.server.is_killed();
        if let Some(hung) = self.server.hung() {
            self.findings.push(format!("HANG: {hung}"));
        } else if !is_killed {
            match status.code() {
                Some(0) if !had_died => {}
                Some(1) if !had_died && self.case.is_some_and(|case| case.site.call == "clone3") => {
                    self.findings.push("the end fails because no thread could be started".into());
                }
                Some(1) if !had_died && self.server.hits() > 0 => {
                    let is_over = hits > 0 && self.case.is_some_and(Case::is_over_at_end);
                    let may_fail = self.state_is_broken() || self.may_last();
                    if is_over && self.server.hits() == hits && !may_fail {
                        self.findings
                            .push("the end fails with status 1 although the failure was over".into());
                    }
                }
                _ => self.findings.push(format!("the server died: {status}")),
            }
        }
        let is_saved = !is_killed && status.code() == Some(0);
        for disk in self.model.disks.values_mut() {
            match disk.lifetime {
                Lifetime::Permanent => disk.oracle.die(),
                Lifetime::Saved if is_saved => {
                    let flush = disk.oracle.begin_flush();
                    disk.oracle.end_flush(flush, true);
                }
                Lifetime::Saved | Lifetime::Temporary => {}
            }
        }
        let (hits, mut sites) = (self.server.hits() + self.beside.0, self.server.sites());
        sites.extend(self.beside.1);
        (ServerExit { status, is_killed, hits, sites }, self.findings)
    }

    // ---- programs beside the server -------------------------------------------------------------

    /// Runs the program with these arguments beside the server, with the failures of the case. Returns true on success.
    pub fn run(&mut self, words: &[&str]) -> bool {
        let mut command = Command::new(self.run_dir.program);
        command.args(words).current_dir(&self.run_dir.dir).env_remove("RUST_LOG");
        // Read the output through a pipe, not a file: the disk may be full.
        let (mut reader, writer) = std::io::pipe().expect("there are descriptors");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(writer);
        let program = match TracedProcess::start(command, &self.run_dir.dir, Arm::AtFile, self.case) {
            Ok(program) => program,
            Err(error) => panic!("{words:?}: {error}"),
        };
        program.step(words.join(" "));
        let status = program.wait();
        let (hits, is_killed) = (program.hits(), program.is_killed());
        self.beside = (hits, program.sites());
        let hung = program.hung();
        // `program` holds the write end of the pipe: drop it, so that reading ends.
        drop(program);
        let mut said = String::new();
        if let Err(error) = reader.read_to_string(&mut said) {
            said = error.to_string();
        }
        if let Some(hung) = hung {
            self.findings.push(format!("HANG: {hung}"));
        } else if !is_killed && !matches!(status.code(), Some(0 | 1)) {
            self.findings.push(format!("{words:?}: {status}: {said}"));
        } else if status.code() == Some(1) && (hits == 0 || !said.contains("freestone: ")) {
            self.findings.push(format!("{words:?}: fails after {hits} failures with output {said:?}"));
        }
        status.success()
    }
}

/// Makes a server write a verbose log to a small pipe. The returned read end is never read.
fn undrained(command: &mut Command) -> std::io::Result<PipeReader> {
    let (reader, writer) = std::io::pipe()?;
    rustix::pipe::fcntl_setpipe_size(&writer, PIPE_BYTES)?;
    command.stderr(writer).env("RUST_LOG", "debug");
    Ok(reader)
}

/// Returns a verb and its parameters as text, at most 120 characters.
fn verb_text(method: &str, params: &Value) -> String {
    format!("{method} {params}").chars().take(120).collect()
}
