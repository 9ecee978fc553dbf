//! `freestone serve`: sets up what was asked for, runs until it is told to end, leaves nothing
//! behind.

mod plan;

use std::collections::HashSet;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Args;
use freestone::mutants::{self, Mutant};
use freestone::replace;
use freestone_nbd::{Access, Address};
use freestone_spec::config;
use freestone_spec::machine::keep_large_blocks_apart;
use signal_hook::consts::SIGTERM;
use tempfile::TempDir;
use tracing::{error, info, warn};

use self::plan::Plan;
use crate::access::AccessArgs;
use crate::announce::{announce, run_command};
use crate::apply;
use crate::control::server::ControlServer;
use crate::control::socket::{PrivateSocket, SocketPath};
use crate::declared::Declared;
use crate::ending::{self, Closing};
use crate::handshake::HandshakeArgs;
use crate::http::HttpServer;
use crate::late;
use crate::metrics::{MetricsArgs, MetricsOf, MetricsSite};
use crate::output;
use crate::page::{PageArgs, PageSite};
use crate::process;
use crate::saves::Saves;
use crate::service::Service;
use crate::single;
use crate::standby::Standby;
use crate::start::{self, Begun};
use crate::started_by::{self, Pidfile};
use crate::state_args::{Asked, StateArgs};
use crate::tls::TlsArgs;
use crate::until::{self, Ended, Event, Events};
use crate::verbs;

/// What is served where nothing was said.
const DEFAULT_DEVICE: &str = "ram0=ram,disksize=1G";
/// How long requests in flight may take when the server ends.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);
/// How long the end of the server waits for verbs in the background.
const JOBS_GRACE: Duration = Duration::from_secs(2);

const NBD_HELP: &str = "Listen for NBD clients at unix:PATH or tcp:HOST:PORT [default: unix:nbd.sock in \
                        $XDG_RUNTIME_DIR/freestone, else in /tmp/freestone-UID; with --run in a fresh directory]";

const ALLOW_HELP: &str = "Let only these connect to the addresses of --nbd: networks (10.0.0.0/8, ::1) by TCP, \
                          uid:USER and gid:GROUP at Unix sockets";

const CONTROL_HELP: &str = "Where the control socket goes [default: $FREESTONE_CONTROL, but for --run; else control.sock \
                            in the same directory; with --single nowhere]";

const UBLK_HELP: &str = "Show what is published as block devices of this machine, too: /dev/ublkbN, which are \
                         printed; what a killed server left of them is removed";

const MAX_CONNECTIONS_HELP: &str = "Serve at most N NBD connections at one time; each can hold 35 MiB \
                                    [default: 1024]";

const MAX_MEMORY_HELP: &str = "Hold at most SIZE of data for requests of all connections; further ones wait \
                               [default: 256M]";

/// The command line of `serve`.
#[derive(Debug, Args)]
#[allow(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub struct ServeArgs {
    /// NAME=KIND[,key=value]..., KIND is ram, fork, snapshot, template, null, file, qcow2 or nbd
    #[arg(value_name = "DEVICE", value_parser = verbs::keys::words_parser())]
    devices: Vec<String>,
    /// NBD addresses.
    #[arg(long, value_name = "ADDR", help = NBD_HELP, value_parser = verbs::keys::words_parser())]
    nbd: Vec<String>,
    /// Who may connect to these.
    #[arg(long, value_name = "WHO", help = ALLOW_HELP, value_delimiter = ',')]
    allow: Vec<String>,
    /// Block devices.
    #[arg(long, help = UBLK_HELP)]
    ublk: bool,
    /// The control socket.
    #[arg(long, value_name = "PATH", help = CONTROL_HELP)]
    control: Option<PathBuf>,
    /// A second control socket, at which only what changes nothing is answered
    #[arg(long, value_name = "PATH")]
    control_read_only: Option<PathBuf>,
    /// Most connections.
    #[arg(long, value_name = "N", help = MAX_CONNECTIONS_HELP)]
    #[arg(value_parser = clap::value_parser!(u32).range(config::MAX_CONNECTIONS_RANGE))]
    max_connections: Option<u32>,
    /// Memory for requests.
    #[arg(long, value_name = "SIZE", help = MAX_MEMORY_HELP, value_parser = config::memory_in_flight)]
    max_memory_in_flight: Option<u64>,
    #[command(flatten)]
    handshake: HandshakeArgs,
    /// The state.
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
    /// Serve the one client that is connected to standard input, and end when it ends; as inetd,
    /// systemd (Accept=yes) and ssh start servers
    #[arg(long, conflicts_with_all = ["nbd", "run"])]
    single: bool,
    /// A TOML file with devices ([[device]]) and what the options above say; the command line adds
    /// devices and replaces the rest
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check the devices, the file and the options, and end; nothing is opened
    #[arg(long)]
    check: bool,
    /// Write the process number to FILE once the server is ready; it is removed at the end
    #[arg(long, value_name = "FILE")]
    pidfile: Option<PathBuf>,
    /// End when the process that has started the server ends
    #[arg(long)]
    exit_with_parent: bool,
    /// Serve while sh -c CMD runs, and end with its exit status; $uri, $nbd, $unixsocket and
    /// $control are set
    #[arg(long, value_name = "CMD")]
    run: Option<String>,
}

/// How the devices were left.
struct Flushed {
    /// How many could not be flushed.
    failed: usize,
    /// When the server has ended, whatever does not.
    end: Instant,
}

/// A server that listens. However this ends, a panic included, its sockets go with it, and what
/// clients may have written is saved and flushed.
struct Running {
    service: Arc<Service>,
    /// Clients may have come, and the devices are not flushed since.
    is_in_use: bool,
    /// The control sockets.
    controls: Vec<Arc<ControlServer>>,
    /// For who watches.
    http: Vec<HttpServer>,
    /// The NBD sockets of the command line.
    sockets: Vec<SocketPath>,
    pidfile: Option<Pidfile>,
    private: Option<TempDir>,
}

impl Running {
    fn start(plan: Plan, events: &Events) -> Result<Self> {
        let Plan { devices, addresses, sockets, control, access, tls, limits, ublk, state: asked, .. } = plan;
        let Plan { metrics, page, private, control_read_only, allow, .. } = plan;
        let (control_access, read_only_access) = (access.control.is, access.control_read_only.is);
        let service = Service::new(limits, access, tls);
        let registry = Arc::downgrade(&service.registry);
        events.at_signal(move || _ = registry.upgrade().map(|registry| registry.ahead.abandon()));
        service.exports.tls.begin(&service.exports.nbd)?;
        if let Some(control) = &control {
            // First of all, because that tells whether another server is there.
            PrivateSocket::clear(control)?;
            let _ = service.control.set(control.clone());
        }
        if let Some(control) = &control_read_only {
            PrivateSocket::clear(control)?;
            let _ = service.control_read_only.set(control.clone());
        }
        service.as_block_devices.store(ublk, Ordering::SeqCst);
        service.exports.plan_home(&addresses);
        if let Some((list, is_fixed)) = allow {
            service.exports.begin_home_allow(Some(list), is_fixed);
        }
        let mut running = Self {
            service: Arc::clone(&service),
            is_in_use: false,
            controls: Vec::new(),
            http: Vec::new(),
            sockets: Vec::new(),
            pidfile: None,
            private,
        };
        let known = asked.as_ref().map(|asked| start::open(&service, asked, &devices)).transpose()?;
        if let Some(empty) = known.as_ref().filter(|topology| topology.devices().next().is_none()) {
            // Marks content that belongs to no device.
            service.saves.find(empty)?;
        }
        let known = known.filter(|topology| topology.devices().next().is_some());
        let is_applied = asked.as_ref().is_some_and(|asked| asked.apply);
        let of_state = known.is_some();
        let (mut begun, late, changes) = match known {
            Some(topology) => {
                // Devices that are to be changed must exist.
                let until = (!is_applied).then(|| Instant::now() + late::GRACE);
                let (begun, late) = late::of_state(&service, &topology, until)?;
                (begun, Some(late), is_applied.then_some(devices))
            }
            None => (start::of_words(&service, devices)?, None, None),
        };
        if of_state && mutants::on(Mutant::GoesOnEarly) {
            start::keep(&service, &mut begun);
        }
        // What may fail comes first: then the state says that its devices go on, and clients see them.
        for address in &addresses {
            if let Address::Unix(path) = service.exports.listen_home(address)? {
                let socket =
                    SocketPath::adopt(&path).with_context(|| format!("{}: is gone", path.display()))?;
                running.sockets.push(socket);
            }
        }
        for socket in sockets {
            service.exports.adopt_home(socket)?;
        }
        if let Some(MetricsOf { at, forks }) = metrics {
            let server = HttpServer::start(at, MetricsSite::new(&service, forks))?;
            let _ = service.metrics_url.set(server.url().to_owned());
            running.http.push(server);
        }
        if let Some(at) = page {
            let server = HttpServer::start(at, PageSite::new(&service))?;
            let _ = service.http_url.set(server.url().to_owned());
            running.http.push(server);
        }
        Saves::run(&service).context("cannot start the thread that saves")?;
        if begun.iter().any(Begun::is_block_device) {
            remove_left_behind();
        }
        running.is_in_use = true;
        if of_state {
            start::keep(&service, &mut begun);
            start::merge(&service, &mut begun);
        } else {
            start::show_new(&service, &begun)?;
        }
        running.show(&begun, of_state, changes.zip(asked), &control_access, &read_only_access)?;
        if let Some(late) = late {
            late.begin(&service);
        }
        Ok(running)
    }

    /// Shows the devices of a state, makes the changes that were asked for, and then serves the control
    /// sockets.
    fn show(
        &mut self,
        begun: &[Begun],
        of_state: bool,
        changes: Option<(Vec<Declared>, Asked)>,
        control_access: &Access,
        read_only_access: &Access,
    ) -> Result<()> {
        let service = &self.service;
        if of_state {
            start::show(service, begun)?;
        }
        if let Some((devices, asked)) = changes {
            start::bring_in(service, &devices, asked.has_file)?;
        }
        tell_left(service);
        if let Some(control) = service.control_read_only.get() {
            let socket = PrivateSocket::bind(control, read_only_access)?;
            let answers = Arc::new(verbs::ReadOnly(Arc::clone(service)));
            self.controls.push(Arc::new(ControlServer::start_read_only(socket, answers)?));
        }
        // Last of all: where it is, all is ready.
        if let Some(control) = service.control.get() {
            let socket = PrivateSocket::bind(control, control_access)?;
            self.controls.push(Arc::new(ControlServer::start(socket, Arc::clone(service) as _)?));
        }
        Ok(())
    }

    /// Refuses further work, and returns what ends, saves and flushes the rest.
    fn begin_end(&mut self) -> impl FnOnce() -> Flushed + Send + 'static + use<> {
        self.is_in_use = false;
        self.service.jobs.end_all();
        self.service.registry.ahead.abandon();
        for entry in self.service.registry.all() {
            // What is held back keeps devices alive, which flush when they end.
            if let Some(faults) = &entry.layers.faults {
                faults.close();
            }
        }
        let all = self.service.registry.all();
        let waits: Vec<_> = all.iter().flat_map(|entry| self.service.exports.no_waiting(entry)).collect();
        drop(all);
        self.service.records.end();
        let (service, controls) = (Arc::clone(&self.service), self.controls.clone());
        move || {
            // First of all: each connection has a thread and descriptors, which the rest may need.
            service.exports.shutdown(SHUTDOWN_GRACE);
            // Verbs write, too.
            for control in controls {
                control.stop();
            }
            service.jobs.wait_ended(JOBS_GRACE);
            if let Some(time) = service.saves.timeout() {
                started_by::ending_within("content is saved", time + ending::FLUSH_MAX);
            }
            let unsaved = Saves::end(&service);
            started_by::ending("devices are flushed");
            let end = Instant::now() + ending::FLUSH_MAX;
            let failed = unsaved + ending::flush(&service.registry.all(), end) + service.leaving.wait(end);
            drop((service, waits));
            Flushed { failed, end }
        }
    }

    /// Ends the server with grace, on that thread; `events` hears when that is done. Then [`Drop`] has
    /// nothing left to wait for but what a disk does not do at once.
    fn shutdown(&mut self, thread: Standby, events: Sender<Event>) -> Receiver<Flushed> {
        let end = self.begin_end();
        let (sender, flushed) = mpsc::channel();
        thread.run(move || {
            let _ended = SendEnded(events);
            let _ = sender.send(end());
        });
        flushed
    }

    /// Closes the devices until `end`, on that thread; `events` hears when that is done. Returns a channel for
    /// the number of devices that could not be closed.
    fn close(self, thread: Standby, events: Sender<Event>, end: Instant) -> Receiver<usize> {
        let (sender, unclosed) = mpsc::channel();
        thread.run(move || {
            let _ended = SendEnded(events);
            let closing = Closing::of(&self.service.registry.all());
            drop(self);
            let _ = sender.send(closing.wait(end));
        });
        unclosed
    }

    /// Removes what is visible to others, waiting for nobody.
    fn remove_paths(&mut self) {
        for control in &self.controls {
            control.remove_path();
        }
        self.sockets.clear();
        self.pidfile = None;
        self.private = None;
    }
}

/// Sends [`Event::Ended`] when dropped, also by a panic.
struct SendEnded(Sender<Event>);

impl Drop for SendEnded {
    fn drop(&mut self) {
        // The main thread exists until it has received this, or does not wait for it any more.
        let _ = self.0.send(Event::Ended);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.is_in_use {
            let end = self.begin_end();
            end();
        }
        self.controls.clear();
        self.http.clear();
        self.service.exports.shutdown(Duration::ZERO);
    }
}

/// Runs the server. Returns the exit status: 0, or that of the command of `--run`.
pub fn serve(args: &ServeArgs) -> Result<ExitCode> {
    if args.check {
        let devices = Plan::new(args)?.devices.len();
        let plural = if devices == 1 { "" } else { "s" };
        // A closed pipe has heard enough.
        let _ = writeln!(io::stdout(), "{devices} device{plural}, nothing is wrong with the words");
        return Ok(ExitCode::SUCCESS);
    }
    let parent = started_by::parent();
    process::become_io_flusher();
    keep_large_blocks_apart();
    let open_files = process::raise_open_files();
    output::detach()?;
    // Dropped after the server, whose end may log.
    let _flush = output::FlushAtEnd;
    started_by::open_manager();
    // Before any socket exists, so that no signal can leave one behind.
    let events = Events::listen()?;
    let standby = |name| Standby::start(name).context("cannot start the threads of the end");
    let (ender, closer) = (standby("shutdown")?, standby("close")?);
    if args.exit_with_parent {
        started_by::end_with(parent)?;
    }
    let client = args.single.then(single::take).transpose()?;
    let plan = Plan::new(args)?;
    let control = plan.control.clone().unwrap_or_default();
    let mut running = Running::start(plan, &events)?;
    let end = events.sender();
    // It waits for its end, or has done so.
    let _ = running.service.end.set(Box::new(move || _ = end.send(Event::Signal(SIGTERM))));
    // From here on every error is an orderly end.
    let outcome = serve_until_told(&mut running, args, client, &events, &control, open_files);
    info!("ending");
    started_by::ending("requests are answered");
    if mutants::on(Mutant::EndStartsThread) && Standby::start("shutdown").is_err() {
        at_once(1);
    }
    let flushed = running.shutdown(ender, events.sender());
    if let Ended::Signal(signal) = until::ended(&events, None) {
        // Told twice: at once.
        running.remove_paths();
        at_once(until::STATUS_OF_SIGNAL_0 + signal);
    }
    let Flushed { failed, end } = flushed.recv().unwrap_or(Flushed { failed: 1, end: Instant::now() });
    // What else devices do when they end is not what a client waits for, and not waited for longer
    // than that.
    running.remove_paths();
    started_by::ending("devices are closed");
    let unclosed = running.close(closer, events.sender(), end);
    let unclosed = match until::ended(&events, Some(end)) {
        // The thread sends the number before it ends, unless it panics.
        Ended::Well => unclosed.recv().unwrap_or(1),
        Ended::Signal(signal) => at_once(until::STATUS_OF_SIGNAL_0 + signal),
        Ended::Late => {
            error!("a disk or a verb does not end: its devices are not closed");
            1
        }
    };
    // A verb that hangs on a disk did not end with the rest.
    replace::abandon();
    // The next start cannot know that a device was closed in order that was not closed in time.
    let is_incomplete = unclosed > 0 || failed > 0 && !mutants::on(Mutant::EndHidesLoss);
    outcome.map(|status| ExitCode::from(if is_incomplete && status == 0 { 1 } else { status }))
}

/// Serves until something asks for the end. Returns the exit status of the command of `--run`, or 0.
fn serve_until_told(
    running: &mut Running,
    args: &ServeArgs,
    client: Option<single::Client>,
    events: &Events,
    control: &Path,
    open_files: Option<u64>,
) -> Result<u8> {
    running.pidfile = args.pidfile.as_deref().map(Pidfile::write).transpose()?;
    started_by::ready(running.service.registry.all().len());
    if args.run.is_some() || client.is_some() {
        // Standard output is the command's, or the client's.
        for seed in running.service.registry.seeds() {
            warn!("{seed}");
        }
    }
    if let Some(command) = &args.run {
        return until::command_ends(events, run_command(command, open_files, &running.service, control));
    }
    match client {
        Some(client) => client.serve(&running.service, events.sender())?,
        None => announce(&running.service, control),
    }
    let (config, service) = (args.config.as_deref(), running.service.weak());
    let had_terminal = until::has_terminal();
    let has_files = config.is_some() || running.service.exports.tls.mode().is_some();
    let on_hangup = || {
        // Else it is the terminal that hung up.
        let is_meant = has_files && (!had_terminal || until::has_terminal());
        if is_meant {
            apply::again(&service, config);
        }
        is_meant
    };
    until::signalled(events, &on_hangup).map(|()| 0)
}

fn at_once(status: i32) -> ! {
    replace::abandon();
    output::flush();
    std::process::exit(status)
}

/// Block devices of servers that were killed.
fn remove_left_behind() {
    match freestone_ublk::remove_left_behind() {
        Ok(ids) => ids.iter().for_each(|id| warn!("/dev/ublkb{id}: was left by a killed server: removed")),
        Err(error) => warn!("block devices that a killed server left are not removed: {error}"),
    }
}

/// Logs what a crash has left beside the images.
fn tell_left(service: &Service) {
    let mut looked = HashSet::new();
    for entry in service.registry.all() {
        if let Some((path, _)) = entry.spec.kind.image()
            && looked.insert(path.parent().map(Path::to_owned))
        {
            verbs::left_behind(path);
        }
    }
}

#[cfg(test)]
mod tests;
