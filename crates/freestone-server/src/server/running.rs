//! A running server: the order of its start and of its end.

mod succession;

use std::collections::HashSet;
use std::mem;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use freestone::mutants::{self, Mutant};
use freestone_control::http::HttpServer;
use freestone_control::server::ControlServer;
use freestone_control::socket::{PrivateSocket, SocketPath};
use freestone_core::work_queue::OwnedQueue;
use freestone_nbd::{Access, Address};
use freestone_spec::kinds::{Entry, WaitBypass};
use freestone_state::State;
use tracing::warn;

use self::succession::{Inherited, control_socket};
use super::plan::Plan;
use crate::declared::DeclaredDevice;
use crate::devices::shutdown::{self, Closing};
use crate::observe::metrics::{MetricsConfig, MetricsSite};
use crate::observe::page::PageSite;
use crate::persistence::saves::Saves;
use crate::persistence::state_args::StateSettings;
use crate::service::Service;
use crate::startup::adoption::{self, HeldFamilies};
use crate::startup::pending_devices;
use crate::startup::start;
use crate::verbs::{ReadOnly, left_behind};

/// Longest wait of the shutdown for requests in flight.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);
/// Longest wait of a recoverable server for the end of one that was killed.
const KILLED_MAX: Duration = Duration::from_secs(5);
/// Longest wait of the shutdown for running jobs.
const JOBS_GRACE: Duration = Duration::from_secs(2);

/// Result of flushing the devices at shutdown.
pub struct FlushResult {
    /// Number of devices that could not be saved, flushed or removed.
    pub failed: usize,
    /// Time by which the devices must be closed.
    pub end: Instant,
}

/// A step of the shutdown that can take long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShutdownStep {
    /// Content is saved and devices are flushed, within this time.
    Save(Duration),
    /// Devices are flushed.
    Flush,
}

/// Function that is called before each [`ShutdownStep`].
pub type ReportStep = Arc<dyn Fn(ShutdownStep) + Send + Sync>;

/// A listening server. Dropping it, even during a panic, removes its sockets, and saves and flushes the
/// devices.
pub struct Running {
    /// The devices, exports and jobs.
    pub service: Arc<Service>,
    /// True if clients may have connected and the devices have not been flushed since.
    is_in_use: bool,
    /// Servers of the control sockets.
    controls: Vec<Arc<ControlServer>>,
    /// HTTP servers of the metrics and the web page.
    http: Vec<HttpServer>,
    /// Paths of the Unix sockets at the server's NBD addresses, removed when dropped.
    sockets: Vec<SocketPath>,
    /// Addresses whose sockets the service manager has created.
    sockets_of_manager: Vec<Address>,
    /// Number of connections of the predecessor that continue.
    pub adopted_connections: usize,
    report_step: ReportStep,
}

impl Running {
    /// Starts a server. `on_service` receives the service before devices are opened. `report_step` is called during the
    /// shutdown.
    ///
    /// # Errors
    /// Fails if a device cannot be created, or an address not be used. Then everything that was started has ended.
    pub fn start(
        plan: Plan,
        on_service: impl FnOnce(&Arc<Service>),
        report_step: ReportStep,
    ) -> Result<Self> {
        let service = Service::new(plan.limits.clone(), plan.access.clone(), plan.tls.clone());
        on_service(&service);
        Self::start_service(plan, &service, report_step).inspect_err(|_| {
            if service.recovery.get().is_some() {
                // The next start adopts the content again.
                adoption::leave(&service.registry.all());
            }
        })
    }

    fn start_service(plan: Plan, service: &Arc<Service>, report_step: ReportStep) -> Result<Self> {
        let Plan { devices, addresses, sockets, control, access, ublk, state: asked, .. } = plan;
        let Plan { metrics, page, control_read_only, allow, holder, inherited, .. } = plan;
        let mut inherited = Inherited::new(service, inherited);
        let (control_access, read_only_access) = (access.control.resolved, access.control_read_only.resolved);
        service.exports.tls.begin(&service.exports.nbd)?;
        if let Some(asked) = asked.as_ref().filter(|asked| asked.recoverable) {
            State::wait_until_free(&asked.dir, KILLED_MAX);
        }
        if let Some(control) = &control {
            // The control socket is cleared first, because that fails if another server is running.
            if inherited.control.is_none() {
                PrivateSocket::clear(control)?;
            }
            let _ = service.control.set(control.clone());
        }
        if let Some(control) = &control_read_only {
            if inherited.control_read_only.is_none() {
                PrivateSocket::clear(control)?;
            }
            let _ = service.control_read_only.set(control.clone());
        }
        service.as_block_devices.store(ublk, Ordering::SeqCst);
        service.exports.plan_server_addresses(&addresses);
        if let Some((list, is_fixed)) = allow {
            service.exports.init_server_allow_list(Some(list), is_fixed);
        }
        let mut running = Self {
            service: Arc::clone(service),
            is_in_use: false,
            controls: Vec::new(),
            http: Vec::new(),
            sockets: Vec::new(),
            sockets_of_manager: Vec::new(),
            adopted_connections: 0,
            report_step,
        };
        let known = asked.as_ref().map(|asked| start::open(service, asked, &devices)).transpose()?;
        if let Some((asked, recorded)) = asked.as_ref().zip(known.as_ref()) {
            adoption::begin_holding(service, &asked.dir, holder)?;
            adoption::find_block_devices(service, &asked.dir, recorded)?;
        }
        if let Some(empty) = known.as_ref().filter(|recorded| recorded.all().is_empty()) {
            // No device is recorded, so this only marks saved content as unused, or removes it if it was marked long
            // ago, and frees memory that a killed server has left.
            service.saves.find(empty)?;
            drop(HeldFamilies::open(service, empty));
        }
        let known = known.filter(|recorded| !recorded.all().is_empty());
        let is_applied = asked.as_ref().is_some_and(|asked| asked.apply);
        let of_state = known.is_some();
        let (created, pending, changes) = match known {
            Some(recorded) => {
                // Devices must exist before `--apply` can change them, so the start waits for all remote servers.
                let until = (!is_applied).then(|| Instant::now() + pending_devices::GRACE);
                let (created, pending) = pending_devices::set_up_state(service, recorded, until)?;
                (created, Some(pending), is_applied.then_some(devices))
            }
            None => (start::set_up_declared(service, devices)?, None, None),
        };
        if of_state && mutants::on(Mutant::GoesOnEarly) {
            start::record_devices(service, &created);
        }
        // Steps that can fail come first. Then the state records that its devices are in use, and clients can
        // connect.
        // A client that reconnects after a restart must find its export.
        service.exports.nbd.pause();
        for address in &addresses {
            if let Address::Unix(path) = service.exports.listen_at_server_address(address)? {
                let socket =
                    SocketPath::adopt(&path).with_context(|| format!("{}: is gone", path.display()))?;
                running.sockets.push(socket);
            }
        }
        for socket in sockets {
            running.sockets_of_manager.push(service.exports.adopt_server_socket(socket)?);
        }
        if let Some(MetricsConfig { at, forks }) = metrics {
            let server = HttpServer::start(at, MetricsSite::new(service, forks))?;
            let _ = service.metrics_url.set(server.url().to_owned());
            running.http.push(server);
        }
        if let Some(at) = page {
            let server = HttpServer::start(at, PageSite::new(service))?;
            let _ = service.http_url.set(server.url().to_owned());
            running.http.push(server);
        }
        Saves::run(service).context("cannot start the thread that saves")?;
        if created.iter().any(|entry| start::has_block_device(service, entry)) {
            remove_stale_block_devices();
        }
        running.is_in_use = true;
        if of_state {
            start::record_devices(service, &created);
            start::begin_merges(service, &created);
        } else {
            start::publish_new(service, &created)?;
        }
        let connections = mem::take(&mut inherited.connections);
        running.publish(
            &created,
            of_state,
            changes.zip(asked),
            &control_access,
            &read_only_access,
            inherited,
        )?;
        // Nothing that follows can fail: the predecessor could not continue the connections.
        running.adopt_connections(connections);
        service.exports.nbd.close_unused_listeners();
        if let Some(pending) = pending {
            pending.begin(service);
        }
        Ok(running)
    }

    /// Publishes the devices of the state, applies the changes of `--apply`, and then opens the control sockets.
    fn publish(
        &mut self,
        created: &[Arc<Entry>],
        of_state: bool,
        changes: Option<(Vec<DeclaredDevice>, StateSettings)>,
        control_access: &Access,
        read_only_access: &Access,
        inherited: Inherited,
    ) -> Result<()> {
        let service = &self.service;
        if of_state {
            start::publish(service, created)?;
        }
        service.exports.nbd.resume();
        if let Some((devices, asked)) = changes {
            start::apply_declared(service, &devices, asked.has_file)?;
        }
        log_leftover_files(service);
        if let Some(control) = service.control_read_only.get() {
            let socket = control_socket(inherited.control_read_only, control, read_only_access)?;
            let answers = Arc::new(ReadOnly(Arc::clone(service)));
            self.controls.push(Arc::new(ControlServer::start_read_only(socket, answers)?));
        }
        // The control socket is opened last, because its existence means that the server is ready.
        if let Some(control) = service.control.get() {
            let socket = control_socket(inherited.control, control, control_access)?;
            self.controls.push(Arc::new(ControlServer::start(socket, Arc::clone(service) as _)?));
        }
        Ok(())
    }

    /// Begins the shutdown: refuses new work. Returns a function that ends exports and verbs, and saves and flushes the
    /// devices; it may block. With `frees_memory`, the memory of the devices is no longer held for the next server.
    fn begin_end(&mut self, frees_memory: bool) -> impl FnOnce() -> FlushResult + Send + 'static + use<> {
        let no_waiting = self.refuse_new_work();
        let (service, controls) = (Arc::clone(&self.service), self.controls.clone());
        let report_step = Arc::clone(&self.report_step);
        move || {
            // Exports end first, because the following steps may need the threads and descriptors of connections.
            if frees_memory {
                service.exports.shutdown(SHUTDOWN_GRACE);
            } else {
                service.exports.leave(SHUTDOWN_GRACE);
            }
            // Control sockets stop before the flush, because verbs write to devices as well.
            for control in controls {
                control.stop();
            }
            service.jobs.wait_ended(JOBS_GRACE);
            if let Some(time) = service.saves.timeout() {
                report_step(ShutdownStep::Save(time + shutdown::FLUSH_MAX));
            }
            let unsaved = Saves::end(&service);
            report_step(ShutdownStep::Flush);
            let end = Instant::now() + shutdown::FLUSH_MAX;
            let failed =
                unsaved + shutdown::flush(&service.registry.all(), end) + service.pending_removals.wait(end);
            match service.recovery.get() {
                Some(holder) if frees_memory => holder.end(),
                Some(_) => adoption::leave(&service.registry.all()),
                None => {}
            }
            drop((service, no_waiting));
            FlushResult { failed, end }
        }
    }

    /// Refuses new jobs and changes, and lets requests that wait for limits or fault rules continue, until the result is
    /// dropped.
    fn refuse_new_work(&mut self) -> Vec<WaitBypass> {
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
        no_waiting
    }

    /// Shuts the server down on the given thread, and calls `ended` when that is done. Returns a channel for
    /// the result. Afterwards [`Drop`] can only wait for disks.
    pub fn shutdown(
        &mut self,
        thread: &OwnedQueue,
        ended: impl FnOnce() + Send + 'static,
    ) -> Receiver<FlushResult> {
        let finish = self.begin_end(true);
        let (sender, flushed) = mpsc::channel();
        thread.push(move || {
            let _ended = CallAtEnd(Some(ended));
            let _ = sender.send(finish());
        });
        flushed
    }

    /// Closes the devices on the given thread, until `end` at most, and calls `ended` when that is done.
    /// Returns a channel for the number of devices that could not be closed.
    pub fn close(
        self,
        thread: &OwnedQueue,
        ended: impl FnOnce() + Send + 'static,
        end: Instant,
    ) -> Receiver<usize> {
        let (sender, unclosed) = mpsc::channel();
        thread.push(move || {
            let _ended = CallAtEnd(Some(ended));
            let closing = Closing::of(&self.service.registry.all());
            let state = self.service.records.shared_state();
            drop(self);
            let unclosed = closing.wait(end);
            if let Some(state) = state.filter(|_| unclosed == 0) {
                // A thread that is ending may still hold the service.
                state.release();
            }
            let _ = sender.send(unclosed);
        });
        unclosed
    }

    /// Removes the sockets, without waiting.
    pub fn remove_paths(&mut self) {
        for control in &self.controls {
            control.remove_path();
        }
        self.sockets.clear();
    }
}

/// Guard that calls a function when dropped, also by a panic.
struct CallAtEnd<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Drop for CallAtEnd<F> {
    fn drop(&mut self) {
        if let Some(call) = self.0.take() {
            call();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.is_in_use {
            // After a panic or an error, the next start adopts devices in memory.
            let finish = self.begin_end(false);
            if finish().failed == 0
                && let Some(state) = self.service.records.state()
            {
                state.release();
            }
        }
        self.controls.clear();
        self.http.clear();
        self.service.exports.shutdown(Duration::ZERO);
    }
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
            left_behind(path);
        }
    }
}

#[cfg(test)]
mod tests;
