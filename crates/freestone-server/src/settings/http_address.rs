//! HTTP listening addresses (`--metrics`, `--http`), from the command line and the configuration file.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs as _};
use std::str::FromStr;

use anyhow::Result;
use freestone_control::http::is_of_this_machine;

use crate::usage::Usage;

/// The settings of one HTTP listening address, before they are checked.
#[derive(Debug)]
pub struct AddressWords<'a> {
    /// Name of the option without dashes; also the key in the configuration file.
    pub key: &'static str,
    /// Address from the command line.
    pub line: Option<&'a str>,
    /// Address from the configuration file.
    pub file: Option<&'a str>,
    /// True if other machines may connect (`--KEY-open`).
    pub open: bool,
    /// Error message if `open` is set without an address: the part after `--KEY-open:`.
    pub useless: &'static str,
}

impl AddressWords<'_> {
    /// Returns the address to listen at, or None if neither the command line nor the file contains one.
    ///
    /// # Errors
    /// The address is invalid, or other machines can reach it and `open` is not set.
    pub fn resolve(&self) -> Result<Option<SocketAddr>> {
        let Self { key, line, file, open, useless } = self;
        let (source, text) = match (line, file) {
            (Some(text), _) => (format!("--{key}"), text),
            (None, Some(text)) => ((*key).to_owned(), text),
            (None, None) if *open => return Err(Usage(format!("--{key}-open: {useless}")).into()),
            (None, None) => return Ok(None),
        };
        let refused = |why| Usage(format!("{source}: {text}: {why}"));
        let address: HttpAddress = text.parse().map_err(refused)?;
        Ok(Some(address.resolve(key, *open).map_err(refused)?))
    }
}

/// An HTTP address as the user writes it: `PORT` (this machine only) or `HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpAddress {
    /// Host name or IP address; `None` for 127.0.0.1.
    host: Option<String>,
    /// TCP port; 0 for any free port.
    port: u16,
}

const FORM: &str = "must be PORT or HOST:PORT, for example 9100 or 127.0.0.1:9100";

impl FromStr for HttpAddress {
    type Err = String;

    /// Parses `PORT` or `HOST:PORT`. The error is the part of a message that follows the address.
    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with("unix:") || text.contains('/') {
            return Err(format!("{FORM}; HTTP needs TCP"));
        }
        let text = text.strip_prefix("tcp:").unwrap_or(text);
        let Some((host, port)) = text.rsplit_once(':') else {
            let port = parse_port(text).ok_or(FORM)?;
            return Ok(Self { host: None, port });
        };
        let port = parse_port(port).ok_or(FORM)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        match bare {
            Some(host) if host.parse::<std::net::Ipv6Addr>().is_err() => {
                Err("an address in brackets must be an IPv6 address".into())
            }
            None if host.contains(':') => Err(format!("write an IPv6 address in brackets: [{host}]:{port}")),
            None if host.is_empty() => Err(FORM.into()),
            _ => Ok(Self { host: Some(bare.unwrap_or(host).to_owned()), port }),
        }
    }
}

/// Parses a port that consists of digits only. Returns None if there is a sign, or if the port is too large.
fn parse_port(text: &str) -> Option<u16> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

impl fmt::Display for HttpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            None => write!(f, "{}", self.port),
            Some(host) if host.contains(':') => write!(f, "[{host}]:{}", self.port),
            Some(host) => write!(f, "{host}:{}", self.port),
        }
    }
}

impl HttpAddress {
    /// Returns the socket address, which is the first address of a host name.
    ///
    /// # Errors
    /// The part of a message that follows the address. Either the host is unknown; or other machines can
    /// reach the address, and `allowed` (the option `--KEY-open`) is false.
    pub fn resolve(&self, key: &str, allowed: bool) -> Result<SocketAddr, String> {
        let Some(host) = &self.host else { return Ok((Ipv4Addr::LOCALHOST, self.port).into()) };
        let found = (host.as_str(), self.port).to_socket_addrs().map_err(|e| format!("no such host: {e}"))?;
        let found: Vec<_> = found.collect();
        let at = *found.first().ok_or("no such host")?;
        // All addresses of the host are checked, because the next lookup may return them in another order.
        if !allowed && !found.iter().all(|at| is_of_this_machine(at.ip())) {
            return Err(format!(
                "other machines can reach this address and would see the names and activity of all devices; \
                 --{key}-open allows it"
            ));
        }
        Ok(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(text: &str, allowed: bool) -> Result<String, String> {
        text.parse::<HttpAddress>()?.resolve("metrics", allowed).map(|at| at.to_string())
    }

    #[test]
    fn non_loopback_address_needs_open() {
        for (text, at) in [
            ("9100", "127.0.0.1:9100"),
            ("0", "127.0.0.1:0"),
            ("127.0.0.1:9100", "127.0.0.1:9100"),
            ("tcp:127.0.0.2:1", "127.0.0.2:1"),
            ("[::1]:9100", "[::1]:9100"),
            ("[::ffff:127.0.0.1]:9100", "[::ffff:127.0.0.1]:9100"),
        ] {
            assert_eq!(resolved(text, false).as_deref(), Ok(at));
            assert_eq!(resolved(text, true).as_deref(), Ok(at));
        }
        for text in ["0.0.0.0:9100", "[::]:9100", "192.0.2.7:9100", "[fd00::1]:9100"] {
            let why = resolved(text, false).unwrap_err();
            assert!(why.contains("--metrics-open allows it"), "{text}: {why}");
            assert_eq!(resolved(text, true).as_deref(), Ok(text));
        }
    }

    #[test]
    fn invalid_address_error_shows_valid_form() {
        for (text, why) in [
            ("", FORM),
            ("x", FORM),
            ("65536", FORM),
            ("+80", FORM),
            ("-1", FORM),
            (":9100", FORM),
            ("host:", FORM),
            ("host:port", FORM),
            ("unix:/run/m.sock", "HTTP needs TCP"),
            ("http://host:9100", "HTTP needs TCP"),
            ("::1:9100", "in brackets: [::1]:9100"),
            ("[127.0.0.1]:9100", "must be an IPv6 address"),
            ("[::1:9100", "in brackets"),
        ] {
            let error = text.parse::<HttpAddress>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
        assert!(resolved("no-such-host.invalid:9100", true).unwrap_err().starts_with("no such host"));
    }

    #[test]
    fn displayed_address_parses_again() {
        for text in ["9100", "host:9100", "[::1]:9100", "127.0.0.1:0"] {
            assert_eq!(text.parse::<HttpAddress>().unwrap().to_string(), text);
        }
    }
}
