//! A minimal parser of HTTP/1.1 requests, sufficient for test clients.

use std::collections::BTreeMap;
use std::io::{self, BufRead, Read as _};

/// Longest header line that is accepted, in bytes.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// Maximum number of header lines in a request.
const LINES_MAX: usize = 200;
/// Longest request body that is accepted, in bytes.
const BODY_BYTES_MAX: u64 = 1 << 30;

#[derive(Debug, Default)]
pub struct Request {
    pub method: String,
    /// Path of the URL without the query, percent-decoded.
    pub path: String,
    pub query: BTreeMap<String, String>,
    /// Header values, by header name in lower case.
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
    /// Size of the whole request in bytes.
    pub bytes: u64,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

/// Reads the next request of a connection. Returns `None` if the client has closed the connection.
pub fn read(stream: &mut impl BufRead) -> io::Result<Option<Request>> {
    let mut request = Request::default();
    let mut line = String::new();
    let next = |stream: &mut dyn BufRead, line: &mut String, bytes: &mut u64| {
        line.clear();
        *bytes += stream.take(LINE_BYTES_MAX).read_line(line)? as u64;
        let ended = line.len();
        line.truncate(line.trim_end_matches(['\r', '\n']).len());
        io::Result::Ok(ended > 0)
    };
    if !next(stream, &mut line, &mut request.bytes)? {
        return Ok(None);
    }
    let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let mut words = line.split(' ');
    let (Some(method), Some(target)) = (words.next(), words.next()) else { return Err(bad("no request")) };
    method.clone_into(&mut request.method);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    request.path = decode_percent(path);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        request.query.insert(decode_percent(name), decode_percent(&value.replace('+', " ")));
    }
    for _ in 0..LINES_MAX {
        if !next(stream, &mut line, &mut request.bytes)? {
            return Err(bad("a head without an end"));
        }
        if line.is_empty() {
            let length =
                request.header("content-length").unwrap_or("0").parse().map_err(|_| bad("length"))?;
            if length > BODY_BYTES_MAX || request.header("transfer-encoding").is_some() {
                return Err(bad("a body that is too long, or in chunks"));
            }
            request.body = Vec::with_capacity(length as usize);
            stream.take(length).read_to_end(&mut request.body)?;
            request.bytes += length;
            return if request.body.len() as u64 == length { Ok(Some(request)) } else { Err(bad("cut off")) };
        }
        let (name, value) = line.split_once(':').ok_or_else(|| bad("a header without a colon"))?;
        request.headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    Err(bad("too many headers"))
}

fn decode_percent(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let code = bytes.get(at + 1..at + 3).and_then(|hex| std::str::from_utf8(hex).ok());
        let byte = code.and_then(|hex| u8::from_str_radix(hex, 16).ok()).filter(|_| bytes[at] == b'%');
        out.push(byte.unwrap_or(bytes[at]));
        at += if byte.is_some() { 3 } else { 1 };
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pipelined_requests_are_parsed() {
        let text = b"PUT /b/a%20b%2Fc?x=1%262&y HTTP/1.1\r\nContent-LENGTH: 3\r\nA: b: c\r\n\r\nabcGET /b HTTP/1.1\r\n\r\n";
        let mut stream = &text[..];
        let put = read(&mut stream).unwrap().unwrap();
        assert_eq!((put.method.as_str(), put.path.as_str(), &put.body[..]), ("PUT", "/b/a b/c", &b"abc"[..]));
        assert_eq!(
            (put.query["x"].as_str(), put.query["y"].as_str(), put.header("a")),
            ("1&2", "", Some("b: c"))
        );
        let get = read(&mut stream).unwrap().unwrap();
        assert_eq!((get.path.as_str(), put.bytes + get.bytes), ("/b", text.len() as u64));
        assert!(read(&mut stream).unwrap().is_none());
        read(&mut &b"PUT / HTTP/1.1\r\ncontent-length: 3\r\n\r\nab"[..]).unwrap_err();
    }
}
