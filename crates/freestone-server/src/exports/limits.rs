//! Limits of exports: changes while exports are in use.

use std::sync::Arc;

use freestone::device::Counting;
use freestone_control::protocol::RpcError;
use freestone_spec::kinds::{Entry, WaitBypass};
use freestone_spec::limits::LimitSpec;
use freestone_spec::refusal::Errno;

use super::Exports;
use crate::devices::claims::Claim;
use crate::exports::export_spec::ExportAddress;

impl Exports {
    /// Makes requests to a device, or to all forks of a template, no longer wait for memory or limits, until the
    /// returned guards are dropped.
    pub fn bypass_waiting(&self, entry: &Entry) -> Vec<WaitBypass> {
        self.for_each_device(entry, Entry::bypass_waiting)
    }

    /// Like [`bypass_waiting`](Self::bypass_waiting), for a device whose content is about to be removed: requests that
    /// wait for a limit fail with the error `Gone`.
    pub fn fail_waiting(&self, entry: &Entry) -> Vec<WaitBypass> {
        self.for_each_device(entry, Entry::fail_waiting)
    }

    fn for_each_device(
        &self,
        entry: &Entry,
        end: fn(&Entry, &[Arc<Counting>]) -> WaitBypass,
    ) -> Vec<WaitBypass> {
        let live = self.live(entry.name());
        let access_paths: Vec<_> = live.iter().flat_map(|live| live.limits.access_paths()).collect();
        if entry.device().is_some() {
            return vec![end(entry, &access_paths)];
        }
        let of_template = |fork: &&Arc<Entry>| fork.template.as_deref() == Some(entry.name());
        let forks = self.registry.all();
        forks
            .iter()
            .filter(of_template)
            .map(|fork| {
                let own: Vec<_> =
                    access_paths.iter().filter(|path| fork.is_access_path(path)).cloned().collect();
                end(fork, &own)
            })
            .collect()
    }

    /// Sets the limits of the export at an address. Returns the previous limits.
    pub fn limit_at(
        &self,
        _: &Claim<'_>,
        entry: &Entry,
        place: &ExportAddress,
        limits: LimitSpec,
    ) -> Result<LimitSpec, RpcError> {
        let name = entry.name();
        let failed = |errno, why: String| RpcError::failed(errno, format!("{name}: {why}"));
        place.check_limits(&limits).map_err(|why| rpc_error!(invalid, "{name}: publish: {why}"))?;
        let Some(live) = self.find(name, place) else {
            return Err(failed(Errno::ENODEV, format!("is not published at {place}")));
        };
        let before = live.limits.limits();
        let set = live.limits.set(limits);
        set.map_err(|e| {
            failed(Errno::ENOMEM, format!("limits need a thread, which cannot be started: {e}"))
        })?;
        Ok(before)
    }
}
