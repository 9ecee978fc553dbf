//! Stores of objects over the network, as [`Objects`]: S3 and what speaks like it (`s3://bucket/prefix`),
//! and, only to read from, files of a web server (`http://host/path`, `https://host/path`).
//!
//! Google Cloud Storage (`gs://bucket/prefix`) and Azure (`az://container/prefix`) are there too, by the same
//! means. They were not tested: the project has no account.
//!
//! All requests run on one thread of the process, which is asynchronous inside; calls from any thread wait
//! for it. A call is tried once, and ends at its deadline. What a store answers is not believed: bodies are
//! bounded and counted, and what it says comes into messages as a code, if at all.
//!
//! Credentials come from where other programs have them (see [`Options::credentials`]) and are in no message,
//! no log and no `Debug` output. TLS is rustls with ring, with the host's certificates (`SSL_CERT_FILE` names
//! others). Proxies are those of the environment, but not for this host's own addresses.

mod address;
mod fault;
mod others;
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

/// Longest time for a connection to come about.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);

/// How a store is reached. What is not given comes from the environment.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// `s3://`, `gs://`, `az://`: the service, `http://HOST[:PORT]` or `https://HOST[:PORT]`. Without TLS it is
    /// spoken to only where this says `http://`. Buckets are named in the path, not in the host. For S3 otherwise
    /// `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, `endpoint_url` of the profile, Amazon.
    pub endpoint: Option<String>,
    /// `s3://`: otherwise `AWS_REGION`, `AWS_DEFAULT_REGION`, `region` of the profile, `us-east-1`.
    pub region: Option<String>,
    /// `s3://`: a file with profiles, of which `AWS_PROFILE` or `default` is taken; it is read again every 30
    /// seconds. `gs://`: the key of a service account. Without it, for S3: `AWS_ACCESS_KEY_ID` with
    /// `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`; the profile in `AWS_SHARED_CREDENTIALS_FILE` and
    /// `AWS_CONFIG_FILE`; a web identity; the container's; the instance's. Without TLS only the last two are asked,
    /// and at an address of this machine or of its link.
    pub credentials: Option<PathBuf>,
    /// Requests are not signed: what is read is public.
    pub anonymous: bool,
    /// A read that has not ended after this time is sent a second time, and the first good answer counts.
    pub hedge: Option<Duration>,
}

/// Why a store cannot be opened.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OpenError {
    /// The URL begins with something else.
    #[error("{0}: the URL of a store begins with s3://, gs://, az://, http:// or https://")]
    Scheme(String),
    /// Someone would see them there.
    #[error(
        "the URL of a store has no user, password or key in it: give a file of credentials, or the environment"
    )]
    UserInfo,
    /// Nothing of that is sent.
    #[error("the URL of a store has no ? and no # in it")]
    Query,
    /// It is no name of a bucket.
    #[error("{0}: no bucket is called so: 3 to 63 letters, digits, dots and dashes")]
    Bucket(String),
    /// The path is none.
    #[error("{0}: the path has empty parts, parts of dots, or characters that a path has not")]
    Prefix(String),
    /// The endpoint, or a URL of a web server.
    #[error("an endpoint is http://HOST[:PORT] or https://HOST[:PORT]")]
    Endpoint,
    /// It is no name of a region.
    #[error("{0}: no region is called so")]
    Region(String),
    /// Where they come from, and what is wrong.
    #[error("{0}: no credentials: {1}")]
    Credentials(String, String),
    /// That kind of store has no such option.
    #[error("a store of {scheme}:// has no option {option}")]
    Option {
        /// The kind of store.
        scheme: &'static str,
        /// What it has not.
        option: &'static str,
    },
    /// Something else that requests need.
    #[error("the store cannot be set up: {0}")]
    Setup(String),
}

/// Opens a store; nothing is asked of it yet.
pub fn open(url: &str, options: &Options) -> Result<Arc<dyn Objects>, OpenError> {
    open_in(url, options, &|name| env::var(name).ok())
}

fn open_in(url: &str, options: &Options, env: s3::Env<'_>) -> Result<Arc<dyn Objects>, OpenError> {
    let (scheme, rest) = url.split_once("://").ok_or_else(|| OpenError::Scheme(scheme_of(url)))?;
    let remote: Remote = match scheme {
        "s3" => s3::open(rest, options, env),
        "gs" => others::open_google(rest, options),
        "az" => others::open_azure(rest, options),
        "http" | "https" => others::open_http(url, options),
        _ => Err(OpenError::Scheme(scheme_of(scheme))),
    }?;
    Ok(Arc::new(remote))
}

/// Of what may be anything, so much that it cannot be a secret's end.
fn scheme_of(url: &str) -> String {
    plain(&url.chars().take_while(char::is_ascii_alphanumeric).take(16).collect::<String>())
}

/// Who calls tries again.
fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

/// Requests have no time of their own: who calls gives one.
fn client_options() -> ClientOptions {
    ClientOptions::new().with_timeout_disabled().with_connect_timeout(CONNECT_TIME_MAX)
}

#[cfg(test)]
mod tests;
