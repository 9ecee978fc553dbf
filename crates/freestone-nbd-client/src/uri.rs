//! Where an export is: the URIs of the NBD project's `doc/uri.md`.

use std::fmt;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;
use std::str::FromStr;

use freestone_core::unix_socket::MAX_SOCKET_PATH_BYTES;
use freestone_nbd_proto::{At, MAX_STRING_BYTES};
use thiserror::Error;

/// The port of NBD where none is said.
pub const DEFAULT_PORT: u16 = 10809;

/// Why a text is no URI of an export. What stands before an `@` is in none of them: it may be a
/// password.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum UriError {
    /// Another scheme.
    #[error("the scheme must be nbd://, nbds://, nbd+unix:// or nbds+unix://")]
    Scheme,
    /// A name or a password before the host.
    #[error("a user or a password before the host is not allowed; NBD has none (it is not shown here)")]
    UserInfo,
    /// No path of a socket.
    #[error("the socket is missing: write nbd+unix:///EXPORT?socket=PATH")]
    NoSocket,
    /// A path that no socket has.
    #[error("the path of the socket must have 1 to {MAX_SOCKET_PATH_BYTES} bytes, and no zero byte")]
    Socket,
    /// A host beside a socket, or a socket beside a host.
    #[error("{0}")]
    Place(&'static str),
    /// The port is no number, or too large.
    #[error("the port must be a number from 1 to 65535")]
    Port,
    /// The host cannot be.
    #[error("the host must be a name or an IP address, an IPv6 address in brackets")]
    Host,
    /// A `%` without two hexadecimal digits behind it.
    #[error("a % must be followed by two hexadecimal digits")]
    Percent,
    /// The name of the export cannot be.
    #[error("the name of the export must be at most {MAX_STRING_BYTES} bytes of UTF-8, without a zero byte")]
    Export,
    /// A parameter that is not known.
    #[error("{0:?} is no parameter; allowed is socket (nbd+unix, nbds+unix){1}")]
    Parameter(String, &'static str),
    /// A fragment.
    #[error("a # and what follows it is not allowed; as a part of a name write %23")]
    Fragment,
}

/// How a server is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// Over TCP.
    Tcp {
        /// A name or an IP address, IPv6 without brackets.
        host: String,
        /// The port.
        port: u16,
    },
    /// A Unix socket.
    Unix(PathBuf),
}

/// An export of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uri {
    /// Where the server is.
    pub place: Place,
    /// Over TLS.
    pub tls: bool,
    /// The name of the export; empty is the server's default one.
    pub export: String,
}

impl Uri {
    /// The same with an absolute path of the socket, so that it means the same from every directory.
    #[must_use]
    pub fn absolute(mut self, base: &std::path::Path) -> Self {
        if let Place::Unix(path) = &mut self.place {
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
        // First of all, so that no other error shows it.
        let authority = &rest[..rest.find(['/', '?', '#']).unwrap_or(rest.len())];
        if authority.contains('@') {
            return Err(UriError::UserInfo);
        }
        if rest.contains('#') {
            return Err(UriError::Fragment);
        }
        let rest = &rest[authority.len()..];
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let export = String::from_utf8(decoded(path.strip_prefix('/').unwrap_or(path))?)
            .map_err(|_| UriError::Export)?;
        if export.len() > MAX_STRING_BYTES || export.contains('\0') {
            return Err(UriError::Export);
        }
        let socket = socket_of(query)?;
        let place = if unix {
            if !authority.is_empty() {
                return Err(UriError::Place(
                    "with +unix there is no host: write nbd+unix:///EXPORT?socket=PATH",
                ));
            }
            let path = socket.ok_or(UriError::NoSocket)?;
            if path.is_empty() || path.len() > MAX_SOCKET_PATH_BYTES || path.contains(&0) {
                return Err(UriError::Socket);
            }
            Place::Unix(std::ffi::OsString::from_vec(path).into())
        } else {
            if socket.is_some() {
                return Err(UriError::Place("socket is for nbd+unix and nbds+unix"));
            }
            tcp(authority)?
        };
        Ok(Self { place, tls, export })
    }
}

/// `HOST`, `HOST:PORT`, or nothing, which is this machine.
fn tcp(authority: &str) -> Result<Place, UriError> {
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
        // `parse` alone would take a leading plus sign.
        Some(port) if port.bytes().all(|byte| byte.is_ascii_digit()) => {
            port.parse().ok().filter(|port| *port != 0).ok_or(UriError::Port)?
        }
        Some(_) => return Err(UriError::Port),
    };
    let host = String::from_utf8(decoded(host)?).map_err(|_| UriError::Host)?;
    let bad = |c: char| c.is_control() || c.is_whitespace() || "/@[]?#".contains(c);
    if host.contains(bad) || host.len() > MAX_STRING_BYTES {
        return Err(UriError::Host);
    }
    let host = if host.is_empty() { "localhost".to_owned() } else { host };
    Ok(Place::Tcp { host, port })
}

/// The socket among the parameters.
fn socket_of(query: &str) -> Result<Option<Vec<u8>>, UriError> {
    let mut socket = None;
    for part in query.split(['&', ';']).filter(|part| !part.is_empty()) {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        match name {
            "socket" if socket.is_none() => socket = Some(decoded(value)?),
            _ if name.starts_with("tls-") => {
                return Err(UriError::Parameter(name.into(), "; of TLS say tls_ca, tls_cert, tls_key"));
            }
            _ => return Err(UriError::Parameter(name.into(), "")),
        }
    }
    Ok(socket)
}

fn decoded(text: &str) -> Result<Vec<u8>, UriError> {
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
        let at = match &self.place {
            Place::Tcp { host, port } => At::Tcp { host, port: *port },
            Place::Unix(path) => At::Unix(path),
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
    fn all_forms_are_taken_and_shown_again() {
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
            // Two slashes: the name begins with one.
            ("nbd://host//x", "nbd://host:10809//x"),
        ] {
            let uri = parse(text).unwrap();
            assert_eq!(uri.to_string(), shown);
            assert_eq!(parse(shown), Ok(uri), "{text}");
        }
        assert_eq!(parse("nbd://h//x").unwrap().export, "/x");
    }

    #[test]
    fn what_cannot_be_is_refused() {
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
        assert!(matches!(parse("nbd://h/?socket=/s"), Err(UriError::Place(_))));
        assert!(matches!(parse("nbd+unix://h/?socket=/s"), Err(UriError::Place(_))));
        assert!(matches!(parse("nbd+unix:///?socket=/s&socket=/t"), Err(UriError::Parameter(..))));
        assert!(matches!(parse("nbds://h/?tls-psk-file=x"), Err(UriError::Parameter(..))));
    }

    #[test]
    fn a_password_is_in_no_error() {
        for text in ["nbd://me:secret@h", "nbd://me:secret@h:x/#", "nbds://secret@[::1"] {
            assert!(!parse(text).unwrap_err().to_string().contains("secret"));
        }
    }
}
