//! A served device: the content that it may have, and the state that verbs and restarts change.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use crate::oracle::{Durability, Oracle, ReadToken, SECTOR_BYTES};
use crate::program::transport::Address;

/// Tags of the image store to which verbs push.
pub const TAGS: [&str; 3] = ["a", "b", "c"];

/// An image to which a tag may refer.
pub struct PossibleImage {
    /// Name of the image; `None` if the push of the image was not confirmed.
    pub image: Option<String>,
    pub oracle: Oracle,
}

/// Kinds of devices, which have different clients, verbs and lifetimes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A RAM disk, possibly restored from a saved file.
    Ram,
    /// A null device that stores its content in memory.
    Null,
    /// A writable file as a device.
    File,
    /// A read-only file, the base of forks.
    Base,
    /// An image in the image store.
    Image,
    /// A fork of a base, an image or a snapshot.
    Fork,
    /// A snapshot of a RAM disk or fork, without a COW device.
    Frozen,
    /// A snapshot of a file, with a COW device.
    Cow,
    /// A template: each connection has a fork of its own.
    Template,
    /// A fork that was restored from a saved file.
    Restored,
}

/// A device, and what the torture knows about it.
#[expect(clippy::struct_excessive_bools, reason = "independent properties")]
pub struct Disk {
    pub name: String,
    pub kind: Kind,
    /// Base of a fork, or origin of a snapshot.
    pub parent: Option<Arc<Disk>>,
    pub writable: bool,
    /// Block size in bytes, of which offsets and lengths of requests are multiples.
    pub block: u64,
    /// Unflushed writes are lost when the power is cut. For a file, they are also lost when the server is killed.
    pub has_volatile_cache: bool,
    /// The device has fault rules, or may have some later.
    pub faults: bool,
    /// The device has a backing device, to which its family spills pages.
    pub spills: bool,
    /// The content survives a restart: it, or the COW device of a snapshot, is in a file or in the image store.
    pub survives_restart: bool,
    /// Name of the image; `None` if the device is not an image.
    pub image: Option<String>,
    /// Arguments of `serve` that create the device; `None` if there are none.
    pub device_args: Option<String>,
    /// The verb that created the device, for messages; empty if arguments of `serve` did.
    pub created_by: String,
    /// Arguments of `serve` created the device; otherwise a verb did.
    pub from_start: bool,
    /// The content is in memory only and lost when the server ends.
    pub is_lost: bool,
    /// The device is served empty, and not withheld, if its content is lost (`on_data_loss=empty`).
    pub serves_lost: bool,
    /// The content is saved when the server ends in an orderly way (`keep=yes`).
    pub keeps: bool,
    /// Content at the last orderly end of a server; `None` if there was none.
    pub saved: Option<Oracle>,
    /// A merge was running or pending at the restart. If the merge has finished since, the device is now a new
    /// snapshot.
    pub merged_before: bool,
    /// The versions that the content may have.
    pub oracle: Mutex<Oracle>,
    /// Held for reading by clients with requests in flight, and for writing while no request may be in flight.
    pub gate: RwLock<()>,
    /// Held during `publish`, `unpublish` and `merge`. If two of these verbs ran at once, the torture would not know
    /// the remaining addresses, or which call started the merge.
    pub publishing: Mutex<()>,
    /// The part of the state that changes while the server runs.
    pub state: Mutex<State>,
}

/// The part of a device's state that changes while a server runs.
#[derive(Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent properties")]
pub struct State {
    addresses: Vec<Address>,
    /// State that a server with a state directory must keep.
    known: KnownState,
    /// Requests may fail with ENOSPC because a memory limit is small.
    tight: bool,
    /// Requests may fail with EIO because of faults or a small COW device.
    fails: bool,
    /// Number of reasons why clients must not connect to the device now.
    closed: u32,
    /// Number of running verbs that may end connections to the device.
    ending: u32,
    /// Number of verbs that may have ended connections to the device, the running ones included.
    ended: u64,
    /// A merge into the origin is running or pending.
    merging: bool,
    removed: bool,
    /// Number of running verbs that replace the content of the device.
    replacing: u32,
    /// Reads completed while such a verb runs. These reads may return the new content, and are judged when the verb
    /// ends.
    deferred: Vec<DeferredRead>,
}

/// State of a device, except its addresses, that a server with a state directory must keep.
#[derive(Debug, Clone, Default)]
pub struct KnownState {
    /// UUID of the device; `None` if it was not queried yet.
    pub uuid: Option<String>,
    /// Number of times that the content was lost.
    pub losses: u64,
    /// Memory limit in bytes; `None` if none was set.
    pub limit: Option<u64>,
    /// `limit` does not apply, because the server died before it reported the limit.
    pub is_limit_unknown: bool,
    /// Size in bytes that a verb has set; `None` if none has.
    pub size: Option<u64>,
    /// The device is withheld (not served): its content was lost, and no verb has released it since.
    pub withheld: bool,
}

/// Effect of the end of a server on the content of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentEnd {
    /// An orderly end flushed and saved the device.
    Saved,
    /// The server was killed, and wrote nothing at its end.
    Killed,
    /// The server was killed, and the next one has adopted the device.
    Adopted,
}

impl ContentEnd {
    pub fn of(killed: bool) -> Self {
        if killed { Self::Killed } else { Self::Saved }
    }
}

/// A read that is judged when the verbs that replace the content have ended.
pub struct DeferredRead {
    pub read: ReadToken,
    pub first: u64,
    pub data: Vec<u8>,
    pub text: String,
}

/// The verbs that had ended connections of a device at one moment; see [`Disk::may_have_ended`].
#[derive(Debug, Clone, Copy)]
pub struct ConnectionMark {
    ended: u64,
    ending: bool,
}

impl Disk {
    /// Creates a device with the content of `oracle`, published at the addresses `at`.
    pub fn new(name: &str, kind: Kind, oracle: Oracle, at: Vec<Address>) -> Self {
        Self {
            name: name.to_owned(),
            kind,
            parent: None,
            writable: !matches!(kind, Kind::Base | Kind::Image | Kind::Frozen),
            block: SECTOR_BYTES as u64,
            has_volatile_cache: false,
            faults: false,
            spills: false,
            survives_restart: false,
            image: None,
            device_args: None,
            created_by: String::new(),
            from_start: false,
            is_lost: !matches!(kind, Kind::File | Kind::Base | Kind::Image | Kind::Template),
            serves_lost: false,
            keeps: false,
            saved: None,
            merged_before: false,
            oracle: Mutex::new(oracle),
            gate: RwLock::new(()),
            publishing: Mutex::new(()),
            state: Mutex::new(State { addresses: at, ..State::default() }),
        }
    }

    pub fn oracle(&self) -> MutexGuard<'_, Oracle> {
        self.oracle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the addresses at which clients find the device now; none if it is withheld, removed or blocked.
    pub fn addresses(&self) -> Vec<Address> {
        let state = self.state();
        if state.closed > 0 || state.removed || state.known.withheld {
            Vec::new()
        } else {
            state.addresses.clone()
        }
    }

    /// Returns the addresses of the device, even if clients do not find it there now.
    pub fn all_addresses(&self) -> Vec<Address> {
        self.state().addresses.clone()
    }

    pub fn known(&self) -> KnownState {
        self.state().known.clone()
    }

    pub fn update_known(&self, tell: impl FnOnce(&mut KnownState)) {
        tell(&mut self.state().known);
    }

    pub fn is_withheld(&self) -> bool {
        self.state().known.withheld
    }

    /// Returns an NBD address of the device, or `None` if clients find none now.
    pub fn nbd(&self) -> Option<PathBuf> {
        self.addresses().into_iter().find_map(|place| match place {
            Address::Nbd(path) => Some(path),
            _ => None,
        })
    }

    /// Returns a vhost-user address of the device, or `None` if clients find none now.
    pub fn machine(&self) -> Option<PathBuf> {
        self.addresses().into_iter().find_map(|place| match place {
            Address::Machine(path) => Some(path),
            _ => None,
        })
    }

    pub fn publish(&self, at: Address) {
        self.state().addresses.push(at);
    }

    pub fn unpublish(&self) {
        let mut state = self.state();
        state.addresses.clear();
        state.known.withheld = false;
    }

    /// Prevents new connections until [`allow_clients`](Self::allow_clients) has been called as often as this function.
    pub fn block_clients(&self) {
        self.state().closed += 1;
    }

    pub fn allow_clients(&self) {
        self.state().closed -= 1;
    }

    pub fn set_tight(&self, tight: bool) {
        self.state().tight = tight;
    }

    /// Returns true if the memory limit of the device or of its base is small.
    pub fn is_tight(&self) -> bool {
        self.state().tight || self.parent.as_ref().is_some_and(|of| of.is_tight())
    }

    pub fn set_may_fail(&self, fails: bool) {
        self.state().fails = fails;
    }

    pub fn may_fail(&self) -> bool {
        self.state().fails
    }

    pub fn set_merging(&self) {
        self.state().merging = true;
    }

    pub fn is_merging(&self) -> bool {
        self.state().merging
    }

    pub fn set_removed(&self) {
        self.state().removed = true;
    }

    pub fn is_removed(&self) -> bool {
        self.state().removed
    }

    /// Records the start of a verb that replaces the content. Ends with [`end_replacement`](Self::end_replacement).
    pub fn begin_replacement(&self) -> ReadToken {
        self.state().replacing += 1;
        self.oracle().begin_read()
    }

    /// Records the end of a verb that replaces the content. `tell` reports the new content to the oracle.
    ///
    /// # Errors
    /// Fails if a read during the verb found neither the old content nor the new.
    pub fn end_replacement(&self, tell: impl FnOnce(&mut Oracle)) -> Result<(), String> {
        let mut oracle = self.oracle();
        tell(&mut oracle);
        let deferred = {
            let mut state = self.state();
            state.replacing -= 1;
            if state.replacing > 0 { Vec::new() } else { std::mem::take(&mut state.deferred) }
        };
        for DeferredRead { read, first, data, text } in deferred {
            oracle.check_read(read, first, &data).map_err(|wrong| format!("{text}: {wrong}"))?;
        }
        Ok(())
    }

    /// Judges a read now, or defers it until the running verbs that replace the content have ended.
    ///
    /// # Errors
    /// Fails if a read that is judged now found content that is not allowed.
    pub fn judge(&self, oracle: &mut Oracle, deferred: DeferredRead) -> Result<(), String> {
        let mut state = self.state();
        if state.replacing > 0 {
            state.deferred.push(deferred);
            return Ok(());
        }
        drop(state);
        let DeferredRead { read, first, data, .. } = deferred;
        oracle.check_read(read, first, &data).map_err(|wrong| wrong.to_string())
    }

    /// Returns the oracle of a snapshot taken since `verb` started. Waits for running verbs that replace the content.
    pub fn snapshot_since(&self, verb: ReadToken, name: &str) -> Oracle {
        loop {
            let mut oracle = self.oracle();
            if self.state().replacing == 0 {
                return oracle.snapshot_since(verb, name, Durability::Completed);
            }
            drop(oracle);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn describe(&self) -> String {
        let device_args = self.device_args.as_deref().unwrap_or(&self.created_by);
        let below = self.parent.as_ref().map(|of| format!(", of {}", of.describe())).unwrap_or_default();
        format!("{} ({device_args}{below})", self.name)
    }

    /// Records the start of a verb that may end connections to the device.
    pub fn begin_disconnect(&self) {
        let mut state = self.state();
        state.ending += 1;
        state.ended += 1;
    }

    /// Records the end of a verb that may end connections to the device.
    pub fn end_disconnect(&self) {
        self.state().ending -= 1;
    }

    pub fn mark(&self) -> ConnectionMark {
        let state = self.state();
        ConnectionMark { ended: state.ended, ending: state.ending > 0 }
    }

    /// Returns true if a verb may have ended a connection since `mark` was taken, or if the device was removed.
    pub fn may_have_ended(&self, mark: ConnectionMark) -> bool {
        let state = self.state();
        mark.ending || state.ended != mark.ended || state.removed
    }

    /// Returns what content survives a power loss.
    fn durability(&self) -> Durability {
        if self.has_volatile_cache { Durability::Flushed } else { Durability::Completed }
    }

    /// Returns true if the next recoverable server adopts the device after a kill: the settings of its family allow it.
    pub fn is_adoptable(&self) -> bool {
        let mut root = self;
        while let Some(of) = root.parent.as_deref() {
            root = of;
        }
        let is_excluded = |device_args: &String| device_args.contains("backing_dev=device:");
        matches!(self.kind, Kind::Ram | Kind::Fork | Kind::Frozen | Kind::Restored)
            && !root.device_args.as_ref().is_some_and(is_excluded)
    }

    /// Returns the device as it must be after a restart. `size`: size in sectors, if known.
    pub fn after_restart(
        &self,
        end: ContentEnd,
        parent: Option<Arc<Disk>>,
        at: Vec<Address>,
        known: KnownState,
        size: Option<u64>,
    ) -> Self {
        let mut oracle = self.oracle();
        let name = self.name.as_str();
        let mut saved = self.saved.clone();
        let fresh = match self.kind {
            _ if end == ContentEnd::Adopted => {
                oracle.crash();
                oracle.grow(size.unwrap_or_default());
                oracle.clone()
            }
            _ if self.keeps && end == ContentEnd::Saved => {
                let flush = oracle.begin_flush();
                oracle.end_flush(flush, true);
                oracle.crash();
                oracle.grow(size.unwrap_or_default());
                saved = Some(oracle.clone());
                oracle.clone()
            }
            // The device may have grown since its content was saved.
            _ if self.saved.is_some() => {
                let mut fresh = self.saved.clone().expect("looked at just now");
                fresh.grow(size.unwrap_or_default());
                fresh
            }
            Kind::File | Kind::Cow | Kind::Base | Kind::Image if self.survives_restart => {
                if end == ContentEnd::Saved {
                    let flush = oracle.begin_flush();
                    oracle.end_flush(flush, true);
                }
                oracle.crash();
                oracle.clone()
            }
            _ => match &parent {
                Some(of) => {
                    let mut fresh = of.oracle().snapshot(name, self.durability());
                    fresh.grow(size.unwrap_or_default());
                    fresh
                }
                None => Oracle::new(name, size.unwrap_or(oracle.size()), self.durability()),
            },
        };
        drop(oracle);
        let (tight, fails) = {
            let state = self.state();
            (state.tight, state.fails)
        };
        let state = State { addresses: at, known, tight, fails, ..State::default() };
        let (merging, device_args) = (self.is_merging(), self.device_args.clone());
        Self {
            parent,
            writable: self.writable,
            block: self.block,
            has_volatile_cache: self.has_volatile_cache,
            faults: self.faults,
            spills: self.spills,
            survives_restart: self.survives_restart,
            image: self.image.clone(),
            device_args,
            created_by: self.created_by.clone(),
            from_start: self.from_start,
            is_lost: self.is_lost,
            serves_lost: self.serves_lost,
            keeps: self.keeps,
            saved,
            merged_before: merging,
            // Block clients of a merging snapshot: its content is judged through its origin.
            state: Mutex::new(State { merging, closed: u32::from(merging), ..state }),
            ..Self::new(name, self.kind, fresh, Vec::new())
        }
    }
}
