//! Allow lists: the networks, users and groups that may connect to an address.
#![expect(unsafe_code)]
// UNSAFETY: calls getsockopt for SO_PEERGROUPS, which rustix lacks, and for SO_PEERCRED, which rustix cannot
// report for a peer without a pid in this namespace.

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

/// Maximum number of entries of a list. Each new connection is compared with all of them.
pub const MAX_ALLOWED: usize = 256;

/// Maximum number of groups of a process (`NGROUPS_MAX`).
const GROUPS_MAX: usize = 65_536;
/// Groups that the first getsockopt call has space for.
const GROUPS_FIRST: usize = 64;
/// Bits of an IPv6 address in front of an IPv4-mapped address.
const MAPPED_BITS: u8 = 96;

/// An entry of an allow list, such as `10.0.0.0/8`, `uid:1000` or `gid:1000`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Who {
    /// TCP clients whose address is in this network.
    Network(IpNet),
    /// Processes of this user, connected by a Unix socket.
    User(u32),
    /// Processes with this primary or supplementary group, connected by a Unix socket.
    Group(u32),
}

/// Error from parsing a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NetworkError {
    /// The text is neither a network nor an address.
    #[error(
        "must be a network (10.0.0.0/8, fe80::/10), an address (192.168.1.5, ::1), uid:USER or gid:GROUP"
    )]
    Syntax,
    /// The address has bits set behind the prefix length. Contains the network without them.
    #[error("the address has bits set behind the prefix length; use {0}")]
    Bits(IpNet),
}

impl Who {
    /// Parses a network or a single address. IPv4-mapped IPv6 networks become IPv4 networks.
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
        let IpNet::V6(network_v6) = net else { return Ok(Self::Network(net)) };
        let mapped = network_v6.addr().to_ipv4_mapped().zip(network_v6.prefix_len().checked_sub(MAPPED_BITS));
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

/// The set of clients that may connect. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowList {
    /// Sorted, without duplicates.
    entries: Arc<[Who]>,
}

/// The process that connected to a Unix socket, with its credentials at connect time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Process id; 0 if the process has none in this pid namespace.
    pub process: i32,
    user: u32,
    group: u32,
}

impl Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid {} of uid {}", self.process, self.user)
    }
}

impl AllowList {
    /// Creates a list from entries in any order.
    pub fn new(entries: impl IntoIterator<Item = Who>) -> Self {
        let mut entries: Vec<_> = entries.into_iter().collect();
        entries.sort_unstable();
        entries.dedup();
        Self { entries: entries.into() }
    }

    /// Returns the entries, sorted.
    pub fn entries(&self) -> &[Who] {
        &self.entries
    }

    /// Returns true if the list has users or groups, so that a Unix socket can be used.
    pub fn has_users(&self) -> bool {
        self.entries.iter().any(|who| !matches!(who, Who::Network(_)))
    }

    /// Returns true if a TCP client could be allowed at `host`, a name or an address without brackets.
    pub fn has_networks_for(&self, host: &str) -> bool {
        // IPv4 addresses accept only IPv4 clients and IPv6 addresses only IPv6 clients; `::` and names accept
        // both.
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

    /// Returns true if the list allows the peer of a stream socket. An unknown peer is not allowed.
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

    /// Calls `has_group` for groups other than the process's primary group.
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
        let mut separator = "";
        self.entries.iter().try_for_each(|who| {
            write!(f, "{separator}{who}")?;
            separator = ",";
            Ok(())
        })
    }
}

/// Returns the process that connected to a Unix socket, or `None` for other sockets.
pub fn peer_of(socket: BorrowedFd<'_>) -> Option<Peer> {
    let mut found = MaybeUninit::<libc::ucred>::uninit();
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is borrowed; the kernel writes at most `len` bytes there.
    let status = unsafe {
        let at = found.as_mut_ptr().cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, at, &raw mut len)
    };
    if status != 0 || len as usize != size_of::<libc::ucred>() {
        return None;
    }
    // SAFETY: the kernel has written the whole structure.
    let found = unsafe { found.assume_init() };
    let is_process = found.uid != u32::MAX;
    is_process.then_some(Peer { process: found.pid, user: found.uid, group: found.gid })
}

/// Returns the peer's supplementary groups, or none if the kernel cannot report them.
fn groups_of(socket: BorrowedFd<'_>) -> Vec<libc::gid_t> {
    let mut groups = vec![0; GROUPS_FIRST];
    loop {
        let room = groups.len() * size_of::<libc::gid_t>();
        let mut len = room as libc::socklen_t;
        // SAFETY: the descriptor is borrowed; the kernel writes at most `len` bytes there.
        let status = unsafe {
            let at = groups.as_mut_ptr().cast();
            libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERGROUPS, at, &raw mut len)
        };
        if status == 0 {
            groups.truncate(len as usize / size_of::<libc::gid_t>());
            return groups;
        }
        // ERANGE: the buffer is too small.
        let is_short = rustix::io::Errno::from_io_error(&std::io::Error::last_os_error())
            == Some(rustix::io::Errno::RANGE);
        if !is_short || groups.len() >= GROUPS_MAX {
            return Vec::new();
        }
        groups.resize(GROUPS_MAX, 0);
    }
}

/// Counter of denied connections, which also logs at most one line a minute. Shared by all addresses of a
/// server.
#[derive(Default)]
pub struct Denials {
    count: AtomicU64,
    lines: LogLimit<()>,
}

impl Denials {
    /// Counts and logs a denied connection from `peer` at `address`.
    pub fn add(&self, address: &dyn Display, peer: &dyn Display) {
        self.count.fetch_add(1, Ordering::SeqCst);
        if let Some(held_back) = self.lines.line(()) {
            tracing::warn!("{address}: connection closed, peer not in the allow list: {peer}{held_back}");
        }
    }

    /// Returns the number of denied connections.
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
    fn networks_parse_and_print_in_canonical_form() {
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
        assert!(said.ends_with("; use 10.0.0.0/8"), "{said}");
        let two = AllowList::new([Who::Group(5), network("::1"), Who::User(7), Who::User(7)]);
        assert_eq!(two.to_string(), "::1,uid:7,gid:5");
        assert_eq!(two, AllowList::new([Who::User(7), network("::1"), Who::Group(5)]));
    }

    #[test]
    fn network_contains_ipv4_mapped_address() {
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
    fn process_matches_by_user_and_groups() {
        let peer = Peer { process: 1, user: 7, group: 8 };
        let is_in = |who: Who| AllowList::new([who]).has_process(peer, &mut |group| group == 9);
        assert!(is_in(Who::User(7)) && is_in(Who::Group(8)) && is_in(Who::Group(9)));
        assert!(!is_in(Who::User(8)) && !is_in(Who::Group(7)) && !is_in(network("0.0.0.0/0")));
    }

    #[test]
    fn list_without_usable_entries_is_detected() {
        let users = AllowList::new([Who::User(1)]);
        assert!(users.has_users() && !users.has_networks_for("::") && !users.has_networks_for("host"));
        let four = list(&["10.0.0.0/8"]);
        assert!(!four.has_users());
        for (host, v4_allowed, v6_allowed) in [
            ("127.0.0.1", true, false),
            ("0.0.0.0", true, false),
            ("::1", false, true),
            ("::", true, true),
            ("::ffff:127.0.0.1", true, false),
            ("localhost", true, true),
        ] {
            assert_eq!(four.has_networks_for(host), v4_allowed, "{host}");
            assert_eq!(list(&["fe80::/10"]).has_networks_for(host), v6_allowed, "{host}");
        }
    }

    #[test]
    fn socket_peer_is_matched() {
        let (here, _there) = UnixStream::pair().unwrap();
        let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let lets_in = |who: Who| AllowList::new([who]).lets_in(here.as_fd());
        assert!(lets_in(Who::User(user)) && lets_in(Who::Group(group)));
        assert!(!lets_in(Who::User(user + 1)) && !lets_in(network("::/0")));
        let supplementary = rustix::process::getgroups().unwrap();
        assert!(supplementary.iter().all(|group| lets_in(Who::Group(group.as_raw()))));
        let other = (1..u32::MAX)
            .find(|n| *n != group && supplementary.iter().all(|known| known.as_raw() != *n))
            .unwrap();
        assert!(!lets_in(Who::Group(other)));

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (here, _) = listener.accept().unwrap();
        assert!(list(&["127.0.0.0/8"]).lets_in(here.as_fd()));
        assert!(!list(&["127.0.0.2", "::/0"]).lets_in(here.as_fd()));
        assert!(!AllowList::new([Who::User(user), Who::User(0)]).lets_in(here.as_fd()));
    }
}
