//! Specifications of exports: where a device is published, and with which permissions and limits. They come
//! from command lines, requests and configuration files.

use std::fmt;
use std::path::{Path, PathBuf};

use freestone_nbd::{Address, AllowList};
use freestone_spec::config::ExportWords;
use freestone_spec::limits::LimitSpec;
use freestone_spec::path_text;
use freestone_ublk as ublk;

use crate::allow;
use crate::paths::{address_text, parse_address};

/// Address of an export.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Place {
    /// An NBD address.
    Nbd(Address),
    /// A vhost-user-blk socket.
    VhostUser(PathBuf),
    /// A ublk block device with this number of queues. 0 stands for one queue per CPU, up to the limit.
    Ublk(u16),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nbd(address) => write!(f, "{}", address_text(address)),
            Self::VhostUser(path) => write!(f, "vhost-user:{}", path_text::text(path)),
            Self::Ublk(_) => write!(f, "a block device"),
        }
    }
}

/// Specification of an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The address.
    pub place: Place,
    /// Clients cannot write.
    pub read_only: bool,
    /// Allow list. `None` admits every client, or keeps the list of an address that is already open.
    pub allow: Option<AllowList>,
    /// Limits.
    pub limits: LimitSpec,
}

/// All exports of a device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Seen {
    /// The device is exported at the addresses of the server.
    pub home: bool,
    /// Other exports. The boolean is true if a configuration file declares the export.
    pub exports: Vec<(Wanted, bool)>,
}

impl Seen {
    /// Returns true if both have the same exports, in any order.
    pub fn is_same(&self, other: &Self) -> bool {
        let all_there = self.exports.iter().all(|export| other.exports.contains(export));
        self.home == other.home && self.exports.len() == other.exports.len() && all_there
    }
}

impl Place {
    /// Returns true unless the port is 0, which stands for a new port each time.
    pub fn is_fixed(&self) -> bool {
        !matches!(self, Self::Nbd(Address::Tcp { port: 0, .. }))
    }

    /// Returns true if both are the same address. Port 0 is never the same; a device has one block device, so
    /// the number of queues is ignored.
    pub fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Nbd(Address::Tcp { port: 0, .. }), _) => false,
            (Self::Ublk(_), Self::Ublk(_)) => true,
            _ => self == other,
        }
    }

    /// Returns true if `asked` has port 0, and this address has the same host with the chosen port.
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
    /// The end of a sentence: the list is invalid, or no client could connect.
    pub fn allow(&self, words: &[String]) -> Result<AllowList, String> {
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

    /// Fails for limits that do not apply to this kind of address.
    ///
    /// # Errors
    /// The end of a sentence.
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
    /// The end of a sentence that begins with the option or key.
    pub fn vhost_user(text: &str, base: Option<&Path>) -> Result<Self, String> {
        match parse_address(text, base)? {
            Address::Unix(path) => Ok(Self::VhostUser(path)),
            other @ (Address::Tcp { .. } | Address::Stdin) => {
                Err(format!("{other}: a virtual machine shares its memory: it must be unix:PATH"))
            }
        }
    }

    /// Returns a block device with this number of queues.
    ///
    /// # Errors
    /// The end of a sentence: the number is out of range.
    pub fn ublk(queues: Option<u16>) -> Result<Self, String> {
        match queues {
            None => Ok(Self::Ublk(0)),
            Some(queues @ 1..=ublk::MAX_QUEUES) => Ok(Self::Ublk(queues)),
            Some(queues) => Err(format!("queues={queues}: must be 1 to {}", ublk::MAX_QUEUES)),
        }
    }
}

impl Wanted {
    /// Parses an export of a file. Relative paths start at `base`.
    ///
    /// # Errors
    /// The end of a sentence that begins with the device.
    pub fn of(words: &ExportWords, base: &Path) -> Result<Self, String> {
        let ExportWords { nbd, vhost_user, queues, read_only, allow, limits, .. } = words;
        let place = match (nbd, vhost_user) {
            (Some(text), _) => {
                Place::Nbd(parse_address(text, Some(base)).map_err(|why| format!("export: nbd: {why}"))?)
            }
            (None, Some(text)) => {
                Place::vhost_user(text, Some(base)).map_err(|why| format!("export: vhost_user: {why}"))?
            }
            (None, None) => Place::ublk(*queues).map_err(|why| format!("export: {why}"))?,
        };
        let allow = allow.as_deref().map(|words| place.allow(words)).transpose();
        let allow = allow.map_err(|why| format!("export: allow: {why}"))?;
        let limits = limits.over(LimitSpec::default());
        place.check_limits(&limits).map_err(|why| format!("export: {why}"))?;
        Ok(Self { place, read_only: *read_only, allow, limits })
    }

    /// Returns true if address and `read_only` are equal. Ignores allow list and limits.
    pub fn is_asked_as(&self, other: &Self) -> bool {
        self.place == other.place && self.read_only == other.read_only
    }
}
