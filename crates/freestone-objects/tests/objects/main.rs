//! Tests of object storage over the network, with a server in this process that injects failures.

mod calls;
mod dependencies;
mod quirks;
mod secrets;
mod time;
mod tls;
mod troubles;
mod web;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::time::Duration;

use freestone_objects::{Options, open};
use freestone_store::objects::{CallLimits, Objects};
use freestone_testkit::s3::{Conditions, Server};
use tempfile::TempDir;

const KEY: &str = "AKTESTKEY";
const SECRET: &str = "geheimgeheim";
const TOKEN: &str = "tokentokentoken";

/// An S3 server with the bucket `disks`, and the object store `s3://disks/a/b` on that server.
struct Store {
    server: Server,
    objects: Arc<dyn Objects>,
    _dir: TempDir,
}

impl Store {
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl Fn(&mut Options)) -> Self {
        let server = Server::start(&["disks"]);
        server.require_key(Some(KEY));
        server.set_conditions(Conditions::Bare);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("credentials");
        let text = format!(
            "[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\naws_session_token = {TOKEN}\n"
        );
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let mut options =
            Options { endpoint: Some(server.endpoint()), credentials: Some(path), ..Options::default() };
        change(&mut options);
        let objects = open("s3://disks/a/b", &options).unwrap();
        Self { server, objects, _dir: dir }
    }

    /// Returns the number of requests with this method that the server received for a key of the object
    /// store.
    fn requests(&self, method: &str, key: &str) -> u64 {
        let key = (method.to_owned(), format!("a/b/{key}"));
        self.server.traffic().requests.get(&key).copied().unwrap_or_default()
    }
}

fn soon() -> CallLimits<'static> {
    CallLimits::within(Duration::from_secs(20))
}
