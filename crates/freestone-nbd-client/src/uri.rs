//! NBD URIs, as in the NBD project's `doc/uri.md`.

use std::fmt;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;
use std::str::FromStr;

use freestone_core::unix_socket::MAX_SOCKET_PATH_BYTES;
use freestone_nbd_proto::{MAX_STRING_BYTES, UriAddress};
use thiserror::Error;

/// Default NBD port.
pub const DEFAULT_PORT: u16 = 10809;

/// Errors from parsing an NBD URI. No error shows the text before an `@`, which may contain a
/// password.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum UriError {
    /// Unsupported scheme.
    #[error("the scheme must be nbd://, nbds://, nbd+unix:// or nbds+unix://")]
    Scheme,
    /// User or password before the host.
    #[error("a user or a password before the host is not allowed; NBD has none (it is not shown here)")]
    UserInfo,
    /// Missing socket path.
    #[error("the socket is missing: write nbd+unix:///EXPORT?socket=PATH")]
    NoSocket,
    /// Invalid socket path.
    #[error("the path of the socket must have 1 to {MAX_SOCKET_PATH_BYTES} bytes, and no zero byte")]
    Socket,
    /// Host given together with a Unix socket, or socket without `+unix`.
    #[error("{0}")]
    Address(&'static str),
    /// Invalid port.
    #[error("the port must be a number from 1 to 65535")]
    Port,
    /// Invalid host.
    #[error("the host must be a name or an IP address, an IPv6 address in brackets")]
    Host,
    /// `%` without two hexadecimal digits.
    #[error("a % must be followed by two hexadecimal digits")]
    Percent,
    /// Invalid export name.
    #[error("the name of the export must be at most {MAX_STRING_BYTES} bytes of UTF-8, without a zero byte")]
    Export,
    /// Unknown query parameter.
    #[error("{0:?} is not a known parameter; socket is allowed (nbd+unix, nbds+unix){1}")]
    Parameter(String, &'static str),
    /// Fragment.
    #[error("a fragment (#) is not allowed; in a name, write %23")]
    Fragment,
}

/// Address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerAddress {
    /// TCP.
    Tcp {
        /// Host name or IP address, IPv6 without brackets.
        host: String,
        /// TCP port.
        port: u16,
    },
    /// A Unix socket.
    Unix(PathBuf),
}

/// An export of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uri {
    /// Address of the server.
    pub address: ServerAddress,
    /// True if the scheme requires TLS (`nbds`).
    pub tls: bool,
    /// Name of the export; an empty name is the server's default export.
    pub export: String,
}

impl Uri {
    /// Makes a socket path absolute, relative to `base`, so that the URI is valid in every
    /// directory.
    #[must_use]
    pub fn absolute(mut self, base: &std::path::Path) -> Self {
        if let ServerAddress::Unix(path) = &mut self.address {
            *path = base.join(&*path);
        }
        self
    }
}

impl FromStr for Uri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        let (scheme, rest) = text.split_once("://").ok_or(UriError::Scheme)?;
        let (tls, unix) = match scheme.to_ascii_lowercase().as_str() {
            "nbd" => (false, false),
            "nbds" => (true, false),
            "nbd+unix" => (false, true),
            "nbds+unix" => (true, true),
            _ => return Err(UriError::Scheme),
        };
        // Checked first, so that no other error can show a password.
        let authority = &rest[..rest.find(['/', '?', '#']).unwrap_or(rest.len())];
        if authority.contains('@') {
            return Err(UriError::UserInfo);
        }
        if rest.contains('#') {
            return Err(UriError::Fragment);
        }
        let rest = &rest[authority.len()..];
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let export = String::from_utf8(decode_percent(path.strip_prefix('/').unwrap_or(path))?)
            .map_err(|_| UriError::Export)?;
        if export.len() > MAX_STRING_BYTES || export.contains('\0') {
            return Err(UriError::Export);
        }
        let socket = socket_of(query)?;
        let address = if unix {
            if !authority.is_empty() {
                return Err(UriError::Address(
                    "a host is not allowed with +unix: write nbd+unix:///EXPORT?socket=PATH",
                ));
            }
            let path = socket.ok_or(UriError::NoSocket)?;
            if path.is_empty() || path.len() > MAX_SOCKET_PATH_BYTES || path.contains(&0) {
                return Err(UriError::Socket);
            }
            ServerAddress::Unix(std::ffi::OsString::from_vec(path).into())
        } else {
            if socket.is_some() {
                return Err(UriError::Address("socket is for nbd+unix and nbds+unix"));
            }
            tcp(authority)?
        };
        Ok(Self { address, tls, export })
    }
}

/// Parses `HOST`, `HOST:PORT`, or an empty string for localhost.
fn tcp(authority: &str) -> Result<ServerAddress, UriError> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(inner) => {
            let (host, after) = inner.split_once(']').ok_or(UriError::Host)?;
            let port = match after.strip_prefix(':') {
                Some(port) => Some(port),
                None if after.is_empty() => None,
                None => return Err(UriError::Host),
            };
            if !host.contains(':') {
                return Err(UriError::Host);
            }
            (host, port)
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let port = match port {
        None | Some("") => DEFAULT_PORT,
        // `str::parse` alone would accept a leading plus sign.
        Some(port) if port.bytes().all(|byte| byte.is_ascii_digit()) => {
            port.parse().ok().filter(|port| *port != 0).ok_or(UriError::Port)?
        }
        Some(_) => return Err(UriError::Port),
    };
    let host = String::from_utf8(decode_percent(host)?).map_err(|_| UriError::Host)?;
    let bad = |c: char| c.is_control() || c.is_whitespace() || "/@[]?#".contains(c);
    if host.contains(bad) || host.len() > MAX_STRING_BYTES {
        return Err(UriError::Host);
    }
    let host = if host.is_empty() { "localhost".to_owned() } else { host };
    Ok(ServerAddress::Tcp { host, port })
}

/// Returns the socket parameter of a query, decoded, or None if it is missing.
fn socket_of(query: &str) -> Result<Option<Vec<u8>>, UriError> {
    let mut socket = None;
    for part in query.split(['&', ';']).filter(|part| !part.is_empty()) {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        match name {
            "socket" if socket.is_none() => socket = Some(decode_percent(value)?),
            _ if name.starts_with("tls-") => {
                return Err(UriError::Parameter(name.into(), "; for TLS set tls_ca, tls_cert, tls_key"));
            }
            _ => return Err(UriError::Parameter(name.into(), "")),
        }
    }
    Ok(socket)
}

fn decode_percent(text: &str) -> Result<Vec<u8>, UriError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || {
            let digit = char::from(rest.next()?).to_digit(16)?;
            u8::try_from(digit).ok()
        };
        let (high, low) = (digit(), digit());
        let (Some(high), Some(low)) = (high, low) else { return Err(UriError::Percent) };
        bytes.push(high << 4 | low);
    }
    Ok(bytes)
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = match &self.address {
            ServerAddress::Tcp { host, port } => UriAddress::Tcp { host, port: *port },
            ServerAddress::Unix(path) => UriAddress::Unix(path),
        };
        f.write_str(&at.uri(self.tls, &self.export))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Uri, UriError> {
        text.parse()
    }

    #[test]
    fn uri_forms_parse_and_display() {
        for (text, shown) in [
            ("nbd://host", "nbd://host:10809/"),
            ("nbd://host/", "nbd://host:10809/"),
            ("NBD://host:1/a/b%20c", "nbd://host:1/a/b%20c"),
            ("nbds://[::1]:7/x", "nbds://[::1]:7/x"),
            ("nbd://[fe80::1%25eth0]", "nbd://[fe80::1%25eth0]:10809/"),
            ("nbd:///x", "nbd://localhost:10809/x"),
            ("nbd+unix:///?socket=/run/a%20b", "nbd+unix:///?socket=/run/a%20b"),
            ("nbd+unix:///e%2Ff?socket=rel", "nbd+unix:///e/f?socket=rel"),
            ("nbds+unix:///%C3%BC?socket=/s", "nbds+unix:///%C3%BC?socket=/s"),
            ("nbd+unix://?socket=/s", "nbd+unix:///?socket=/s"),
            // With two slashes, the name begins with a slash.
            ("nbd://host//x", "nbd://host:10809//x"),
        ] {
            let uri = parse(text).unwrap();
            assert_eq!(uri.to_string(), shown);
            assert_eq!(parse(shown), Ok(uri), "{text}");
        }
        assert_eq!(parse("nbd://h//x").unwrap().export, "/x");
    }

    #[test]
    fn invalid_uris_are_refused() {
        for (text, error) in [
            ("", UriError::Scheme),
            ("nbd:host", UriError::Scheme),
            ("http://host", UriError::Scheme),
            ("nbd+vsock://1", UriError::Scheme),
            ("nbd://u@h", UriError::UserInfo),
            ("nbd://h:0", UriError::Port),
            ("nbd://h:+1", UriError::Port),
            ("nbd://h:65536", UriError::Port),
            ("nbd://h:1:2", UriError::Port),
            ("nbd://[::1", UriError::Host),
            ("nbd://[::1]x", UriError::Host),
            ("nbd://[host]", UriError::Host),
            ("nbd://a b", UriError::Host),
            ("nbd://h/%", UriError::Percent),
            ("nbd://h/%4", UriError::Percent),
            ("nbd://h/%zz", UriError::Percent),
            ("nbd://h/%00", UriError::Export),
            ("nbd://h/%ff", UriError::Export),
            ("nbd://h/x#y", UriError::Fragment),
            ("nbd+unix:///x", UriError::NoSocket),
            ("nbd+unix:///x?socket=", UriError::Socket),
            ("nbd+unix:///x?socket=a%00", UriError::Socket),
        ] {
            assert_eq!(parse(text), Err(error), "{text}");
        }
        let long = format!("nbd://h/{}", "x".repeat(MAX_STRING_BYTES + 1));
        assert_eq!(parse(&long), Err(UriError::Export));
        assert!(matches!(parse("nbd://h/?socket=/s"), Err(UriError::Address(_))));
        assert!(matches!(parse("nbd+unix://h/?socket=/s"), Err(UriError::Address(_))));
        assert!(matches!(parse("nbd+unix:///?socket=/s&socket=/t"), Err(UriError::Parameter(..))));
        assert!(matches!(parse("nbds://h/?tls-psk-file=x"), Err(UriError::Parameter(..))));
    }

    #[test]
    fn errors_do_not_show_password() {
        for text in ["nbd://me:secret@h", "nbd://me:secret@h:x/#", "nbds://secret@[::1"] {
            assert!(!parse(text).unwrap_err().to_string().contains("secret"));
        }
    }
}
