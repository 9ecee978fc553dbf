//! Monitoring: metrics, the web page, `top`, the request log and trace probes.

mod browser;
mod chromium;
mod hostile;
mod map;
pub mod openmetrics;
mod page;
mod requests;
mod scrape;
mod top;

use std::net::TcpStream;

use crate::harness::prelude::*;

/// A server with an HTTP port for monitoring, and the address of this port.
struct Watched {
    serve: Serve,
    at: String,
}

impl Watched {
    /// Starts a server with `--metrics` on a free port.
    fn start(args: &[&str]) -> Self {
        Self::of(Serve::start(&[args, &["--metrics", "0"]].concat()), "metrics: http://", "/metrics")
    }

    /// Starts a server with `--http` on a free port.
    fn page(args: &[&str]) -> Self {
        Self::of(Serve::start(&[args, &["--http", "0"]].concat()), "page: http://", "/")
    }

    fn of(serve: Serve, word: &str, path: &str) -> Self {
        let at = serve.startup_output.lines().find_map(|line| line.strip_prefix(word));
        let at = at.and_then(|rest| rest.strip_suffix(path)).expect(&serve.startup_output).to_owned();
        Self { serve, at }
    }

    /// Sends an HTTP GET for `path`, as the page does. Returns the HTTP status and the JSON body.
    fn get(&self, path: &str) -> (u16, Value) {
        let (status, head, body) = self.ask(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes());
        let content_type = "Content-Type: application/json; charset=utf-8";
        assert!(head.iter().any(|line| line == content_type), "{path}: {head:?}");
        (status, serde_json::from_str(&body).unwrap_or_else(|why| panic!("{path}: {why}: {body}")))
    }

    /// Like [`get`](Self::get), for requests that must succeed. Returns the JSON body.
    fn json(&self, path: &str) -> Value {
        let (status, reply) = self.get(path);
        assert_eq!(status, 200, "{path}: {reply}");
        reply
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.at).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Sends these bytes on a new connection. Returns the HTTP status, the header lines and the
    /// body.
    fn ask(&self, bytes: &[u8]) -> (u16, Vec<String>, String) {
        let mut stream = self.connect();
        // The server may reply and close the connection before all bytes are sent, so errors are
        // ignored.
        let _ = stream.write_all(bytes);
        answer(&mut stream)
    }

    /// Returns the metrics, parsed by a strict parser.
    fn scrape(&self) -> openmetrics::Exposition {
        let request = format!("GET /metrics HTTP/1.1\r\nHost: {}\r\n\r\n", self.at);
        let (status, head, body) = self.ask(request.as_bytes());
        assert_eq!(status, 200, "{body}");
        let content_type = "Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8";
        assert!(head.iter().any(|line| line == content_type), "{head:?}");
        openmetrics::parse(&body).unwrap_or_else(|why| panic!("{why}\n{body}"))
    }
}

pub fn answer(stream: &mut TcpStream) -> (u16, Vec<String>, String) {
    let mut bytes = Vec::new();
    let end = stream.read_to_end(&mut bytes);
    // The server may close the connection after its reply while bytes of the client are in transit.
    // The read then ends with an error.
    assert!(end.is_ok() || !bytes.is_empty(), "{end:?}");
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let mut lines = head.split("\r\n").map(str::to_owned);
    let status = lines.next().unwrap();
    let status = status.strip_prefix("HTTP/1.1 ").unwrap()[..3].parse().unwrap();
    (status, lines.collect(), body.to_owned())
}
