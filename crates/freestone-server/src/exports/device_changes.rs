//! Changes of published devices: cuts of connections, replacement, new sizes.

use std::time::{Duration, Instant};

use freestone_nbd::Address;
use freestone_spec::kinds::Entry;
use tracing::warn;

use super::publish::{access_path, description};
use super::{Exports, LiveExport};

/// Longest wait for requests that still run in a device when its connections are cut, the same as in the NBD server.
const CUT_GRACE: Duration = Duration::from_secs(1);

impl Exports {
    /// Cuts all connections to a device, as a loss of its power does, runs `action`, and serves the device again.
    /// Requests in flight get no replies. New clients wait until `action` has returned. Returns the number of ended
    /// connections and the result of `action`. If the device blocks a thread for longer than [`CUT_GRACE`], that thread
    /// may still be in a call of the device while `action` runs.
    pub fn restart<T>(&self, name: &str, action: impl FnOnce() -> T) -> (usize, T) {
        let local = self.standalone(name);
        let held: Vec<_> = local.iter().map(|export| export.hold()).collect();
        let cut = held.iter().filter(|held| held.cut()).count();
        let end = Instant::now() + CUT_GRACE;
        if !held.iter().all(|held| held.wait_gone(end)) {
            warn!("{name}: a request is still running in the device");
        }
        let (ended, done) = self.nbd.cut_connections_during(name, action);
        (ended + cut, done)
    }

    /// Replaces the device that has the name of `new` in all its exports. Connections to the old device keep using it,
    /// so the caller should end them first with [`restart`](Self::restart).
    pub fn replace(&self, new: &Entry) {
        if new.device().is_none() {
            return;
        }
        let live = self.live(new.name());
        let access_path = |at: &Address| {
            let live = live.iter().find(|live| live.is_at(at));
            access_path(new, at, live.map(|live| &live.limits)).expect("checked above")
        };
        self.nbd.replace(new.name(), &access_path, &description(new), &new.failures);
        for LiveExport { standalone, limits, .. } in &live {
            if let Some(export) = standalone {
                export.replace(new, limits);
            }
        }
    }

    /// Reports the new size of a device to local exports. NBD clients see the new size when they connect again.
    pub fn announce_size(&self, name: &str) {
        for export in self.standalone(name) {
            export.announce_size();
        }
    }
}
