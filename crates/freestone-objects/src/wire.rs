//! What stands between `object_store` and the network: it believes nothing that a store answers.
//!
//! Answers that are no success come back as [`Wire`], with as much of their body read as a code takes. A
//! body that has to be read whole is bounded. A store that answers a whole object where a part was asked for
//! is given the part's answer here; one that answers another part has broken the contract.

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

/// Bytes of an answer that is read whole and is no object: a page of a list has up to a thousand keys of
/// 1 KiB, and each byte of these may be written as three.
const ANSWER_BYTES_MAX: u64 = 16 << 20;
/// Bytes of an error's answer that are looked at.
const ERROR_BYTES_MAX: u64 = 16 << 10;
/// Bytes of an object that are read for nothing, where a store answers no parts.
const SKIP_BYTES_MAX: u64 = 16 << 20;
/// Redirects that are followed where they are at all.
const REDIRECTS_MAX: usize = 5;

/// Whose answer it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    Store,
    /// Of the service that gives credentials.
    Credentials,
}

/// Why a request came to nothing. Each sentence names the host.
#[derive(Debug, Error)]
pub enum Wire {
    #[error("{host} answers {status} {code}")]
    Refused { whose: Whose, host: String, status: u16, code: String },
    #[error("{0}")]
    Broken(String),
    #[error("{0}")]
    Tls(String),
    #[error("{0} answers no parts of objects")]
    NoParts(String),
    #[error("{0} gives credentials with TLS alone, and its URL says http://")]
    NoTls(String),
}

impl From<Wire> for HttpError {
    fn from(wire: Wire) -> Self {
        Self::new(HttpErrorKind::Unknown, wire)
    }
}

/// Put into the extensions of a request whose answer is an object: it is read piece by piece by who knows how
/// much is wanted.
#[derive(Debug, Clone, Copy)]
pub struct IsObject;

/// Makes the clients of one store.
#[derive(Debug)]
pub struct Connector {
    /// Host and port of the store; others give credentials.
    pub authority: String,
    /// The store is spoken to without TLS.
    pub is_plain: bool,
    /// A store that is only read from may lead elsewhere.
    pub follows: bool,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        // Fails where there is one already, and then that one is used.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let build = |builder: reqwest::ClientBuilder| {
            let mut builder = builder
                .user_agent(concat!("freestone/", env!("CARGO_PKG_VERSION")))
                .http1_only()
                .redirect(if self.follows { Policy::custom(follow) } else { Policy::none() });
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
            // A host without certificates of authorities needs none for this store.
            let tls = rustls::ClientConfig::builder()
                .with_root_certificates(rustls::RootCertStore::empty())
                .with_no_client_auth();
            client = build(reqwest::Client::builder().tls_backend_preconfigured(tls));
        }
        let client =
            client.map_err(|e| object_store::Error::Generic { store: "HTTP", source: Box::new(e) })?;
        let client = HttpClient::new(client);
        // object_store says it of each client, and leaves it to the connector to keep to it.
        let allowed = options.get_config_value(&ClientConfigKey::AllowHttp);
        let may_be_plain = allowed.as_deref() == Some("true");
        let authority = self.authority.clone();
        Ok(HttpClient::new(Guard { client, authority, is_plain: self.is_plain, may_be_plain }))
    }
}

/// A redirect leads neither from TLS to none nor on and on.
fn follow(attempt: reqwest::redirect::Attempt<'_>) -> reqwest::redirect::Action {
    let was_tls = attempt.previous().last().is_some_and(|url| url.scheme() == "https");
    if attempt.previous().len() > REDIRECTS_MAX || (was_tls && attempt.url().scheme() != "https") {
        attempt.stop()
    } else {
        attempt.follow()
    }
}

/// Without the port, and without the brackets of an address.
fn host_of(authority: &str) -> &str {
    // The colons of an address in brackets are no port.
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

/// Where a machine finds its own credentials: what is asked there leaves neither it nor its host.
fn is_of_machine(authority: &str) -> bool {
    /// Of Amazon's machines, beside the addresses of a link.
    const AMAZON: [u16; 2] = [0xfd00, 0xec2];
    let host = host_of(authority);
    let is_of_link = |address: IpAddr| match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local() || address.segments()[..2] == AMAZON,
    };
    is_loopback(authority) || host == "metadata.google.internal" || host.parse().is_ok_and(is_of_link)
}

/// A client that checks what it is answered.
#[derive(Debug)]
struct Guard {
    client: HttpClient,
    /// The store's, and whether that is spoken to without TLS.
    authority: String,
    is_plain: bool,
    /// What this client asks may go without TLS, if it goes to such a store or stays on this machine.
    may_be_plain: bool,
}

impl Guard {
    fn allows_plain(&self, authority: &str) -> bool {
        let is_store = self.is_plain && authority == self.authority;
        self.may_be_plain && (is_store || is_of_machine(authority))
    }
}

#[async_trait]
impl HttpService for Guard {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let authority = request.uri().authority().map(|a| a.as_str().to_owned()).unwrap_or_default();
        let whose = if authority == self.authority { Whose::Store } else { Whose::Credentials };
        let host = plain(&authority);
        if request.uri().scheme_str() != Some("https") && !self.allows_plain(&authority) {
            return Err(Wire::NoTls(host).into());
        }
        let is_get = request.method() == Method::GET;
        let is_object = is_get && request.extensions().get::<IsObject>().is_some();
        let part = request.headers().get(RANGE).filter(|_| is_get).and_then(asked_part);
        let answer = self.client.execute(request).await.map_err(|e| failed(&host, &e))?;
        let (mut head, body) = answer.into_parts();
        if !head.status.is_success() {
            let status = head.status;
            let code = error_code(&head.headers, body, &host).await;
            let code = code.or_else(|| status.canonical_reason().map(str::to_owned)).unwrap_or_default();
            return Err(Wire::Refused { whose, host, status: status.as_u16(), code }.into());
        }
        // object_store takes no answer without one, also where nobody asks for it; we read this as none.
        head.headers.entry(ETAG).or_insert(HeaderValue::from_static("\"\""));
        let mut window = Window { body, host, skip: 0, left: u64::MAX, is_cut: true };
        match part {
            Some((start, end)) if head.status == StatusCode::PARTIAL_CONTENT => {
                let bytes = check_part(&head.headers, start, end)
                    .map_err(|what| Wire::Broken(format!("{}: {what}", window.host)))?;
                // Where the body comes in chunks nothing says so otherwise.
                head.headers.insert(CONTENT_LENGTH, HeaderValue::from(bytes));
            }
            Some((start, end)) => {
                let Some(bytes) = number(&head.headers, CONTENT_LENGTH.as_str()) else {
                    return Err(Wire::NoParts(window.host).into());
                };
                if start >= bytes {
                    let status = StatusCode::RANGE_NOT_SATISFIABLE.as_u16();
                    return Err(
                        Wire::Refused { whose, host: window.host, status, code: String::new() }.into()
                    );
                }
                if start > SKIP_BYTES_MAX {
                    return Err(Wire::NoParts(window.host).into());
                }
                window.skip = start;
                window.left = end.min(bytes) - start;
                head.status = StatusCode::PARTIAL_CONTENT;
                let range = format!("bytes {start}-{}/{bytes}", start + window.left - 1);
                head.headers.insert(CONTENT_LENGTH, HeaderValue::from(window.left));
                head.headers.insert(CONTENT_RANGE, HeaderValue::from_str(&range).map_err(|_| no_header())?);
            }
            None if !is_object => {
                window.left = ANSWER_BYTES_MAX;
                window.is_cut = false;
            }
            None => {}
        }
        Ok(HttpResponse::from_parts(head, HttpResponseBody::new(window)))
    }
}

fn no_header() -> Wire {
    Wire::Broken("a header cannot be written".to_owned())
}

/// The start and the end of `bytes=START-LAST`, as we ask.
fn asked_part(range: &HeaderValue) -> Option<(u64, u64)> {
    let (start, last) = range.to_str().ok()?.strip_prefix("bytes=")?.split_once('-')?;
    Some((start.parse().ok()?, last.parse::<u64>().ok()?.checked_add(1)?))
}

/// The length of the part that is answered, where it is the one that was asked for, or as much of it as there is.
fn check_part(headers: &HeaderMap, start: u64, end: u64) -> Result<u64, &'static str> {
    let said = headers.get(CONTENT_RANGE).and_then(|value| value.to_str().ok());
    let said = said.and_then(|said| said.strip_prefix("bytes ")).and_then(|said| said.split_once('/'));
    let (range, all) = said.ok_or("it does not say which part it answers")?;
    let all: u64 = all.parse().map_err(|_| "it does not say how long the object is")?;
    let range = range.split_once('-').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    let (first, last): (u64, u64) = range.ok_or("it does not say which part it answers")?;
    if first != start || last.checked_add(1) != Some(end.min(all)) || last < first {
        return Err("it answers another part than was asked for");
    }
    let bytes = last + 1 - first;
    match number(headers, CONTENT_LENGTH.as_str()) {
        Some(length) if length != bytes => Err("its answer has another length than the part"),
        _ => Ok(bytes),
    }
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

/// The code in an error's answer, where there is one: of S3, Google and Azure in XML, of Azure in a header too.
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

/// Why a request had no answer, or an answer no end.
fn failed(host: &str, error: &HttpError) -> Wire {
    let (mut innermost, mut is_tls) = (error as &(dyn StdError + 'static), false);
    loop {
        is_tls |= innermost.is::<rustls::Error>();
        // An error of the kind that wraps another passes over it in `source`.
        let wrapped = innermost.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        let next = wrapped.map(|e| e as &(dyn StdError + 'static)).or_else(|| innermost.source());
        let Some(next) = next else { break };
        innermost = next;
    }
    let why = plain(&format!("{host}: {innermost}"));
    match error.kind() {
        HttpErrorKind::Connect if is_tls => Wire::Tls(why),
        HttpErrorKind::Timeout => Wire::Broken(format!("{host}: no connection in time")),
        _ => Wire::Broken(why),
    }
}

/// A part of a body.
#[derive(Debug)]
struct Window {
    body: HttpResponseBody,
    host: String,
    skip: u64,
    left: u64,
    /// Where it is longer the rest is left; otherwise that is an error.
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
                Poll::Ready(Some(Err(e))) => return Poll::Ready(Some(Err(failed(&self.host, &e).into()))),
                other => return other,
            };
            let Ok(mut data) = frame.into_data() else { continue };
            let skipped = self.skip.min(data.len() as u64);
            self.skip -= skipped;
            let mut data = data.split_off(skipped as usize);
            if data.len() as u64 > self.left {
                if !self.is_cut {
                    let what = format!("{}: its answer is too long", self.host);
                    return Poll::Ready(Some(Err(Wire::Broken(what).into())));
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
    fn only_the_part_that_was_asked_for_is_taken() {
        let check = |range: Option<&str>, length: Option<&str>| {
            let mut headers = HeaderMap::new();
            for (name, value) in [(CONTENT_RANGE, range), (CONTENT_LENGTH, length)] {
                if let Some(value) = value {
                    headers.insert(name, HeaderValue::from_str(value).unwrap());
                }
            }
            check_part(&headers, 10, 20)
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
    fn hosts_of_this_machine_need_no_proxy() {
        for host in ["localhost", "localhost:80", "127.0.0.1:9000", "127.0.0.1", "[::1]:80", "[::1]"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["example.org", "localhost.example.org:1", "10.0.0.1:80", "[fe80::1]:80", "[fe80::1]"] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn credentials_without_tls_come_from_this_machine_alone() {
        let own = [
            "localhost:42356",
            "127.0.0.1",
            "169.254.169.254",
            "169.254.170.2:80",
            "metadata.google.internal",
        ];
        for host in own.iter().chain(&["[fd00:ec2::254]", "[fd00:ec2::23]:80", "[fe80::1]", "[::1]:8080"]) {
            assert!(is_of_machine(host), "{host}");
        }
        for host in [
            "sts.example.org",
            "10.0.0.1",
            "169.255.0.1:80",
            "[fd00:ec3::1]",
            "metadata.google.internal.example.org",
        ] {
            assert!(!is_of_machine(host), "{host}");
        }
    }
}
