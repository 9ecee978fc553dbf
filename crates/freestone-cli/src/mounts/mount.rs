//! `mount NAME DIR`: attaches a device and mounts its file system. Without arguments it lists the mounts.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use freestone_control::protocol::RpcError;
use freestone_server::exports::DISCONNECT_MAX;
use freestone_spec::refusal::Errno;

use super::helper::{command, run, wait_until};
use super::mount_table::MountTable;
use super::record::{LockedRecord, Record, Records, Via};
use super::server::{Server, ServerState};
use super::show::{self, Row};
use super::{check_root, control, umount, via};
use crate::client::Common;
use crate::error::Stdout;

/// The help below the options.
pub const EXAMPLES: &str = "\
Examples:
  freestone mount job-7 /mnt/job
  freestone mount job-7 /mnt/job --via nbdfuse -o noatime
  freestone mount                                        lists the mounts
  freestone rewind job-7                                 unmounts, rewinds and mounts again, in one call
  freestone umount job-7

Ways to attach, of which the first that is available is used: ublk (the kernel's driver), nbd (the kernel's NBD client,
with nbd-client), nbdfuse (with a loop device). Needs root. NAME must have a file system.

States of mounts: mounted; stale, what is left of a mount that was cut short or undone by hand; dead, the server does
not answer. `freestone umount` ends all of them. Records of the mounts are in $FREESTONE_MOUNTS, else
/run/freestone-mounts.";

/// The command line.
#[derive(Debug, Args)]
pub struct Line {
    /// The device; without it, the mounts are listed
    #[arg(requires = "dir")]
    name: Option<String>,
    /// Mount point: a directory that exists
    dir: Option<PathBuf>,
    /// Way to attach it as a block device [default: the first that is available]
    #[arg(long, value_enum)]
    via: Option<Via>,
    /// File-system type [default: as mount(8) finds it]
    #[arg(long, value_name = "TYPE")]
    fs: Option<String>,
    /// Options of mount(8); with ro, the device is attached read-only
    #[arg(short, long, value_name = "OPTIONS")]
    options: Option<String>,
}

/// Runs the verb `mount`. Lists the mounts if the command line names no device.
pub fn ask(line: &Line, common: &Common) -> Result<()> {
    let (Some(name), Some(dir)) = (&line.name, &line.dir) else {
        return show::list(&Records::locate(), common);
    };
    let request =
        MountRequest { name, dir, via: line.via, fs: line.fs.as_deref(), options: line.options.as_deref() };
    let locked = mount(&request, &control(common)?)?;
    if common.json {
        return show::print_json(&Row::mounted(&locked.record));
    }
    let mut out = io::stdout().lock();
    let device = locked.record.device.as_deref().unwrap_or(Path::new("-"));
    let line = writeln!(out, "{name}: {} at {}", device.display(), locked.record.dir.display());
    Ok(line.map_err(Stdout::from)?)
}

/// A device to mount, and how.
pub struct MountRequest<'a> {
    pub name: &'a str,
    /// Mount point: a directory that exists.
    pub dir: &'a Path,
    /// Way to attach the device, or `None` for the first that is available.
    pub via: Option<Via>,
    /// File-system type, or `None` if mount(8) finds it.
    pub fs: Option<&'a str>,
    /// Options of mount(8).
    pub options: Option<&'a str>,
}

/// Mounts a device of the server at the control socket `control`. Returns the record of the mount, which stays locked
/// until dropped.
pub fn mount(request: &MountRequest<'_>, control: &Path) -> Result<LockedRecord> {
    let name = request.name;
    check_root("mount")?;
    let dir = directory(name, request.dir)?;
    let mut server = ServerState::of(control, name).into_server(control)?;
    let records = Records::locate();
    let record = Record {
        name: name.to_owned(),
        dir,
        control: control.to_owned(),
        server: server.process,
        via: request.via,
        device: None,
        published: None,
        fs: request.fs.map(ToOwned::to_owned),
        options: request.options.map(ToOwned::to_owned),
    };
    // The server may still count a client that is disconnecting.
    wait_until(DISCONNECT_MAX, || {
        record.is_read_only() || server.connections() == 0 || server.refresh(name).is_err()
    });
    check_device(&record, &server)?;
    let mut locked = records.create(record)?;
    if let Err(error) = attach_and_mount(&mut locked, &mut server) {
        let Err(undoing) = umount::release(locked, false) else { return Err(error) };
        let hint = format!("`freestone umount {name}` undoes the rest");
        return Err(error.context(format!("{name}: cannot be mounted, nor undone ({undoing:#}); {hint}")));
    }
    Ok(locked)
}

fn directory(name: &str, dir: &Path) -> Result<PathBuf> {
    let at = dir.display();
    let found =
        fs::canonicalize(dir).with_context(|| format!("{name}: mount: {at}: create the directory first"))?;
    if !found.is_dir() {
        bail!("{name}: mount: {at}: is not a directory");
    }
    Ok(found)
}

/// Fails if the device does not exist, is a template, or is in use by clients.
fn check_device(record: &Record, server: &Server) -> Result<()> {
    let name = &record.name;
    let refuse = |errno, why: String| Err(RpcError::failed(errno, format!("{name}: mount: {why}")).into());
    let Some(device) = server.device() else {
        return refuse(Errno::ENODEV, "there is no such device".into());
    };
    if device.kind == "template" {
        return refuse(
            Errno::EOPNOTSUPP,
            "a template is not mounted; `freestone fork` makes a disk of its base".into(),
        );
    }
    let connections = server.connections();
    if connections > 0 && !record.is_read_only() {
        let why =
            "their writes and the kernel's would destroy each other; disconnect them, or mount with -o ro";
        return refuse(Errno::EBUSY, format!("clients are connected ({connections}): {why}"));
    }
    let block = device.exports.iter().find(|export| export.is_ublk());
    if let Some(block) = block.filter(|block| !super::attached::is_unused(Path::new(&block.address))) {
        return refuse(
            Errno::EBUSY,
            format!("{} is mounted or in use already; unmount that first", block.address),
        );
    }
    Ok(())
}

/// Attaches the device of a record as a block device, and mounts its file system.
pub fn attach_and_mount(locked: &mut LockedRecord, server: &mut Server) -> Result<()> {
    via::attach(locked, server)?;
    let (name, dir) = (locked.record.name.clone(), locked.record.dir.clone());
    let (device, option) = via::mountable(locked).with_context(|| format!("{name}: no block device"))?;
    let mut mount = command("mount")?;
    if let Some(fs) = &locked.record.fs {
        mount.args(["-t", fs]);
    }
    let options: Vec<_> = option.into_iter().chain(locked.record.options.as_deref()).collect();
    if !options.is_empty() {
        mount.arg("-o").arg(options.join(","));
    }
    let step = format!("{name}: mount {} at {}", device.display(), dir.display());
    run(mount.arg(&device).arg(&dir), Some(locked.lock()))?.require(&step)?;
    // mount(8) chooses the number of a loop device, so the block device is recorded only now.
    if let Some(source) = via::sources(locked, &MountTable::read()?).into_iter().next() {
        locked.record.device = Some(source);
    }
    locked.record.server = server.process;
    locked.save()
}
