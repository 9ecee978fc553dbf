//! URIs of exports, as in `doc/uri.md` of the NBD project.

use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// Address of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UriAddress<'a> {
    /// A Unix socket.
    Unix(&'a Path),
    /// A TCP address.
    Tcp {
        /// Host name or IP address. An IPv6 address has no brackets here.
        host: &'a str,
        /// The port.
        port: u16,
    },
}

impl UriAddress<'_> {
    /// Returns the URI of an export at this address. The default export has an empty name.
    pub fn uri(&self, tls: bool, export: &str) -> String {
        let mut uri = String::from(if tls { "nbds" } else { "nbd" });
        match self {
            Self::Unix(path) => {
                uri.push_str("+unix:///");
                escape(&mut uri, export.as_bytes(), b"/");
                uri.push_str("?socket=");
                escape(&mut uri, path.as_os_str().as_bytes(), b"/");
            }
            Self::Tcp { host, port } => {
                uri.push_str("://");
                if host.contains(':') {
                    // RFC 6874 requires a zone index (`%eth0`) to be escaped, too.
                    uri.push('[');
                    escape(&mut uri, host.as_bytes(), b":");
                    uri.push(']');
                } else {
                    escape(&mut uri, host.as_bytes(), b"");
                }
                // Writing to a String cannot fail.
                let _ = write!(uri, ":{port}/");
                escape(&mut uri, export.as_bytes(), b"/");
            }
        }
        uri
    }
}

/// Percent-encodes all but the unreserved characters of RFC 3986 and those in `also`.
fn escape(out: &mut String, text: &[u8], also: &[u8]) {
    for &byte in text {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || also.contains(&byte) {
            out.push(char::from(byte));
        } else {
            // Writing to a String cannot fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uri_escapes_reserved_characters() {
        let unix = UriAddress::Unix(Path::new("/run/a b.sock"));
        assert_eq!(unix.uri(false, "a?b/c"), "nbd+unix:///a%3Fb/c?socket=/run/a%20b.sock");
        assert_eq!(unix.uri(true, ""), "nbds+unix:///?socket=/run/a%20b.sock");
        let tcp = |host| UriAddress::Tcp { host, port: 7 };
        assert_eq!(tcp("localhost").uri(true, "ü"), "nbds://localhost:7/%C3%BC");
        assert_eq!(tcp("fe80::1%eth0").uri(false, "x"), "nbd://[fe80::1%25eth0]:7/x");
    }
}
