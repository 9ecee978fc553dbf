//! Devices of kind `nbd` that lead back to this server.
//!
//! Such a device would wait for a request that the server carries out with that same device, or with
//! one that stands on it. Which exports are safe changes with every verb, so none is: a device and an
//! address of the server that are one place exclude one another. What stands between (a forwarder,
//! another server that leads back here) is not seen.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, ToSocketAddrs, UdpSocket};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use freestone_nbd::Address;
use freestone_nbd_client::Place;
use freestone_spec::kinds::Spec;
use freestone_spec::kinds::registry::Registry;
use freestone_spec::refusal::Errno;

use crate::control::protocol::Fault;

/// Refuses a device that is an export of a server which listens at these addresses.
pub fn check_device(spec: &Spec, addresses: &[Address]) -> Result<(), Fault> {
    let Some(uri) = spec.kind.uri() else { return Ok(()) };
    let Some(at) = addresses.iter().find(|address| leads_to(&uri.place, address)) else { return Ok(()) };
    let name = &spec.name;
    let why = format!("{name}: uri={uri}: {at} is an address of this server, which would wait for itself");
    Err(Fault::failed(Errno::EINVAL, why))
}

/// Refuses an address of the server to which one of its devices leads.
pub fn check_address(registry: &Registry, address: &Address) -> Result<(), Fault> {
    for entry in registry.remote() {
        if entry.spec.kind.uri().is_some_and(|uri| leads_to(&uri.place, address)) {
            let name = entry.name();
            let why =
                format!("{address}: the device {name} leads there, and the server would wait for itself");
            return Err(Fault::failed(Errno::EADDRNOTAVAIL, why));
        }
    }
    Ok(())
}

/// Whether who connects to `place` comes to a server that listens at `address`. A name of a host is
/// looked up.
fn leads_to(place: &Place, address: &Address) -> bool {
    match (place, address) {
        (Place::Unix(to), Address::Unix(at)) => is_one_socket(to, at),
        (Place::Tcp { host, port }, Address::Tcp { host: at, port: listens }) => {
            port == listens && (host == at || is_one_host(host, at, *port))
        }
        _ => false,
    }
}

fn is_one_socket(to: &Path, at: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    match (identity(to), identity(at)) {
        (Some(to), Some(at)) => to == at,
        // One is not there yet: it is where its directory is.
        _ => in_directory(to) == in_directory(at),
    }
}

/// The path without links, but for the last part.
fn in_directory(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return path };
    fs::canonicalize(parent).map_or_else(|_| path.clone(), |parent| parent.join(name))
}

fn is_one_host(to: &str, at: &str, port: u16) -> bool {
    let (to, at) = (addresses(to, port), addresses(at, port));
    to.iter().any(|to| at.contains(to) || (at.iter().any(IpAddr::is_unspecified) && is_ours(*to)))
}

fn addresses(host: &str, port: u16) -> Vec<IpAddr> {
    // One that is not known leads nowhere.
    let Ok(found) = (host, port).to_socket_addrs() else { return Vec::new() };
    found.map(|at| at.ip().to_canonical()).collect()
}

/// Whether an address is one of this machine: then a socket can have it.
fn is_ours(at: IpAddr) -> bool {
    let unspecified: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    unspecified.contains(&at) || UdpSocket::bind((at, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leads(to: &str, at: &str) -> bool {
        let uri: freestone_nbd_client::Uri = to.parse().unwrap();
        leads_to(&uri.place, &at.parse().unwrap())
    }

    #[test]
    fn hosts_of_this_machine_lead_to_a_wildcard() {
        for (to, at, same) in [
            ("nbd://127.0.0.1:7/x", "tcp:127.0.0.1:7", true),
            ("nbd://127.0.0.1:8/x", "tcp:127.0.0.1:7", false),
            ("nbd://127.0.0.1", "tcp:0.0.0.0:10809", true),
            ("nbd://127.0.0.9", "tcp:0.0.0.0:10809", true),
            ("nbd://localhost", "tcp:0.0.0.0:10809", true),
            ("nbd://localhost", "tcp:127.0.0.1:10809", true),
            ("nbd://0.0.0.0", "tcp:0.0.0.0:10809", true),
            ("nbd://[::ffff:127.0.0.1]:7", "tcp:127.0.0.1:7", true),
            ("nbd://127.0.0.1:7", "tcp:[::]:7", true),
            // Of documentation, and nobody's.
            ("nbd://192.0.2.1", "tcp:0.0.0.0:10809", false),
            ("nbd://192.0.2.1:7", "tcp:192.0.2.1:7", true),
            ("nbd+unix:///x?socket=/a", "tcp:0.0.0.0:10809", false),
        ] {
            assert_eq!(leads(to, at), same, "{to} {at}");
        }
    }

    #[test]
    fn a_socket_is_one_under_each_of_its_names() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        let uri = |path: String| format!("nbd+unix:///x?socket={path}");
        let address = |path: String| format!("unix:{path}");
        std::os::unix::fs::symlink(dir.path(), dir.path().join("link")).unwrap();
        // Nothing is there yet.
        assert!(leads(&uri(at("s")), &address(at("link/s"))));
        assert!(!leads(&uri(at("s")), &address(at("t"))));
        let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("s")).unwrap();
        std::os::unix::fs::symlink("s", dir.path().join("other")).unwrap();
        assert!(leads(&uri(at("other")), &address(at("link/s"))));
    }
}
