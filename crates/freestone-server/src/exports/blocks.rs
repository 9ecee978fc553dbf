//! Exclusive use of ublk block devices while their content is replaced.
//!
//! The kernel caches block devices. While the server has a block device open exclusively, no program can mount it.
//! Dirty data is written before the content is replaced, and the cache is dropped afterwards. Both steps wait for
//! requests of the device, so the caller must hold no lock.

use std::sync::Arc;

use freestone_control::protocol::RpcError;
use freestone_spec::kinds::Entry;
use freestone_spec::refusal::Errno;
use freestone_ublk::{ClaimError, DeviceClaim};
use tracing::warn;

use super::Exports;
use crate::exports::standalone_export::StandaloneExport;

/// Guard of the ublk block devices of a device, opened exclusively so that no program can mount them.
#[must_use]
pub struct Blocks {
    claimed: Vec<(String, DeviceClaim)>,
}

impl Exports {
    /// Returns true if wiping a device would change no content. In that case only resets the counters, if `counters`
    /// is set. The kernel may hold unwritten changes of a block device, so a device with one is always wiped.
    pub fn skip_wipe(&self, entry: &Entry, counters: bool) -> bool {
        let is_block = |export: &Arc<StandaloneExport>| matches!(&**export, StandaloneExport::Ublk(_));
        !self.standalone(entry.name()).iter().any(is_block) && entry.skip_wipe(counters)
    }

    /// Opens the ublk block devices of a device exclusively, so that no program mounts them. Fails if a block device is
    /// in use; the error ends with `advice`. With `force`, logs a warning and skips that block device.
    pub fn claim_blocks(&self, entry: &Entry, force: bool, advice: &str) -> Result<Blocks, RpcError> {
        let name = entry.name();
        let mut claimed = Vec::new();
        for export in self.standalone(name) {
            let StandaloneExport::Ublk(ublk) = &*export else { continue };
            match ublk.claim() {
                Ok(exclusive) => claimed.push((export.address(), exclusive)),
                Err(error) if force => {
                    warn!(
                        "{name}: the content is replaced (--force) although {error}; cached blocks of it are stale"
                    );
                }
                Err(error) => {
                    let errno =
                        if matches!(error, ClaimError::InUse { .. }) { Errno::EBUSY } else { Errno::EIO };
                    let why = "its cached blocks would corrupt the new content; unmount it first";
                    return Err(RpcError::failed(errno, format!("{name}: {error}; {why}; {advice}")));
                }
            }
        }
        Ok(Blocks { claimed })
    }
}

impl Blocks {
    /// Drops the kernel's cache of the old content, and ends the exclusive use of the block devices.
    pub fn drop_caches(self) {
        for (address, exclusive) in self.claimed {
            if let Err(error) = exclusive.drop_cache() {
                warn!(
                    "{address}: the kernel's cache of the old content cannot be dropped: {error}; close all programs \
                     that have it open before using it"
                );
            }
        }
    }
}
