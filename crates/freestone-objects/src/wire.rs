//! HTTP layer between `object_store` and the network, which does not trust responses.
//!
//! Unsuccessful responses become a [`WireError`]; only enough of their body is read to find an error code.
//! Other bodies are limited in size, except those of objects. If an object store responds to a range request
//! with the whole object, this layer cuts out the range. A response with a different range is an error.

use std::error::Error as StdError;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt as _;
use http::header::{CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, HeaderValue, RANGE};
use http::{Method, StatusCode};
use http_body::{Body, Frame};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};
use reqwest::redirect::Policy;
use thiserror::Error;

use crate::text::{code, plain};

/// Maximum size in bytes of a response that is not an object. The largest is a page of a listing: up to a
/// thousand keys of 1 KiB, where each byte may be escaped as three bytes.
const RESPONSE_BYTES_MAX: u64 = 16 << 20;
/// Maximum number of bytes read from the body of an error response, to find the error code.
const ERROR_BYTES_MAX: u64 = 16 << 10;
/// Maximum number of bytes that are read and discarded before a range, if an object store ignores ranges.
const SKIP_BYTES_MAX: u64 = 16 << 20;
/// Maximum number of redirects of a request to a web server.
const REDIRECTS_MAX: usize = 5;

/// Kind of service that sent a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    Store,
    /// The service that provides credentials.
    Credentials,
}

/// Failure of a request. Each message contains the host that the request was sent to.
#[derive(Debug, Error)]
pub enum WireError {
    #[error("{host} answers {status} {code}")]
    Refused { peer: Peer, host: String, status: u16, code: String },
    #[error("{0}")]
    Broken(String),
    #[error("{0}")]
    Tls(String),
    #[error("{0} does not support range requests")]
    NoRanges(String),
    #[error("{0}: credentials need TLS, but the URL begins with http://")]
    PlainCredentials(String),
    /// The instance's metadata service failed, which is the last source of credentials that is tried.
    #[error(
        "{cause}, and the environment of this process names no credentials; {advice}. A verb of a server uses \
         the environment of the server"
    )]
    NoCredentials { cause: Box<Self>, advice: &'static str },
}

impl From<WireError> for HttpError {
    fn from(wire: WireError) -> Self {
        Self::new(HttpErrorKind::Unknown, wire)
    }
}

/// Extension that marks a request whose response is an object. The caller reads the object in pieces and
/// limits its size.
#[derive(Debug, Clone, Copy)]
pub struct ObjectRequest;

/// Creates the HTTP clients of an object store.
#[derive(Debug)]
pub struct Connector {
    /// Host and port of the object store. Requests to other hosts are for credentials.
    pub authority: String,
    /// True if the object store is used without TLS.
    pub is_plain: bool,
    /// True if redirects are followed, which is allowed only for a read-only store.
    pub follows_redirects: bool,
    /// Advice on providing credentials, added to a failure of the instance's metadata service. `None` if the
    /// store has another credential service, or needs no credentials.
    pub advice: Option<&'static str>,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        // Fails if a provider is installed already, which is then used.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let build = |builder: reqwest::ClientBuilder| {
            let mut builder = builder
                .user_agent(concat!("freestone/", env!("CARGO_PKG_VERSION")))
                .http1_only()
                .redirect(if self.follows_redirects { Policy::custom(follow) } else { Policy::none() });
            let time = |key| options.get_config_value(&key).and_then(|v| humantime::parse_duration(&v).ok());
            if let Some(time) = time(ClientConfigKey::ConnectTimeout) {
                builder = builder.connect_timeout(time);
            }
            if is_loopback(&self.authority) {
                builder = builder.no_proxy();
            }
            builder.tcp_keepalive(Duration::from_secs(15)).build()
        };
        let mut client = build(reqwest::Client::builder());
        if client.is_err() && self.is_plain {
            // A host without root certificates cannot create a client with TLS, but a store without TLS does
            // not need it.
            let tls = rustls::ClientConfig::builder()
                .with_root_certificates(rustls::RootCertStore::empty())
                .with_no_client_auth();
            client = build(reqwest::Client::builder().tls_backend_preconfigured(tls));
        }
        let client =
            client.map_err(|e| object_store::Error::Generic { store: "HTTP", source: Box::new(e) })?;
        let client = HttpClient::new(client);
        // object_store sets this option for each client, and relies on the connector to refuse plain HTTP.
        let allowed = options.get_config_value(&ClientConfigKey::AllowHttp);
        let may_be_plain = allowed.as_deref() == Some("true");
        let authority = self.authority.clone();
        let (is_plain, advice) = (self.is_plain, self.advice);
        Ok(HttpClient::new(Guard { client, authority, is_plain, may_be_plain, advice }))
    }
}

/// Follows a redirect, unless it leads from TLS to plain HTTP or exceeds [`REDIRECTS_MAX`].
fn follow(attempt: reqwest::redirect::Attempt<'_>) -> reqwest::redirect::Action {
    let was_tls = attempt.previous().last().is_some_and(|url| url.scheme() == "https");
    if attempt.previous().len() > REDIRECTS_MAX || (was_tls && attempt.url().scheme() != "https") {
        attempt.stop()
    } else {
        attempt.follow()
    }
}

/// Returns the host of an authority, without the port and without the brackets of an IPv6 address.
fn host_of(authority: &str) -> &str {
    // Colons inside the brackets of an IPv6 address do not separate a port.
    let host = if authority.ends_with(']') {
        authority
    } else {
        authority.rsplit_once(':').map_or(authority, |(host, _)| host)
    };
    host.trim_start_matches('[').trim_end_matches(']')
}

fn is_loopback(authority: &str) -> bool {
    let host = host_of(authority);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Returns true for hosts that may run a local credential service. Requests to these hosts do not leave the
/// machine or its hypervisor.
fn is_machine_local(authority: &str) -> bool {
    /// IPv6 prefix of Amazon's metadata services, which is not link-local.
    const AMAZON: [u16; 2] = [0xfd00, 0xec2];
    let host = host_of(authority);
    let is_link_local_or_amazon = |address: IpAddr| match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local() || address.segments()[..2] == AMAZON,
    };
    is_loopback(authority)
        || host == "metadata.google.internal"
        || host.parse().is_ok_and(is_link_local_or_amazon)
}

/// HTTP client that checks requests and responses.
#[derive(Debug)]
struct Guard {
    client: HttpClient,
    /// Host and port of the object store, which is used without TLS if `is_plain` is true.
    authority: String,
    is_plain: bool,
    /// True if plain HTTP is allowed, to an object store without TLS or to a local credential service.
    may_be_plain: bool,
    /// Advice on providing credentials, added to a failure of the instance's metadata service.
    advice: Option<&'static str>,
}

impl Guard {
    fn allows_plain(&self, authority: &str) -> bool {
        let is_store = self.is_plain && authority == self.authority;
        self.may_be_plain && (is_store || is_machine_local(authority))
    }

    /// Adds the advice on providing credentials, if the request was for the instance's metadata service.
    fn add_advice(&self, authority: &str, cause: WireError) -> WireError {
        match self.advice {
            Some(advice) if authority != self.authority && is_machine_local(authority) => {
                WireError::NoCredentials { cause: Box::new(cause), advice }
            }
            _ => cause,
        }
    }
}

#[async_trait]
impl HttpService for Guard {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let authority = request.uri().authority().map(|a| a.as_str().to_owned()).unwrap_or_default();
        let peer = if authority == self.authority { Peer::Store } else { Peer::Credentials };
        let host = plain(&authority);
        if request.uri().scheme_str() != Some("https") && !self.allows_plain(&authority) {
            return Err(WireError::PlainCredentials(host).into());
        }
        let is_get = request.method() == Method::GET;
        let is_object = is_get && request.extensions().get::<ObjectRequest>().is_some();
        let part = request.headers().get(RANGE).filter(|_| is_get).and_then(requested_range);
        let response = self.client.execute(request).await;
        let response = response.map_err(|e| self.add_advice(&authority, connection_error(&host, &e)))?;
        let (mut head, body) = response.into_parts();
        if !head.status.is_success() {
            let status = head.status;
            let code = error_code(&head.headers, body, &host).await;
            let code = code.or_else(|| status.canonical_reason().map(str::to_owned)).unwrap_or_default();
            let refused = WireError::Refused { peer, host, status: status.as_u16(), code };
            return Err(self.add_advice(&authority, refused).into());
        }
        // object_store requires an entity tag in all responses. An empty entity tag is treated as none.
        head.headers.entry(ETAG).or_insert(HeaderValue::from_static("\"\""));
        let mut window = Window { body, host, skip: 0, left: u64::MAX, is_cut: true };
        match part {
            Some((start, end)) if head.status == StatusCode::PARTIAL_CONTENT => {
                let bytes = check_range(&head.headers, start, end)
                    .map_err(|what| WireError::Broken(format!("{}: {what}", window.host)))?;
                // object_store needs the length, which a chunked response does not contain.
                head.headers.insert(CONTENT_LENGTH, HeaderValue::from(bytes));
            }
            Some((start, end)) => {
                let Some(bytes) = number(&head.headers, CONTENT_LENGTH.as_str()) else {
                    return Err(WireError::NoRanges(window.host).into());
                };
                if start >= bytes {
                    let status = StatusCode::RANGE_NOT_SATISFIABLE.as_u16();
                    return Err(
                        WireError::Refused { peer, host: window.host, status, code: String::new() }.into()
                    );
                }
                if start > SKIP_BYTES_MAX {
                    return Err(WireError::NoRanges(window.host).into());
                }
                window.skip = start;
                window.left = end.min(bytes) - start;
                head.status = StatusCode::PARTIAL_CONTENT;
                let range = format!("bytes {start}-{}/{bytes}", start + window.left - 1);
                head.headers.insert(CONTENT_LENGTH, HeaderValue::from(window.left));
                head.headers
                    .insert(CONTENT_RANGE, HeaderValue::from_str(&range).map_err(|_| header_error())?);
            }
            None if !is_object => {
                window.left = RESPONSE_BYTES_MAX;
                window.is_cut = false;
            }
            None => {}
        }
        Ok(HttpResponse::from_parts(head, HttpResponseBody::new(window)))
    }
}

fn header_error() -> WireError {
    WireError::Broken("a header cannot be written".to_owned())
}

/// Parses the range `bytes=START-LAST`. Returns the offsets of its start and its end, or `None` if it has
/// another form.
fn requested_range(range: &HeaderValue) -> Option<(u64, u64)> {
    let (start, last) = range.to_str().ok()?.strip_prefix("bytes=")?.split_once('-')?;
    Some((start.parse().ok()?, last.parse::<u64>().ok()?.checked_add(1)?))
}

/// Checks that a response contains the requested range, which ends at the end of the object at the latest.
/// Returns the length of the range in bytes.
fn check_range(headers: &HeaderMap, start: u64, end: u64) -> Result<u64, &'static str> {
    let said = headers.get(CONTENT_RANGE).and_then(|value| value.to_str().ok());
    let said = said.and_then(|said| said.strip_prefix("bytes ")).and_then(|said| said.split_once('/'));
    let (range, all) = said.ok_or("the response does not state its range")?;
    let all: u64 = all.parse().map_err(|_| "the response does not state the size of the object")?;
    let range = range.split_once('-').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    let (first, last): (u64, u64) = range.ok_or("the response does not state its range")?;
    if first != start || last.checked_add(1) != Some(end.min(all)) || last < first {
        return Err("the response has another range than requested");
    }
    let bytes = last + 1 - first;
    match number(headers, CONTENT_LENGTH.as_str()) {
        Some(length) if length != bytes => Err("the response has another length than its range"),
        _ => Ok(bytes),
    }
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

/// Returns the error code of a response, or `None` if there is none. The code is in an XML body for S3,
/// Google and Azure, or in a header for Azure.
async fn error_code(headers: &HeaderMap, body: HttpResponseBody, host: &str) -> Option<String> {
    if let Some(said) = headers.get("x-ms-error-code").and_then(|value| value.to_str().ok()) {
        return code(said).map(str::to_owned);
    }
    let window = Window { body, host: host.to_owned(), skip: 0, left: ERROR_BYTES_MAX, is_cut: true };
    let mut pieces = HttpResponseBody::new(window).bytes_stream();
    let mut text = Vec::new();
    while let Some(Ok(piece)) = pieces.next().await {
        text.extend_from_slice(&piece);
    }
    let text = String::from_utf8_lossy(&text);
    let (_, rest) = text.split_once("<Code>")?;
    code(rest.split_once("</Code>")?.0.trim()).map(str::to_owned)
}

/// Converts a failure of the connection, before or during the response, to an error that names the host.
fn connection_error(host: &str, error: &HttpError) -> WireError {
    let (mut innermost, mut is_tls) = (error as &(dyn StdError + 'static), false);
    loop {
        is_tls |= innermost.is::<rustls::Error>();
        // `source` of an I/O error skips the error that it wraps.
        let wrapped = innermost.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        let next = wrapped.map(|e| e as &(dyn StdError + 'static)).or_else(|| innermost.source());
        let Some(next) = next else { break };
        innermost = next;
    }
    let why = plain(&format!("{host}: {innermost}"));
    match error.kind() {
        HttpErrorKind::Connect if is_tls => WireError::Tls(why),
        HttpErrorKind::Timeout => WireError::Broken(format!("{host}: no connection in time")),
        _ => WireError::Broken(why),
    }
}

/// Part of a body: skips the first `skip` bytes, and passes on at most `left` bytes.
#[derive(Debug)]
struct Window {
    body: HttpResponseBody,
    host: String,
    skip: u64,
    left: u64,
    /// If the body is longer than `left`: true ends it there, false makes it an error.
    is_cut: bool,
}

impl Body for Window {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        loop {
            if self.left == 0 && self.is_cut {
                return Poll::Ready(None);
            }
            let frame = match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(Some(Err(e))) => {
                    return Poll::Ready(Some(Err(connection_error(&self.host, &e).into())));
                }
                other => return other,
            };
            let Ok(mut data) = frame.into_data() else { continue };
            let skipped = self.skip.min(data.len() as u64);
            self.skip -= skipped;
            let mut data = data.split_off(skipped as usize);
            if data.len() as u64 > self.left {
                if !self.is_cut {
                    let what = format!("{}: the response is too long", self.host);
                    return Poll::Ready(Some(Err(WireError::Broken(what).into())));
                }
                data.truncate(self.left as usize);
            }
            self.left -= data.len() as u64;
            if !data.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn response_with_other_range_is_refused() {
        let check = |range: Option<&str>, length: Option<&str>| {
            let mut headers = HeaderMap::new();
            for (name, value) in [(CONTENT_RANGE, range), (CONTENT_LENGTH, length)] {
                if let Some(value) = value {
                    headers.insert(name, HeaderValue::from_str(value).unwrap());
                }
            }
            check_range(&headers, 10, 20)
        };
        for (good, bytes) in [("bytes 10-19/100", 10), ("bytes 10-14/15", 5), ("bytes 10-19/20", 10)] {
            assert_eq!(check(Some(good), None), Ok(bytes), "{good}");
        }
        assert_eq!(check(Some("bytes 10-19/100"), Some("10")), Ok(10));
        check(Some("bytes 10-19/100"), Some("11")).unwrap_err();
        check(None, Some("10")).unwrap_err();
        for bad in [
            "bytes 9-19/100",
            "bytes 10-18/100",
            "bytes 10-20/100",
            "bytes 10-19/*",
            "bytes 10-9/10",
            "bytes 10-18446744073709551615/100",
            "10-19/100",
            "bytes */100",
            "",
        ] {
            check(Some(bad), None).unwrap_err();
        }
    }

    #[test]
    fn loopback_hosts_bypass_proxy() {
        for host in ["localhost", "localhost:80", "127.0.0.1:9000", "127.0.0.1", "[::1]:80", "[::1]"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["example.org", "localhost.example.org:1", "10.0.0.1:80", "[fe80::1]:80", "[fe80::1]"] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn only_machine_local_hosts_may_skip_tls() {
        let own = [
            "localhost:42356",
            "127.0.0.1",
            "169.254.169.254",
            "169.254.170.2:80",
            "metadata.google.internal",
        ];
        for host in own.iter().chain(&["[fd00:ec2::254]", "[fd00:ec2::23]:80", "[fe80::1]", "[::1]:8080"]) {
            assert!(is_machine_local(host), "{host}");
        }
        for host in [
            "sts.example.org",
            "10.0.0.1",
            "169.255.0.1:80",
            "[fd00:ec3::1]",
            "metadata.google.internal.example.org",
        ] {
            assert!(!is_machine_local(host), "{host}");
        }
    }
}
