//! The HTTP site that serves the metrics.

use std::sync::{Arc, Weak};

use freestone_control::http::{Client, Refusal, Request, Response, Site};
use freestone_core::sync::Mutex;

use super::{scrape, text};
use crate::service::Service;

const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// HTTP site that serves the metrics as text for Prometheus.
pub struct MetricsSite {
    /// Weak, so that an HTTP client does not keep the devices of the server alive.
    service: Weak<Service>,
    forks: usize,
    /// Locked while a response is prepared, so that only one is prepared at a time.
    writing: Mutex<()>,
}

impl MetricsSite {
    /// Creates the site. At most `forks` forks, the busiest, have metrics of their own.
    pub fn new(service: &Arc<Service>, forks: usize) -> Self {
        Self { service: Arc::downgrade(service), forks, writing: Mutex::default() }
    }
}

impl Site for MetricsSite {
    const NAME: &'static str = "metrics";
    const PATH: &'static str = "/metrics";
    const HEADERS: &'static str = "";

    fn respond(&self, request: &Request, _: &Client<'_>) -> Result<Response, Refusal> {
        match request.path.as_str() {
            "/metrics" => {}
            "/" => {
                let body = b"freestone: metrics are at /metrics\n";
                return Ok(Response::ok("text/plain; charset=utf-8", body.as_slice()));
            }
            _ => return Err(Refusal::NotFound),
        }
        let service = self.service.upgrade().ok_or(Refusal::Busy)?;
        let _writing = self.writing.lock();
        let body = text::text(scrape::scrape(&service, self.forks));
        Ok(Response::ok(CONTENT_TYPE, body.into_bytes()))
    }
}
