//! Strict parser of HTTP requests. Requests with unknown syntax are refused. Only method, path, query and
//! host are used.

use std::net::IpAddr;

/// Maximum size in bytes of a request head: request line, header lines and the empty line.
pub const HEAD_BYTES_MAX: usize = 8 << 10;
/// Maximum number of header lines of a request, without the request line.
const HEADERS_MAX: usize = 64;

/// The parts of an HTTP request that the server uses.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    /// True if the method is HEAD, so that the response has no body.
    pub head_only: bool,
    /// The path without the query, not decoded.
    pub path: String,
    /// The text after the question mark, not decoded; empty if there is none.
    pub query: String,
    /// The `Host` header without the port. Only HTTP/1.0 requests may lack the header.
    pub host: Option<String>,
}

/// Reason why a request gets an error response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The request is not a valid HTTP/1 request.
    Bad,
    /// The `Host` header contains a name that is not a name of this server.
    Misdirected,
    /// The path does not exist.
    NotFound,
    /// The method is neither GET nor HEAD.
    Method,
    /// The client did not send the request in time.
    Timeout,
    /// The head exceeds 8 KiB or 64 header fields.
    TooLarge,
    /// The server panicked while it prepared the response.
    Broken,
    /// There are too many connections, or the server is shutting down.
    Busy,
    /// The HTTP version is neither 1.0 nor 1.1.
    Version,
}

impl Refusal {
    /// Returns the HTTP status code and text of the error response.
    pub const fn status(self) -> &'static str {
        match self {
            Self::Bad => "400 Bad Request",
            Self::Misdirected => "421 Misdirected Request",
            Self::NotFound => "404 Not Found",
            Self::Method => "405 Method Not Allowed",
            Self::Timeout => "408 Request Timeout",
            Self::TooLarge => "431 Request Header Fields Too Large",
            Self::Broken => "500 Internal Server Error",
            Self::Busy => "503 Service Unavailable",
            Self::Version => "505 HTTP Version Not Supported",
        }
    }
}

/// Returns the length of the request head at the start of `bytes`, or None if the head is incomplete.
pub fn head_end(bytes: &[u8]) -> Option<usize> {
    bytes.windows(4).position(|four| four == b"\r\n\r\n").map(|at| at + 4)
}

impl Request {
    /// Parses a request head, including the empty line at its end.
    pub fn parse(head: &[u8]) -> Result<Self, Refusal> {
        let text = std::str::from_utf8(head).map_err(|_| Refusal::Bad)?;
        let text = text.strip_suffix("\r\n\r\n").ok_or(Refusal::Bad)?;
        let mut lines = text.split("\r\n");
        let first = lines.next().ok_or(Refusal::Bad)?;
        let mut words = first.split(' ');
        let (Some(method), Some(target), Some(version), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(Refusal::Bad);
        };
        if method.is_empty() || !method.bytes().all(is_token) {
            return Err(Refusal::Bad);
        }
        let must_have_host = match version {
            "HTTP/1.1" => true,
            "HTTP/1.0" => false,
            _ if version.starts_with("HTTP/") => return Err(Refusal::Version),
            _ => return Err(Refusal::Bad),
        };
        if !target.starts_with('/') || !target.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Refusal::Bad);
        }
        let mut host = None;
        for (number, line) in lines.enumerate() {
            if number == HEADERS_MAX {
                return Err(Refusal::TooLarge);
            }
            let (name, value) = line.split_once(':').ok_or(Refusal::Bad)?;
            let is_text = |byte: u8| byte == b'\t' || (byte >= b' ' && byte != 0x7F);
            if name.is_empty() || !name.bytes().all(is_token) || !value.bytes().all(is_text) {
                return Err(Refusal::Bad);
            }
            if name.eq_ignore_ascii_case("host") && host.replace(host_of(value.trim())?).is_some() {
                return Err(Refusal::Bad);
            }
        }
        if must_have_host && host.is_none() {
            return Err(Refusal::Bad);
        }
        let head_only = match method {
            "GET" => false,
            "HEAD" => true,
            _ => return Err(Refusal::Method),
        };
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        Ok(Self { head_only, path: path.to_owned(), query: query.to_owned(), host })
    }

    /// Refuses a `Host` header that is neither an IP address nor `localhost`. The check prevents DNS
    /// rebinding: a web page can make its own host name resolve to this address, and then read responses
    /// through the browser.
    pub fn check_host(&self) -> Result<(), Refusal> {
        let Some(host) = &self.host else { return Ok(()) };
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if host.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok() {
            return Ok(());
        }
        Err(Refusal::Misdirected)
    }
}

/// Returns true for a character that methods and header names may contain.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Returns the host of a `Host` header, `HOST[:PORT]`.
fn host_of(value: &str) -> Result<String, Refusal> {
    let (host, port) = match value.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        _ => (value, None),
    };
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit()) && port.len() <= 5;
    let is_host = |byte: u8| byte.is_ascii_alphanumeric() || b"-._[]:".contains(&byte);
    if host.is_empty() || !host.bytes().all(is_host) || !port.is_none_or(is_port) {
        return Err(Refusal::Bad);
    }
    Ok(host.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Request, Refusal> {
        Request::parse(text.as_bytes())
    }

    #[test]
    fn valid_requests_are_parsed() {
        let scrape = "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9100\r\nAccept: */*\r\n\r\n";
        let (path, host) = ("/metrics".into(), Some("127.0.0.1".into()));
        let expected = Request { head_only: false, path, query: String::new(), host };
        assert_eq!(parse(scrape).as_ref(), Ok(&expected));
        assert_eq!(head_end(scrape.as_bytes()), Some(scrape.len()));
        assert_eq!(head_end(&scrape.as_bytes()[..scrape.len() - 1]), None);
        let request = parse("HEAD /metrics?a=b HTTP/1.0\r\n\r\n").unwrap();
        let Request { head_only, path, query, host } = request;
        assert_eq!((head_only, path.as_str(), query.as_str(), host), (true, "/metrics", "a=b", None));
    }

    #[test]
    fn foreign_host_names_are_refused() {
        for (host, ok) in [
            ("localhost", true),
            ("LOCALHOST:9100", true),
            ("127.0.0.1", true),
            ("192.0.2.1:80", true),
            ("[::1]:9100", true),
            ("[::1]", true),
            ("example.org", false),
            ("example.org:9100", false),
            ("localhost.example.org", false),
            ("127.0.0.1.example.org", false),
            ("localhost.", false),
        ] {
            let request = parse(&format!("GET / HTTP/1.1\r\nhOst:{host}\r\n\r\n")).unwrap();
            assert_eq!(request.check_host().is_ok(), ok, "{host}");
        }
    }

    #[test]
    fn malformed_requests_are_refused() {
        for (text, why) in [
            ("", Refusal::Bad),
            ("\r\n\r\n", Refusal::Bad),
            ("GET\r\n\r\n", Refusal::Bad),
            ("GET /\r\n\r\n", Refusal::Bad),
            ("GET  / HTTP/1.1\r\nHost: a\r\n\r\n", Refusal::Bad),
            ("GET / HTTP/1.1 \r\nHost: a\r\n\r\n", Refusal::Bad),
            ("GET / HTTP/1.1\r\n\r\n", Refusal::Bad),
            ("GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", Refusal::Bad),
            ("GET / HTTP/1.1\r\nHost:\r\n\r\n", Refusal::Bad),
            ("GET / HTTP/1.1\r\nHost: a b\r\n\r\n", Refusal::Bad),
            ("GET / HTTP/1.1\r\nHost: a:b\r\n\r\n", Refusal::Bad),
            ("GET / HTTP/1.1\r\nHost : a\r\n\r\n", Refusal::Bad),
            ("GET / HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n", Refusal::Bad),
            ("GET / HTTP/1.1\nHost: a\n\r\n\r\n", Refusal::Bad),
            ("GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n", Refusal::Bad),
            ("GET / HTTP/1.1\r\nHost: a\r\nX: \0\r\n\r\n", Refusal::Bad),
            ("GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", Refusal::Bad),
            ("GET * HTTP/1.1\r\nHost: a\r\n\r\n", Refusal::Bad),
            ("GET /\u{e4} HTTP/1.1\r\nHost: a\r\n\r\n", Refusal::Bad),
            ("G(T / HTTP/1.1\r\nHost: a\r\n\r\n", Refusal::Bad),
            ("GET / http/1.1\r\nHost: a\r\n\r\n", Refusal::Bad),
            ("GET / HTTP/2.0\r\nHost: a\r\n\r\n", Refusal::Version),
            ("POST / HTTP/1.1\r\nHost: a\r\n\r\n", Refusal::Method),
        ] {
            assert_eq!(parse(text), Err(why), "{text:?}");
        }
        assert_eq!(Request::parse(b"GET / HTTP/1.1\r\nHost: \xFF\r\n\r\n"), Err(Refusal::Bad));
        let many = "X: y\r\n".repeat(HEADERS_MAX + 1);
        assert_eq!(parse(&format!("GET / HTTP/1.1\r\n{many}\r\n")), Err(Refusal::TooLarge));
    }
}
