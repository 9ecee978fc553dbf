//! Monitoring: metrics, the web page, `top`, the request log and probes.

mod browser;
mod chromium;
mod hostile;
mod map;
mod openmetrics;
mod page;
mod requests;
mod scrape;
mod top;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;

use crate::harness::Serve;

/// A server that is monitored over HTTP, and its address.
struct Watched {
    serve: Serve,
    at: String,
}

impl Watched {
    /// Starts a server with `--metrics`.
    fn start(args: &[&str]) -> Self {
        Self::of(Serve::start(&[args, &["--metrics", "0"]].concat()), "metrics: http://", "/metrics")
    }

    /// Starts a server with `--http`.
    fn page(args: &[&str]) -> Self {
        Self::of(Serve::start(&[args, &["--http", "0"]].concat()), "page: http://", "/")
    }

    fn of(serve: Serve, word: &str, path: &str) -> Self {
        let at = serve.startup_output.lines().find_map(|line| line.strip_prefix(word));
        let at = at.and_then(|rest| rest.strip_suffix(path)).expect(&serve.startup_output).to_owned();
        Self { serve, at }
    }

    /// Sends a request of the page. Returns the status and the JSON.
    fn get(&self, path: &str) -> (u16, Value) {
        let (status, head, body) = self.ask(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes());
        let content_type = "Content-Type: application/json; charset=utf-8";
        assert!(head.iter().any(|line| line == content_type), "{path}: {head:?}");
        (status, serde_json::from_str(&body).unwrap_or_else(|why| panic!("{path}: {why}: {body}")))
    }

    /// Like [`get`](Self::get), for requests that must succeed.
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

    /// Sends these bytes. Returns the status, the lines of the head and the body.
    fn ask(&self, bytes: &[u8]) -> (u16, Vec<String>, String) {
        let mut stream = self.connect();
        // The server may close before all bytes are sent.
        let _ = stream.write_all(bytes);
        answer(&mut stream)
    }

    /// Returns the metrics, checked strictly.
    fn scrape(&self) -> openmetrics::Exposition {
        let request = format!("GET /metrics HTTP/1.1\r\nHost: {}\r\n\r\n", self.at);
        let (status, head, body) = self.ask(request.as_bytes());
        assert_eq!(status, 200, "{body}");
        let content_type = "Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8";
        assert!(head.iter().any(|line| line == content_type), "{head:?}");
        openmetrics::parse(&body).unwrap_or_else(|why| panic!("{why}\n{body}"))
    }
}

fn answer(stream: &mut TcpStream) -> (u16, Vec<String>, String) {
    let mut bytes = Vec::new();
    let end = stream.read_to_end(&mut bytes);
    // After its reply the server may close while bytes are in transit.
    assert!(end.is_ok() || !bytes.is_empty(), "{end:?}");
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let mut lines = head.split("\r\n").map(str::to_owned);
    let status = lines.next().unwrap();
    let status = status.strip_prefix("HTTP/1.1 ").unwrap()[..3].parse().unwrap();
    (status, lines.collect(), body.to_owned())
}
