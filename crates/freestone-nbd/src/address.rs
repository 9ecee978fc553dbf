//! Addresses at which a server listens.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use freestone_nbd_proto::UriAddress;
use thiserror::Error;

/// A listening address: `unix:PATH` or `tcp:HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// A TCP port.
    Tcp {
        /// Host name or IP address. An IPv6 address has no brackets here.
        host: String,
        /// Port number; 0 lets the system choose a free port.
        port: u16,
    },
    /// Standard input, a socket on which the single client is already connected. Parsing never returns this
    /// address.
    Stdin,
}

/// Errors from parsing an [`Address`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AddressError {
    /// The prefix is neither `unix:` nor `tcp:`.
    #[error("`{0}` is no address: write unix:PATH or tcp:HOST:PORT")]
    Kind(String),
    /// No path follows `unix:`.
    #[error("`unix:` needs a path after it")]
    NoPath,
    /// The port is missing.
    #[error("`{0}` has no port: write tcp:HOST:PORT, an IPv6 address in brackets")]
    NoPort(String),
    /// The host is missing.
    #[error("`{0}` has no host: write tcp:HOST:PORT, for example tcp:127.0.0.1:10809")]
    NoHost(String),
    /// The port is not a number, or is above 65535.
    #[error("`{0}` is no port: a number from 0 to 65535 is wanted")]
    Port(String),
    /// An IPv6 address without brackets, or unbalanced brackets.
    #[error("`{0}`: an IPv6 address is written in brackets, as in tcp:[::1]:10809")]
    Brackets(String),
}

impl Address {
    /// Returns the URI of `export` at this address: `nbd+unix:///name?socket=/path` or
    /// `nbd://host:port/name`. Returns an empty string for standard input, which other clients cannot reach.
    pub fn uri(&self, export: &str) -> String {
        self.uri_by(export, false)
    }

    /// Returns the URI of `export` like [`uri`](Self::uri), with the scheme `nbds+unix:` or `nbds:` if `tls`
    /// is true.
    pub fn uri_by(&self, export: &str, tls: bool) -> String {
        let at = match self {
            Self::Unix(path) => UriAddress::Unix(path),
            Self::Tcp { host, port } => UriAddress::Tcp { host, port: *port },
            Self::Stdin => return String::new(),
        };
        at.uri(tls, export)
    }

    /// Returns the address with an absolute socket path, which does not depend on the current directory.
    #[must_use]
    pub fn absolute(&self) -> Self {
        match self {
            Self::Unix(path) => Self::Unix(std::path::absolute(path).unwrap_or_else(|_| path.clone())),
            Self::Tcp { .. } | Self::Stdin => self.clone(),
        }
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Some(path) = text.strip_prefix("unix:") {
            if path.is_empty() {
                return Err(AddressError::NoPath);
            }
            return Ok(Self::Unix(Path::new(path).to_path_buf()));
        }
        let Some(rest) = text.strip_prefix("tcp:") else {
            return Err(AddressError::Kind(text.to_owned()));
        };
        let (host, port) = if let Some(inner) = rest.strip_prefix('[') {
            let (host, after) =
                inner.split_once(']').ok_or_else(|| AddressError::Brackets(text.to_owned()))?;
            (host, after.strip_prefix(':').ok_or_else(|| AddressError::NoPort(text.to_owned()))?)
        } else {
            let (host, port) = rest.rsplit_once(':').ok_or_else(|| AddressError::NoPort(text.to_owned()))?;
            if host.contains([':', ']']) {
                return Err(AddressError::Brackets(text.to_owned()));
            }
            (host, port)
        };
        if host.is_empty() {
            return Err(AddressError::NoHost(text.to_owned()));
        }
        // `str::parse` alone would accept a leading plus sign.
        if port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(AddressError::Port(port.to_owned()));
        }
        let port = port.parse().map_err(|_| AddressError::Port(port.to_owned()))?;
        Ok(Self::Tcp { host: host.to_owned(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Self::Stdin => write!(f, "stdin"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Address, AddressError> {
        text.parse()
    }

    #[test]
    fn address_display_matches_parsed_text() {
        for text in ["unix:/run/a b.sock", "unix:rel", "tcp:127.0.0.1:0", "tcp:[::1]:10809", "tcp:host:65535"]
        {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn address_parse_invalid_returns_reason() {
        assert_eq!(parse(""), Err(AddressError::Kind(String::new())));
        assert_eq!(parse("/run/x"), Err(AddressError::Kind("/run/x".to_owned())));
        assert_eq!(parse("unix:"), Err(AddressError::NoPath));
        assert_eq!(parse("tcp:host"), Err(AddressError::NoPort("tcp:host".to_owned())));
        assert_eq!(parse("tcp:[::1]"), Err(AddressError::NoPort("tcp:[::1]".to_owned())));
        assert_eq!(parse("tcp::1"), Err(AddressError::NoHost("tcp::1".to_owned())));
        assert_eq!(parse("tcp:[]:1"), Err(AddressError::NoHost("tcp:[]:1".to_owned())));
        assert_eq!(parse("tcp:::1:10809"), Err(AddressError::Brackets("tcp:::1:10809".to_owned())));
        assert_eq!(parse("tcp:[::1:1"), Err(AddressError::Brackets("tcp:[::1:1".to_owned())));
        for port in ["65536", "-1", "+1", "x", "", "99999999999"] {
            assert_eq!(parse(&format!("tcp:h:{port}")), Err(AddressError::Port(port.to_owned())));
        }
    }

    #[test]
    fn uri_special_characters_are_escaped() {
        let unix = parse("unix:/run/a b.sock").unwrap();
        assert_eq!(unix.uri("ram0"), "nbd+unix:///ram0?socket=/run/a%20b.sock");
        assert_eq!(unix.uri("a?b"), "nbd+unix:///a%3Fb?socket=/run/a%20b.sock");
        assert_eq!(unix.uri_by("a", true), "nbds+unix:///a?socket=/run/a%20b.sock");
        assert_eq!(parse("tcp:h:1").unwrap().uri_by("a", true), "nbds://h:1/a");
        assert_eq!(Address::Stdin.uri_by("a", true), "");
        assert_eq!(unix.uri(""), "nbd+unix:///?socket=/run/a%20b.sock");
        assert_eq!(parse("tcp:[::1]:10809").unwrap().uri("ram0"), "nbd://[::1]:10809/ram0");
        assert_eq!(parse("tcp:localhost:1").unwrap().uri("ü"), "nbd://localhost:1/%C3%BC");
    }
}
