//! What the verbs work on: the devices, the NBD server, and who listens where.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use freestone::ram::Ram;
use freestone_nbd::{Address, ExportInfo, ExportOptions, Server};
use serde_json::Value;
use tracing::warn;

use crate::advice::{self, Place};
use crate::control::protocol::{Errno, Fault};
use crate::control::server::Handler;
use crate::entries::nearest;
use crate::machine;
use crate::registry::{Entry, Kind, Refused, Registry};
use crate::spec::Spec;
use crate::verbs;

/// The state behind the control socket.
///
/// Lock order: `changes`, then the registry's lock. `changes` makes verbs that change what exists, what is
/// published or who listens run one after the other, also while a forced end of connections takes its time; the
/// NBD server and readers of statistics never take it.
pub struct Service {
    /// The devices.
    pub registry: Registry,
    /// Who serves them.
    pub nbd: Arc<Server>,
    changes: Mutex<Changes>,
}

/// The right to change what exists or is published.
#[derive(Default)]
pub struct Changes {
    /// The addresses of the command line: there as long as the server.
    home: Vec<Address>,
    /// Addresses that `publish` opened; closed when their last export goes.
    opened: Vec<Address>,
}

impl Service {
    /// A service without devices.
    pub fn new(nbd: Arc<Server>) -> Self {
        Self { registry: Registry::default(), nbd, changes: Mutex::default() }
    }

    /// Waits for the right to change things.
    pub fn changes(&self) -> MutexGuard<'_, Changes> {
        // A verb that panicked leaves at worst an address listed that is closed already.
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device of that name.
    pub fn find(&self, name: &str) -> Result<Arc<Entry>, Fault> {
        self.registry.find(name).ok_or_else(|| {
            let entries = self.registry.all();
            let names: Vec<&str> = entries.iter().map(|e| e.name()).collect();
            let hint = nearest(name, &names).map(|h| format!("; {h}?")).unwrap_or_default();
            Fault::failed(Errno::ENODEV, format!("{name}: no such device{hint}"))
        })
    }

    /// The RAM disk of that name; `can` is what only such a device can.
    pub fn find_ram(&self, name: &str, can: &str) -> Result<Arc<Ram>, Fault> {
        match &self.find(name)?.kind {
            Kind::Ram(ram) => Ok(Arc::clone(ram)),
            Kind::Null(_) | Kind::File(_) => {
                Err(Fault::failed(Errno::EOPNOTSUPP, format!("{name}: only a ram device {can}")))
            }
        }
    }

    /// Listens at an address of the command line. Returns it with the port that it got.
    pub fn listen_home(&self, changes: &mut Changes, address: &Address) -> Result<Address, Fault> {
        let listen = self.nbd.listen(address);
        let at = listen.map_err(|e| Fault::failed(Errno::EADDRNOTAVAIL, e.to_string()))?;
        warn_of_exposure(&at);
        changes.home.push(at.clone());
        Ok(at)
    }

    /// Publishes a device at the addresses of the command line.
    pub fn publish_home(&self, changes: &mut Changes, entry: &Entry) -> Result<(), Fault> {
        for address in changes.home.clone() {
            self.publish(changes, entry, &address, false)?;
        }
        Ok(())
    }

    /// Sets a device up and publishes it at home, where that is asked.
    pub fn create(&self, changes: &mut Changes, spec: Spec, publish: bool) -> Result<Arc<Entry>, Fault> {
        let name = spec.name.clone();
        self.registry.check_free(&name).map_err(|refused| match refused {
            Refused::Duplicate => {
                Fault::failed(Errno::EEXIST, format!("{name}: a device of that name exists"))
            }
            Refused::Full => Fault::failed(Errno::ENOSPC, format!("{name}: no room for another device")),
        })?;
        // Before it is there: a file that is made has no name to look at.
        let place = spec.backing_path().map(Place::of);
        let entry = Arc::new(Entry::build(spec).map_err(|e| Fault::failed(e.errno, e.sentence))?);
        self.warn_of_memory(&entry, place.unwrap_or_default());
        self.registry.add(Arc::clone(&entry));
        if publish && let Err(fault) = self.publish_home(changes, &entry) {
            // All or nothing. That it was published nowhere yet is no error here.
            let _ = self.nbd.unpublish(&name, true);
            self.registry.remove(&name);
            return Err(fault);
        }
        Ok(entry)
    }

    /// Called before the device is among the others.
    fn warn_of_memory(&self, entry: &Entry, place: Place) {
        let Kind::Ram(ram) = &entry.kind else { return };
        let config = ram.config();
        if let (Some(backing), Some(stat)) = (&config.backing, ram.backing()) {
            for warning in advice::of_backing(entry.name(), backing, stat.size, config.mem_limit, place) {
                warn!("{warning}");
            }
        }
        // Without /proc there is nothing to compare with.
        let Ok(memory) = machine::memory() else { return };
        let others = self.registry.all();
        let limits = others.iter().filter_map(|other| match &other.kind {
            Kind::Ram(ram) => Some(ram.config().mem_limit),
            Kind::Null(_) | Kind::File(_) => None,
        });
        for warning in advice::of_memory(entry.name(), &config, limits, memory) {
            warn!("{warning}");
        }
    }

    /// Publishes a device at an address, and listens there if nobody does. The first export of an address is
    /// also its default one. Returns the address with the port that it got.
    pub fn publish(
        &self,
        changes: &mut Changes,
        entry: &Entry,
        address: &Address,
        read_only: bool,
    ) -> Result<Address, Fault> {
        let name = entry.name();
        let exports = self.nbd.exports();
        if exports.iter().any(|e| e.name == name && e.address == *address) {
            return Err(Fault::failed(Errno::EEXIST, format!("{name}: already published at {address}")));
        }
        let (at, opened) = if self.nbd.addresses().contains(address) {
            (address.clone(), false)
        } else {
            let listen = self.nbd.listen(address);
            (listen.map_err(|e| Fault::failed(Errno::EADDRNOTAVAIL, format!("{name}: {e}")))?, true)
        };
        let options = ExportOptions {
            read_only: read_only || entry.device().geometry().read_only,
            default: !exports.iter().any(|e| e.default && e.address == at),
            description: format!("freestone {} device", entry.kind_name()),
        };
        match self.nbd.publish(&at, name, entry.device(), options) {
            Ok(()) => {
                if opened {
                    warn_of_exposure(&at);
                    changes.opened.push(at.clone());
                }
                Ok(at)
            }
            Err(e) => {
                if opened {
                    self.nbd.close(&at);
                }
                Err(Fault::failed(Errno::EIO, format!("{name}: cannot be published at {at}: {e}")))
            }
        }
    }

    /// Takes a device off all addresses. Returns how many connections that ended.
    pub fn unpublish(&self, changes: &mut Changes, name: &str, force: bool) -> Result<usize, Fault> {
        if !force {
            self.check_idle(name)?;
        }
        let connections = self.nbd.connections(name);
        // Between the check and here somebody may have connected.
        let done = self.nbd.unpublish(name, force);
        done.map_err(|e| Fault::failed(Errno::EBUSY, format!("{name}: cannot be unpublished: {e}")))?;
        let exports = self.nbd.exports();
        changes.opened.retain(|address| {
            let used = exports.iter().any(|e| e.address == *address);
            if !used {
                self.nbd.close(address);
            }
            used
        });
        Ok(connections)
    }

    /// Refuses where clients are connected.
    pub fn check_idle(&self, name: &str) -> Result<(), Fault> {
        match self.nbd.connections(name) {
            0 => Ok(()),
            1 => {
                Err(Fault::failed(Errno::EBUSY, format!("{name}: a client is connected; --force goes ahead")))
            }
            n => Err(Fault::failed(
                Errno::EBUSY,
                format!("{name}: {n} clients are connected; --force goes ahead"),
            )),
        }
    }

    /// Where a device is published.
    pub fn exports_of(&self, name: &str) -> Vec<ExportInfo> {
        self.nbd.exports().into_iter().filter(|e| e.name == name).collect()
    }
}

fn warn_of_exposure(address: &Address) {
    if let Some(warning) = advice::of_exposure(address) {
        warn!("{warning}");
    }
}

impl Handler for Service {
    fn call(&self, method: &str, params: Option<Value>) -> Result<Value, Fault> {
        verbs::dispatch(self, method, params)
    }
}
