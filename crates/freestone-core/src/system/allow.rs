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

/// Maximum number of entries in an allow list. Each new connection is compared with every entry.
pub const MAX_ALLOWED: usize = 256;

/// Maximum number of groups of a process (`NGROUPS_MAX`).
const GROUPS_MAX: usize = 65_536;
/// Number of groups that fit in the buffer of the first getsockopt call. A second call has space for
/// [`GROUPS_MAX`].
const GROUPS_FIRST: usize = 64;
/// Prefix length in bits of `::ffff:0:0/96`, the network of IPv4-mapped IPv6 addresses.
const MAPPED_BITS: u8 = 96;

/// An entry of an allow list, such as `10.0.0.0/8`, `uid:1000` or `gid:1000`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum AllowEntry {
    /// TCP clients whose address is in this network.
    Network(IpNet),
    /// Processes of the user with this id, connected by a Unix socket.
    User(u32),
    /// Processes with this primary or supplementary group id, connected by a Unix socket.
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
    /// The address has bits set behind the prefix length. Contains the network with these bits cleared.
    #[error("the address has bits set behind the prefix length; use {0}")]
    Bits(IpNet),
}

impl AllowEntry {
    /// Parses a network or a single address. IPv4-mapped IPv6 networks become IPv4 networks.
    pub fn parse_network(text: &str) -> Result<Self, NetworkError> {
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

impl Display for AllowEntry {
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
    /// Entries, sorted and without duplicates.
    entries: Arc<[AllowEntry]>,
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
    /// Creates an allow list from entries in any order. Duplicates are removed.
    pub fn new(entries: impl IntoIterator<Item = AllowEntry>) -> Self {
        let mut entries: Vec<_> = entries.into_iter().collect();
        entries.sort_unstable();
        entries.dedup();
        Self { entries: entries.into() }
    }

    /// Returns the entries, sorted.
    pub fn entries(&self) -> &[AllowEntry] {
        &self.entries
    }

    /// Returns true if the list contains a user or a group. Otherwise no client of a Unix socket is allowed.
    pub fn has_users(&self) -> bool {
        self.entries.iter().any(|entry| !matches!(entry, AllowEntry::Network(_)))
    }

    /// Returns true if the list allows some TCP client of a listener at `host`, a name or an address without
    /// brackets.
    pub fn has_networks_for(&self, host: &str) -> bool {
        // A listener at an IPv4 address accepts only IPv4 clients, one at an IPv6 address only IPv6 clients.
        // Listeners at `::` and host names accept both.
        let host = host.parse::<IpAddr>().ok().map(|host| host.to_canonical());
        self.networks().any(|net| match (host, net) {
            (Some(IpAddr::V4(_)), net) => net.addr().is_ipv4(),
            (Some(IpAddr::V6(host)), net) if !host.is_unspecified() => net.addr().is_ipv6(),
            _ => true,
        })
    }

    fn networks(&self) -> impl Iterator<Item = &IpNet> {
        self.entries
            .iter()
            .filter_map(|entry| if let AllowEntry::Network(net) = entry { Some(net) } else { None })
    }

    /// Returns true if the list allows the peer of a stream socket. A peer that cannot be determined is not
    /// allowed.
    pub fn allows(&self, socket: BorrowedFd<'_>) -> bool {
        match sockopt::socket_domain(socket) {
            Ok(AddressFamily::UNIX) => {
                let mut groups = None;
                let mut has =
                    |group| groups.get_or_insert_with(|| supplementary_groups(socket)).contains(&group);
                socket_peer(socket).is_some_and(|peer| self.has_process(peer, &mut has))
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

    /// Returns true if an entry allows the process. Calls `has_group` only for groups other than its primary
    /// group.
    fn has_process(&self, peer: Peer, has_group: &mut dyn FnMut(u32) -> bool) -> bool {
        self.entries.iter().any(|entry| match *entry {
            AllowEntry::Network(_) => false,
            AllowEntry::User(user) => user == peer.user,
            AllowEntry::Group(group) => group == peer.group || has_group(group),
        })
    }
}

impl Display for AllowList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        self.entries.iter().try_for_each(|entry| {
            write!(f, "{separator}{entry}")?;
            separator = ",";
            Ok(())
        })
    }
}

/// Returns the process that connected to a Unix socket, or `None` for other sockets.
pub fn socket_peer(socket: BorrowedFd<'_>) -> Option<Peer> {
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

/// Returns the supplementary group ids of a Unix socket's peer, or an empty list if the kernel cannot report
/// them.
fn supplementary_groups(socket: BorrowedFd<'_>) -> Vec<libc::gid_t> {
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
        // ERANGE: the buffer for the group ids is too small.
        let is_short = rustix::io::Errno::from_io_error(&std::io::Error::last_os_error())
            == Some(rustix::io::Errno::RANGE);
        if !is_short || groups.len() >= GROUPS_MAX {
            return Vec::new();
        }
        groups.resize(GROUPS_MAX, 0);
    }
}

/// Counter of denied connections, which also logs at most one line a minute. Shared by all listening
/// addresses of a server.
#[derive(Default)]
pub struct Denials {
    count: AtomicU64,
    lines: LogLimit<()>,
}

impl Denials {
    /// Counts a denied connection from `peer` to the listening address `address`, and logs it within the rate
    /// limit.
    pub fn add(&self, address: &dyn Display, peer: &dyn Display) {
        self.count.fetch_add(1, Ordering::SeqCst);
        if let Some(suppressed) = self.lines.admit(()) {
            tracing::warn!("{address}: connection closed, peer not in the allow list: {peer}{suppressed}");
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

    fn network(text: &str) -> AllowEntry {
        AllowEntry::parse_network(text).unwrap_or_else(|why| panic!("{text}: {why}"))
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
            assert_eq!(AllowEntry::parse_network(text), Err(NetworkError::Syntax), "{text}");
        }
        let said = AllowEntry::parse_network("10.0.0.1/8").unwrap_err().to_string();
        assert!(said.ends_with("; use 10.0.0.0/8"), "{said}");
        let two =
            AllowList::new([AllowEntry::Group(5), network("::1"), AllowEntry::User(7), AllowEntry::User(7)]);
        assert_eq!(two.to_string(), "::1,uid:7,gid:5");
        assert_eq!(two, AllowList::new([AllowEntry::User(7), network("::1"), AllowEntry::Group(5)]));
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
        let is_in = |entry: AllowEntry| AllowList::new([entry]).has_process(peer, &mut |group| group == 9);
        assert!(is_in(AllowEntry::User(7)) && is_in(AllowEntry::Group(8)) && is_in(AllowEntry::Group(9)));
        assert!(!is_in(AllowEntry::User(8)) && !is_in(AllowEntry::Group(7)) && !is_in(network("0.0.0.0/0")));
    }

    #[test]
    fn list_without_usable_entries_is_detected() {
        let users = AllowList::new([AllowEntry::User(1)]);
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
        let allows = |entry: AllowEntry| AllowList::new([entry]).allows(here.as_fd());
        assert!(allows(AllowEntry::User(user)) && allows(AllowEntry::Group(group)));
        assert!(!allows(AllowEntry::User(user + 1)) && !allows(network("::/0")));
        let supplementary = rustix::process::getgroups().unwrap();
        assert!(supplementary.iter().all(|group| allows(AllowEntry::Group(group.as_raw()))));
        let other = (1..u32::MAX)
            .find(|n| *n != group && supplementary.iter().all(|known| known.as_raw() != *n))
            .unwrap();
        assert!(!allows(AllowEntry::Group(other)));

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (here, _) = listener.accept().unwrap();
        assert!(list(&["127.0.0.0/8"]).allows(here.as_fd()));
        assert!(!list(&["127.0.0.2", "::/0"]).allows(here.as_fd()));
        assert!(!AllowList::new([AllowEntry::User(user), AllowEntry::User(0)]).allows(here.as_fd()));
    }
}
