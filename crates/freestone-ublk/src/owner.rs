//! Looks up the owner of an unprivileged device, for the udev rule.

use rustix::io::Errno;
use thiserror::Error;

use crate::kernel::Kernel;
use crate::kernel::abi::feature;
use crate::kernel::control::{Control, ControlError, is_id};

/// An error from looking up a device's owner.
#[derive(Debug, Error)]
pub enum OwnerError {
    /// The name is not the node of a ublk device.
    #[error("{0}: must be ublkcN or ublkbN")]
    Name(String),
    /// The control device cannot be opened.
    #[error("/dev/ublk-control: {0}")]
    ControlDevice(Errno),
    /// The driver rejected the query.
    #[error("{name}: {source}")]
    Control {
        /// Name of the node.
        name: String,
        /// Error of the driver.
        source: ControlError,
    },
}

/// Returns the user id and group id that created the device with the node `name`, or `None` if root
/// created it.
pub fn device_owner(kernel: &dyn Kernel, name: &str) -> Result<Option<(u32, u32)>, OwnerError> {
    let id = id_of(name).ok_or_else(|| OwnerError::Name(name.to_owned()))?;
    kernel.check().map_err(OwnerError::ControlDevice)?;
    let info = Control(kernel).info(id);
    let info = info.map_err(|source| OwnerError::Control { name: name.to_owned(), source })?;
    let is_users = info.flags & feature::UNPRIVILEGED_DEV != 0;
    Ok(is_users.then_some((info.owner_uid, info.owner_gid)))
}

/// Returns the id in a node name, which may be that of a partition, or None for other names.
fn id_of(name: &str) -> Option<u32> {
    let whole = match name.strip_prefix("ublkb") {
        Some(block) => block.split_once('p').map_or(block, |(whole, _)| whole),
        None => name.strip_prefix("ublkc")?,
    };
    let is_number = !whole.is_empty() && whole.bytes().all(|byte| byte.is_ascii_digit());
    whole.parse().ok().filter(|id| is_number && is_id(*id))
}

#[cfg(test)]
mod tests {
    use super::id_of;

    #[test]
    fn id_is_parsed_from_node_name() {
        for (name, id) in [("ublkc0", 0), ("ublkb17", 17), ("ublkb3p1", 3)] {
            assert_eq!(id_of(name), Some(id));
        }
        for name in ["ublk-control", "ublkb", "ublkc+1", "ublkc3p1", "ublkb1048576", "sda", ""] {
            assert_eq!(id_of(name), None, "{name}");
        }
    }
}
