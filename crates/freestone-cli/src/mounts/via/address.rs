//! The NBD address that the kernel's client or nbdfuse connects to.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use freestone_spec::path_text;
use serde::Deserialize;
use serde_json::json;

use crate::mounts::record::LockedRecord;
use crate::mounts::server::Server;

const UNIX: &str = "unix:";
const URI: &str = "nbd+unix:";

/// A Unix socket with an export of the device.
pub struct Address {
    /// Path of the socket.
    pub path: PathBuf,
    /// NBD URI, with the name of the export.
    pub uri: String,
}

#[derive(Deserialize)]
struct Published {
    uri: Option<String>,
}

/// Returns an existing address of the device that fits, or publishes the device at a new address with access only for
/// root.
pub fn of_device(locked: &mut LockedRecord, server: &mut Server) -> Result<Address> {
    let read_only = locked.record.is_read_only();
    let exports = server.device().map(|device| device.exports.clone()).unwrap_or_default();
    for export in exports {
        let is_own = locked.record.published.as_ref() == Some(&export.address);
        let is_fit = export.allow.is_empty() && (read_only || !export.read_only);
        if let (Some(path), Some(uri)) = (export.address.strip_prefix(UNIX), export.uri)
            && uri.starts_with(URI)
            && (is_own || is_fit)
        {
            return Ok(Address { path: path_text::path(path), uri });
        }
    }
    publish(locked, server, read_only)
}

/// Publishes the device at a socket beside the control socket. The server may lack the right to create a socket in the
/// directory of the records.
fn publish(locked: &mut LockedRecord, server: &mut Server, read_only: bool) -> Result<Address> {
    let dir = locked.record.control.parent().unwrap_or(Path::new("/"));
    let path = dir.join(format!("mount-{}.sock", locked.id()));
    let address = format!("{UNIX}{}", path_text::text(&path));
    locked.record.published = Some(address.clone());
    locked.save()?;
    let params =
        json!({ "name": locked.record.name, "nbd": address, "allow": ["uid:0"], "read_only": read_only });
    let answer = server.call("publish", &params).with_context(|| format!("publish at {address}"))?;
    let Published { uri } =
        serde_json::from_str(answer.get()).context("publish: the answer is not understood")?;
    match uri {
        Some(uri) if uri.starts_with(URI) => Ok(Address { path, uri }),
        _ => bail!("the device is published with TLS only, which this way cannot use; say --via ublk"),
    }
}
