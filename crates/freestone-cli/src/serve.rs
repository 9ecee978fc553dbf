//! `freestone serve`: creates the devices and sockets, serves until a signal, a verb or the command of `--run`
//! ends the server, and then flushes and removes everything.

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
use freestone_spec::machine::mmap_large_allocations;
use signal_hook::consts::SIGTERM;
use tempfile::TempDir;
use tracing::{error, info, warn};

use self::plan::Plan;
use crate::access::AccessArgs;
use crate::announce::{announce, run_command};
use crate::control::server::ControlServer;
use crate::control::socket::{PrivateSocket, SocketPath};
use crate::declared::DeclaredDevice;
use crate::device_shutdown::{self, Closing};
use crate::events::{self, Event, Events, WaitOutcome};
use crate::handshake::HandshakeArgs;
use crate::help;
use crate::http::HttpServer;
use crate::metrics::{MetricsArgs, MetricsConfig, MetricsSite};
use crate::output;
use crate::page::{PageArgs, PageSite};
use crate::pending_devices;
use crate::process;
use crate::reload;
use crate::saves::Saves;
use crate::service::Service;
use crate::single;
use crate::standby::Standby;
use crate::start::{self, NewDevice};
use crate::state_args::{StateArgs, StateSettings};
use crate::supervisor::{self, Pidfile};
use crate::tls::TlsArgs;
use crate::verbs;

/// Specification of the device that is served if no device is specified.
const DEFAULT_DEVICE: &str = "ram0=ram,disksize=1G";
/// Longest wait of the shutdown for requests in flight.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);
/// Longest wait of the shutdown for running jobs.
const JOBS_GRACE: Duration = Duration::from_secs(2);

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
    #[arg(value_name = "DEVICE", value_parser = verbs::keys::words_parser())]
    devices: Vec<String>,
    /// NBD addresses.
    #[arg(long, value_name = "ADDR", help = NBD_HELP, help_heading = ADDRESSES, value_parser = verbs::keys::words_parser())]
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

/// Result of flushing the devices at shutdown.
struct FlushResult {
    /// Number of devices that could not be saved, flushed or removed.
    failed: usize,
    /// Time by which the devices must be closed.
    end: Instant,
}

/// A listening server. Dropping it, even during a panic, removes its sockets, and saves and flushes the
/// devices.
struct Running {
    service: Arc<Service>,
    /// True if clients may have connected and the devices have not been flushed since.
    is_in_use: bool,
    /// Servers of the control sockets.
    controls: Vec<Arc<ControlServer>>,
    /// HTTP servers of the metrics and the web page.
    http: Vec<HttpServer>,
    /// Paths of the Unix sockets at the server's NBD addresses, removed when dropped.
    sockets: Vec<SocketPath>,
    pidfile: Option<Pidfile>,
    private: Option<TempDir>,
}

impl Running {
    fn start(plan: Plan, events: &Events) -> Result<Self> {
        let Plan { devices, addresses, sockets, control, access, tls, limits, ublk, state: asked, .. } = plan;
        let Plan { metrics, page, private, control_read_only, allow, .. } = plan;
        let (control_access, read_only_access) = (access.control.resolved, access.control_read_only.resolved);
        let service = Service::new(limits, access, tls);
        let registry = Arc::downgrade(&service.registry);
        events.at_signal(move || _ = registry.upgrade().map(|registry| registry.parallel_open.abandon()));
        service.exports.tls.begin(&service.exports.nbd)?;
        if let Some(control) = &control {
            // The control socket is cleared first, because that fails if another server is running.
            PrivateSocket::clear(control)?;
            let _ = service.control.set(control.clone());
        }
        if let Some(control) = &control_read_only {
            PrivateSocket::clear(control)?;
            let _ = service.control_read_only.set(control.clone());
        }
        service.as_block_devices.store(ublk, Ordering::SeqCst);
        service.exports.plan_server_addresses(&addresses);
        if let Some((list, is_fixed)) = allow {
            service.exports.init_server_allow_list(Some(list), is_fixed);
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
            // No device is recorded, so this only marks saved content as unused, or removes it if it was marked long
            // ago.
            service.saves.find(empty)?;
        }
        let known = known.filter(|topology| topology.devices().next().is_some());
        let is_applied = asked.as_ref().is_some_and(|asked| asked.apply);
        let of_state = known.is_some();
        let (mut created, pending, changes) = match known {
            Some(topology) => {
                // Devices must exist before `--apply` can change them, so the start waits for all remote servers.
                let until = (!is_applied).then(|| Instant::now() + pending_devices::GRACE);
                let (created, pending) = pending_devices::set_up_state(&service, &topology, until)?;
                (created, Some(pending), is_applied.then_some(devices))
            }
            None => (start::set_up_declared(&service, devices)?, None, None),
        };
        if of_state && mutants::on(Mutant::GoesOnEarly) {
            start::record_devices(&service, &mut created);
        }
        // Steps that can fail come first. Then the state records that its devices are in use, and clients can
        // connect.
        for address in &addresses {
            if let Address::Unix(path) = service.exports.listen_at_server_address(address)? {
                let socket =
                    SocketPath::adopt(&path).with_context(|| format!("{}: is gone", path.display()))?;
                running.sockets.push(socket);
            }
        }
        for socket in sockets {
            service.exports.adopt_server_socket(socket)?;
        }
        if let Some(MetricsConfig { at, forks }) = metrics {
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
        if created.iter().any(NewDevice::is_block_device) {
            remove_stale_block_devices();
        }
        running.is_in_use = true;
        if of_state {
            start::record_devices(&service, &mut created);
            start::begin_merges(&service, &mut created);
        } else {
            start::publish_new(&service, &created)?;
        }
        running.publish(&created, of_state, changes.zip(asked), &control_access, &read_only_access)?;
        if let Some(pending) = pending {
            pending.begin(&service);
        }
        Ok(running)
    }

    /// Publishes the devices of the state, applies the changes of `--apply`, and then opens the control sockets.
    fn publish(
        &mut self,
        created: &[NewDevice],
        of_state: bool,
        changes: Option<(Vec<DeclaredDevice>, StateSettings)>,
        control_access: &Access,
        read_only_access: &Access,
    ) -> Result<()> {
        let service = &self.service;
        if of_state {
            start::publish(service, created)?;
        }
        if let Some((devices, asked)) = changes {
            start::apply_declared(service, &devices, asked.has_file)?;
        }
        log_leftover_files(service);
        if let Some(control) = service.control_read_only.get() {
            let socket = PrivateSocket::bind(control, read_only_access)?;
            let answers = Arc::new(verbs::ReadOnly(Arc::clone(service)));
            self.controls.push(Arc::new(ControlServer::start_read_only(socket, answers)?));
        }
        // The control socket is opened last, because its existence means that the server is ready.
        if let Some(control) = service.control.get() {
            let socket = PrivateSocket::bind(control, control_access)?;
            self.controls.push(Arc::new(ControlServer::start(socket, Arc::clone(service) as _)?));
        }
        Ok(())
    }

    /// Begins the shutdown: refuses new work. Returns a function that ends exports and verbs, and saves and flushes the
    /// devices; it may block.
    fn begin_end(&mut self) -> impl FnOnce() -> FlushResult + Send + 'static + use<> {
        self.is_in_use = false;
        self.service.jobs.end_all();
        self.service.registry.parallel_open.abandon();
        for entry in self.service.registry.all() {
            // Requests held by a fault rule keep devices alive, which are flushed when they are dropped.
            if let Some(faults) = &entry.layers.faults {
                faults.close();
            }
        }
        let all = self.service.registry.all();
        let no_waiting: Vec<_> =
            all.iter().flat_map(|entry| self.service.exports.bypass_waiting(entry)).collect();
        drop(all);
        self.service.records.close();
        let (service, controls) = (Arc::clone(&self.service), self.controls.clone());
        move || {
            // Exports end first, because the following steps may need the threads and descriptors of connections.
            service.exports.shutdown(SHUTDOWN_GRACE);
            // Control sockets stop before the flush, because verbs write to devices as well.
            for control in controls {
                control.stop();
            }
            service.jobs.wait_ended(JOBS_GRACE);
            if let Some(time) = service.saves.timeout() {
                supervisor::notify_stopping_within("saving content", time + device_shutdown::FLUSH_MAX);
            }
            let unsaved = Saves::end(&service);
            supervisor::notify_stopping("flushing devices");
            let end = Instant::now() + device_shutdown::FLUSH_MAX;
            let failed = unsaved
                + device_shutdown::flush(&service.registry.all(), end)
                + service.pending_removals.wait(end);
            drop((service, no_waiting));
            FlushResult { failed, end }
        }
    }

    /// Shuts the server down on the given thread, and sends [`Event::Ended`] when that is done. Returns a channel for
    /// the result. Afterwards [`Drop`] can only wait for disks.
    fn shutdown(&mut self, thread: Standby, events: Sender<Event>) -> Receiver<FlushResult> {
        let finish = self.begin_end();
        let (sender, flushed) = mpsc::channel();
        thread.run(move || {
            let _ended = SendEnded(events);
            let _ = sender.send(finish());
        });
        flushed
    }

    /// Closes the devices on the given thread, until `end` at most, and sends [`Event::Ended`] when that is done.
    /// Returns a channel for the number of devices that could not be closed.
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

    /// Removes sockets, pidfile and temporary directory, without waiting.
    fn remove_paths(&mut self) {
        for control in &self.controls {
            control.remove_path();
        }
        self.sockets.clear();
        self.pidfile = None;
        self.private = None;
    }
}

/// Guard that sends [`Event::Ended`] when dropped, also by a panic.
struct SendEnded(Sender<Event>);

impl Drop for SendEnded {
    fn drop(&mut self) {
        // The send fails only if the main thread no longer waits for the event.
        let _ = self.0.send(Event::Ended);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.is_in_use {
            let finish = self.begin_end();
            finish();
        }
        self.controls.clear();
        self.http.clear();
        self.service.exports.shutdown(Duration::ZERO);
    }
}

/// Runs the server. Returns the exit status: 0, the status of the command of `--run`, or 1 if devices could not
/// be saved, flushed or closed.
pub fn serve(args: &ServeArgs) -> Result<ExitCode> {
    if args.help_devices {
        return Ok(help::print(&help::devices::all()));
    }
    if args.check {
        let devices = Plan::new(args)?.devices.len();
        let plural = if devices == 1 { "" } else { "s" };
        // A closed stdout is ignored.
        let _ = writeln!(io::stdout(), "{devices} device{plural}: the configuration is valid");
        return Ok(ExitCode::SUCCESS);
    }
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
    let standby = |name| Standby::start(name).context("cannot start the threads of the shutdown");
    let (ender, closer) = (standby("shutdown")?, standby("close")?);
    if args.exit_with_parent {
        supervisor::end_with_parent(parent)?;
    }
    let client = args.single.then(single::take).transpose()?;
    let plan = Plan::new(args)?;
    let control = plan.control.clone().unwrap_or_default();
    let mut running = Running::start(plan, &events)?;
    let end = events.sender();
    // A failed send is ignored: the main thread no longer waits for events.
    let _ = running.service.end.set(Box::new(move || _ = end.send(Event::Signal(SIGTERM))));
    // From here on, an error leads to a clean shutdown.
    let outcome = serve_until_end(&mut running, args, client, &events, &control, open_files);
    info!("ending");
    supervisor::notify_stopping("waiting for requests");
    if mutants::on(Mutant::EndStartsThread) && Standby::start("shutdown").is_err() {
        exit_at_once(1);
    }
    let flushed = running.shutdown(ender, events.sender());
    if let WaitOutcome::Signal(signal) = events::wait_for_end(&events, None) {
        // A second signal ends the process at once.
        running.remove_paths();
        exit_at_once(events::STATUS_OF_SIGNAL_0 + signal);
    }
    let FlushResult { failed, end } =
        flushed.recv().unwrap_or(FlushResult { failed: 1, end: Instant::now() });
    // Clients do not depend on the rest of the shutdown, so paths are removed before devices are closed.
    running.remove_paths();
    supervisor::notify_stopping("closing devices");
    let unclosed = running.close(closer, events.sender(), end);
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
    outcome.map(|status| ExitCode::from(if is_incomplete && status == 0 { 1 } else { status }))
}

/// Serves until an event ends the server. Returns the exit status of the command of `--run`, or 0.
fn serve_until_end(
    running: &mut Running,
    args: &ServeArgs,
    client: Option<single::Client>,
    events: &Events,
    control: &Path,
    open_files: Option<u64>,
) -> Result<u8> {
    running.pidfile = args.pidfile.as_deref().map(Pidfile::write).transpose()?;
    supervisor::notify_ready(running.service.registry.all().len());
    if args.run.is_some() || client.is_some() {
        // Standard output belongs to the command or the client, so the seeds are logged and not announced.
        for seed in running.service.registry.seeds() {
            warn!("{seed}");
        }
    }
    if let Some(command) = &args.run {
        return events::run_to_exit(events, run_command(command, open_files, &running.service, control));
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
    events::wait_for_end_request(events, &on_hangup).map(|()| 0)
}

fn exit_at_once(status: i32) -> ! {
    replace::remove_temporary_files();
    output::flush();
    std::process::exit(status)
}

/// Removes ublk devices that killed servers have left in the kernel.
fn remove_stale_block_devices() {
    match freestone_ublk::remove_stale_devices() {
        Ok(ids) => ids.iter().for_each(|id| warn!("/dev/ublkb{id}: was left by a killed server: removed")),
        Err(error) => warn!("cannot remove the block devices of killed servers: {error}"),
    }
}

/// Logs unfinished files that an interrupted save has left in the directories of images.
fn log_leftover_files(service: &Service) {
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
