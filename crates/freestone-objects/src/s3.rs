//! Opening S3 and compatible object stores.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use object_store::StaticCredentialProvider;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, S3ConditionalPut};

use crate::address::{BucketPath, Service};
use crate::profile::{self, FileCredentials, Section};
use crate::remote::{Dialect, Remote};
use crate::text::plain;
use crate::wire::Connector;
use crate::{OpenError, Options, client_options, retry_config};

/// Default region. Object stores other than Amazon's ignore the region.
const REGION: &str = "us-east-1";

/// Environment variables of credential sources that `object_store` implements, and the corresponding
/// settings.
const ELSEWHERE: [(&str, AmazonS3ConfigKey); 9] = [
    ("AWS_WEB_IDENTITY_TOKEN_FILE", AmazonS3ConfigKey::WebIdentityTokenFile),
    ("AWS_ROLE_ARN", AmazonS3ConfigKey::RoleArn),
    ("AWS_ROLE_SESSION_NAME", AmazonS3ConfigKey::RoleSessionName),
    ("AWS_ENDPOINT_URL_STS", AmazonS3ConfigKey::StsEndpoint),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", AmazonS3ConfigKey::ContainerCredentialsRelativeUri),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", AmazonS3ConfigKey::ContainerCredentialsFullUri),
    ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", AmazonS3ConfigKey::ContainerAuthorizationTokenFile),
    ("AWS_METADATA_ENDPOINT", AmazonS3ConfigKey::MetadataEndpoint),
    ("AWS_IMDSV1_FALLBACK", AmazonS3ConfigKey::ImdsV1Fallback),
];

/// Environment variables of the credential services that are preferred to the instance's metadata service.
const SERVICES: [&str; 3] = [
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
];
/// Advice on providing credentials, for error messages.
const ADVICE: &str = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give credentials=FILE";

/// Function that returns environment variables of the process, or those of a test.
pub type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Opens `s3://REST`, where REST is a bucket and a key prefix.
pub fn open(rest: &str, options: &Options, env: Env<'_>) -> Result<Remote, OpenError> {
    let place = BucketPath::parse("s3", rest)?;
    let env = |name: &str| env(name).filter(|value| !value.is_empty());
    let profile = env("AWS_PROFILE").unwrap_or_else(|| profile::DEFAULT.to_owned());
    let home = env("HOME").map(PathBuf::from);
    let file = |variable: &str, name: &str| {
        env(variable).map(PathBuf::from).or_else(|| home.as_ref().map(|home| home.join(".aws").join(name)))
    };
    // A missing or unreadable config file is treated as an empty one.
    let config = file("AWS_CONFIG_FILE", "config");
    let settings = config.as_deref().and_then(|path| profile::read(path, &profile).ok()).unwrap_or_default();

    let region = options.region.clone().or_else(|| env("AWS_REGION")).or_else(|| env("AWS_DEFAULT_REGION"));
    let region = region.or_else(|| settings.get("region").cloned()).unwrap_or_else(|| REGION.to_owned());
    if !region.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_') || region.is_empty() {
        return Err(OpenError::Region(plain(&region)));
    }
    let endpoint = options.endpoint.clone().or_else(|| env("AWS_ENDPOINT_URL_S3"));
    let endpoint =
        endpoint.or_else(|| env("AWS_ENDPOINT_URL")).or_else(|| settings.get("endpoint_url").cloned());
    let service = match endpoint {
        Some(endpoint) => Service::parse(&endpoint)?,
        None => Service::parse(&format!("https://s3.{region}.amazonaws.com"))?,
    };

    let mut builder = AmazonS3Builder::new()
        .with_bucket_name(&place.bucket)
        .with_region(region)
        .with_endpoint(&service.url)
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        .with_disable_bulk_delete(true)
        .with_disable_tagging(true)
        .with_retry(retry_config())
        .with_client_options(client_options().with_allow_http(service.is_plain))
        .with_http_connector(Connector {
            authority: service.authority,
            is_plain: service.is_plain,
            follows_redirects: false,
            advice: SERVICES.iter().all(|name| env(name).is_none()).then_some(ADVICE),
        });
    let shared = file("AWS_SHARED_CREDENTIALS_FILE", "credentials");
    builder = with_credentials(builder, options, &env, &profile, [shared, config], &settings)?;
    let store = Arc::new(builder.build().map_err(|e| OpenError::Setup(plain(&e.to_string())))?);
    Ok(Remote {
        url: place.url("s3"),
        place: format!("the bucket {}", place.bucket),
        base: place.base,
        dialect: Dialect::S3,
        store: store.clone(),
        pages: Some(store),
        hedge: options.hedge,
        takes_bare_tags: AtomicBool::new(false),
    })
}

/// Sets the credentials: those of the given file, else of the environment, else of the shared files, else of
/// a source that `object_store` implements.
fn with_credentials(
    mut builder: AmazonS3Builder,
    options: &Options,
    env: Env<'_>,
    profile: &str,
    shared: [Option<PathBuf>; 2],
    settings: &Section,
) -> Result<AmazonS3Builder, OpenError> {
    if options.anonymous {
        return Ok(builder.with_skip_signature(true));
    }
    if let Some(path) = &options.credentials {
        return Ok(builder.with_credentials(Arc::new(from_file(path, profile)?)));
    }
    let (key, secret) = (env("AWS_ACCESS_KEY_ID"), env("AWS_SECRET_ACCESS_KEY"));
    if key.is_some() || secret.is_some() {
        let token = env("AWS_SESSION_TOKEN");
        let credential = profile::credential(key.as_deref(), secret.as_deref(), token.as_deref());
        let credential =
            credential.map_err(|why| OpenError::Credentials("the environment".to_owned(), why))?;
        return Ok(builder.with_credentials(Arc::new(StaticCredentialProvider::new(credential))));
    }
    for path in shared.into_iter().flatten() {
        let has_key = profile::read(&path, profile).is_ok_and(|s| s.contains_key("aws_access_key_id"));
        if has_key {
            return Ok(builder.with_credentials(Arc::new(from_file(&path, profile)?)));
        }
    }
    // Without this check, a missing profile would be ignored and other credentials used.
    if env("AWS_PROFILE").is_some() && settings.is_empty() {
        let why = format!("no file has the profile [{}]", plain(profile));
        return Err(OpenError::Credentials("AWS_PROFILE".to_owned(), why));
    }
    let mut is_elsewhere = false;
    for (name, key) in ELSEWHERE {
        if let Some(value) = env(name) {
            is_elsewhere = true;
            builder = builder.with_config(key, value);
        }
    }
    if !is_elsewhere
        && env("AWS_EC2_METADATA_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"))
    {
        let why =
            format!("no variable and no file has some; {ADVICE}. A verb of a server uses its environment");
        return Err(OpenError::Credentials("the environment".to_owned(), why));
    }
    Ok(builder)
}

fn from_file(path: &Path, profile: &str) -> Result<FileCredentials, OpenError> {
    FileCredentials::open(path, profile)
        .map_err(|why| OpenError::Credentials(plain(&path.display().to_string()), plain(&why)))
}
