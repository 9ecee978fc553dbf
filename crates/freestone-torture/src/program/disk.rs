//! A served device: its possible content, and its state while it lives.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use super::link::Address;
use crate::oracle::{Durability, Oracle, ReadToken, SECTOR_BYTES};

/// Tags of the image store that verbs set.
pub const TAGS: [&str; 3] = ["a", "b", "c"];

/// An image that a tag may refer to.
pub struct PossibleImage {
    /// Name of the image; `None` if the push was not confirmed.
    pub image: Option<String>,
    pub oracle: Oracle,
}

/// Kinds of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A RAM disk, possibly restored.
    Ram,
    /// A test drive with memory.
    Null,
    /// A writable file.
    File,
    /// A read-only file, for forks.
    Base,
    /// An image in a store.
    Image,
    /// A fork.
    Fork,
    /// A snapshot of a RAM disk or fork.
    Frozen,
    /// A snapshot of a file.
    Cow,
    /// A fork for every connection.
    Template,
    /// A fork restored from a saved file.
    Restored,
}

/// A device and what the torture knows about it.
#[expect(clippy::struct_excessive_bools, reason = "independent properties")]
pub struct Disk {
    pub name: String,
    pub kind: Kind,
    /// Base or origin.
    pub parent: Option<Arc<Disk>>,
    /// Clients may write.
    pub writable: bool,
    /// Requests are multiples of this many bytes.
    pub block: u64,
    /// Unflushed writes are lost when the power is cut; for a file also when the server is killed.
    pub has_volatile_cache: bool,
    /// Has fault rules, or can have.
    pub faults: bool,
    /// Has a backing device.
    pub spills: bool,
    /// The content, or the COW device of a snapshot, is in a file or a store and survives a restart.
    pub survives_restart: bool,
    /// Name of the image, for an image.
    pub image: Option<String>,
    /// Arguments of `serve` that create the device.
    pub device_args: Option<String>,
    /// The verb that created the device, if one did.
    pub created_by: String,
    /// Created by the arguments of `serve`; other devices were created by a verb.
    pub from_start: bool,
    /// The content is in memory only and ends with the server.
    pub is_lost: bool,
    /// If its content is lost, the device is served empty and not withheld (`on_lost=empty`).
    pub serves_lost: bool,
    /// The content is saved when the server ends in order (`keep=yes`).
    pub keeps: bool,
    /// Content at the last orderly end of a server.
    pub saved: Option<Oracle>,
    /// A merge was running or pending at the restart. If it finished, the device is a new snapshot
    /// now.
    pub merged_before: bool,
    /// The possible content.
    pub oracle: Mutex<Oracle>,
    /// Held for reading by clients with requests in flight; for writing while no request may be in
    /// flight.
    pub gate: RwLock<()>,
    /// Held during `publish`, `unpublish` and `merge`: with two of them at once the remaining
    /// addresses, or which call started the merge, would be unknown.
    pub publishing: Mutex<()>,
    /// Mutable state.
    pub state: Mutex<State>,
}

/// The mutable state of a device.
#[derive(Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent properties")]
pub struct State {
    addresses: Vec<Address>,
    /// State that a server with a state directory keeps.
    known: KnownState,
    /// Requests may fail with ENOSPC.
    tight: bool,
    /// Requests may fail with EIO.
    fails: bool,
    /// Number of reasons why clients must not start anything.
    closed: u32,
    /// Number of running verbs that may end connections, and of all such verbs so far.
    ending: u32,
    ended: u64,
    /// A merge into the origin is running or pending.
    merging: bool,
    removed: bool,
    /// Number of running verbs that replace the content.
    replacing: u32,
    /// Reads completed during such a verb: they may show the new content, and are judged when it is
    /// known.
    deferred: Vec<DeferredRead>,
}

/// State of a device that a server with a state directory keeps, apart from its addresses.
#[derive(Debug, Clone, Default)]
pub struct KnownState {
    /// UUID, if it was queried.
    pub uuid: Option<String>,
    /// Number of times the content was lost.
    pub losses: u64,
    /// Memory limit in bytes.
    pub limit: Option<u64>,
    /// Size that was set, in bytes.
    pub size: Option<u64>,
    /// The content was lost, and no verb has released the device.
    pub withheld: bool,
}

/// A read that is judged later.
pub struct DeferredRead {
    pub read: ReadToken,
    pub first: u64,
    pub data: Vec<u8>,
    pub text: String,
}

/// The state of a device's connections at one moment.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionMark {
    ended: u64,
    ending: bool,
}

impl Disk {
    /// Creates a device with the content of `oracle`, published at `at`.
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

    /// Returns the addresses where clients find the device now.
    pub fn addresses(&self) -> Vec<Address> {
        let state = self.state();
        if state.closed > 0 || state.removed || state.known.withheld {
            Vec::new()
        } else {
            state.addresses.clone()
        }
    }

    /// Returns the addresses of the device, including those from which it is withheld.
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

    /// Returns an address for NBD clients.
    pub fn nbd(&self) -> Option<PathBuf> {
        self.addresses().into_iter().find_map(|place| match place {
            Address::Nbd(path) => Some(path),
            _ => None,
        })
    }

    /// Returns an address for virtual machines.
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

    /// Prevents clients from starting anything until [`allow_clients`](Self::allow_clients) was called as often.
    pub fn block_clients(&self) {
        self.state().closed += 1;
    }

    pub fn allow_clients(&self) {
        self.state().closed -= 1;
    }

    pub fn set_tight(&self, tight: bool) {
        self.state().tight = tight;
    }

    /// Returns true if the memory limit of the device or its family is small.
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

    /// Records the start of a verb that replaces the content.
    pub fn begin_replacement(&self) -> ReadToken {
        self.state().replacing += 1;
        self.oracle().begin_read()
    }

    /// Records the completion of the verb; `tell` informs the oracle of the new content.
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

    /// Judges a read, or defers it until a running verb has completed.
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

    /// Returns the content since `verb` started, once it is known.
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

    /// Describes the origin of the device.
    pub fn describe(&self) -> String {
        let device_args = self.device_args.as_deref().unwrap_or(&self.created_by);
        let below = self.parent.as_ref().map(|of| format!(", of {}", of.describe())).unwrap_or_default();
        format!("{} ({device_args}{below})", self.name)
    }

    /// Records the start of a verb that may end connections.
    pub fn begin_disconnect(&self) {
        let mut state = self.state();
        state.ending += 1;
        state.ended += 1;
    }

    /// Records the completion of the verb.
    pub fn end_disconnect(&self) {
        self.state().ending -= 1;
    }

    pub fn mark(&self) -> ConnectionMark {
        let state = self.state();
        ConnectionMark { ended: state.ended, ending: state.ending > 0 }
    }

    /// Returns true if a verb may have ended a connection made after `mark`.
    pub fn may_have_ended(&self, mark: ConnectionMark) -> bool {
        let state = self.state();
        mark.ending || state.ended != mark.ended || state.removed
    }

    /// Returns what survives a power loss.
    fn durability(&self) -> Durability {
        if self.has_volatile_cache { Durability::Flushed } else { Durability::Completed }
    }

    /// Returns the same device after a restart. `killed`: the server ended without writing
    /// anything. `size` is in sectors, if known.
    pub fn after_restart(
        &self,
        killed: bool,
        parent: Option<Arc<Disk>>,
        at: Vec<Address>,
        known: KnownState,
        size: Option<u64>,
    ) -> Self {
        let mut oracle = self.oracle();
        let name = self.name.as_str();
        let mut saved = self.saved.clone();
        let fresh = match self.kind {
            _ if self.keeps && !killed => {
                let flush = oracle.begin_flush();
                oracle.end_flush(flush, true);
                oracle.crash();
                oracle.grow(size.unwrap_or_default());
                saved = Some(oracle.clone());
                oracle.clone()
            }
            // The device may have grown since.
            _ if self.saved.is_some() => {
                let mut fresh = self.saved.clone().expect("looked at just now");
                fresh.grow(size.unwrap_or_default());
                fresh
            }
            Kind::File | Kind::Cow | Kind::Base | Kind::Image if self.survives_restart => {
                if !killed {
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
            // The content of a merging snapshot is judged through its origin.
            state: Mutex::new(State { merging, closed: u32::from(merging), ..state }),
            ..Self::new(name, self.kind, fresh, Vec::new())
        }
    }
}
