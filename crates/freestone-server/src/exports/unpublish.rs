//! Unpublishing of devices, and the end of all exports.

use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_control::protocol::RpcError;
use freestone_nbd::Address;
use freestone_spec::kinds::Entry;
use freestone_spec::refusal::Errno;
use tracing::warn;

use super::Exports;
use super::checks::{FORCE, in_use};
use super::export_spec::ExportAddress;
use super::standalone_export::{StandaloneExport, end_all};
use crate::devices::claims::Claim;

/// Longest wait for requests in flight when a local export (vhost-user or ublk) ends.
const END_GRACE: Duration = Duration::from_secs(5);

impl Exports {
    /// Removes a local export, and waits until it has ended, for at most [`END_GRACE`].
    fn remove_local(&self, entry: &Entry, export: &Arc<StandaloneExport>) {
        let mut all = self.lock_local();
        if let Some(exports) = all.get_mut(entry.name()) {
            exports.retain(|other| !Arc::ptr_eq(other, export));
            if exports.is_empty() {
                all.remove(entry.name());
            }
        }
        drop(all);
        end_all(std::slice::from_ref(export), END_GRACE);
        self.limited.forget(entry.name(), &export.address());
    }

    /// Unpublishes a device at one address. Fails if clients are connected, unless `force` is set.
    pub fn unpublish_from(
        &self,
        _: &Claim<'_>,
        entry: &Entry,
        place: &ExportAddress,
        force: bool,
    ) -> Result<(), RpcError> {
        let name = entry.name();
        if self.unpublished.remove(name, Some(place)) {
            return Ok(());
        }
        // Connections end when their requests complete, so requests must not wait for memory or limits.
        let _now = force.then(|| self.bypass_waiting(entry));
        if let ExportAddress::Nbd(address) = place {
            let done = self.nbd.unpublish_at(name, address, force);
            done.map_err(|e| RpcError::failed(Errno::EBUSY, format!("{name}: cannot be unpublished: {e}")))?;
            self.limited.forget(name, &address.absolute().to_string());
            self.release_address(address);
            return Ok(());
        }
        let local = self.local_of(name);
        let Some(export) = local.iter().find(|export| export.spec().address.is_same(place)) else {
            return Ok(());
        };
        let held = export.hold();
        if export.is_in_use() && !force {
            return Err(in_use(name, 1, FORCE));
        }
        export.begin_to_end();
        drop(held);
        self.remove_local(entry, export);
        Ok(())
    }

    /// Unpublishes a device at all addresses. Returns the number of connections that were closed.
    pub fn unpublish(&self, _: &Claim<'_>, entry: &Entry, force: bool) -> Result<usize, RpcError> {
        let name = entry.name();
        if !force {
            self.check_idle(entry)?;
        }
        let (at, local) = (self.nbd.exports_named(name), self.local_of(name));
        // A client may have connected since the check. No client can connect while the exports are held.
        let held: Vec<_> = local.iter().map(|export| export.hold()).collect();
        let used = local.iter().filter(|export| export.is_in_use()).count();
        if used > 0 && !force {
            return Err(in_use(name, used, FORCE));
        }
        let connections = self.nbd.connections(name) + used;
        // Connections end when their requests complete, so requests must not wait for memory or limits.
        let _now = force.then(|| self.bypass_waiting(entry));
        if !at.is_empty() {
            let done = self.nbd.unpublish(name, force);
            done.map_err(|e| RpcError::failed(Errno::EBUSY, format!("{name}: cannot be unpublished: {e}")))?;
        }
        for export in at {
            self.release_address(&export.address);
        }
        self.lock_local().remove(name);
        for export in &local {
            export.begin_to_end();
        }
        // The hold ends first, because the kernel writes back its cache of a block device before the export ends.
        drop(held);
        end_all(&local, END_GRACE);
        self.limited.forget_all(name);
        self.unpublished.forget(name);
        Ok(connections)
    }

    /// Decrements the number of exports at an address that `publish` opened, and closes the address at 0.
    fn release_address(&self, address: &Address) {
        {
            let mut addresses = self.addresses();
            let Some(left) = addresses.opened.get_mut(address) else { return };
            *left -= 1;
            if *left > 0 {
                return;
            }
        }
        let Ok(_address) = self.claims.address("unpublish", address) else {
            // Another verb hangs on the address, which is closed when its next export is unpublished.
            return warn!("{address}: stays open because another verb is working on it");
        };
        {
            let mut addresses = self.addresses();
            // Another device may have been published there while this thread waited.
            if addresses.opened.get(address).is_none_or(|left| *left > 0) {
                return;
            }
            addresses.opened.remove(address);
        }
        self.nbd.close(address);
    }

    /// Stops listening everywhere, completes the requests in flight, and closes all connections. Cuts connections with
    /// requests still in flight after `grace`.
    pub fn shutdown(&self, grace: Duration) {
        let local: Vec<_> = self.lock_local().drain().flat_map(|(_, exports)| exports).collect();
        // Begins here, so that local exports and NBD connections end in parallel.
        for export in &local {
            export.begin_to_end();
        }
        let end = Instant::now() + grace;
        self.nbd.shutdown(grace);
        end_all(&local, end.saturating_duration_since(Instant::now()));
    }
}
