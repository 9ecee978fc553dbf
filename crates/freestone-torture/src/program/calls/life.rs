//! One life of a server: the steps of a script, each judged by its answer.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, PipeReader, Read as _, Write as _};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use freestone_testkit::Rng;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::super::control::{self, No};
use super::super::said::{self, Broken};
use super::super::server::{self, Held};
use super::super::wire::Wire;
use super::fault::{Case, End, Extent, Site};
use super::limits::{self, Reached};
use super::model::{Lasts, Model, Presence, SECTOR};
use super::tracer::{Arm, Traced};
use crate::oracle::{Fill, Kind as Writing, Outcome, fill};

/// While calls fail for longer, a client waits for an answer no longer than this.
const PATIENCE: Duration = Duration::from_secs(3);
/// Longest wait for a save that is due.
const SAVE_MAX: Duration = Duration::from_secs(5);
/// Threads beyond those of a run without failures, for each failure: of a file that has no ring, or of pools.
const POOL_THREADS: usize = 4;
/// Longest time until threads and descriptors of what was removed are gone.
const HELD_MAX: Duration = Duration::from_secs(5);
const HELD_FOR: Duration = Duration::from_millis(500);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Most calls that fail while requests and verbs have to succeed when they are repeated.
const FAILURES_MAX: u32 = 2;
/// Smallest size of a pipe.
const PIPE_BYTES: usize = 4096;
/// Bytes of one read.
const READ_BYTES: u64 = 256 << 10;

/// Where a scene is played.
pub struct Place<'a> {
    pub program: &'a Path,
    pub dir: PathBuf,
}

/// A server that runs, and what it must hold.
pub struct Life<'a> {
    pub place: &'a Place<'a>,
    pub model: &'a mut Model,
    pub server: Traced,
    case: Option<&'a Case>,
    wires: BTreeMap<String, Wire>,
    /// What was wrong.
    pub findings: Vec<String>,
    /// Calls of a program beside the server that failed, and all of them.
    beside: (u32, Vec<Site>),
    /// Standard error of a server whose log nobody reads.
    _log: Option<PipeReader>,
}

/// How a server ended.
pub struct Ended {
    pub status: ExitStatus,
    /// The server was killed by the run.
    pub is_killed: bool,
    /// Calls that failed.
    pub hits: u32,
    /// All calls that were numbered.
    pub sites: Vec<Site>,
}

/// The answer to a verb.
#[derive(Debug)]
pub enum Answer {
    Done(Value),
    Refused(String),
    /// The server ended, or did not answer while its calls failed.
    None,
}

impl<'a> Life<'a> {
    /// Starts a server. The error is what it said instead of being ready.
    pub fn start(
        place: &'a Place<'a>,
        model: &'a mut Model,
        words: &[&str],
        arm: Arm,
        case: Option<&'a Case>,
    ) -> Result<Self, (String, Ended)> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let fail = |why: String| {
            let status = std::os::unix::process::ExitStatusExt::from_raw(0);
            (why, Ended { status, is_killed: false, hits: 0, sites: Vec::new() })
        };
        let mut command = server::command(place.program, &place.dir, &words).map_err(fail)?;
        let mut log = None;
        if limits::of(case) == Some(Reached::Log) {
            log = Some(undrained(&mut command).map_err(|error| fail(error.to_string()))?);
        }
        let mut server =
            Traced::start(command, &place.dir, arm, case).map_err(|error| fail(error.to_string()))?;
        match server.wait_ready() {
            Ok(()) => Ok(Self {
                place,
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
                Err((why, Ended { status, is_killed, hits, sites }))
            }
        }
    }

    fn find(&mut self, what: impl Into<String>) {
        // A server that was killed owes no answer.
        if !self.server.is_killed() {
            self.findings.push(what.into());
        }
    }

    /// A failure that is over has to be over for requests as well.
    fn fails_shortly(&self) -> bool {
        self.case.is_none_or(Case::is_short)
    }

    /// While the state's own disk goes on failing, verbs are refused, as docs/restarts.md says.
    fn state_is_broken(&self) -> bool {
        !self.fails_shortly() && self.fails_of_state()
    }

    /// A start that cannot record that kept content is in use withholds it, as docs/restarts.md says. A second
    /// failure may be that of the second way to write the state.
    pub fn start_may_withhold(&self) -> bool {
        self.case.is_some_and(|case| case.extent != Extent::Once) && self.fails_of_state()
    }

    fn fails_of_state(&self) -> bool {
        self.case.is_some_and(|case| case.site.object.starts_with("state") || case.site.call == limits::LIMIT)
    }

    /// What stays so until a file is opened again, as docs/testing.md says: a flush of it has failed, or a
    /// snapshot has lost its COW device.
    fn is_lasting(&self) -> bool {
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
            Err(No::Refused { message, .. }) => {
                if self.server.hits() == 0 {
                    self.find(format!("{text} is refused although no call has failed: {message}"));
                }
                let is_sentence = !message.is_empty() && !message.contains(['\n', '{']);
                if !is_sentence {
                    self.find(format!("{text} is refused by what is no sentence: {message:?}"));
                }
                Answer::Refused(message)
            }
            Err(No::Ended(why)) => {
                // The connection itself may have been what failed.
                if self.server.hits() == 0 && !self.server.has_ended() {
                    self.find(format!("{text} has no answer although no call has failed: {why}"));
                }
                Answer::None
            }
            Err(No::Wrong(why)) => {
                self.find(format!("{text}: {why}"));
                Answer::None
            }
        }
    }

    fn exchange(&self, method: &str, params: &Value) -> Result<Value, No> {
        let ended = |error: std::io::Error| No::Ended(error.to_string());
        let mut stream = UnixStream::connect(self.place.dir.join(server::CONTROL)).map_err(ended)?;
        if !self.fails_shortly() {
            stream.set_read_timeout(Some(PATIENCE)).map_err(ended)?;
        }
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        stream.write_all(format!("{request}\n").as_bytes()).map_err(ended)?;
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).map_err(ended)?;
        if line.ends_with('\n') { control::answer(&line) } else { Err(No::Ended("no answer".into())) }
    }

    /// Asks for a verb, again and again while calls fail shortly. Then it has to be done.
    pub fn ask(&mut self, method: &str, params: &Value) -> Answer {
        let mut last = self.ask_once(method, params);
        for _ in 0..FAILURES_MAX {
            if !self.fails_shortly() || matches!(last, Answer::Done(_)) || self.server.has_ended() {
                break;
            }
            let hits = self.server.hits();
            let again = self.ask_once(method, params);
            match (&last, &again) {
                // The verb may have met the second failure.
                (Answer::Refused(first), Answer::Refused(again))
                    if self.server.hits() == hits && !self.is_lasting() =>
                {
                    let text = verb_text(method, params);
                    self.find(format!("{text} is refused although no call fails: {first:?}, then {again:?}"));
                }
                // A verb without an answer may have been done.
                (Answer::None, Answer::Refused(_)) => return last,
                _ => {}
            }
            last = again;
        }
        last
    }

    /// Asks for a verb that makes a device, which the model has already.
    pub fn make(&mut self, name: &str, method: &str, params: &Value) -> bool {
        let presence = match self.ask(method, params) {
            Answer::Done(_) => Presence::Yes,
            Answer::Refused(_) | Answer::None => Presence::Unknown,
        };
        self.model.disk(name).presence = presence;
        presence == Presence::Yes
    }

    /// Removes a device.
    pub fn remove(&mut self, name: &str) {
        if self.model.disk(name).presence != Presence::Yes {
            return;
        }
        self.wires.remove(name);
        // The server may not have seen yet that the client has left.
        let removed = self.ask("remove", &json!({ "name": name, "force": true }));
        self.model.disk(name).presence = match removed {
            Answer::Done(_) => Presence::No,
            Answer::Refused(_) | Answer::None => Presence::Unknown,
        };
    }

    // ---- requests -------------------------------------------------------------------------------

    fn wire(&mut self, name: &str) -> Result<&mut Wire, Broken> {
        if !self.wires.contains_key(name) {
            let stream = UnixStream::connect(self.place.dir.join(server::NBD))?;
            if !self.fails_shortly() {
                stream.set_read_timeout(Some(PATIENCE))?;
            }
            let wire = Wire::over(stream, name, &mut Rng::new(1))?;
            self.wires.insert(name.to_owned(), wire);
        }
        Ok(self.wires.get_mut(name).expect("it was put there"))
    }

    /// Sends one request and waits for its answer: the error, and what was read.
    fn request(
        &mut self,
        name: &str,
        command: u16,
        at: u64,
        len: u32,
        data: &[u8],
    ) -> Result<(u32, Vec<u8>), Broken> {
        self.server.step(format!("{name}: command {command}, {len} bytes at {at}"));
        let wire = self.wire(name)?;
        wire.send(0, command, at, len, data)?;
        let reply = wire.reply()?;
        Ok((reply.error, reply.data))
    }

    /// The same, again and again while calls fail shortly.
    fn request_again(&mut self, name: &str, command: u16, at: u64, len: u32, data: &[u8]) -> Option<Vec<u8>> {
        let text = format!("{name}: command {command}, {len} bytes at {at}");
        for attempt in 0..=FAILURES_MAX {
            if self.server.has_ended() {
                return None;
            }
            let hits = self.server.hits();
            let last = match self.request(name, command, at, len, data) {
                Ok((0, data)) => return Some(data),
                Ok((error, _)) => format!("{text}: is answered with error {error}"),
                Err(Broken::Wrong(why)) => {
                    self.wires.remove(name);
                    self.find(format!("{text}: {why}"));
                    return None;
                }
                Err(Broken::Refused(_, why)) => format!("{text}: is refused: {why}"),
                Err(Broken::Ended(why)) => {
                    self.wires.remove(name);
                    format!("{text}: connection lost: {why}")
                }
            };
            if self.server.hits() == 0 {
                self.find(format!("{last}, although no call has failed"));
                return None;
            }
            if !self.fails_shortly() {
                return None;
            }
            // The call may have failed just now.
            let may_last = self.model.disk(name).is_fragile || command == said::FLUSH && self.is_lasting();
            if attempt > 0 && self.server.hits() == hits && !may_last {
                self.find(format!("{last}, repeatedly and although no call fails"));
                return None;
            }
        }
        None
    }

    fn is_usable(&mut self, name: &str) -> bool {
        let disk = self.model.disk(name);
        disk.presence == Presence::Yes && disk.is_seen
    }

    /// Writes sectors. Returns true if that was answered well.
    pub fn write(&mut self, name: &str, sectors: Range<u64>, filled: Fill) -> bool {
        self.write_id(name, sectors, filled).is_some()
    }

    /// The same. Returns what was written where if that was answered well.
    pub fn write_id(&mut self, name: &str, sectors: Range<u64>, filled: Fill) -> Option<(u64, Range<u64>)> {
        if !self.is_usable(name) || self.server.has_ended() {
            return None;
        }
        let id = self.model.write_id(filled);
        let mut data = vec![0; ((sectors.end - sectors.start) * SECTOR) as usize];
        fill(id, sectors.start, &mut data);
        let token = self.model.disk(name).oracle.begin_write(id, sectors.clone(), Writing::Write);
        let at = sectors.start * SECTOR;
        let done = self.request_again(name, said::WRITE, at, data.len() as u32, &data).is_some();
        let outcome = if done { Outcome::Done { fua: false } } else { Outcome::Failed };
        self.model.disk(name).oracle.end(token, outcome);
        done.then_some((id, sectors))
    }

    /// Flushes a device. Returns true if that was answered well.
    pub fn flush(&mut self, name: &str) -> bool {
        self.is_usable(name) && self.request_again(name, said::FLUSH, 0, 0, &[]).is_some()
    }

    /// Reads a whole device and holds it against the oracle.
    pub fn read_all(&mut self, name: &str) {
        if !self.is_usable(name) {
            return;
        }
        let bytes = self.model.disk(name).shown * SECTOR;
        let mut at = 0;
        while at < bytes && !self.server.has_ended() {
            let len = READ_BYTES.min(bytes - at);
            let token = self.model.disk(name).oracle.begin_read();
            let data = self.request_again(name, said::READ, at, len as u32, &[]);
            let oracle = &mut self.model.disk(name).oracle;
            match data {
                Some(data) => {
                    if let Err(wrong) = oracle.check_read(token, at / SECTOR, &data) {
                        return self.find(format!("LOSS: {wrong}"));
                    }
                }
                None => oracle.abandon(token),
            }
            at += len;
        }
    }

    /// Returns true if a snapshot is no longer valid, which its owner is told.
    pub fn is_invalid(&mut self, name: &str) -> bool {
        let stat = self.ask_once("stat", &json!({ "name": name }));
        matches!(stat, Answer::Done(stat) if matches!(stat["status"].as_str(), Some("Invalid" | "Overflow")))
    }

    /// Waits until all that a kept device holds is saved, if the server says so.
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
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Returns the most descriptors and threads that the server has for a while: what a verb leaves comes and
    /// goes a moment later.
    pub fn most_held(&self) -> Held {
        let (began, mut most) = (Instant::now(), Held::default());
        while began.elapsed() < HELD_FOR {
            most.join(self.server.held(&self.place.dir));
            thread::sleep(LOOK_EVERY);
        }
        most
    }

    /// Compares descriptors and threads with those of a run without failures, once all is done.
    pub fn check_held(&mut self, held: &Held) {
        let began = Instant::now();
        let pools = POOL_THREADS * self.server.hits().max(1) as usize;
        loop {
            let now = self.server.held(&self.place.dir);
            let are_few = now.descriptors_without_rings() <= held.descriptors_without_rings()
                && now.threads.values().sum::<usize>() <= held.threads.values().sum::<usize>() + pools;
            if are_few || self.server.has_ended() {
                return;
            }
            if began.elapsed() > HELD_MAX {
                return self.find(format!("LEAK: {now:?}, without the failure {held:?}"));
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    // ---- end ------------------------------------------------------------------------------------

    /// Ends the server and tells the model what may be left.
    pub fn end(mut self, how: End) -> (Ended, Vec<String>) {
        self.server.end_script();
        self.server.step(format!("the end: {how:?}"));
        let hits = self.server.hits();
        let died = self.server.has_ended() && !self.server.is_killed();
        let is_killed = how == End::Killed && !died;
        self.server.signal(if how == End::Killed { Signal::KILL } else { Signal::TERM });
        let status = self.server.wait();
        let is_killed = is_killed || self.server.is_killed();
        if let Some(hung) = self.server.hung() {
            self.findings.push(format!("HANG: {hung}"));
        } else if !is_killed {
            match status.code() {
                Some(0) if !died => {}
                Some(1) if !died && self.case.is_some_and(|case| case.site.call == "clone3") => {
                    self.findings.push("the end fails because no thread can be started".into());
                }
                Some(1) if !died && self.server.hits() > 0 => {
                    let is_over = hits > 0 && self.case.is_some_and(Case::is_over_at_end);
                    let may_fail = self.state_is_broken() || self.is_lasting();
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
            match disk.lasts {
                Lasts::Always => disk.oracle.die(),
                Lasts::Saved if is_saved => {
                    let flush = disk.oracle.begin_flush();
                    disk.oracle.end_flush(flush, true);
                }
                Lasts::Saved | Lasts::Never => {}
            }
        }
        let (hits, mut sites) = (self.server.hits() + self.beside.0, self.server.sites());
        sites.extend(self.beside.1);
        (Ended { status, is_killed, hits, sites }, self.findings)
    }

    // ---- programs beside the server -------------------------------------------------------------

    /// Runs the program with these words, and has its calls fail. Returns true if it succeeds.
    pub fn run(&mut self, words: &[&str]) -> bool {
        let mut command = Command::new(self.place.program);
        command.args(words).current_dir(&self.place.dir).env_remove("RUST_LOG");
        // No file: the disk may be full.
        let (mut reader, writer) = std::io::pipe().expect("there are descriptors");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(writer);
        let program = match Traced::start(command, &self.place.dir, Arm::AtFile, self.case) {
            Ok(program) => program,
            Err(error) => panic!("{words:?}: {error}"),
        };
        program.step(words.join(" "));
        let status = program.wait();
        let (hits, is_killed) = (program.hits(), program.is_killed());
        self.beside = (hits, program.sites());
        let hung = program.hung();
        // It has the other end of the pipe.
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
            self.findings.push(format!("{words:?}: fails after {hits} failures and says {said:?}"));
        }
        status.success()
    }
}

/// Has a server write its log, and much of it, to a pipe that is small and not read.
fn undrained(command: &mut Command) -> std::io::Result<PipeReader> {
    let (reader, writer) = std::io::pipe()?;
    rustix::pipe::fcntl_setpipe_size(&writer, PIPE_BYTES)?;
    command.stderr(writer).env("RUST_LOG", "debug");
    Ok(reader)
}

/// Returns a verb in words, without the end of a long one.
fn verb_text(method: &str, params: &Value) -> String {
    format!("{method} {params}").chars().take(120).collect()
}
