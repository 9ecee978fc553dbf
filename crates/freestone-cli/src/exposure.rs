//! An address where others than this machine's users can connect.

use std::net::ToSocketAddrs as _;

use freestone_nbd::Address;

/// Warns where others than this machine's users can connect.
pub fn warning(address: &Address) -> Option<String> {
    let Address::Tcp { host, port } = address else { return None };
    let local = (host.as_str(), *port)
        .to_socket_addrs()
        .is_ok_and(|mut all| all.all(|a| a.ip().to_canonical().is_loopback()));
    (!local).then(|| {
        format!(
            "{address}: not encrypted, and open to whoever reaches the port: who connects reads and writes"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::warning;

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
            let said = warning(&address.parse().unwrap());
            assert_eq!(said.is_some(), open, "{address}");
            assert!(said.is_none_or(|text| text.starts_with(&format!("{address}: not encrypted"))));
        }
    }
}
