//! Opening object stores other than S3: Google Cloud Storage, Azure, and files of a web server.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;

use crate::address::{BucketPath, Service};
use crate::remote::{Dialect, Remote};
use crate::text::plain;
use crate::wire::Connector;
use crate::{OpenError, Options, client_options, retry_config};

const GOOGLE: &str = "https://storage.googleapis.com";
/// Advice on providing credentials, for error messages.
const GOOGLE_ADVICE: &str = "set GOOGLE_SERVICE_ACCOUNT, or give credentials=FILE";
const AZURE_ADVICE: &str = "set AZURE_STORAGE_ACCOUNT_KEY";

fn setup(error: &object_store::Error) -> OpenError {
    OpenError::Setup(plain(&error.to_string()))
}

fn refuse(scheme: &'static str, option: &'static str, is_given: bool) -> Result<(), OpenError> {
    if is_given { Err(OpenError::Option { scheme, option }) } else { Ok(()) }
}

fn connector(service: &Service, advice: Option<&'static str>) -> Connector {
    // Only web servers may redirect: requests to them contain no credentials, which a redirect could send
    // elsewhere.
    let follows_redirects = advice.is_none();
    Connector { authority: service.authority.clone(), is_plain: service.is_plain, follows_redirects, advice }
}

/// Opens `gs://REST`. Missing options are read from the environment variables of Google's tools.
pub fn open_google(rest: &str, options: &Options) -> Result<Remote, OpenError> {
    let place = BucketPath::parse("gs", rest)?;
    refuse("gs", "region", options.region.is_some())?;
    let service = Service::parse(options.endpoint.as_deref().unwrap_or(GOOGLE))?;
    let mut builder = GoogleCloudStorageBuilder::from_env()
        .with_bucket_name(&place.bucket)
        .with_base_url(&service.url)
        .with_skip_signature(options.anonymous)
        .with_retry(retry_config())
        .with_client_options(client_options().with_allow_http(service.is_plain))
        .with_http_connector(connector(&service, Some(GOOGLE_ADVICE)));
    if let Some(path) = &options.credentials {
        builder = builder.with_service_account_path(path.to_string_lossy());
    }
    let store = Arc::new(builder.build().map_err(|e| setup(&e))?);
    Ok(Remote {
        url: place.url("gs"),
        place: format!("the bucket {}", place.bucket),
        base: place.base,
        dialect: Dialect::Google,
        store: store.clone(),
        pages: Some(store),
        hedge: options.hedge,
        takes_bare_tags: AtomicBool::new(false),
    })
}

/// Opens `az://REST`, where REST begins with a container. `AZURE_STORAGE_ACCOUNT_NAME` names the account.
pub fn open_azure(rest: &str, options: &Options) -> Result<Remote, OpenError> {
    let place = BucketPath::parse("az", rest)?;
    refuse("az", "region", options.region.is_some())?;
    refuse("az", "credentials", options.credentials.is_some())?;
    let mut builder = MicrosoftAzureBuilder::from_env();
    let account = builder.get_config_value(&AzureConfigKey::AccountName);
    let account = account.ok_or_else(|| {
        let why = "AZURE_STORAGE_ACCOUNT_NAME is not set".to_owned();
        OpenError::Credentials("the environment".to_owned(), why)
    })?;
    let endpoint =
        options.endpoint.clone().unwrap_or_else(|| format!("https://{account}.blob.core.windows.net"));
    let service = Service::parse(&endpoint)?;
    builder = builder
        .with_container_name(&place.bucket)
        .with_endpoint(service.url.clone())
        .with_skip_signature(options.anonymous)
        .with_disable_tagging(true)
        .with_retry(retry_config())
        .with_client_options(client_options().with_allow_http(service.is_plain))
        .with_http_connector(connector(&service, Some(AZURE_ADVICE)));
    let store = Arc::new(builder.build().map_err(|e| setup(&e))?);
    Ok(Remote {
        url: place.url("az"),
        place: format!("the container {}", place.bucket),
        base: place.base,
        dialect: Dialect::Azure,
        store: store.clone(),
        pages: Some(store),
        hedge: options.hedge,
        takes_bare_tags: AtomicBool::new(false),
    })
}

/// Opens the files below an `http://` or `https://` URL as a read-only object store.
pub fn open_http(url: &str, options: &Options) -> Result<Remote, OpenError> {
    let scheme = if url.starts_with("https") { "https" } else { "http" };
    refuse(scheme, "endpoint", options.endpoint.is_some())?;
    refuse(scheme, "region", options.region.is_some())?;
    refuse(scheme, "credentials", options.credentials.is_some())?;
    let service = Service::parse(url)?;
    let store = HttpBuilder::new()
        .with_url(&service.url)
        .with_retry(retry_config())
        .with_client_options(client_options().with_allow_http(service.is_plain))
        .with_http_connector(connector(&service, None));
    Ok(Remote {
        place: plain(&service.url),
        url: service.url,
        base: String::new(),
        dialect: Dialect::Http,
        store: Arc::new(store.build().map_err(|e| setup(&e))?),
        pages: None,
        hedge: options.hedge,
        takes_bare_tags: AtomicBool::new(false),
    })
}
