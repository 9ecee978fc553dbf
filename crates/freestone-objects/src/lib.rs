//! Object stores over the network, as [`Objects`]: S3 and compatible stores (`s3://bucket/prefix`), and
//! read-only files of a web server (`http://host/path`, `https://host/path`).
//!
//! Google Cloud Storage (`gs://bucket/prefix`) and Azure (`az://container/prefix`) use the same code, but
//! were never tested: the project has no accounts there.
//!
//! All requests run on one asynchronous thread of the process, and callers block. A call makes one attempt
//! and ends at its deadline. Responses are not trusted: the size of a body is limited and checked, and
//! messages quote only the error code of a response.
//!
//! Credentials are found as by other tools (see [`Options::credentials`]), and never appear in messages, logs
//! or `Debug` output. TLS is rustls with ring, and trusts the certificates of the host or of `SSL_CERT_FILE`.
//! The environment names proxies, which are not used for loopback addresses.
//!
//! The HTTP client is `object_store`: the one maintained library that supports S3 with conditional writes
//! without a vendor's SDK. Retries and timeouts of `object_store` are off, because `freestone-store` retries
//! for all kinds of object stores.

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

/// Maximum time for establishing a connection to an object store.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);

/// Options for opening an object store. A missing option is replaced by a default, often from the
/// environment.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// For `s3://`, `gs://` and `az://`: URL of the service, `http://HOST[:PORT]` or `https://HOST[:PORT]`.
    /// Requests are sent without TLS only if this URL begins with `http://`. Requests name the bucket in the
    /// path, not in the host.
    ///
    /// Defaults for S3, in this order: `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, `endpoint_url` of the
    /// profile, Amazon's URL for the region.
    pub endpoint: Option<String>,
    /// For `s3://`: name of the region. Defaults, in this order: `AWS_REGION`, `AWS_DEFAULT_REGION`, `region`
    /// of the profile, `us-east-1`.
    pub region: Option<String>,
    /// For `s3://`: a credentials file with profiles, read again every 30 seconds. `AWS_PROFILE` names the
    /// profile, otherwise it is `default`. For `gs://`: the key file of a service account.
    ///
    /// Defaults for S3, in this order: `AWS_ACCESS_KEY_ID` with `AWS_SECRET_ACCESS_KEY` and
    /// `AWS_SESSION_TOKEN`; the profile in `AWS_SHARED_CREDENTIALS_FILE` and `AWS_CONFIG_FILE`; a web
    /// identity; the container's credential service; the instance's metadata service. Without TLS, only the
    /// last two services are used, and only at a loopback or link-local address.
    pub credentials: Option<PathBuf>,
    /// Sends requests without a signature, for public objects. No credentials are needed then.
    pub anonymous: bool,
    /// Time after which a pending read is sent a second time; the first successful response is used. `None`
    /// sends each read once.
    pub hedge: Option<Duration>,
}

/// Errors from opening an object store.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OpenError {
    /// The URL has an unknown scheme.
    #[error("{0}: the URL of a store begins with s3://, gs://, az://, http:// or https://")]
    Scheme(String),
    /// The URL contains a user, a password or a key, which logs and messages would show.
    #[error(
        "the URL of a store has no user, password or key in it: give a file of credentials, or the environment"
    )]
    UserInfo,
    /// The URL has a query or a fragment, which requests to the object store would not contain.
    #[error("the URL of a store has no ? and no # in it")]
    Query,
    /// The name of the bucket or container is invalid.
    #[error("{0}: invalid bucket name: must be 3 to 63 letters, digits, dots, dashes and underscores")]
    Bucket(String),
    /// The key prefix, which is the path of the URL, is invalid.
    #[error("{0}: the path has empty or dot components, or invalid characters")]
    Prefix(String),
    /// The endpoint, or the URL of a web server, is invalid.
    #[error("an endpoint is http://HOST[:PORT] or https://HOST[:PORT]")]
    Endpoint,
    /// The name of the region contains invalid characters or is empty.
    #[error("{0}: invalid region name")]
    Region(String),
    /// Credentials are missing or invalid. The fields are the source of the credentials and the reason.
    #[error("{0}: no credentials: {1}")]
    Credentials(String, String),
    /// The option is not available for object stores of this kind.
    #[error("a store of {scheme}:// has no option {option}")]
    Option {
        /// Scheme of the URL.
        scheme: &'static str,
        /// Name of the option.
        option: &'static str,
    },
    /// The HTTP client cannot be created.
    #[error("the store cannot be set up: {0}")]
    Setup(String),
}

/// Opens the object store at `url`. No request is sent, so an unreachable store is not detected.
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

/// Returns the scheme of a URL for an error message. Only the first 16 letters and digits are returned, so
/// that no secret of an invalid URL is shown.
fn scheme_of(url: &str) -> String {
    plain(&url.chars().take_while(char::is_ascii_alphanumeric).take(16).collect::<String>())
}

/// Returns settings that disable the retries of `object_store`, because callers retry.
fn retry_config() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

/// Returns settings that disable the request timeout of `object_store`, because callers set deadlines.
fn client_options() -> ClientOptions {
    ClientOptions::new().with_timeout_disabled().with_connect_timeout(CONNECT_TIME_MAX)
}

#[cfg(test)]
mod tests;
