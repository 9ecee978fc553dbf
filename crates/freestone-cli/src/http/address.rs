//! Where HTTP is listened for, as a command line and a file say it.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs as _};
use std::str::FromStr;

use anyhow::Result;

use crate::error::Usage;

/// What is said of one address.
#[derive(Debug)]
pub struct Words<'a> {
    /// The option, without its dashes: the key of a file is the same.
    pub key: &'static str,
    /// On the command line.
    pub line: Option<&'a str>,
    /// In the file.
    pub file: Option<&'a str>,
    /// Others than this machine's users may ask: `KEY-open`.
    pub open: bool,
    /// Why that alone makes no sense: half a sentence.
    pub useless: &'static str,
}

impl Words<'_> {
    /// Where it is listened; `None`: nowhere.
    ///
    /// # Errors
    /// The address cannot be meant, or others reach it and nobody said that they may.
    pub fn resolve(&self) -> Result<Option<SocketAddr>> {
        let Self { key, line, file, open, useless } = self;
        let (said, text) = match (line, file) {
            (Some(text), _) => (format!("--{key}"), text),
            (None, Some(text)) => ((*key).to_owned(), text),
            (None, None) if *open => return Err(Usage(format!("--{key}-open: {useless}")).into()),
            (None, None) => return Ok(None),
        };
        let refused = |why| Usage(format!("{said}: {text}: {why}"));
        let address: HttpAddress = text.parse().map_err(refused)?;
        Ok(Some(address.resolve(key, *open).map_err(refused)?))
    }
}

/// An address of HTTP, as it is asked for: `PORT` of this machine alone, or `HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpAddress {
    /// `None`: of this machine alone.
    host: Option<String>,
    /// 0: one that is free.
    port: u16,
}

const FORM: &str = "must be PORT or HOST:PORT, for example 9100 or 127.0.0.1:9100";

impl FromStr for HttpAddress {
    type Err = String;

    /// The error is a half sentence that follows the text.
    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with("unix:") || text.contains('/') {
            return Err(format!("{FORM}: HTTP goes over TCP"));
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
                Err("an address in brackets must be one of IPv6".into())
            }
            None if host.contains(':') => Err(format!("an address of IPv6 is in brackets: [{host}]:{port}")),
            None if host.is_empty() => Err(FORM.into()),
            _ => Ok(Self { host: Some(bare.unwrap_or(host).to_owned()), port }),
        }
    }
}

/// Digits alone.
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
    /// Where that is: of a name with several addresses the first one.
    ///
    /// # Errors
    /// A half sentence: nobody knows the name; or others than this machine's users reach it, and
    /// that is not `allowed`, with the option `key`-open.
    pub fn resolve(&self, key: &str, allowed: bool) -> Result<SocketAddr, String> {
        let Some(host) = &self.host else { return Ok((Ipv4Addr::LOCALHOST, self.port).into()) };
        let found = (host.as_str(), self.port).to_socket_addrs().map_err(|e| format!("no such host: {e}"))?;
        let found: Vec<_> = found.collect();
        let at = *found.first().ok_or("no such host")?;
        // Whichever of them is taken next time.
        if !allowed && !found.iter().all(|at| is_of_this_machine(at.ip())) {
            return Err(format!(
                "others than this machine's users reach it, who would see the names of all devices and what is \
                 done with them; --{key}-open says that they may"
            ));
        }
        Ok(at)
    }
}

/// Whether nobody else reaches it.
pub fn is_of_this_machine(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(text: &str, allowed: bool) -> Result<String, String> {
        text.parse::<HttpAddress>()?.resolve("metrics", allowed).map(|at| at.to_string())
    }

    #[test]
    fn it_is_of_this_machine_unless_it_is_said() {
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
            assert!(why.contains("--metrics-open says that they may"), "{text}: {why}");
            assert_eq!(resolved(text, true).as_deref(), Ok(text));
        }
    }

    #[test]
    fn what_is_no_address_is_refused_with_what_is_one() {
        for (text, why) in [
            ("", FORM),
            ("x", FORM),
            ("65536", FORM),
            ("+80", FORM),
            ("-1", FORM),
            (":9100", FORM),
            ("host:", FORM),
            ("host:port", FORM),
            ("unix:/run/m.sock", "HTTP goes over TCP"),
            ("http://host:9100", "HTTP goes over TCP"),
            ("::1:9100", "in brackets: [::1]:9100"),
            ("[127.0.0.1]:9100", "must be one of IPv6"),
            ("[::1:9100", "in brackets"),
        ] {
            let said = text.parse::<HttpAddress>().unwrap_err();
            assert!(said.contains(why), "{text}: {said}");
        }
        assert!(resolved("no-such-host.invalid:9100", true).unwrap_err().starts_with("no such host"));
    }

    #[test]
    fn it_is_shown_as_it_can_be_asked_for() {
        for text in ["9100", "host:9100", "[::1]:9100", "127.0.0.1:0"] {
            assert_eq!(text.parse::<HttpAddress>().unwrap().to_string(), text);
        }
    }
}
