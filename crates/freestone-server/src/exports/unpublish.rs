//! Unpublishing of devices, and the end of all exports.

use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_control::protocol::RpcError;
use freestone_nbd::{Address, Passed};
use freestone_spec::kinds::Entry;
use tracing::warn;

use super::checks::{FORCE, in_use};
use super::export_spec::ExportAddress;
use super::standalone_export::{StandaloneExport, end_all};
use super::table::ExportRecord;
use super::{DeviceExports, Exports};
use crate::devices::claims::Claim;

/// Longest wait for requests in flight when a local export (vhost-user or ublk) ends.
const END_GRACE: Duration = Duration::from_secs(5);

impl Exports {
    /// Unpublishes a device at one address. Fails if clients are connected, unless `force` is set.
    pub fn unpublish_from(
        &self,
        _: &Claim<'_>,
        entry: &Entry,
        place: &ExportAddress,
        force: bool,
    ) -> Result<(), RpcError> {
        let name = entry.name();
        if self.change(name, |device| device.remove_absent(place)) {
            return Ok(());
        }
        // Connections end when their requests complete, so requests must not wait for memory or limits.
        let _now = force.then(|| self.bypass_waiting(entry));
        let live = self.find(name, place);
        let remove = || {
            let is_other =
                |record: &ExportRecord| !record.published.as_ref().is_ok_and(|live| live.at.is_same(place));
            self.change(name, |device| device.records.retain(is_other));
        };
        if let ExportAddress::Nbd(address) = place {
            let done = self.nbd.unpublish_at(name, address, force);
            done.map_err(|e| rpc_error!(EBUSY, "{name}: cannot be unpublished: {e}"))?;
            remove();
            self.close_unused(address);
            return Ok(());
        }
        let Some(export) = live.and_then(|live| live.standalone) else { return Ok(()) };
        let held = export.hold();
        if export.is_in_use() && !force {
            return Err(in_use(name, 1, FORCE));
        }
        export.begin_to_end();
        drop(held);
        remove();
        end_all(&[export], END_GRACE);
        Ok(())
    }

    /// Unpublishes a device at all addresses. Returns the number of connections that were closed.
    pub fn unpublish(&self, _: &Claim<'_>, entry: &Entry, force: bool) -> Result<usize, RpcError> {
        let name = entry.name();
        if !force {
            self.check_idle(entry)?;
        }
        let (live, local) = (self.live(name), self.standalone(name));
        // A client may have connected since the check. No client can connect while the exports are held.
        let held: Vec<_> = local.iter().map(|export| export.hold()).collect();
        let used = local.iter().filter(|export| export.is_in_use()).count();
        if used > 0 && !force {
            return Err(in_use(name, used, FORCE));
        }
        let connections = self.nbd.connections(name) + used;
        // Connections end when their requests complete, so requests must not wait for memory or limits.
        let _now = force.then(|| self.bypass_waiting(entry));
        let nbd = live.iter().filter_map(|live| match &live.at {
            ExportAddress::Nbd(at) => Some(at),
            _ => None,
        });
        if nbd.clone().next().is_some() {
            let done = self.nbd.unpublish(name, force);
            done.map_err(|e| rpc_error!(EBUSY, "{name}: cannot be unpublished: {e}"))?;
        }
        self.change(name, DeviceExports::clear);
        nbd.for_each(|address| self.close_unused(address));
        for export in &local {
            export.begin_to_end();
        }
        // The hold ends first, because the kernel writes back its cache of a block device before the export ends.
        drop(held);
        end_all(&local, END_GRACE);
        Ok(connections)
    }

    /// Closes an address that `publish` opened, unless it has exports.
    fn close_unused(&self, address: &Address) {
        if !self.nbd.is_unused(address) || self.server_addresses().contains(address) {
            return;
        }
        let Ok(_address) = self.claims.address("unpublish", address) else {
            // Another verb hangs on the address, which is closed when its next export is unpublished.
            return warn!("{address}: stays open because another verb is working on it");
        };
        // Another device may have been published there while this thread waited.
        if self.nbd.is_unused(address) {
            self.nbd.close(address);
        }
    }

    /// Stops listening everywhere, completes the requests in flight, and closes all connections. Cuts connections with
    /// requests still in flight after `grace`.
    pub fn shutdown(&self, grace: Duration) {
        self.end_all(grace, StandaloneExport::begin_to_end);
    }

    /// Ends all exports like [`shutdown`](Self::shutdown), but leaves recoverable block devices in the kernel for the
    /// next server.
    pub fn leave(&self, grace: Duration) {
        self.end_all(grace, StandaloneExport::begin_to_leave);
    }

    /// Ends all exports like [`leave`](Self::leave), and returns the listening sockets and connections of the NBD
    /// server for the successor.
    pub fn pass_on(&self, grace: Duration) -> Passed {
        let local = self.begin_to_end_local(StandaloneExport::begin_to_leave);
        let end = Instant::now() + grace;
        let passed = self.nbd.pass_on(grace);
        end_all(&local, end.saturating_duration_since(Instant::now()));
        passed
    }

    fn end_all(&self, grace: Duration, begin: fn(&StandaloneExport)) {
        let local = self.begin_to_end_local(begin);
        let end = Instant::now() + grace;
        self.nbd.shutdown(grace);
        end_all(&local, end.saturating_duration_since(Instant::now()));
    }

    /// Begins to end the exports of block devices and vhost-user, so that they end in parallel with NBD connections.
    fn begin_to_end_local(&self, begin: fn(&StandaloneExport)) -> Vec<Arc<StandaloneExport>> {
        let records = |device: &mut DeviceExports| std::mem::take(&mut device.records);
        let records: Vec<_> = self.table().devices.values_mut().flat_map(records).collect();
        let live = records.into_iter().filter_map(|record| record.published.ok());
        let local: Vec<_> = live.filter_map(|live| live.standalone).collect();
        for export in &local {
            begin(export);
        }
        local
    }
}
