//! The verbs `mount` and `umount`, and what `reset` and `rewind` do to a device that is mounted.
//!
//! All of this runs in the client, which calls the server over the control socket, and runs mount(8), nbd-client(8)
//! and nbdfuse(1). Each mount has a [`record`], written before anything is attached and removed last. `umount` undoes
//! the state that it finds in the kernel, whatever step a mount reached, so it can be repeated after a kill.
//! Lock order: the directory of the records, then a record.

mod attached;
pub mod helper;
mod holders;
pub mod mount;
mod mount_table;
mod processes;
pub mod record;
pub mod remount;
mod server;
mod show;
pub mod umount;
mod unmounting;
mod via;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use rustix::process::geteuid;

use crate::client::Common;
use crate::client::connection::Client;

/// Fails for users other than root.
pub fn check_root(verb: &str) -> Result<()> {
    if !geteuid().is_root() {
        bail!(
            "{verb}: only root can mount; run it with sudo, and say --control if root has another default socket"
        );
    }
    Ok(())
}

/// Returns the resolved path of the server's control socket, which identifies the server in records.
fn control(common: &Common) -> Result<PathBuf> {
    let (path, _) = Client::locate(common.control.as_deref())?;
    // A missing socket is reported by the later connection attempt.
    let found = fs::canonicalize(&path).or_else(|_| std::path::absolute(&path));
    found.with_context(|| format!("{}: cannot tell its directory", path.display()))
}
