//! The families that a server has another process hold.
//!
//! A thread has them held by another process when the former one has ended, and has the files of removed families
//! closed.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use freestone::ram::{Family, WeakFamily};
use freestone::sync::Mutex;
use freestone_spec::family::FamilyHolder;
use freestone_spec::refusal::{Errno, Refusal};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{error, warn};
use uuid::Uuid;

use super::holder::{HeldFiles, Holder};
use super::manager::{ManagerHolder, ServiceManager};
use super::messages::in_order;
use super::process::{HolderProcess, HolderProgram};

/// Interval in which the thread looks for removed families, and retries to start a holder.
const CHECK_EVERY: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Process that holds the memory of a server's devices.
pub enum HolderChoice {
    /// A process that the server starts.
    Process(HolderProgram),
    /// The service manager.
    Manager(ServiceManager),
}

/// The families of a server, and their holder.
pub struct RemoteFamilies {
    /// Families of a killed server.
    found: Mutex<Vec<HeldFiles>>,
    /// Locked during a request to the holder. No other lock is taken meanwhile.
    held: Mutex<Held>,
}

struct Held {
    holder: Box<dyn Holder>,
    /// Families that this server has created or adopted.
    families: Vec<(Uuid, WeakFamily)>,
    /// True once families are no longer held: the server shuts down.
    is_ended: bool,
}

impl RemoteFamilies {
    /// Connects to the holder of the server with this state directory, or starts one.
    ///
    /// # Errors
    /// Fails if there is no holder, and none can be started.
    pub fn start(state: &Path, holder: HolderChoice) -> io::Result<Arc<Self>> {
        let mut holder: Box<dyn Holder> = match holder {
            HolderChoice::Process(program) => Box::new(HolderProcess::new(state, program)),
            HolderChoice::Manager(manager) => Box::new(ManagerHolder::new(manager)),
        };
        let found = Mutex::new(holder.connect()?);
        let held = Mutex::new(Held { holder, families: Vec::new(), is_ended: false });
        let all = Arc::new(Self { found, held });
        let weak = Arc::downgrade(&all);
        thread::Builder::new().name("holder".into()).spawn(move || watch(&weak))?;
        Ok(all)
    }

    /// Returns the families that the holder had when this server started. Later calls return none.
    pub fn take_found(&self) -> Vec<HeldFiles> {
        std::mem::take(&mut *self.found.lock())
    }

    /// Records that a family which the holder has was adopted.
    pub fn adopt(&self, id: Uuid, family: &Family) {
        self.held.lock().families.push((id, family.downgrade()));
    }

    /// Has the files of a family closed that no device needs.
    pub fn release(&self, id: Uuid) {
        if let Err(why) = self.held.lock().holder.release(id) {
            warn!("cannot free the memory of removed devices: {why}");
        }
    }

    /// Has the files of all families closed that this server has created or adopted: the server shuts down.
    pub fn end(&self) {
        let Held { holder, families, is_ended } = &mut *self.held.lock();
        *is_ended = true;
        let released = families.drain(..).try_for_each(|(id, _)| holder.release(id));
        if let Err(why) = released {
            error!("the memory of the devices may remain in the process that holds it: {why}");
        }
        holder.leave();
    }

    /// Returns the files that the service manager stores, by name, for a successor in the same process: the manager passes
    /// them only to a process that it starts.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn stored(&self) -> io::Result<Vec<(String, OwnedFd)>> {
        let held = self.held.lock();
        let mut stored = Vec::new();
        for (id, family) in &held.families {
            let (Some(family), Some(names)) = (family.upgrade(), held.holder.stored_names(*id)) else {
                continue;
            };
            let files = family.files().map(in_order).unwrap_or_default();
            for (name, file) in names.into_iter().zip(files) {
                stored.push((name, file.try_clone_to_owned()?));
            }
        }
        Ok(stored)
    }

    /// Connects again if the holder has ended, and has the files of removed families closed.
    fn check(&self) -> io::Result<()> {
        let mut held = self.held.lock();
        if held.is_ended {
            return Ok(());
        }
        if held.holder.has_ended() {
            held.reconnect()?;
            warn!("another process holds the memory of the devices now, because the former one had ended");
        }
        while let Some(index) = held.families.iter().position(|(_, family)| !family.exists()) {
            let (id, _) = held.families[index];
            held.holder.release(id)?;
            held.families.swap_remove(index);
        }
        Ok(())
    }
}

impl FamilyHolder for RemoteFamilies {
    fn hold(&self, family: &Family) -> Result<(), Refusal> {
        let id = Uuid::new_v4();
        let mut held = self.held.lock();
        let attempt = |held: &mut Held| {
            if held.holder.has_ended() {
                held.reconnect()?;
            }
            held.hold(id, family)
        };
        // The holder may end meanwhile; then there is another one at the second attempt.
        let done = attempt(&mut held)
            .or_else(|why| if held.holder.has_ended() { attempt(&mut held) } else { Err(why) });
        done.map_err(|why| {
            let errno = Errno::of_file(&why);
            Refusal::failed(errno, format!("its memory cannot be held for the next server: {why}"))
        })?;
        held.families.push((id, family.downgrade()));
        Ok(())
    }
}

impl Held {
    /// Connects again, and has all families held.
    fn reconnect(&mut self) -> io::Result<()> {
        self.holder.connect()?;
        for (id, family) in self.families.clone() {
            if let Some(family) = family.upgrade() {
                self.hold(id, &family)?;
            }
        }
        Ok(())
    }

    fn hold(&mut self, id: Uuid, family: &Family) -> io::Result<()> {
        family.files().map_or(Ok(()), |files| self.holder.hold(id, &in_order(files)))
    }
}

/// Checks the holder as soon as it ends, and every second, until the server has dropped the families.
fn watch(families: &Weak<RemoteFamilies>) {
    let mut last_error = String::new();
    loop {
        let Some(socket) = families.upgrade().map(|all| all.held.lock().holder.watched()) else { return };
        match &socket {
            Some(socket) => drop(poll(&mut [PollFd::new(socket, PollFlags::empty())], Some(&CHECK_EVERY))),
            None => thread::sleep(Duration::from_secs(1)),
        }
        let Some(all) = families.upgrade() else { return };
        match all.check() {
            Ok(()) => last_error.clear(),
            Err(why) => {
                let why = why.to_string();
                if why != last_error {
                    error!("the content of RAM disks is lost if the server is killed now: {why}");
                    last_error = why;
                }
            }
        }
    }
}
