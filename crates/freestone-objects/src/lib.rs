//! Object storage over the network, as [`Objects`]: S3 and compatible stores (`s3://bucket/prefix`), and
//! read-only files of a web server (`http://host/path`, `https://host/path`).
//!
//! Google Cloud Storage (`gs://bucket/prefix`) and Azure (`az://container/prefix`) use the same code, but
//! were never tested: the project has no accounts.
//!
//! All requests run on one asynchronous thread of the process, and callers block. A call makes one attempt
//! and ends at its deadline. Responses are not trusted: bodies are limited and counted, and messages contain
//! at most the error code of a response.
//!
//! Credentials come from the usual places (see [`Options::credentials`]), and never appear in messages, logs
//! or `Debug` output. TLS is rustls with ring, and trusts the certificates of the host or of `SSL_CERT_FILE`.
//! Proxies come from the environment, and are not used for loopback addresses.
//!
//! The HTTP client is `object_store`: the one maintained library that supports S3 with conditional writes and
//! does not bring an SDK. Retries and timeouts of `object_store` are off, as `freestone-store` retries for
//! all kinds of stores.

mod address;
mod fault;
mod other_stores;
mod profile;
mod remote;
mod runtime;
mod s3;
mod text;
mod wire;

use std::env;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use freestone_store::objects::Objects;
use object_store::{ClientOptions, RetryConfig};
use thiserror::Error;

use crate::remote::Remote;
use crate::text::plain;

/// Timeout of establishing a connection.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);

/// Options of a store. The environment provides missing options.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// For `s3://`, `gs://` and `az://`: URL of the service, `http://HOST[:PORT]` or `https://HOST[:PORT]`.
    /// Requests without TLS need an explicit `http://` here. Requests name the bucket in the path, not in the
    /// host.
    ///
    /// Defaults for S3: `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, `endpoint_url` of the profile, Amazon.
    pub endpoint: Option<String>,
    /// For `s3://`. Defaults: `AWS_REGION`, `AWS_DEFAULT_REGION`, `region` of the profile, `us-east-1`.
    pub region: Option<String>,
    /// For `s3://`: a file with profiles, read again every 30 seconds. `AWS_PROFILE` selects the profile, by
    /// default `default`. For `gs://`: the key file of a service account.
    ///
    /// Defaults for S3, in this order: `AWS_ACCESS_KEY_ID` with `AWS_SECRET_ACCESS_KEY` and
    /// `AWS_SESSION_TOKEN`; the profile in `AWS_SHARED_CREDENTIALS_FILE` and `AWS_CONFIG_FILE`; a web
    /// identity; the container; the instance. Without TLS only the last two are used, and only at a loopback
    /// or link-local address.
    pub credentials: Option<PathBuf>,
    /// Send unsigned requests, for public objects.
    pub anonymous: bool,
    /// Time after which a pending read is sent a second time. The first good response is used.
    pub hedge: Option<Duration>,
}

/// Reason why a store cannot be opened.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OpenError {
    /// The URL has an unknown scheme.
    #[error("{0}: the URL of a store begins with s3://, gs://, az://, http:// or https://")]
    Scheme(String),
    /// The URL contains a user or a secret, which logs and messages would show.
    #[error(
        "the URL of a store has no user, password or key in it: give a file of credentials, or the environment"
    )]
    UserInfo,
    /// The URL has a query or a fragment, which requests would not contain.
    #[error("the URL of a store has no ? and no # in it")]
    Query,
    /// The name of the bucket is invalid.
    #[error("{0}: invalid bucket name: must be 3 to 63 letters, digits, dots, dashes and underscores")]
    Bucket(String),
    /// The key prefix is invalid.
    #[error("{0}: the path has empty or dot components, or invalid characters")]
    Prefix(String),
    /// The endpoint, or the URL of a web server, is invalid.
    #[error("an endpoint is http://HOST[:PORT] or https://HOST[:PORT]")]
    Endpoint,
    /// The name of the region is invalid.
    #[error("{0}: invalid region name")]
    Region(String),
    /// Credentials are missing or invalid: their source, and the reason.
    #[error("{0}: no credentials: {1}")]
    Credentials(String, String),
    /// The option is not available for this kind of store.
    #[error("a store of {scheme}:// has no option {option}")]
    Option {
        /// Scheme of the URL.
        scheme: &'static str,
        /// Name of the option.
        option: &'static str,
    },
    /// The client cannot be created.
    #[error("the store cannot be set up: {0}")]
    Setup(String),
}

/// Opens a store, without a request.
pub fn open(url: &str, options: &Options) -> Result<Arc<dyn Objects>, OpenError> {
    open_in(url, options, &|name| env::var(name).ok())
}

fn open_in(url: &str, options: &Options, env: s3::Env<'_>) -> Result<Arc<dyn Objects>, OpenError> {
    let (scheme, rest) = url.split_once("://").ok_or_else(|| OpenError::Scheme(scheme_of(url)))?;
    let remote: Remote = match scheme {
        "s3" => s3::open(rest, options, env),
        "gs" => other_stores::open_google(rest, options),
        "az" => other_stores::open_azure(rest, options),
        "http" | "https" => other_stores::open_http(url, options),
        _ => Err(OpenError::Scheme(scheme_of(scheme))),
    }?;
    Ok(Arc::new(remote))
}

/// Returns the scheme of a URL for a message. The result is short, so that it cannot contain a secret.
fn scheme_of(url: &str) -> String {
    plain(&url.chars().take_while(char::is_ascii_alphanumeric).take(16).collect::<String>())
}

/// Disables retries, as callers retry.
fn retry_config() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

/// Disables the timeout of requests, as callers set deadlines.
fn client_options() -> ClientOptions {
    ClientOptions::new().with_timeout_disabled().with_connect_timeout(CONNECT_TIME_MAX)
}

#[cfg(test)]
mod tests;
