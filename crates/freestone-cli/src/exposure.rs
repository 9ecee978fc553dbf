//! Addresses where others than this machine's users can connect.

use std::net::ToSocketAddrs as _;

use freestone_nbd::Address;

/// Whether they can. A name of a host is looked up.
pub fn is_open(address: &Address) -> bool {
    let Address::Tcp { host, port } = address else { return false };
    let resolved = (host.as_str(), *port).to_socket_addrs();
    !resolved.is_ok_and(|mut all| all.all(|at| at.ip().to_canonical().is_loopback()))
}

/// Says that they can.
pub fn warn(address: &Address) {
    tracing::warn!(
        "{address}: not encrypted, and open to whoever reaches the port: who connects reads and writes"
    );
}

/// Why it is not listened there.
pub fn refusal(address: &Address) -> String {
    format!(
        "{address}: other machines can connect there, without TLS; start the server with --tls require, or say \
         --allow-plaintext where the network is yours"
    )
}

#[cfg(test)]
mod tests {
    use super::is_open;

    #[test]
    fn only_loopback_is_private() {
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
