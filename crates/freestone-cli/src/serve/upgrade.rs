//! The upgrade of this server: checks that a program can be its successor, and executes that program.

use std::env;
use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use anyhow::{Context as _, Result};
use freestone_control::protocol::RpcError;
use freestone_core::sync::Mutex;
use freestone_server::service::Service;
use freestone_server::upgrade::{Handover, NamedDescriptor, UpgradeOutcome, Versions};
use freestone_spec::path_text;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, PidfdFlags, Signal, getpid, kill_process, pidfd_open};
use tracing::{error, info};

use super::events::Event;
use super::supervisor::VARIABLES;
use crate::{output, pidfd};

/// Environment variable with the number of the descriptor of the [`Handover`].
const VARIABLE: &str = "FREESTONE_HANDOVER";
/// Line that a possible successor prints.
const CAN_TAKE_OVER: &str = "freestone: can take over";
/// Longest wait for the answer of a possible successor.
const CHECK_MAX: Duration = Duration::from_secs(20);
/// Maximum length of the output of a possible successor that is read, in bytes.
const OUTPUT_MAX: u64 = 64 << 10;

/// Program that a client has requested as the successor.
#[derive(Default, Clone)]
pub struct NextProgram(Arc<Mutex<Option<PathBuf>>>);

impl NextProgram {
    /// Lets clients upgrade the server. An upgrade begins with an event.
    pub fn allow(&self, service: &Service, events: Sender<Event>) {
        let next = self.clone();
        let events = Mutex::new(events);
        // The service is new, so `set` does not fail.
        let _ = service.upgrades.begin.set(Box::new(move |program| {
            check(program)?;
            let mut next = next.0.lock();
            if next.is_some() {
                return Err(rpc_error!(EBUSY, "the server is being upgraded"));
            }
            *next = Some(program.to_owned());
            // A failed send is ignored: the main thread no longer waits for events.
            let _ = events.lock().send(Event::Upgrade);
            Ok(())
        }));
    }

    /// Returns the program.
    pub fn take(&self) -> Option<PathBuf> {
        self.0.lock().take()
    }
}

/// Fails unless the program answers that it can be the successor of this one, with the same arguments.
fn check(program: &Path) -> Result<(), RpcError> {
    let at = program.display();
    let failed = |why: String| rpc_error!(EINVAL, "{at}: cannot take over: {why}");
    let description = Versions::describe().map_err(|why| failed(why.to_string()))?;
    let mut command = of_program(program, &arguments(), &description);
    command.arg("--check").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    fcntl_setfd(&description, FdFlags::empty()).map_err(|errno| failed(errno.to_string()))?;
    let child = super::process::spawn(&mut command);
    drop(description);
    let mut child = child.map_err(|why| failed(why.to_string()))?;
    let process = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
    let has_ended = process.map_err(Into::into).and_then(|process| pidfd::wait(process, Some(CHECK_MAX)));
    if !matches!(has_ended, Ok(true)) {
        let _ = child.kill();
    }
    let status = child.wait().map_err(|why| failed(why.to_string()))?;
    let (mut out, mut errors) = (String::new(), Vec::new());
    if let Some(pipe) = child.stdout.take() {
        // Output that is not text does not contain the line.
        let _ = pipe.take(OUTPUT_MAX).read_to_string(&mut out);
    }
    if let Some(pipe) = child.stderr.take() {
        let _ = pipe.take(OUTPUT_MAX).read_to_end(&mut errors);
    }
    if status.success() && out.lines().any(|line| line == CAN_TAKE_OVER) {
        return Ok(());
    }
    let errors = String::from_utf8_lossy(&errors);
    let why = errors
        .lines()
        .last()
        .map_or("it is another program, or too old", |line| line.strip_prefix("freestone: ").unwrap_or(line));
    Err(failed(why.to_owned()))
}

/// Returns the command line of this program.
fn arguments() -> Vec<String> {
    env::args_os().map(|word| path_text::text(Path::new(&word))).collect()
}

/// Returns the command that starts a program in place of another one, with the same arguments.
fn of_program(program: &Path, arguments: &[String], description: &OwnedFd) -> Command {
    let mut words = arguments.iter().map(|text| path_text::path(text));
    let mut command = Command::new(program);
    command.arg0(words.next().unwrap_or_else(|| "freestone".into()));
    command.args(words).env(VARIABLE, description.as_raw_fd().to_string());
    // The successor gets the sockets of the service manager with the others.
    for variable in VARIABLES.into_iter().filter(|name| name.starts_with("LISTEN_")) {
        command.env_remove(variable);
    }
    command
}

/// Executes the successor. If that fails, executes this program again. Returns only if that fails, too.
pub fn execute(program: &Path, mut handover: Handover) -> anyhow::Error {
    info!("{}: takes over", program.display());
    handover.arguments = arguments();
    let former = File::open("/proc/self/exe");
    handover.former =
        former.ok().map(|file| NamedDescriptor { name: program_name(), descriptor: file.into() });
    let why = execute_with(program, &handover);
    error!("{}: cannot be executed: {why:#}", program.display());
    handover.former = None;
    handover.error = Some(format!("{}: cannot be executed: {why:#}", program.display()));
    execute_with(Path::new("/proc/self/exe"), &handover)
}

/// Executes the predecessor again, because this program could not start. Returns the error of the start if this program is
/// itself executed again, or the predecessor cannot be executed.
pub fn execute_former(mut handover: Handover, why: anyhow::Error) -> anyhow::Error {
    let Some(former) = handover.former.take() else { return why };
    error!("{why:#}; the former program continues");
    handover.error = Some(format!("{why:#}"));
    let path = PathBuf::from(format!("/proc/self/fd/{}", former.descriptor.as_raw_fd()));
    let failed = execute_with(&path, &handover);
    why.context(format!("{}: cannot be executed again: {failed:#}", former.name))
}

fn execute_with(program: &Path, handover: &Handover) -> anyhow::Error {
    let description = match handover.write() {
        Ok(description) => description,
        Err(why) => return anyhow::Error::new(why).context("cannot describe the server"),
    };
    output::flush();
    of_program(program, &handover.arguments, &description).exec().into()
}

fn program_name() -> String {
    std::fs::read_link("/proc/self/exe").map(|path| path_text::text(&path)).unwrap_or_default()
}

/// Returns the number of the descriptor of the [`Handover`], or `None` if this program has no predecessor.
fn descriptor() -> Result<Option<RawFd>> {
    let Some(number) = env::var_os(VARIABLE) else { return Ok(None) };
    let number = number.to_str().and_then(|text| text.parse().ok());
    number.map(Some).with_context(|| format!("{VARIABLE}: is not the number of a descriptor"))
}

/// Checks whether this program can be the successor of the one that started it (`serve --check`). Returns false if that
/// program did not ask.
///
/// # Errors
/// This program does not know a version that the other one uses.
pub fn answer_check() -> Result<bool> {
    let Some(number) = descriptor()? else { return Ok(false) };
    Versions::check(number)?;
    Ok(true)
}

/// Prints the answer of a possible successor.
pub fn print_can_take_over() {
    use std::io::Write as _;
    // A closed stdout is ignored: the predecessor does not wait for the answer then.
    let _ = writeln!(std::io::stdout(), "{CAN_TAKE_OVER}");
}

/// Takes over the sockets and descriptors of the predecessor. Returns `None` if there is none.
///
/// # Errors
/// The description cannot be read.
pub fn take() -> Result<Option<Handover>> {
    let Some(number) = descriptor()? else { return Ok(None) };
    // After an execution by descriptor the name would be its number.
    let _ = rustix::thread::set_name(c"freestone");
    Ok(Some(Handover::read(number)?))
}

/// Records the end of the upgrade, and reports it to the service manager.
pub fn complete(service: &Service, handover: &Handover, connections: usize) {
    let paused = Handover::now().saturating_sub(handover.paused_at);
    let outcome = UpgradeOutcome {
        version: env!("FREESTONE_VERSION").to_owned(),
        error: handover.error.clone(),
        paused_ms: u64::try_from(paused.as_millis()).unwrap_or(u64::MAX),
        connections,
    };
    match &outcome.error {
        None => info!("has taken over: {connections} connections continue, after {} ms", outcome.paused_ms),
        Some(why) => error!("the upgrade failed, this program continues: {why}"),
    }
    service.upgrades.complete(handover.count, outcome);
    if handover.ends {
        // A process may always send a signal to itself.
        let _ = kill_process(getpid(), Signal::TERM);
    }
}
