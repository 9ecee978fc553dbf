//! What is at the address of metrics.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::{scrape, text};
use crate::http::{Answer, Client, Refusal, Request, Site};
use crate::service::Service;

const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The numbers, as text that Prometheus reads.
pub struct MetricsSite {
    /// Not held: no client keeps devices alive.
    service: Weak<Service>,
    forks: usize,
    /// One text at a time.
    writing: Mutex<()>,
}

impl MetricsSite {
    /// Of the busiest `forks` is told one by one.
    pub fn new(service: &Arc<Service>, forks: usize) -> Self {
        Self { service: Arc::downgrade(service), forks, writing: Mutex::default() }
    }
}

impl Site for MetricsSite {
    const NAME: &'static str = "metrics";
    const PATH: &'static str = "/metrics";
    const HEADERS: &'static str = "";

    fn answer(&self, request: &Request, _: &Client<'_>) -> Result<Answer, Refusal> {
        match request.path.as_str() {
            "/metrics" => {}
            "/" => {
                let body = b"freestone: metrics are at /metrics\n";
                return Ok(Answer::ok("text/plain; charset=utf-8", body.as_slice()));
            }
            _ => return Err(Refusal::NotFound),
        }
        let service = self.service.upgrade().ok_or(Refusal::Busy)?;
        // Nothing in there can be half done.
        let _alone = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let body = text::text(scrape::scrape(&service, self.forks));
        Ok(Answer::ok(CONTENT_TYPE, body.into_bytes()))
    }
}
