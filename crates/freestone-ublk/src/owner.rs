//! Whose a device is, for who gives the nodes of users' devices to them.

use rustix::io::Errno;
use thiserror::Error;

use crate::abi::feature;
use crate::control::{Control, ControlError, is_id};
use crate::kernel::Kernel;

/// Nobody knows whose a device is.
#[derive(Debug, Error)]
pub enum OwnerError {
    /// The name of another node.
    #[error("{0}: must be ublkcN or ublkbN")]
    Name(String),
    /// The control device cannot be opened.
    #[error("/dev/ublk-control: {0}")]
    NoControl(Errno),
    /// The driver does not tell.
    #[error("{name}: {source}")]
    Control {
        /// The node.
        name: String,
        /// Why not.
        source: ControlError,
    },
}

/// User and group that have made the device with the node `name`; `None`: it is root's.
pub fn owner(kernel: &dyn Kernel, name: &str) -> Result<Option<(u32, u32)>, OwnerError> {
    let id = id_of(name).ok_or_else(|| OwnerError::Name(name.to_owned()))?;
    kernel.check().map_err(OwnerError::NoControl)?;
    let info = Control(kernel).info(id);
    let info = info.map_err(|source| OwnerError::Control { name: name.to_owned(), source })?;
    let is_users = info.flags & feature::UNPRIVILEGED_DEV != 0;
    Ok(is_users.then_some((info.owner_uid, info.owner_gid)))
}

/// The number in the name of a node, which may also be a partition's.
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
    fn numbers_are_in_names_of_nodes() {
        for (name, id) in [("ublkc0", 0), ("ublkb17", 17), ("ublkb3p1", 3)] {
            assert_eq!(id_of(name), Some(id));
        }
        for name in ["ublk-control", "ublkb", "ublkc+1", "ublkc3p1", "ublkb1048576", "sda", ""] {
            assert_eq!(id_of(name), None, "{name}");
        }
    }
}
