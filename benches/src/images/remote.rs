//! Object store behind a simulated network link with a round trip of 20 ms and 1 Gbit/s.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use freestone::store::objects::Objects;
use freestone::store::store::Store;
use freestone_objects::Options;
use freestone_testkit::LatencyProxy;
use freestone_testkit::s3::Server;

use super::test_image::open_or_create;

pub const ROUND_TRIP: Duration = Duration::from_millis(20);
pub const BITS_PER_SECOND: u64 = 1_000_000_000;
const BUCKET: &str = "images";
const REGION: &str = "us-east-1";

/// An object store server, in this process or elsewhere, and the simulated link to it.
pub struct Remote {
    /// Server in this process, which ends on drop; None if the server is elsewhere.
    _server: Option<Server>,
    line: LatencyProxy,
    bucket: String,
    anonymous: bool,
    pub name: &'static str,
}

impl Remote {
    /// Connects to the server at an endpoint, `http://ADDRESS:PORT`, with the credentials of the
    /// environment, or starts one in this process.
    pub fn new(endpoint: Option<&str>, bucket: Option<&str>) -> Result<Self> {
        let (server, target) = if let Some(endpoint) = endpoint {
            let address = endpoint.strip_prefix("http://").unwrap_or(endpoint).trim_end_matches('/');
            (None, address.parse::<SocketAddr>().context("--endpoint must be http://ADDRESS:PORT")?)
        } else {
            let server = Server::start(&[BUCKET]);
            let address = server.address();
            (Some(server), address)
        };
        let name = if server.is_some() { "a server in this process" } else { "the server at --endpoint" };
        let line = LatencyProxy::start(target, ROUND_TRIP, Some(BITS_PER_SECOND));
        let bucket = bucket.unwrap_or(BUCKET).to_owned();
        Ok(Self { anonymous: server.is_some(), _server: server, line, bucket, name })
    }

    /// Opens the stored objects whose keys begin with a prefix.
    fn objects(&self, prefix: &str) -> Result<Arc<dyn Objects>> {
        let options = Options {
            endpoint: Some(self.line.endpoint()),
            region: Some(REGION.into()),
            anonymous: self.anonymous,
            ..Options::default()
        };
        Ok(freestone_objects::open(&format!("s3://{}/{prefix}", self.bucket), &options)?)
    }

    /// Opens the image store under a key prefix, or creates it. The flag is true if the image store is new.
    pub fn store(&self, prefix: &str) -> Result<(Arc<Store>, bool)> {
        open_or_create(self.objects(prefix)?)
    }

    /// Returns the device description of an image in the image store. `image` is the part after the URL of
    /// the store.
    pub fn device(&self, prefix: &str, image: &str) -> String {
        let (bucket, endpoint) = (&self.bucket, self.line.endpoint());
        let anonymous = if self.anonymous { "yes" } else { "no" };
        format!(
            "image,url=s3://{bucket}/{prefix}{image},endpoint={endpoint},region={REGION},anonymous={anonymous}"
        )
    }

    /// Returns the number of requests to the image store under `prefix` until now, by method and key.
    pub fn requests(&self, prefix: &str) -> BTreeMap<(String, String), u64> {
        let of_store = format!("/{}/{prefix}/", self.bucket);
        let requests = self.line.requests().into_iter().filter_map(|((method, path), count)| {
            let is_list = path.trim_end_matches('/') == format!("/{}", self.bucket);
            let key = path.strip_prefix(&of_store).or(is_list.then_some(""))?.to_owned();
            Some(((method, key), count))
        });
        requests.collect()
    }

    /// Returns the bytes sent and received over the link until now, including HTTP headers.
    pub fn bytes(&self) -> (u64, u64) {
        self.line.bytes()
    }
}
