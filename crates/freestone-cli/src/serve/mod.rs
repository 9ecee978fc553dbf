//! `freestone serve`: creates the devices and sockets, serves until a signal, a verb or the command of `--run`
//! ends the server, and then flushes and removes everything.

pub mod announce;
pub mod events;
mod plan;
pub mod process;
mod reload;
mod single;
mod supervisor;
#[cfg(test)]
mod tests;
mod upgrade;

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result};
use clap::Args;
use freestone::mutants::{self, Mutant};
use freestone::replace;
use freestone_core::work_queue::OwnedQueue;
use freestone_server::config;
use freestone_server::observe::metrics::MetricsArgs;
use freestone_server::observe::page::PageArgs;
use freestone_server::persistence::state_args::StateArgs;
use freestone_server::running::{FlushResult, Running, ShutdownStep};
use freestone_server::service::Service;
use freestone_server::settings::access::AccessArgs;
use freestone_server::settings::handshake::HandshakeArgs;
use freestone_server::settings::tls::TlsArgs;
use freestone_server::upgrade::Handover;
use freestone_server::verbs::text::keys;
use freestone_spec::machine::mmap_large_allocations;
use tempfile::TempDir;
use tracing::{error, info, warn};

use self::announce::{announce, run_command};
use self::events::{Event, Events, WaitOutcome};
use self::plan::plan;
pub use self::process::survive_file_size_limit;
use self::supervisor::Pidfile;
use self::upgrade::NextProgram;
use crate::{help, output};

/// Specification of the device that is served if no device is specified.
const DEFAULT_DEVICE: &str = "ram0=ram,disksize=1G";

const NBD_HELP: &str = "NBD address to listen on, unix:PATH or tcp:HOST:PORT; can be repeated [default: unix:nbd.sock in \
    $XDG_RUNTIME_DIR/freestone, else in /tmp/freestone-UID; with --run in a new directory]";

const ALLOW_HELP: &str = "Clients that may connect to the addresses of --nbd: networks (10.0.0.0/8, ::1) for TCP, uid:USER and \
    gid:GROUP for Unix sockets";

const CONTROL_HELP: &str = "Path of the control socket [default: $FREESTONE_CONTROL unless --run, else control.sock in the same \
    directory; none with --single]";

const UBLK_HELP: &str = "Also export devices as block devices of this machine (/dev/ublkbN, printed); removes those that a \
    killed server left";

const MAX_CONNECTIONS_HELP: &str =
    "Limit of NBD connections, each with up to 35 MiB of buffers [default: 1024]";

const MAX_MEMORY_HELP: &str =
    "Limit of request data in flight over all connections; further requests wait [default: 256M]";

// Headings of the options in the help.
const ADDRESSES: &str = "Addresses";
const LIMITS: &str = "Connection limits";
const CONFIGURATION: &str = "Configuration";
const PROCESS: &str = "Process";

/// The command line of `serve`.
#[derive(Debug, Args)]
#[allow(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub struct ServeArgs {
    /// Devices, see below [default: ram0=ram,disksize=1G]
    #[arg(value_name = "DEVICE", value_parser = keys::words_parser())]
    devices: Vec<String>,
    /// NBD addresses.
    #[arg(long, value_name = "ADDR", help = NBD_HELP, help_heading = ADDRESSES, value_parser = keys::words_parser())]
    nbd: Vec<String>,
    /// Allow list of the NBD addresses.
    #[arg(long, value_name = "WHO", help = ALLOW_HELP, help_heading = ADDRESSES, value_delimiter = ',')]
    allow: Vec<String>,
    /// ublk block devices.
    #[arg(long, help = UBLK_HELP, help_heading = ADDRESSES)]
    ublk: bool,
    /// Control socket.
    #[arg(long, value_name = "PATH", help = CONTROL_HELP, help_heading = ADDRESSES)]
    control: Option<PathBuf>,
    /// Second control socket that accepts only commands that change nothing
    #[arg(long, value_name = "PATH", help_heading = ADDRESSES)]
    control_read_only: Option<PathBuf>,
    /// Limit of connections.
    #[arg(long, value_name = "N", help = MAX_CONNECTIONS_HELP, help_heading = LIMITS)]
    #[arg(value_parser = clap::value_parser!(u32).range(config::MAX_CONNECTIONS_RANGE))]
    max_connections: Option<u32>,
    /// Limit of memory for requests in flight.
    #[arg(
        long,
        value_name = "SIZE",
        help = MAX_MEMORY_HELP,
        help_heading = LIMITS,
        value_parser = config::parse_memory_in_flight
    )]
    max_memory_in_flight: Option<u64>,
    #[command(flatten)]
    handshake: HandshakeArgs,
    #[command(flatten)]
    state: StateArgs,
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    tls: TlsArgs,
    #[command(flatten)]
    metrics: MetricsArgs,
    #[command(flatten)]
    page: PageArgs,
    /// Serve one client on standard input and exit when it leaves, for inetd, systemd (Accept=yes) and ssh
    #[arg(long, conflicts_with_all = ["nbd", "run"], help_heading = PROCESS)]
    single: bool,
    /// TOML file with devices ([[device]]) and options; the command line adds devices and overrides options
    #[arg(long, value_name = "FILE", help_heading = CONFIGURATION)]
    config: Option<PathBuf>,
    /// Check devices, file and options without opening anything, then exit
    #[arg(long, help_heading = CONFIGURATION)]
    check: bool,
    /// Write the process number to FILE once the server is ready; removed at the end
    #[arg(long, value_name = "FILE", help_heading = PROCESS)]
    pidfile: Option<PathBuf>,
    /// Exit when the parent process exits
    #[arg(long, help_heading = PROCESS)]
    exit_with_parent: bool,
    /// Serve while `sh -c CMD` runs and exit with its status; sets $uri, $nbd, $unixsocket and $control
    #[arg(long, value_name = "CMD", help_heading = PROCESS)]
    run: Option<String>,
    /// Print the keys of all kinds of device
    #[arg(long, help_heading = "Help", exclusive = true)]
    help_devices: bool,
}

/// Files of the process beside the sockets of its server. Dropping removes them.
struct ProcessFiles {
    pidfile: Option<Pidfile>,
    /// Temporary directory of the sockets.
    private: Option<TempDir>,
}

impl ProcessFiles {
    fn remove(&mut self) {
        self.pidfile = None;
        self.private = None;
    }
}

/// Stops opening devices at once when a signal ends the server.
fn abandon_at_signal(service: &Service, events: &Events) {
    let registry = Arc::downgrade(&service.registry);
    events.at_signal(move || _ = registry.upgrade().map(|registry| registry.parallel_open.abandon()));
}

/// Reports a step of the shutdown to the service manager.
fn report_step(step: ShutdownStep) {
    match step {
        ShutdownStep::Save(time) => supervisor::notify_stopping_within("saving content", time),
        ShutdownStep::Flush => supervisor::notify_stopping("flushing devices"),
    }
}

/// Runs the server. Returns the exit status: 0, the status of the command of `--run`, or 1 if devices could not
/// be saved, flushed or closed.
pub fn serve(args: &ServeArgs) -> Result<ExitCode> {
    if args.help_devices {
        return Ok(help::print(&help::devices::all()));
    }
    if args.check {
        let answers = upgrade::answer_check()?;
        let devices = plan(args, None)?.0.devices.len();
        if answers {
            upgrade::print_can_take_over();
            return Ok(ExitCode::SUCCESS);
        }
        let plural = if devices == 1 { "" } else { "s" };
        // A closed stdout is ignored.
        let _ = writeln!(io::stdout(), "{devices} device{plural}: the configuration is valid");
        return Ok(ExitCode::SUCCESS);
    }
    let mut inherited = upgrade::take()?;
    match (serve_after(args, &mut inherited), inherited) {
        (Err(why), Some(inherited)) => Err(upgrade::execute_former(inherited, why)),
        (outcome, _) => outcome,
    }
}

/// Runs the server, as the successor of the program that has passed `inherited`, if there is one. Sets `inherited` to `None`
/// once the server has started.
fn serve_after(args: &ServeArgs, inherited: &mut Option<Handover>) -> Result<ExitCode> {
    let parent = supervisor::parent();
    process::become_io_flusher();
    mmap_large_allocations();
    let open_files = process::raise_open_files();
    output::detach()?;
    // `_flush` is dropped after the server, whose shutdown may log.
    let _flush = output::FlushAtEnd;
    supervisor::open_manager();
    // Signals are handled before a socket exists: their default action would leave the socket behind.
    let events = Events::listen()?;
    let standby = |name| OwnedQueue::started(name).context("cannot start the threads of the shutdown");
    let (ender, closer) = (standby("shutdown")?, standby("close")?);
    if args.exit_with_parent {
        supervisor::end_with_parent(parent)?;
    }
    let client = args.single.then(single::take).transpose()?;
    // The descriptors are duplicated, so that the predecessor gets them if this program cannot start.
    let copy = inherited.as_ref().map(Handover::try_clone).transpose()?;
    let (plan, private) = plan(args, copy)?;
    let control = plan.control.clone().unwrap_or_default();
    // The files are removed after the server has ended.
    let mut files = ProcessFiles { pidfile: None, private };
    let next = NextProgram::default();
    let on_service = |service: &Arc<Service>| {
        abandon_at_signal(service, &events);
        if args.run.is_none() && !args.single {
            next.allow(service, events.sender());
        }
    };
    let mut running = Running::start(plan, on_service, Arc::new(report_step))?;
    if let Some(inherited) = inherited.take() {
        upgrade::complete(&running.service, &inherited, running.adopted_connections);
    }
    let end = events.sender();
    // A failed send is ignored: the main thread no longer waits for events.
    let _ = running.service.end.set(Box::new(move || _ = end.send(Event::Verb)));
    // From here on, an error leads to a clean shutdown.
    let outcome = serve_until_end(&running, &mut files, args, client, &events, &control, open_files);
    if let (Ok(None), Some(program)) = (&outcome, next.take()) {
        // The successor reports that it is ready.
        supervisor::notify_reloading();
        let mut handover = running.pass_on();
        handover.ends = events.has_end_request();
        return Err(upgrade::execute(&program, handover));
    }
    info!("ending");
    supervisor::notify_stopping("waiting for requests");
    if mutants::on(Mutant::EndStartsThread) && OwnedQueue::started("shutdown").is_err() {
        exit_at_once(1);
    }
    let (flushed_by, closed_by) = (events.sender(), events.sender());
    // A failed send is ignored: the main thread no longer waits for events.
    let flushed = running.shutdown(&ender, move || _ = flushed_by.send(Event::Ended));
    if let WaitOutcome::Signal(signal) = events::wait_for_end(&events, None) {
        // A second signal ends the process at once.
        running.remove_paths();
        files.remove();
        exit_at_once(events::STATUS_OF_SIGNAL_0 + signal);
    }
    let FlushResult { failed, end } =
        flushed.recv().unwrap_or(FlushResult { failed: 1, end: Instant::now() });
    // Clients do not depend on the rest of the shutdown, so paths are removed before devices are closed.
    running.remove_paths();
    files.remove();
    supervisor::notify_stopping("closing devices");
    let unclosed = running.close(&closer, move || _ = closed_by.send(Event::Ended), end);
    let unclosed = match events::wait_for_end(&events, Some(end)) {
        // The thread sends the number before it ends, unless it panics.
        WaitOutcome::Ended => unclosed.recv().unwrap_or(1),
        WaitOutcome::Signal(signal) => exit_at_once(events::STATUS_OF_SIGNAL_0 + signal),
        WaitOutcome::TimedOut => {
            error!("a disk hangs or a verb is still running: some devices are not closed");
            1
        }
    };
    // A verb may still be writing a temporary file to a hung disk.
    replace::remove_temporary_files();
    // A device that was not closed in time lacks the record of a clean close, so the exit status must report it.
    let is_incomplete = unclosed > 0 || failed > 0 && !mutants::on(Mutant::EndHidesLoss);
    outcome.map(|status| {
        let status = status.unwrap_or_default();
        ExitCode::from(if is_incomplete && status == 0 { 1 } else { status })
    })
}

/// Serves until an event ends the server. Returns the exit status of the command of `--run`, or 0. Returns `None` if
/// a successor takes its place.
fn serve_until_end(
    running: &Running,
    files: &mut ProcessFiles,
    args: &ServeArgs,
    client: Option<single::Client>,
    events: &Events,
    control: &Path,
    open_files: Option<u64>,
) -> Result<Option<u8>> {
    files.pidfile = args.pidfile.as_deref().map(Pidfile::write).transpose()?;
    supervisor::notify_ready(running.service.registry.all().len());
    if args.run.is_some() || client.is_some() {
        // Standard output belongs to the command or the client, so the seeds are logged and not announced.
        for seed in running.service.registry.seeds() {
            warn!("{seed}");
        }
    }
    if let Some(command) = &args.run {
        return events::run_to_exit(events, run_command(command, open_files, &running.service, control))
            .map(Some);
    }
    match client {
        Some(client) => client.serve(&running.service, events.sender())?,
        None => announce(&running.service, control),
    }
    let (config, service) = (args.config.as_deref(), running.service.weak());
    let had_terminal = events::has_terminal();
    let has_files = config.is_some() || running.service.exports.tls.mode().is_some();
    let on_hangup = || {
        // A terminal that hangs up ends the server; a SIGHUP of another source reloads the files.
        let is_reload = has_files && (!had_terminal || events::has_terminal());
        if is_reload {
            reload::reload_in_background(&service, config);
        }
        is_reload
    };
    Ok((!events::wait_for_end_request(events, &on_hangup)?).then_some(0))
}

fn exit_at_once(status: i32) -> ! {
    replace::remove_temporary_files();
    output::flush();
    std::process::exit(status)
}
