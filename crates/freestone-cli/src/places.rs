//! Places where a device is to be seen, as they are asked for: in words, in JSON, in a file.

use std::fmt;
use std::path::{Path, PathBuf};

use freestone_nbd::{Address, AllowList};
use freestone_spec::config::ExportWords;
use freestone_spec::limits::LimitSpec;
use freestone_spec::path_text;
use freestone_ublk as ublk;

use crate::allow;
use crate::paths::{address_text, parse_address};

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Place {
    /// An NBD address.
    Nbd(Address),
    /// The socket of a virtual machine.
    VhostUser(PathBuf),
    /// A block device of this machine, with so many queues; 0: what the machine has CPUs for.
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

/// A place, and how it is to be seen there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Where.
    pub place: Place,
    /// Nobody writes there.
    pub read_only: bool,
    /// Who may connect there. `None`: whoever can; at an address that is listened on already, who may.
    pub allow: Option<AllowList>,
    /// What it lets through.
    pub limits: LimitSpec,
}

/// Where a device is to be seen.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Seen {
    /// At the addresses of the server.
    pub home: bool,
    /// Where else, and whether a file says so.
    pub exports: Vec<(Wanted, bool)>,
}

impl Seen {
    /// Whether it is at the same places, in whatever order.
    pub fn is_same(&self, other: &Self) -> bool {
        let all_there = self.exports.iter().all(|export| other.exports.contains(export));
        self.home == other.home && self.exports.len() == other.exports.len() && all_there
    }
}

impl Place {
    /// Whether it is the same one whenever it is asked for: port 0 is another one each time.
    pub fn is_fixed(&self) -> bool {
        !matches!(self, Self::Nbd(Address::Tcp { port: 0, .. }))
    }

    /// Whether it is the same one. Of port 0 there are as many as are asked for.
    pub fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Nbd(Address::Tcp { port: 0, .. }), _) => false,
            (Self::Ublk(_), Self::Ublk(_)) => true,
            _ => self == other,
        }
    }

    /// Whether it is the address whose port was chosen where `asked` is port 0.
    pub fn has_chosen_port_of(&self, asked: &Self) -> bool {
        match (self, asked) {
            (Self::Nbd(Address::Tcp { host, .. }), Self::Nbd(Address::Tcp { host: asked, port: 0 })) => {
                host == asked
            }
            _ => false,
        }
    }

    /// The list of who may connect there that these words say.
    ///
    /// # Errors
    /// Half a sentence: they cannot be meant, or nobody could connect.
    pub fn allow(&self, words: &[String]) -> Result<AllowList, String> {
        let list = allow::parse(words)?;
        match self {
            Self::Nbd(address) => allow::check(&list, address)?,
            Self::VhostUser(_) => allow::check_local(&list, self)?,
            Self::Ublk(_) => return Err("the mode of a block device says who may use it".into()),
        }
        Ok(list)
    }

    /// Refuses limits that have no meaning there, with half a sentence.
    pub fn check_limits(&self, limits: &LimitSpec) -> Result<(), String> {
        let why = match self {
            Self::VhostUser(_) => "the socket of a virtual machine has one client at a time",
            Self::Ublk(_) => "a block device is not connected to",
            Self::Nbd(_) => return Ok(()),
        };
        match limits.max_clients {
            0 => Ok(()),
            most => Err(format!("max_clients={most}: {why}; it is for NBD, and for the device")),
        }
    }

    /// The socket of a virtual machine; the error is half a sentence that follows the text.
    pub fn vhost_user(text: &str, base: Option<&Path>) -> Result<Self, String> {
        match parse_address(text, base)? {
            Address::Unix(path) => Ok(Self::VhostUser(path)),
            other @ (Address::Tcp { .. } | Address::Stdin) => {
                Err(format!("{other}: a virtual machine shares its memory: it must be unix:PATH"))
            }
        }
    }

    /// A block device; the error is a half sentence.
    pub fn ublk(queues: Option<u16>) -> Result<Self, String> {
        match queues {
            None => Ok(Self::Ublk(0)),
            Some(queues @ 1..=ublk::MAX_QUEUES) => Ok(Self::Ublk(queues)),
            Some(queues) => Err(format!("queues={queues}: must be 1 to {}", ublk::MAX_QUEUES)),
        }
    }
}

impl Wanted {
    /// What a file asks for; relative paths start at `base`.
    ///
    /// # Errors
    /// Half a sentence.
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

    /// Whether it was asked for so, whoever may connect and whatever is let through.
    pub fn is_asked_as(&self, other: &Self) -> bool {
        self.place == other.place && self.read_only == other.read_only
    }
}
