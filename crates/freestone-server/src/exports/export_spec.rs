//! Specifications of exports: the address of a published device, its permissions and limits. Command
//! lines, control requests and configuration files contain them.

use std::fmt;
use std::path::{Path, PathBuf};

use freestone_nbd::{Address, AllowList};
use freestone_spec::limits::LimitSpec;
use freestone_spec::path_text;
use freestone_ublk as ublk;

use crate::config::ExportWords;
use crate::settings::allow;
use crate::settings::paths::{address_text, parse_address};

/// Address of an export.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ExportAddress {
    /// An NBD address.
    Nbd(Address),
    /// A vhost-user-blk socket.
    VhostUser(PathBuf),
    /// A ublk block device with this number of queues. 0 means one queue per CPU, up to a limit.
    Ublk(u16),
}

impl fmt::Display for ExportAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nbd(address) => write!(f, "{}", address_text(address)),
            Self::VhostUser(path) => write!(f, "vhost-user:{}", path_text::text(path)),
            Self::Ublk(_) => write!(f, "a block device"),
        }
    }
}

/// Specification of an export, which the state directory records as [`freestone_state::Export`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportSpec {
    /// Address at which the device is published.
    pub address: ExportAddress,
    /// True if clients cannot write.
    pub read_only: bool,
    /// Allow list. `None` admits every client at a new address, and keeps the list of an address that is
    /// already open.
    pub allow: Option<AllowList>,
    /// Limits of clients, requests and bytes per second.
    pub limits: LimitSpec,
    /// True if a configuration file declares the export. A later file that no longer does unpublishes it.
    pub declared: bool,
}

/// All exports of a device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExportSet {
    /// True if the device is exported at the server's own addresses.
    pub at_server_addresses: bool,
    /// Exports at other addresses.
    pub exports: Vec<ExportSpec>,
}

impl ExportSet {
    /// Returns true if one of the exports is a ublk block device.
    pub fn has_block_device(&self) -> bool {
        self.exports.iter().any(|export| matches!(export.address, ExportAddress::Ublk(_)))
    }

    /// Returns true if both sets have the same exports, in any order.
    pub fn is_same(&self, other: &Self) -> bool {
        let all_there = self.exports.iter().all(|export| other.exports.contains(export));
        self.at_server_addresses == other.at_server_addresses
            && self.exports.len() == other.exports.len()
            && all_there
    }
}

impl ExportAddress {
    /// Returns true unless the address is TCP with port 0, for which the system chooses a new port each time.
    pub fn has_fixed_port(&self) -> bool {
        !matches!(self, Self::Nbd(Address::Tcp { port: 0, .. }))
    }

    /// Returns true if both are the same address. Port 0 never equals another address, because its port is
    /// not known yet. The number of ublk queues is ignored, because a device has only one block device.
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Nbd(Address::Tcp { port: 0, .. }), _) => false,
            (Self::Ublk(_), Self::Ublk(_)) => true,
            _ => self == other,
        }
    }

    /// Returns true if `asked` has port 0 and this address has the same host: its port was chosen for
    /// `asked`.
    pub fn has_chosen_port_of(&self, asked: &Self) -> bool {
        match (self, asked) {
            (Self::Nbd(Address::Tcp { host, .. }), Self::Nbd(Address::Tcp { host: asked, port: 0 })) => {
                host == asked
            }
            _ => false,
        }
    }

    /// Parses an allow list for this address.
    ///
    /// # Errors
    /// Returns the reason if the list is invalid, or if the list would admit no client.
    pub fn parse_allow_list(&self, words: &[String]) -> Result<AllowList, String> {
        let list = allow::parse(words)?;
        match self {
            Self::Nbd(address) => allow::check(&list, address)?,
            Self::VhostUser(_) => allow::check_local(&list, self)?,
            Self::Ublk(_) => {
                return Err("does not apply to a block device, whose file mode controls access".into());
            }
        }
        Ok(list)
    }

    /// Fails if a limit does not apply to this kind of address.
    ///
    /// # Errors
    /// Returns the key of that limit and the reason.
    pub fn check_limits(&self, limits: &LimitSpec) -> Result<(), String> {
        let why = match self {
            Self::VhostUser(_) => "the socket of a virtual machine has one client at a time",
            Self::Ublk(_) => "a block device has no connections",
            Self::Nbd(_) => return Ok(()),
        };
        match limits.max_clients {
            0 => Ok(()),
            most => Err(format!("max_clients={most}: {why}; it is for NBD, and for the device")),
        }
    }

    /// Parses the address of a vhost-user-blk socket.
    ///
    /// # Errors
    /// Returns the reason without the option or key, which the caller puts before it.
    pub fn vhost_user(text: &str, base: Option<&Path>) -> Result<Self, String> {
        match parse_address(text, base)? {
            Address::Unix(path) => Ok(Self::VhostUser(path)),
            other @ (Address::Tcp { .. } | Address::Stdin) => {
                Err(format!("{other}: a virtual machine shares its memory: it must be unix:PATH"))
            }
        }
    }

    /// Returns the address of a ublk block device with this number of queues; `None` means one queue per CPU.
    ///
    /// # Errors
    /// Returns the reason if the number is out of range.
    pub fn ublk(queues: Option<u16>) -> Result<Self, String> {
        match queues {
            None => Ok(Self::Ublk(0)),
            Some(queues @ 1..=ublk::MAX_QUEUES) => Ok(Self::Ublk(queues)),
            Some(queues) => Err(format!("queues={queues}: must be 1 to {}", ublk::MAX_QUEUES)),
        }
    }
}

impl ExportSpec {
    /// Returns a writable export at an address, without allow list and limits.
    pub fn at(address: ExportAddress) -> Self {
        Self { address, read_only: false, allow: None, limits: LimitSpec::default(), declared: false }
    }

    /// Parses an export of a configuration file. Relative paths start at `base`.
    ///
    /// # Errors
    /// Returns the reason without the device name, which the caller puts before it.
    pub fn of(words: &ExportWords, base: &Path) -> Result<Self, String> {
        let ExportWords { nbd, vhost_user, queues, read_only, allow, limits, .. } = words;
        let place = match (nbd, vhost_user) {
            (Some(text), _) => ExportAddress::Nbd(
                parse_address(text, Some(base)).map_err(|why| format!("export: nbd: {why}"))?,
            ),
            (None, Some(text)) => ExportAddress::vhost_user(text, Some(base))
                .map_err(|why| format!("export: vhost_user: {why}"))?,
            (None, None) => ExportAddress::ublk(*queues).map_err(|why| format!("export: {why}"))?,
        };
        let allow = allow.as_deref().map(|words| place.parse_allow_list(words)).transpose();
        let allow = allow.map_err(|why| format!("export: allow: {why}"))?;
        let limits = limits.apply_to(LimitSpec::default());
        place.check_limits(&limits).map_err(|why| format!("export: {why}"))?;
        Ok(Self { address: place, read_only: *read_only, allow, limits, declared: true })
    }

    /// Returns true if address and `read_only` are equal. Allow list and limits are ignored.
    pub fn has_same_address_and_mode(&self, other: &Self) -> bool {
        self.address == other.address && self.read_only == other.read_only
    }
}
