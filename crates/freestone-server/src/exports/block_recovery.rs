//! ublk block devices that survive a killed server (`serve --recoverable`).
//!
//! Each block device of a recoverable device has a [tag](freestone_ublk::RecoveryTag), which the kernel stores: the
//! identity of the device, the generation of its content, and the state directory. The state directory itself records
//! no block device, so no kill can come between a block device and its record.
//!
//! A start finds the block devices of the killed server once, before it creates devices. `recreate` keeps the one of a
//! device whose content was adopted, and removes the others of that device before other content can be used under its
//! identity. So a block device is never attached to other content. Publishing the device then attaches it. The block
//! devices of devices that could not be created stay for the next start, like their content.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use freestone_control::protocol::RpcError;
use freestone_spec::kinds::{Entry, Identity, RESTORED};
use freestone_ublk::{Recovery, RecoveryTag, WaitingDevices};
use tracing::warn;

/// Block devices of the killed server, and the tags of this one's.
pub struct BlockRecovery {
    /// Number of the state directory, which a copy of the directory does not have.
    directory: u64,
    waiting: WaitingDevices,
}

impl BlockRecovery {
    /// Finds the block devices of the former server with this state directory.
    ///
    /// # Errors
    /// Fails if the state directory cannot be examined, or block devices not be listed.
    pub fn find(state: &Path) -> Result<Self, RpcError> {
        /// Odd, with bits of all weights: 2^64 divided by the golden ratio.
        const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;
        let at = state.display();
        let metadata =
            fs::metadata(state).map_err(|why| rpc_error!(EIO, "{at}: cannot be examined: {why}"))?;
        let waiting = WaitingDevices::find();
        let waiting = waiting
            .map_err(|why| rpc_error!(EIO, "cannot find the block devices of a killed server: {why}"))?;
        let directory = metadata.ino().wrapping_mul(SPREAD) ^ metadata.dev().rotate_left(20);
        Ok(Self { directory, waiting })
    }

    fn tag(&self, identity: Identity) -> RecoveryTag {
        RecoveryTag::new(identity.uuid.as_u64_pair().1 ^ self.directory, identity.generation)
    }

    /// Removes the block devices that the killed server had for a device, so that their requests fail. With `keeps`,
    /// the block device of exactly this content stays.
    ///
    /// # Errors
    /// Fails if a block device cannot be removed.
    pub fn remove(&self, name: &str, identity: Identity, keeps: bool) -> Result<(), RpcError> {
        let removed = self.waiting.remove(self.tag(identity), keeps);
        let removed = removed.map_err(|why| {
            rpc_error!(EIO, "{name}: its block device of a killed server cannot be removed: {why}")
        })?;
        for id in removed {
            warn!("{name}: /dev/ublkb{id} of a killed server was removed: its content was not adopted");
        }
        Ok(())
    }

    /// Returns how a block device of a device survives a kill, or `None` if it does not, because its content does not.
    pub(super) fn of(&self, entry: &Entry) -> Option<Recovery> {
        let is_held = entry.kind.ram()?.family().files().is_some();
        // Unflushed writes would be lost, and the conditions of zones. Restored snapshots cannot be created again.
        let is_lost =
            entry.layers.power.is_some() || entry.layers.zones.is_some() || entry.spec.words.kind == RESTORED;
        let tag = self.tag(entry.identity);
        let waiting = self.waiting.get(tag).filter(|_| entry.is_adopted);
        (is_held && !is_lost).then_some(Recovery { tag, waiting })
    }

    /// Records that the block device in `recovery` is served again, or was replaced by a new one.
    pub(super) fn end(&self, recovery: Recovery) {
        if let Some(id) = recovery.waiting {
            self.waiting.forget(recovery.tag, id);
        }
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn tag_belongs_to_directory_device_and_generation() {
        let [one, copy] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let tag = |state: &Path, uuid, generation| {
            BlockRecovery::find(state).unwrap().tag(Identity { uuid, generation })
        };
        let (uuid, other) = (Uuid::new_v4(), Uuid::new_v4());
        let first = tag(one.path(), uuid, 1);
        assert_eq!(tag(one.path(), uuid, 1), first);
        assert_ne!(tag(copy.path(), uuid, 1), first);
        assert_ne!(tag(one.path(), other, 1), first);
        assert_ne!(tag(one.path(), uuid, 2), first);
        assert!(BlockRecovery::find(&one.path().join("absent")).is_err());
    }
}
