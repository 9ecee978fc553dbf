//! Finds the HTTP requests in a byte stream that a proxy forwards.

/// Longest header line that is parsed, in bytes.
const LINE_BYTES_MAX: usize = 64 << 10;

/// Finds the HTTP requests of one connection. The bytes may arrive in pieces of any length.
#[derive(Debug, Default)]
pub struct RequestFinder {
    line: Vec<u8>,
    state: State,
}

#[derive(Debug, Default)]
enum State {
    /// The next line is a request line.
    #[default]
    RequestLine,
    /// The next line is a header line. The number is the content length from the lines before, or
    /// 0.
    Header(u64),
    /// Inside of a body, with this number of bytes remaining.
    Body(u64),
    /// Parsing has stopped: the stream is not HTTP, or a body has an unknown length.
    Lost,
}

impl RequestFinder {
    /// Parses the next bytes of the stream. Calls `each` with the method and the target of each
    /// request.
    pub fn feed(&mut self, mut bytes: &[u8], each: &mut dyn FnMut(&str, &str)) {
        while !bytes.is_empty() {
            match &mut self.state {
                State::Lost => return,
                State::Body(left) => {
                    let skipped = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    *left -= skipped as u64;
                    bytes = &bytes[skipped..];
                    if *left == 0 {
                        self.state = State::RequestLine;
                    }
                }
                State::RequestLine | State::Header(_) => {
                    let end = bytes.iter().position(|byte| *byte == b'\n');
                    let (line, rest) = bytes.split_at(end.map_or(bytes.len(), |end| end + 1));
                    bytes = rest;
                    self.line.extend_from_slice(line);
                    if self.line.len() > LINE_BYTES_MAX {
                        self.state = State::Lost;
                    } else if end.is_some() {
                        self.state = self.next_state(each).unwrap_or(State::Lost);
                        self.line.clear();
                    }
                }
            }
        }
    }

    /// Returns the state after the complete line in `self.line`, or `None` to stop parsing.
    fn next_state(&self, each: &mut dyn FnMut(&str, &str)) -> Option<State> {
        let line = std::str::from_utf8(&self.line).ok()?.trim_end_matches(['\r', '\n']);
        let State::Header(body) = self.state else {
            let mut words = line.split(' ');
            let (method, target, version) = (words.next()?, words.next()?, words.next()?);
            return version.starts_with("HTTP/1.").then(|| {
                each(method, target);
                State::Header(0)
            });
        };
        if line.is_empty() {
            return Some(if body > 0 { State::Body(body) } else { State::RequestLine });
        }
        let (name, value) = line.split_once(':')?;
        if name.eq_ignore_ascii_case("content-length") {
            return value.trim().parse().ok().map(State::Header);
        }
        (!name.eq_ignore_ascii_case("transfer-encoding")).then_some(State::Header(body))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &[u8], piece: usize) -> Vec<String> {
        let (mut finder, mut found) = (RequestFinder::default(), Vec::new());
        for piece in text.chunks(piece) {
            finder.feed(piece, &mut |method, target| found.push(format!("{method} {target}")));
        }
        found
    }

    #[test]
    fn requests_split_anywhere_are_found() {
        let text = b"PUT /b/a HTTP/1.1\r\nContent-LENGTH: 21\r\nA: b\r\n\r\nGET /not HTTP/1.1\r\n\r\n\
                     GET /b?list-type=2 HTTP/1.1\r\nHost: x\r\n\r\nHEAD /b/a HTTP/1.1\r\n\r\n";
        for piece in 1..=text.len() {
            assert_eq!(found(text, piece), ["PUT /b/a", "GET /b?list-type=2", "HEAD /b/a"], "{piece}");
        }
    }

    #[test]
    fn non_http_stream_stops_parsing() {
        assert!(found(b"NBDMAGIC\nGET /a HTTP/1.1\r\n\r\n", 7).is_empty());
        let chunked = b"PUT /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nGET /b HTTP/1.1\r\n\r\n";
        assert_eq!(found(chunked, 9), ["PUT /a"]);
        assert!(found(&vec![b'x'; 2 * LINE_BYTES_MAX], 1000).is_empty());
    }
}
