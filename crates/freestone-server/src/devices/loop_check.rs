//! Loop check: refuses devices of kind `nbd` that connect to this server itself.
//!
//! A request of such a device could wait for the device itself, or for a device over it. Any later verb can
//! change which exports are safe, so the check ignores the export name: a device must not connect to any
//! address of the server. Indirect loops, through a port forwarder or another server, are not detected.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, ToSocketAddrs, UdpSocket};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use freestone_control::protocol::RpcError;
use freestone_nbd::Address;
use freestone_nbd_client::ServerAddress;
use freestone_spec::kinds::Spec;
use freestone_spec::kinds::registry::Registry;

/// Fails if the device connects to one of `addresses`, at which this server listens.
pub fn check_device(spec: &Spec, addresses: &[Address]) -> Result<(), RpcError> {
    let Some(uri) = spec.kind.uri() else { return Ok(()) };
    let Some(at) = addresses.iter().find(|address| leads_to(&uri.address, address)) else { return Ok(()) };
    let name = &spec.name;
    refuse!(EINVAL, "{name}: uri={uri}: {at} is an address of this server, which would wait for itself")
}

/// Fails if a device in `registry` connects to `address`, at which this server listens.
pub fn check_address(registry: &Registry, address: &Address) -> Result<(), RpcError> {
    for entry in registry.nbd_devices() {
        if entry.spec.kind.uri().is_some_and(|uri| leads_to(&uri.address, address)) {
            let name = entry.name();
            refuse!(
                EADDRNOTAVAIL,
                "{address}: the device {name} leads there, and the server would wait for itself"
            );
        }
    }
    Ok(())
}

/// Returns true if a connection to `server` reaches a server that listens at `address`. Resolves host names.
fn leads_to(server: &ServerAddress, address: &Address) -> bool {
    match (server, address) {
        (ServerAddress::Unix(to), Address::Unix(at)) => is_same_socket(to, at),
        (ServerAddress::Tcp { host, port }, Address::Tcp { host: at, port: listens }) => {
            port == listens && (host == at || is_same_host(host, at, *port))
        }
        _ => false,
    }
}

fn is_same_socket(to: &Path, at: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    match (identity(to), identity(at)) {
        (Some(to), Some(at)) => to == at,
        // A socket that does not exist yet is compared by directory and name.
        _ => in_directory(to) == in_directory(at),
    }
}

/// Returns the path with symbolic links resolved in all parts except the last.
fn in_directory(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return path };
    fs::canonicalize(parent).map_or_else(|_| path.clone(), |parent| parent.join(name))
}

fn is_same_host(to: &str, at: &str, port: u16) -> bool {
    let (to, at) = (addresses(to, port), addresses(at, port));
    to.iter().any(|to| at.contains(to) || (at.iter().any(IpAddr::is_unspecified) && is_local(*to)))
}

fn addresses(host: &str, port: u16) -> Vec<IpAddr> {
    // No connection can reach an unknown host, so it has no addresses.
    let Ok(found) = (host, port).to_socket_addrs() else { return Vec::new() };
    found.map(|at| at.ip().to_canonical()).collect()
}

/// Returns true if an address belongs to this machine, so that a socket can be bound to it.
fn is_local(at: IpAddr) -> bool {
    let unspecified: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    unspecified.contains(&at) || UdpSocket::bind((at, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leads(to: &str, at: &str) -> bool {
        let uri: freestone_nbd_client::Uri = to.parse().unwrap();
        leads_to(&uri.address, &at.parse().unwrap())
    }

    #[test]
    fn leads_to_matches_local_hosts_with_wildcard() {
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
            // 192.0.2.1 is reserved for documentation, so it is not an address of this machine.
            ("nbd://192.0.2.1", "tcp:0.0.0.0:10809", false),
            ("nbd://192.0.2.1:7", "tcp:192.0.2.1:7", true),
            ("nbd+unix:///x?socket=/a", "tcp:0.0.0.0:10809", false),
        ] {
            assert_eq!(leads(to, at), same, "{to} {at}");
        }
    }

    #[test]
    fn leads_to_follows_links_to_socket() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        let uri = |path: String| format!("nbd+unix:///x?socket={path}");
        let address = |path: String| format!("unix:{path}");
        std::os::unix::fs::symlink(dir.path(), dir.path().join("link")).unwrap();
        // The socket does not exist yet, so directory and name are compared.
        assert!(leads(&uri(at("s")), &address(at("link/s"))));
        assert!(!leads(&uri(at("s")), &address(at("t"))));
        let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("s")).unwrap();
        std::os::unix::fs::symlink("s", dir.path().join("other")).unwrap();
        assert!(leads(&uri(at("other")), &address(at("link/s"))));
    }
}
