//! The HTTP site of the web page: static files and the JSON API.

use std::sync::{Arc, Weak};

use freestone_control::http::{Client, Refusal, Request, Response, Site};

use super::api::{self, ApiError, Parameters};
use super::map::Maps;
use super::{device, files, overview};
use crate::service::Service;

/// HTTP site that serves the web page and its JSON API.
pub struct PageSite {
    /// Weak, so that an HTTP client does not keep the devices of the server alive.
    service: Weak<Service>,
    maps: Maps,
}

impl PageSite {
    /// Creates the site for the devices of `service`.
    pub fn new(service: &Arc<Service>) -> Self {
        Self { service: Arc::downgrade(service), maps: Maps::new(service) }
    }

    fn with_service<T>(&self, query: impl FnOnce(&Service) -> Result<T, ApiError>) -> Result<T, ApiError> {
        let service =
            self.service.upgrade().ok_or_else(|| ApiError::Busy("the server is shutting down".into()))?;
        query(&service)
    }
}

impl Site for PageSite {
    const NAME: &'static str = "http";
    const PATH: &'static str = "/";
    /// Security headers: browsers must not load anything from other hosts, run inline scripts, or show the
    /// page in a frame.
    const HEADERS: &'static str = "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; \
                                   img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; \
                                   frame-ancestors 'none'\r\n\
                                   Cross-Origin-Resource-Policy: same-origin\r\n\
                                   Referrer-Policy: no-referrer\r\n\
                                   X-Frame-Options: DENY\r\n";

    fn respond(&self, request: &Request, client: &Client<'_>) -> Result<Response, Refusal> {
        let Request { path, query, .. } = request;
        if let Some(file) = files::file(path) {
            return Ok(file);
        }
        let parameters = Parameters::of(query);
        if path == "/api/overview" {
            return Ok(api::response(self.with_service(|service| overview::overview(service, parameters))));
        }
        if let Some(name) = path.strip_prefix("/api/device/") {
            let details = api::name(name).and_then(|name| {
                parameters.end()?;
                self.with_service(|service| device::device(service, &name))
            });
            return Ok(api::response(details));
        }
        if let Some(name) = path.strip_prefix("/api/map/") {
            let map = api::name(name).and_then(|name| self.maps.map(&name, parameters, client));
            return Ok(api::response(map));
        }
        Err(Refusal::NotFound)
    }
}
