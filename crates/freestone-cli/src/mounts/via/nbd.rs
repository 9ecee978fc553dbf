//! Attaches a device with the kernel's NBD client, by nbd-client(8).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};

use super::{AttachError, address};
use crate::mounts::attached::nbd_client;
use crate::mounts::helper::{Outcome, STEP_MAX, command, find, line_of, run, wait_until};
use crate::mounts::record::LockedRecord;
use crate::mounts::server::Server;

const PROGRAM: &str = "nbd-client";
/// Name of the file with the ID of the process that connected the device, as the kernel reports it.
const CLIENT: &str = "nbd-client.pid";
/// Shell script that writes its process ID to a file and then runs the program.
const NOTE_PID: &str = r#"echo $$ >"$0" && exec "$@""#;
const CONNECTIONS: &str = "4";
/// Block size of the NBD device, in bytes: the smallest that file systems use. The server accepts
/// requests of any size.
const BLOCK_BYTES: &str = "512";

fn device(number: u32) -> PathBuf {
    format!("/dev/nbd{number}").into()
}

fn has_driver() -> bool {
    Path::new("/sys/block/nbd0").exists()
}

pub fn attach(locked: &mut LockedRecord, server: &mut Server) -> Result<(), AttachError> {
    let Some(program) = find(PROGRAM) else {
        return Err(AttachError::Unavailable(
            "nbd-client is not installed (Debian package nbd-client)".into(),
        ));
    };
    if !has_driver() {
        let loaded = command("modprobe").and_then(|mut modprobe| run(modprobe.arg("nbd"), None));
        if !matches!(loaded, Ok(Outcome::Done)) || !wait_until(STEP_MAX, has_driver) {
            return Err(AttachError::Unavailable("the kernel has no module nbd".into()));
        }
    }
    if is_connected(locked) {
        return Ok(());
    }
    let address = address::of_device(locked, server)?;
    let numbers = (0..).take_while(|number| Path::new(&format!("/sys/block/nbd{number}")).exists());
    for device in numbers.map(device) {
        if nbd_client(&device).is_some() {
            continue;
        }
        locked.record.device = Some(device.clone());
        locked.save()?;
        let mut connect = command("sh")?;
        connect.args(["-c", NOTE_PID]).arg(locked.path(CLIENT)).arg(&program);
        connect.arg("-unix").arg(&address.path).arg(&device).args(["-name", &locked.record.name]);
        connect.args(["-block-size", BLOCK_BYTES, "-connections", CONNECTIONS]);
        if locked.record.is_read_only() {
            connect.arg("-readonly");
        }
        match run(&mut connect, Some(locked.lock()))? {
            Outcome::Done => {
                let mut client = None;
                if !wait_until(STEP_MAX, || {
                    client = nbd_client(&device);
                    client.is_some()
                }) {
                    return Err(anyhow!("{} is not connected", device.display()).into());
                }
                let client = client.unwrap_or_default();
                fs::write(locked.path(CLIENT), client).context("cannot note the client")?;
                return Ok(());
            }
            // Another program has connected the device meanwhile.
            Outcome::Failed(_) if nbd_client(&device).is_some() => {}
            failed => {
                return Err(failed.require(&format!("nbd-client {}", device.display())).unwrap_err().into());
            }
        }
    }
    Err(anyhow!("all devices /dev/nbdN are connected; `modprobe nbd nbds_max=N` makes more").into())
}

/// Returns true if the NBD device of the record is connected, and this mount has connected it.
pub fn is_connected(locked: &LockedRecord) -> bool {
    let client = locked.record.device.as_deref().and_then(nbd_client);
    client.is_some() && client == line_of(&locked.path(CLIENT))
}

/// Disconnects the NBD device of the record, if this mount has connected it.
pub fn detach(locked: &LockedRecord) -> Result<()> {
    let Some(device) = &locked.record.device else { return Ok(()) };
    if !is_connected(locked) {
        return Ok(());
    }
    let step = format!("nbd-client -d {}", device.display());
    run(command(PROGRAM)?.arg("-d").arg(device), Some(locked.lock()))?.require(&step)?;
    if !wait_until(STEP_MAX, || !is_connected(locked)) {
        bail!("{step}: the device stays connected");
    }
    Ok(())
}
