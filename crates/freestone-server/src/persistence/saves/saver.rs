//! Saves of kept content: the saving thread, and the last save at server shutdown.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use freestone::keep::{KeepError, SaveEstimate, SaveKind};
use freestone::ram::Ram;
use freestone::save::SaveError;
use freestone_control::protocol::RpcError;
use freestone_core::work_queue::OwnedQueue;
use freestone_spec::kinds::Entry;
use freestone_spec::size::human;
use tracing::{debug, error, info, warn};

use super::{Group, Member, SaveSchedule, Saves, forget, kept, stamp, unsaved_bytes};
use crate::service::Service;

/// Interval of checks whether a save is due.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// Interval of checks whether the next save would fit on the disk.
const ESTIMATE_EVERY: Duration = Duration::from_secs(60);
/// Pause after a failed save before the next attempt.
const RETRY_AFTER: Duration = Duration::from_secs(60);
/// Additional wait for the last save, after its timeout, before the disk counts as hung.
const END_GRACE: Duration = Duration::from_secs(5);

impl Saves {
    /// Adds a thread that ends soon after `stops` is set, so that the shutdown can join it.
    pub(super) fn adopt(&self, thread: JoinHandle<()>) {
        self.threads.lock().push(thread);
    }

    /// Starts the saving thread, if the server has a state directory.
    pub fn run(service: &Arc<Service>) -> std::io::Result<()> {
        let Some((_, plan)) = service.saves.at.get().cloned() else { return Ok(()) };
        *service.saves.last_save.lock() = Some(OwnedQueue::started("save")?);
        let weak = Arc::downgrade(service);
        let thread = thread::Builder::new().name("keep".into()).spawn(move || watch(&weak, plan))?;
        service.saves.adopt(thread);
        Ok(())
    }

    /// Sleeps for `time`, or until server shutdown. Returns true if the server shuts down.
    fn sleep(&self, time: Duration) -> bool {
        let (lock, bell) = &self.bell;
        let guard = lock.lock();
        if self.stops() {
            return true;
        }
        drop(bell.wait_timeout(guard, time));
        self.stops()
    }

    /// Ends the threads, saves all groups, and records the saves in the state. Gives up on a disk that does not
    /// respond. Returns the number of devices that were not saved in time.
    pub fn end(service: &Arc<Service>) -> usize {
        let Some(timeout) = service.saves.timeout() else { return 0 };
        let (sender, receiver) = mpsc::channel();
        let own = Arc::clone(service);
        let work = move || {
            // The receiver may be gone after the timeout.
            let _ = sender.send(Self::end_now(&own, timeout));
        };
        let thread = service.saves.last_save.lock().take();
        match thread {
            Some(thread) => thread.push(work),
            // The server's start failed before the thread was started.
            None => work(),
        }
        receiver.recv_timeout(timeout + END_GRACE).unwrap_or_else(|_| {
            error!("the content of devices with keep=yes is not saved: a disk does not respond");
            1
        })
    }

    /// Lets the threads end soon, without a further save.
    pub fn begin_stop(&self) {
        {
            let _asleep = self.bell.0.lock();
            self.stops.store(true, Ordering::SeqCst);
        }
        self.bell.1.notify_all();
    }

    fn end_now(service: &Service, timeout: Duration) -> usize {
        let saves = &service.saves;
        saves.begin_stop();
        let threads = std::mem::take(&mut *saves.threads.lock());
        for thread in threads {
            // A thread that panicked has logged the panic.
            let _ = thread.join();
        }
        let end = Instant::now() + timeout;
        let (mut exact, mut failed) = (Vec::new(), 0);
        for (group, devices) in saves.all(service) {
            if let Some(missing) = group.missing(&service.records) {
                failed += devices.len();
                error!("{}", overwrite_error(&devices, &missing));
                continue;
            }
            if devices.is_empty() {
                // All devices of the group were removed just before, so no device needs the directory.
                forget(&mut group.keep.lock(), &group.dir);
                continue;
            }
            match group.save(&devices, &|| Instant::now() >= end) {
                Ok(when) => {
                    let names = devices.iter().map(|(_, entry)| entry.name().to_owned());
                    exact.extend(names.map(|name| (name, stamp(when))));
                }
                Err(why) => {
                    failed += devices.len();
                    error!("{}: not saved: {why}", names(&devices));
                }
            }
        }
        if let Err(RpcError { message, .. }) = service.records.put_saved(&exact) {
            let names: Vec<_> = exact.iter().map(|(name, _)| name.as_str()).collect();
            let names = names.join(", ");
            error!("{names}: saved, but the next start will withhold the content as outdated: {message}");
            failed += exact.len();
        }
        // Counts devices without a group, for which no directory could be created; the error is logged.
        let unsaved = |entry: &Arc<Entry>| kept(entry).is_some_and(|ram| saves.group_of(ram).is_none());
        failed + service.registry.all().iter().filter(|entry| unsaved(entry)).count()
    }

    /// Returns all groups with their devices. Creates groups for families without one.
    fn all(&self, service: &Service) -> Vec<(Arc<Group>, Vec<Member>)> {
        let mut known: HashSet<usize> = self.groups.lock().iter().map(|group| group.family.key()).collect();
        for entry in service.registry.all() {
            let Some(ram) = kept(&entry).filter(|ram| known.insert(ram.family().key())) else { continue };
            if let Err(why) = self.make(ram.family()) {
                self.log_once(&format!("{}: content cannot be saved: {why}", entry.name()));
            }
        }
        let groups = self.groups.lock().clone();
        // The devices are read after the groups, so that all devices of a new group are found.
        let mut devices: HashMap<usize, Vec<Member>> = HashMap::new();
        for entry in service.registry.all() {
            if let Some(ram) = kept(&entry) {
                let member = (entry.identity.uuid.simple().to_string(), Arc::clone(&entry));
                devices.entry(ram.family().key()).or_default().push(member);
            }
        }
        let with_members = |group: Arc<Group>| {
            let members = devices.get(&group.family.key()).cloned().unwrap_or_default();
            (group, members)
        };
        groups.into_iter().map(with_members).collect()
    }

    /// Returns a warning for each group whose next save would not fit on the disk, for the user who ends the server.
    pub fn space_warnings(service: &Service) -> Vec<String> {
        let all = service.saves.all(service);
        all.iter().filter_map(|(group, devices)| group.space_warning(devices)).collect()
    }
}

/// Saves groups when a save is due, until server shutdown.
fn watch(service: &Weak<Service>, plan: SaveSchedule) {
    let mut estimate_at = Instant::now();
    loop {
        {
            let Some(service) = service.upgrade() else { return };
            let estimates = Instant::now() >= estimate_at;
            if estimates {
                estimate_at = Instant::now() + ESTIMATE_EVERY;
            }
            for (group, devices) in service.saves.all(&service) {
                if service.saves.stops() {
                    return;
                }
                save_if_due(&service, &group, &devices, plan, estimates);
            }
        }
        let Some(service) = service.upgrade() else { return };
        if service.saves.sleep(CHECK_EVERY) {
            return;
        }
    }
}

/// Returns the names of devices for a message.
fn names(devices: &[Member]) -> String {
    devices.iter().map(|(_, entry)| entry.name()).collect::<Vec<_>>().join(", ")
}

/// Returns the RAM disks, forks and snapshots of devices, with their UUIDs.
fn rams(devices: &[Member]) -> Vec<(&str, &Ram)> {
    devices.iter().filter_map(|(uuid, entry)| Some((uuid.as_str(), &**entry.kind.ram()?))).collect()
}

/// Returns the error for devices that are not saved, because the save would overwrite the content of a missing
/// device.
fn overwrite_error(devices: &[Member], missing: &str) -> String {
    let why = format!("a save would overwrite the content of {missing}, which could not be created");
    format!("{}: not saved: {why}; `freestone remove {missing}` removes that content", names(devices))
}

fn save_if_due(
    service: &Service,
    group: &Arc<Group>,
    devices: &[Member],
    plan: SaveSchedule,
    estimates: bool,
) {
    if let Some(missing) = group.missing(&service.records) {
        let why = overwrite_error(devices, &missing);
        if group.status.lock().failed.replace(why.clone()).as_ref() != Some(&why) {
            error!("{why}");
        }
        return;
    }
    if devices.is_empty() {
        // All devices of the group were removed. A new device of the family gets a new group.
        service.saves.groups.lock().retain(|other| !Arc::ptr_eq(other, group));
        return forget(&mut group.keep.lock(), &group.dir);
    }
    if estimates && let Some(why) = group.space_warning(devices) {
        warn!("{why}");
    }
    let rams = rams(devices);
    let never_saved = rams.iter().any(|(_, ram)| ram.unsaved_bytes().is_none());
    let bytes: u64 = rams.iter().map(|(_, ram)| unsaved_bytes(ram)).sum();
    let since = group.status.lock().tried.map_or(Duration::MAX, |tried| tried.elapsed());
    let by_time = plan.every.is_some_and(|every| since >= every) && (bytes > 0 || never_saved);
    let by_size = plan.after.is_some_and(|after| bytes >= after);
    let pause = if group.status.lock().failed.is_some() { RETRY_AFTER } else { CHECK_EVERY };
    if (!by_time && !by_size) || since < pause {
        return;
    }
    let stops = || service.saves.stops();
    match group.save(devices, &stops) {
        Ok(_) => group.merge(&stops),
        Err(KeepError::Save(SaveError::Cancelled)) => {}
        Err(why) => {
            error!("{}: not saved: {why}", names(devices));
        }
    }
}

impl Group {
    /// Saves the content of the devices. Returns the time of the saved content.
    fn save(&self, devices: &[Member], cancelled: &dyn Fn() -> bool) -> Result<SystemTime, KeepError> {
        let mut keep = self.keep.lock();
        {
            let mut status = self.status.lock();
            status.tried = Some(Instant::now());
            let bytes = |(uuid, entry): &Member| Some((uuid.clone(), unsaved_bytes(entry.kind.ram()?)));
            // These bytes count as unsaved until the file is durable.
            status.under_way = devices.iter().filter_map(bytes).collect();
        }
        let now = keep.save(&rams(devices), cancelled, &mut |_, _| {});
        self.record_contents(&keep);
        self.status.lock().under_way.clear();
        let now = now.inspect_err(|why| {
            if !cancelled() {
                self.status.lock().failed = Some(why.to_string());
            }
        })?;
        {
            let mut status = self.status.lock();
            status.failed = None;
            let known = if now.kind == SaveKind::Whole { 0 } else { status.lost_pages };
            status.lost_pages = known.max(now.lost);
        }
        if now.lost > 0 {
            error!("{}: {} pages could not be read and were saved as lost", names(devices), now.lost);
        }
        let when = keep.contents().map_or(now.saved_at, |kept| kept.saved_at);
        match now.kind {
            SaveKind::Unchanged => {}
            wrote => info!("saved: {wrote:?}, {} pages, {}", now.pages, human(now.file_bytes)),
        }
        Ok(when)
    }

    /// Merges the save files of the group if a merge is due.
    fn merge(&self, cancelled: &dyn Fn() -> bool) {
        let mut keep = self.keep.lock();
        match keep.merge_if_due(cancelled, &mut |_, _| {}) {
            Ok(None) | Err(KeepError::Save(SaveError::Cancelled)) => {}
            Ok(Some(bytes)) => debug!("merged saves into one file of {}", human(bytes)),
            Err(why) => warn!("cannot merge saves: {why}"),
        }
        self.record_contents(&keep);
    }

    /// Estimates the size of the next save. Returns a warning if the save would not fit on the disk, or `None`.
    fn space_warning(&self, devices: &[Member]) -> Option<String> {
        // A group that is being saved needs no estimate.
        let keep = self.keep.try_lock()?;
        let SaveEstimate { bytes, free_bytes, .. } = keep.estimate(&rams(devices)).ok()?;
        self.status.lock().needs = Some((bytes, free_bytes));
        let (needed, free) = (human(bytes), human(free_bytes));
        let why =
            || format!("{}: the next save needs about {needed}, but only {free} are free", names(devices));
        (bytes > free_bytes).then(why)
    }
}
