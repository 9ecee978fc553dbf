//! Detection of addresses that other machines can reach, and the warning and error about them.

use std::net::ToSocketAddrs as _;

use freestone_nbd::Address;

/// Returns true if other machines can connect to the address. A host name is resolved; a name that cannot be
/// resolved counts as reachable.
pub fn is_open(address: &Address) -> bool {
    let Address::Tcp { host, port } = address else { return false };
    let resolved = (host.as_str(), *port).to_socket_addrs();
    !resolved.is_ok_and(|mut all| all.all(|at| at.ip().to_canonical().is_loopback()))
}

/// Logs that other machines can connect to the address without TLS.
pub fn warn(address: &Address) {
    tracing::warn!(
        "{address}: not encrypted, and open to other machines: every client that connects can read and write"
    );
}

/// Returns the error message for an address that other machines could use without TLS.
pub fn refusal(address: &Address) -> String {
    format!(
        "{address}: other machines can connect without TLS; start the server with --tls require, or with \
         --allow-plaintext if you trust the network"
    )
}

#[cfg(test)]
mod tests {
    use super::is_open;

    #[test]
    fn is_open_only_beyond_loopback() {
        for (address, open) in [
            ("unix:/a", false),
            ("tcp:127.0.0.1:10809", false),
            ("tcp:127.9.9.9:0", false),
            ("tcp:[::1]:10809", false),
            ("tcp:[::ffff:127.0.0.1]:10809", false),
            ("tcp:0.0.0.0:10809", true),
            ("tcp:[::]:10809", true),
            ("tcp:192.0.2.1:10809", true),
            ("tcp:[fd00::1]:10809", true),
        ] {
            assert_eq!(is_open(&address.parse().unwrap()), open, "{address}");
        }
    }
}
