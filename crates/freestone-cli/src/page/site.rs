//! What is at which path.

use std::sync::{Arc, Weak};

use super::api::{self, Parameters, Why};
use super::map::Maps;
use super::{device, files, overview};
use crate::http::{Answer, Client, Refusal, Request, Site};
use crate::service::Service;

/// The page, and what it asks.
pub struct PageSite {
    /// Not held: no client keeps devices alive.
    service: Weak<Service>,
    maps: Maps,
}

impl PageSite {
    /// The page of a server.
    pub fn new(service: &Arc<Service>) -> Self {
        Self { service: Arc::downgrade(service), maps: Maps::new(service) }
    }

    fn ask<T>(&self, question: impl FnOnce(&Service) -> Result<T, Why>) -> Result<T, Why> {
        let service = self.service.upgrade().ok_or_else(|| Why::Busy("the server ends".into()))?;
        question(&service)
    }
}

impl Site for PageSite {
    const NAME: &'static str = "http";
    const PATH: &'static str = "/";
    /// Nothing is loaded from elsewhere, run from within the text, or shown in a frame of others.
    const HEADERS: &'static str = "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; \
                                   img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; \
                                   frame-ancestors 'none'\r\n\
                                   Cross-Origin-Resource-Policy: same-origin\r\n\
                                   Referrer-Policy: no-referrer\r\n\
                                   X-Frame-Options: DENY\r\n";

    fn answer(&self, request: &Request, client: &Client<'_>) -> Result<Answer, Refusal> {
        let Request { path, query, .. } = request;
        if let Some(file) = files::file(path) {
            return Ok(file);
        }
        let parameters = Parameters::of(query);
        if path == "/api/overview" {
            return Ok(api::answer(self.ask(|service| overview::overview(service, parameters))));
        }
        if let Some(name) = path.strip_prefix("/api/device/") {
            let told = api::name(name).and_then(|name| {
                parameters.end()?;
                self.ask(|service| device::device(service, &name))
            });
            return Ok(api::answer(told));
        }
        if let Some(name) = path.strip_prefix("/api/map/") {
            let told = api::name(name).and_then(|name| self.maps.map(&name, parameters, client));
            return Ok(api::answer(told));
        }
        Err(Refusal::NotFound)
    }
}
