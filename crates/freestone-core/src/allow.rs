//! Who may connect to an address: lists of networks, users and groups.
#![expect(unsafe_code)]
// UNSAFETY: who is at the other end of a Unix socket is told by options of sockets that rustix does
// not have in full: the groups, and a process that has no number here.

use std::fmt::{self, Display};
use std::mem::{MaybeUninit, size_of};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ipnet::{IpNet, Ipv4Net};
use rustix::net::{AddressFamily, getpeername, sockopt};
use thiserror::Error;

use crate::log_limit::LogLimit;

/// Most entries of a list: each new connection is held against all of them.
pub const MAX_ALLOWED: usize = 256;

/// Groups of a process; the kernel has no more (`NGROUPS_MAX`).
const GROUPS_MAX: usize = 65_536;
/// There is room for so many at first.
const GROUPS_USUAL: usize = 64;
/// Bits of an IPv6 address in front of the IPv4 address that is mapped into it.
const MAPPED_BITS: u8 = 96;

/// One entry of a list. Written `10.0.0.0/8`, `uid:1000`, `gid:1000`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Who {
    /// Whoever comes by TCP from an address of this network.
    Network(IpNet),
    /// Processes of this user, at Unix sockets.
    User(u32),
    /// Processes with this group, as their own or a further one, at Unix sockets.
    Group(u32),
}

/// Why a text is no network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NetworkError {
    /// Neither a network nor an address.
    #[error(
        "must be a network (10.0.0.0/8, fe80::/10), an address (192.168.1.5, ::1), uid:USER or gid:GROUP"
    )]
    Syntax,
    /// The address has bits that the network does not.
    #[error("the address has bits behind the length of the network; {0} is meant?")]
    Bits(IpNet),
}

impl Who {
    /// A network, or one address. IPv4 that is mapped into IPv6 is IPv4.
    ///
    /// # Errors
    /// See [`NetworkError`].
    pub fn network(text: &str) -> Result<Self, NetworkError> {
        let net = match (text.parse::<IpNet>(), text.parse::<IpAddr>()) {
            (Ok(net), _) => net,
            (_, Ok(address)) => IpNet::from(address),
            _ => return Err(NetworkError::Syntax),
        };
        if net.trunc() != net {
            return Err(NetworkError::Bits(net.trunc()));
        }
        let IpNet::V6(six) = net else { return Ok(Self::Network(net)) };
        let mapped = six.addr().to_ipv4_mapped().zip(six.prefix_len().checked_sub(MAPPED_BITS));
        let four = mapped.and_then(|(address, len)| Ipv4Net::new(address, len).ok());
        Ok(Self::Network(four.map_or(net, IpNet::V4)))
    }
}

impl Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network(net) if net.prefix_len() == net.max_prefix_len() => net.addr().fmt(f),
            Self::Network(net) => net.fmt(f),
            Self::User(user) => write!(f, "uid:{user}"),
            Self::Group(group) => write!(f, "gid:{group}"),
        }
    }
}

/// Who may connect; nobody else. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowList {
    /// In order, each once.
    entries: Arc<[Who]>,
}

/// The process at the other end of a Unix socket, as it was when it connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its number; 0 where it has none here, as one of another namespace.
    process: i32,
    user: u32,
    group: u32,
}

impl Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid {} of uid {}", self.process, self.user)
    }
}

impl AllowList {
    /// Of these, in whatever order.
    pub fn new(entries: impl IntoIterator<Item = Who>) -> Self {
        let mut entries: Vec<_> = entries.into_iter().collect();
        entries.sort_unstable();
        entries.dedup();
        Self { entries: entries.into() }
    }

    /// Its entries, in order.
    pub fn entries(&self) -> &[Who] {
        &self.entries
    }

    /// Whether it has users or groups, so that somebody may come by a Unix socket.
    pub fn has_users(&self) -> bool {
        self.entries.iter().any(|who| !matches!(who, Who::Network(_)))
    }

    /// Whether somebody may come by TCP to this host, a name or an address without brackets.
    pub fn has_networks_for(&self, host: &str) -> bool {
        // At an address of IPv4 nobody comes from IPv6, nor the other way round, but to all addresses.
        let host = host.parse::<IpAddr>().ok().map(|host| host.to_canonical());
        self.networks().any(|net| match (host, net) {
            (Some(IpAddr::V4(_)), net) => net.addr().is_ipv4(),
            (Some(IpAddr::V6(host)), net) if !host.is_unspecified() => net.addr().is_ipv6(),
            _ => true,
        })
    }

    fn networks(&self) -> impl Iterator<Item = &IpNet> {
        self.entries.iter().filter_map(|who| if let Who::Network(net) = who { Some(net) } else { None })
    }

    /// Whether the list lets in who is at the other end of a stream socket. Who cannot be told is not
    /// let in.
    pub fn lets_in(&self, socket: BorrowedFd<'_>) -> bool {
        match sockopt::socket_domain(socket) {
            Ok(AddressFamily::UNIX) => {
                let mut groups = None;
                let mut has = |group| groups.get_or_insert_with(|| groups_of(socket)).contains(&group);
                peer_of(socket).is_some_and(|peer| self.has_process(peer, &mut has))
            }
            Ok(AddressFamily::INET | AddressFamily::INET6) => {
                let peer = getpeername(socket).ok().flatten();
                peer.and_then(|peer| SocketAddr::try_from(peer).ok())
                    .is_some_and(|at| self.has_address(at.ip()))
            }
            _ => false,
        }
    }

    fn has_address(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.networks().any(|net| net.contains(&address))
    }

    /// `has_group` is asked for groups that are not the process's own.
    fn has_process(&self, peer: Peer, has_group: &mut dyn FnMut(u32) -> bool) -> bool {
        self.entries.iter().any(|who| match *who {
            Who::Network(_) => false,
            Who::User(user) => user == peer.user,
            Who::Group(group) => group == peer.group || has_group(group),
        })
    }
}

impl Display for AllowList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = "";
        self.entries.iter().try_for_each(|who| {
            write!(f, "{between}{who}")?;
            between = ",";
            Ok(())
        })
    }
}

/// Who has connected by a Unix socket; `None` where it is none.
pub fn peer_of(socket: BorrowedFd<'_>) -> Option<Peer> {
    let mut found = MaybeUninit::<libc::ucred>::uninit();
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is borrowed; the kernel writes at most `len` bytes there.
    let asked = unsafe {
        let at = found.as_mut_ptr().cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, at, &raw mut len)
    };
    if asked != 0 || len as usize != size_of::<libc::ucred>() {
        return None;
    }
    // SAFETY: it was written whole.
    let found = unsafe { found.assume_init() };
    let is_process = found.uid != u32::MAX;
    is_process.then_some(Peer { process: found.pid, user: found.uid, group: found.gid })
}

/// The further groups of that process; none where they cannot be told.
fn groups_of(socket: BorrowedFd<'_>) -> Vec<libc::gid_t> {
    let mut groups = vec![0; GROUPS_USUAL];
    loop {
        let room = groups.len() * size_of::<libc::gid_t>();
        let mut len = room as libc::socklen_t;
        // SAFETY: the descriptor is borrowed; the kernel writes at most `len` bytes there.
        let asked = unsafe {
            let at = groups.as_mut_ptr().cast();
            libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERGROUPS, at, &raw mut len)
        };
        if asked == 0 {
            groups.truncate(len as usize / size_of::<libc::gid_t>());
            return groups;
        }
        // Too little room.
        let is_short = rustix::io::Errno::from_io_error(&std::io::Error::last_os_error())
            == Some(rustix::io::Errno::RANGE);
        if !is_short || groups.len() >= GROUPS_MAX {
            return Vec::new();
        }
        groups.resize(GROUPS_MAX, 0);
    }
}

/// Who was not let in: how many, and a line of the log a minute at most. Shared by all addresses of a
/// server.
#[derive(Default)]
pub struct Denials {
    count: AtomicU64,
    lines: LogLimit<()>,
}

impl Denials {
    /// Somebody, `peer`, was not let in at an address.
    pub fn add(&self, address: &dyn Display, peer: &dyn Display) {
        self.count.fetch_add(1, Ordering::SeqCst);
        if let Some(held_back) = self.lines.line(()) {
            tracing::warn!("{address}: closed, as allow does not have it: {peer}{held_back}");
        }
    }

    /// How many so far.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }
}

impl fmt::Debug for Denials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Denials").field("count", &self.count).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn network(text: &str) -> Who {
        Who::network(text).unwrap_or_else(|why| panic!("{text}: {why}"))
    }

    fn list(networks: &[&str]) -> AllowList {
        AllowList::new(networks.iter().map(|text| network(text)))
    }

    #[test]
    fn what_is_read_is_shown_in_one_way() {
        for (text, shown) in [
            ("10.0.0.0/8", "10.0.0.0/8"),
            ("192.168.1.5", "192.168.1.5"),
            ("192.168.1.5/32", "192.168.1.5"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("fe80::/10", "fe80::/10"),
            ("::1", "::1"),
            ("::/0", "::/0"),
            ("0:0:0:0:0:0:0:1", "::1"),
            ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
            ("::ffff:10.0.0.1", "10.0.0.1"),
        ] {
            assert_eq!(network(text).to_string(), shown, "{text}");
        }
        for text in
            ["", "10", "10.0.0.0/33", "10.0.0/8", "::/129", "10.0.0.0/", "10.0.0.0/-1", "host", "[::1]"]
        {
            assert_eq!(Who::network(text), Err(NetworkError::Syntax), "{text}");
        }
        let said = Who::network("10.0.0.1/8").unwrap_err().to_string();
        assert!(said.ends_with("10.0.0.0/8 is meant?"), "{said}");
        let two = AllowList::new([Who::Group(5), network("::1"), Who::User(7), Who::User(7)]);
        assert_eq!(two.to_string(), "::1,uid:7,gid:5");
        assert_eq!(two, AllowList::new([Who::User(7), network("::1"), Who::Group(5)]));
    }

    #[test]
    fn addresses_are_in_their_networks_and_mapped_ones_are_ipv4() {
        let is_in = |networks: &[&str], address: &str| list(networks).has_address(address.parse().unwrap());
        assert!(is_in(&["10.0.0.0/8"], "10.255.255.255"));
        assert!(!is_in(&["10.0.0.0/8"], "11.0.0.0"));
        assert!(is_in(&["10.0.0.0/8"], "::ffff:10.1.2.3"));
        assert!(is_in(&["127.0.0.1", "::1"], "::1"));
        assert!(!is_in(&["127.0.0.1"], "127.0.0.2"));
        assert!(is_in(&["fe80::/10"], "febf::1"));
        assert!(!is_in(&["fe80::/10"], "fec0::1"));
        assert!(is_in(&["0.0.0.0/0"], "::ffff:1.2.3.4"));
        assert!(!is_in(&["0.0.0.0/0"], "::1"));
        assert!(!is_in(&["::/0"], "::ffff:1.2.3.4"), "it is IPv4");
        assert!(is_in(&["::ffff:0:0/96"], "1.2.3.4"));
    }

    #[test]
    fn processes_are_known_by_user_and_groups() {
        let peer = Peer { process: 1, user: 7, group: 8 };
        let is_in = |who: Who| AllowList::new([who]).has_process(peer, &mut |group| group == 9);
        assert!(is_in(Who::User(7)) && is_in(Who::Group(8)) && is_in(Who::Group(9)));
        assert!(!is_in(Who::User(8)) && !is_in(Who::Group(7)) && !is_in(network("0.0.0.0/0")));
    }

    #[test]
    fn what_can_never_match_is_seen() {
        let users = AllowList::new([Who::User(1)]);
        assert!(users.has_users() && !users.has_networks_for("::") && !users.has_networks_for("host"));
        let four = list(&["10.0.0.0/8"]);
        assert!(!four.has_users());
        for (host, four_may, six_may) in [
            ("127.0.0.1", true, false),
            ("0.0.0.0", true, false),
            ("::1", false, true),
            ("::", true, true),
            ("::ffff:127.0.0.1", true, false),
            ("localhost", true, true),
        ] {
            assert_eq!(four.has_networks_for(host), four_may, "{host}");
            assert_eq!(list(&["fe80::/10"]).has_networks_for(host), six_may, "{host}");
        }
    }

    #[test]
    fn sockets_tell_who_is_there() {
        let (here, _there) = UnixStream::pair().unwrap();
        let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let lets_in = |who: Who| AllowList::new([who]).lets_in(here.as_fd());
        assert!(lets_in(Who::User(user)) && lets_in(Who::Group(group)));
        assert!(!lets_in(Who::User(user + 1)) && !lets_in(network("::/0")));
        let further = rustix::process::getgroups().unwrap();
        assert!(further.iter().all(|group| lets_in(Who::Group(group.as_raw()))));
        let other =
            (1..u32::MAX).find(|n| *n != group && further.iter().all(|known| known.as_raw() != *n)).unwrap();
        assert!(!lets_in(Who::Group(other)));

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (here, _) = listener.accept().unwrap();
        assert!(list(&["127.0.0.0/8"]).lets_in(here.as_fd()));
        assert!(!list(&["127.0.0.2", "::/0"]).lets_in(here.as_fd()));
        assert!(!AllowList::new([Who::User(user), Who::User(0)]).lets_in(here.as_fd()));
    }
}
