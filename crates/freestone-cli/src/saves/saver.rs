//! Saving: when it is due, and at the end.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError, Weak, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use freestone::keep::{Estimate, KeepError, Wrote};
use freestone::ram::Ram;
use freestone::save::SaveError;
use freestone_spec::kinds::Entry;
use freestone_spec::size::human;
use tracing::{debug, error, info, warn};

use super::{Group, Member, Plan, Saves, forget, kept, stamp, unsaved_bytes};
use crate::control::protocol::Fault;
use crate::service::Service;
use crate::standby::Standby;

/// How often it is looked whether a save is due.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often it is looked whether the next one would fit.
const ESTIMATE_EVERY: Duration = Duration::from_secs(60);
/// After a save that failed another one is not tried before.
const RETRY_AFTER: Duration = Duration::from_secs(60);
/// How long beyond its time the last save may hang on a disk.
const END_GRACE: Duration = Duration::from_secs(5);

impl Saves {
    /// A thread that ends when `stops` is said.
    pub(super) fn adopt(&self, thread: JoinHandle<()>) {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
    }

    /// Begins to save, where there is a state.
    pub fn run(service: &Arc<Service>) -> std::io::Result<()> {
        let Some((_, plan)) = service.saves.at.get().cloned() else { return Ok(()) };
        *service.saves.last_save() = Some(Standby::start("save")?);
        let weak = Arc::downgrade(service);
        let thread = thread::Builder::new().name("keep".into()).spawn(move || watch(&weak, plan))?;
        service.saves.adopt(thread);
        Ok(())
    }

    fn last_save(&self) -> MutexGuard<'_, Option<Standby>> {
        self.last_save.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps; true: the server ends.
    fn sleep(&self, time: Duration) -> bool {
        let (lock, bell) = &self.bell;
        let guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        if self.stops() {
            return true;
        }
        drop(bell.wait_timeout(guard, time).unwrap_or_else(PoisonError::into_inner));
        self.stops()
    }

    /// Ends what runs, saves all once more, and has the state say so, or gives up on a disk that does not
    /// answer. Returns how many devices were not saved in time.
    pub fn end(service: &Arc<Service>) -> usize {
        let Some(timeout) = service.saves.timeout() else { return 0 };
        let (tell, told) = mpsc::channel();
        let own = Arc::clone(service);
        let work = move || {
            // Nobody may wait any more.
            let _ = tell.send(Self::end_now(&own, timeout));
        };
        let thread = service.saves.last_save().take();
        match thread {
            Some(thread) => thread.run(work),
            // The start of the server failed before it had one.
            None => work(),
        }
        told.recv_timeout(timeout + END_GRACE).unwrap_or_else(|_| {
            error!("a disk does not answer: what devices with keep=yes hold is not saved");
            1
        })
    }

    fn end_now(service: &Service, timeout: Duration) -> usize {
        let saves = &service.saves;
        {
            let _asleep = saves.bell.0.lock().unwrap_or_else(PoisonError::into_inner);
            saves.stops.store(true, Ordering::SeqCst);
        }
        saves.bell.1.notify_all();
        let threads = std::mem::take(&mut *saves.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // It has logged what went wrong.
            let _ = thread.join();
        }
        let end = Instant::now() + timeout;
        let (mut exact, mut failed) = (Vec::new(), 0);
        for (group, devices) in saves.all(service) {
            if let Some(missing) = group.missing(&service.records) {
                failed += devices.len();
                error!("{}", not_over(&devices, &missing));
                continue;
            }
            if devices.is_empty() {
                // They were removed just before.
                forget(&mut group.keep(), &group.dir);
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
        if let Err(Fault { message, .. }) = service.records.put_saved(&exact) {
            let names: Vec<_> = exact.iter().map(|(name, _)| name.as_str()).collect();
            let names = names.join(", ");
            error!("{names}: saved, but the next start withholds the content as an older one: {message}");
            failed += exact.len();
        }
        // Of these no directory could be made, as the log says.
        let unsaved = |entry: &Arc<Entry>| kept(entry).is_some_and(|ram| saves.group_of(ram).is_none());
        failed + service.registry.all().iter().filter(|entry| unsaved(entry)).count()
    }

    /// All groups with their devices; new ones are made.
    fn all(&self, service: &Service) -> Vec<(Arc<Group>, Vec<Member>)> {
        let mut known: HashSet<usize> = self.groups().iter().map(|group| group.family.key()).collect();
        for entry in service.registry.all() {
            let Some(ram) = kept(&entry).filter(|ram| known.insert(ram.family().key())) else { continue };
            if let Err(why) = self.make(ram.family()) {
                self.tell_once(&format!("{}: its content is not kept: {why}", entry.name()));
            }
        }
        let groups = self.groups().clone();
        // After the groups were looked at: one that was just made has its device here, too.
        let mut devices: HashMap<usize, Vec<Member>> = HashMap::new();
        for entry in service.registry.all() {
            if let Some(ram) = kept(&entry) {
                let member = (entry.identity.uuid.simple().to_string(), Arc::clone(&entry));
                devices.entry(ram.family().key()).or_default().push(member);
            }
        }
        let with = |group: Arc<Group>| {
            let members = devices.get(&group.family.key()).cloned().unwrap_or_default();
            (group, members)
        };
        groups.into_iter().map(with).collect()
    }

    /// What would not fit, in sentences: for who is about to end the server.
    pub fn unfit(service: &Service) -> Vec<String> {
        let all = service.saves.all(service);
        all.iter().filter_map(|(group, devices)| group.unfit(devices)).collect()
    }
}

/// Saves when that is due, until the server ends.
fn watch(service: &Weak<Service>, plan: Plan) {
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
                look(&service, &group, &devices, plan, estimates);
            }
        }
        let Some(service) = service.upgrade() else { return };
        if service.saves.sleep(LOOK_EVERY) {
            return;
        }
    }
}

/// Their names, for a sentence.
fn names(devices: &[Member]) -> String {
    devices.iter().map(|(_, entry)| entry.name()).collect::<Vec<_>>().join(", ")
}

/// Their disks, by their UUIDs.
fn rams(devices: &[Member]) -> Vec<(&str, &Ram)> {
    devices.iter().filter_map(|(uuid, entry)| Some((uuid.as_str(), &**entry.kind.ram()?))).collect()
}

/// Why nothing is saved: it would go over the content of a device that is missing.
fn not_over(devices: &[Member], missing: &str) -> String {
    let why = format!("with what they hold is that of {missing}, which is not there again");
    format!("{}: not saved: {why}; `freestone remove {missing}` gives it up", names(devices))
}

fn look(service: &Service, group: &Arc<Group>, devices: &[Member], plan: Plan, estimates: bool) {
    if let Some(missing) = group.missing(&service.records) {
        let why = not_over(devices, &missing);
        if group.told().failed.replace(why.clone()).as_ref() != Some(&why) {
            error!("{why}");
        }
        return;
    }
    if devices.is_empty() {
        // All were removed: one that comes later begins anew.
        service.saves.groups().retain(|other| !Arc::ptr_eq(other, group));
        return forget(&mut group.keep(), &group.dir);
    }
    if estimates && let Some(why) = group.unfit(devices) {
        warn!("{why}");
    }
    let rams = rams(devices);
    let never = rams.iter().any(|(_, ram)| ram.unsaved_bytes().is_none());
    let bytes: u64 = rams.iter().map(|(_, ram)| unsaved_bytes(ram)).sum();
    let since = group.told().tried.map_or(Duration::MAX, |tried| tried.elapsed());
    let by_time = plan.every.is_some_and(|every| since >= every) && (bytes > 0 || never);
    let by_size = plan.after.is_some_and(|after| bytes >= after);
    let pause = if group.told().failed.is_some() { RETRY_AFTER } else { LOOK_EVERY };
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
    /// Saves these devices. Of when the content is that is there now.
    fn save(&self, devices: &[Member], cancelled: &dyn Fn() -> bool) -> Result<SystemTime, KeepError> {
        let mut keep = self.keep();
        {
            let mut told = self.told();
            told.tried = Some(Instant::now());
            let bytes = |(uuid, entry): &Member| Some((uuid.clone(), unsaved_bytes(entry.kind.ram()?)));
            // Until the file is durable it is not saved.
            told.under_way = devices.iter().filter_map(bytes).collect();
        }
        let now = keep.save(&rams(devices), cancelled, &mut |_, _| {});
        self.tell(&keep);
        self.told().under_way.clear();
        let now = now.inspect_err(|why| {
            if !cancelled() {
                self.told().failed = Some(why.to_string());
            }
        })?;
        {
            let mut told = self.told();
            told.failed = None;
            let known = if now.wrote == Wrote::Whole { 0 } else { told.lost_pages };
            told.lost_pages = known.max(now.lost);
        }
        if now.lost > 0 {
            error!("{}: {} pages could not be read, and were saved as lost", names(devices), now.lost);
        }
        let when = keep.contents().map_or(now.when, |kept| kept.when);
        match now.wrote {
            Wrote::Nothing => {}
            wrote => info!("saved: {wrote:?}, {} pages, {}", now.pages, human(now.file_bytes)),
        }
        Ok(when)
    }

    /// Merges the files where that is due.
    fn merge(&self, cancelled: &dyn Fn() -> bool) {
        let mut keep = self.keep();
        match keep.merge_if_due(cancelled, &mut |_, _| {}) {
            Ok(None) | Err(KeepError::Save(SaveError::Cancelled)) => {}
            Ok(Some(bytes)) => debug!("saves were merged into one of {}", human(bytes)),
            Err(why) => warn!("saves cannot be merged: {why}"),
        }
        self.tell(&keep);
    }

    /// Estimates the next save. That it would not fit, in a sentence.
    fn unfit(&self, devices: &[Member]) -> Option<String> {
        // One that is saved just now is as good as saved.
        let keep = self.keep.try_lock().ok()?;
        let Estimate { bytes, free_bytes, .. } = keep.estimate(&rams(devices)).ok()?;
        self.told().needs = Some((bytes, free_bytes));
        let (needed, free) = (human(bytes), human(free_bytes));
        let why = || format!("{}: the next save needs about {needed}, and {free} are free", names(devices));
        (bytes > free_bytes).then(why)
    }
}
