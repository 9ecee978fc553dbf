//! Attaches a device with the kernel's ublk driver: the server creates the block device.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use serde::Deserialize;
use serde_json::json;

use super::AttachError;
use crate::mounts::helper::{STEP_MAX, wait_until};
use crate::mounts::record::LockedRecord;
use crate::mounts::server::Server;

/// Value of `published` in the record before the number of the block device is known.
pub const UNKNOWN: &str = "ublk";

#[derive(Deserialize)]
struct Published {
    ublk: PathBuf,
}

pub fn attach(locked: &mut LockedRecord, server: &mut Server) -> Result<(), AttachError> {
    let exports = server.device().map(|device| device.exports.clone()).unwrap_or_default();
    let device = if let Some(export) = exports.iter().find(|export| export.is_ublk()) {
        PathBuf::from(&export.address)
    } else {
        locked.record.published = Some(UNKNOWN.to_owned());
        locked.save()?;
        let params =
            json!({ "name": locked.record.name, "ublk": true, "read_only": locked.record.is_read_only() });
        let answer = server.call("publish", &params).map_err(|error| {
            locked.record.published = None;
            AttachError::Unavailable(format!("{error:#}"))
        })?;
        let Published { ublk } =
            serde_json::from_str(answer.get()).context("publish: the answer is not understood")?;
        locked.record.published = Some(ublk.display().to_string());
        ublk
    };
    locked.record.device = Some(device.clone());
    locked.save()?;
    // udev may create the device node later.
    if !wait_until(STEP_MAX, || Path::new(&device).exists()) {
        return Err(anyhow!("{} does not appear; is /dev a devtmpfs?", device.display()).into());
    }
    Ok(())
}
