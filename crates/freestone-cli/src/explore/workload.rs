//! Records a workload: a command that runs while its disk is served, and every write is recorded.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use anyhow::{Context as _, Result, bail};
use freestone::qcow2::{Format, is_qcow2};
use freestone_server::Server;
use freestone_server::settings::paths;
use freestone_spec::path_text;
use freestone_spec::size::exact;

use super::mounted::{FileSystem, Mounted};
use crate::mounts::helper::{Running, STEP_MAX, command};

/// Name of the recorded device.
const DEVICE: &str = "disk";

/// Content of the disk before the workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Disk {
    /// Zeroes, with this size in bytes.
    Empty(u64),
    /// A raw or qcow2 image, which stays unchanged.
    Image(PathBuf),
}

impl Disk {
    /// Returns the specification of the image as a read-only device, or `None` for an empty disk.
    ///
    /// # Errors
    /// Fails if the image cannot be read.
    pub fn base_spec(&self) -> Result<Option<String>> {
        let Self::Image(path) = self else { return Ok(None) };
        Ok(Some(read_only_spec("base", path, base_format(path)?)))
    }
}

/// Returns the format of the image of `--base`.
///
/// # Errors
/// Fails if the image cannot be read.
pub fn base_format(image: &Path) -> Result<Format> {
    let is_qcow2 = is_qcow2(image).with_context(|| format!("--base {}", image.display()))?;
    Ok(if is_qcow2 { Format::Qcow2 } else { Format::Raw })
}

/// Returns the specification of an image as a read-only device without an export.
pub fn read_only_spec(name: &str, image: &Path, format: Format) -> String {
    let (kind, read_only) = match format {
        Format::Qcow2 => ("qcow2", ""),
        Format::Raw => ("file", ",readonly=yes"),
    };
    format!("{name}={kind},path={}{read_only},publish=no", value(image))
}

/// Returns a path as the value of a key.
fn value(path: &Path) -> String {
    path_text::text(path).replace(',', ",,")
}

/// Creates an image of `size` bytes at `path` with a file system.
///
/// # Errors
/// Fails if the image cannot be written, or mkfs fails.
pub fn make_file_system(path: &Path, size: u64, fs: &str) -> Result<()> {
    let at = || format!("{}: cannot create the image", path.display());
    File::create_new(path).and_then(|file| file.set_len(size)).with_context(at)?;
    let mut mkfs = command(&format!("mkfs.{fs}"))?;
    let mut running = Running::start(mkfs.arg(path), None)?;
    let outcome = running.wait(STEP_MAX)?;
    running.kill();
    outcome.require(&format!("mkfs.{fs}"))
}

/// Runs the workload, and records the writes to its disk in a new log. With `mount`, its file system is mounted. Sockets and the mount point lie in `dir`.
///
/// # Errors
/// Fails if the disk cannot be served or mounted, or the log cannot be written. The status of the workload is not an
/// error.
pub fn record(
    text: &str,
    disk: &Disk,
    log: &Path,
    dir: &Path,
    mount: Option<FileSystem<'_>>,
) -> Result<ExitStatus> {
    let (socket, control) = (dir.join(paths::NBD_SOCKET), dir.join(paths::CONTROL_SOCKET));
    let log_keys = format!("power_cut=yes,record={}", value(log));
    let mut builder = Server::builder().nbd(format!("unix:{}", path_text::text(&socket))).control(&control);
    builder = match (disk, disk.base_spec()?) {
        (_, Some(base)) => builder.device(base).device(format!("{DEVICE}=fork,base=base,{log_keys}")),
        (Disk::Empty(size), None) => {
            builder.device(format!("{DEVICE}=ram,disksize={},{log_keys}", exact(*size)))
        }
        (Disk::Image(_), None) => bail!("an image has a specification"),
    };
    let server = builder.start()?;
    let mounted = mount.map(|fs| Mounted::new(DEVICE, &dir.join("dir"), &control, fs)).transpose()?;
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(text);
    let uri = server.uris(DEVICE).into_iter().next().unwrap_or_default();
    shell.env("uri", &uri).env("nbd", &uri).env("unixsocket", &socket).env("device", DEVICE);
    shell.env("control", &control).env(paths::CONTROL_VARIABLE, &control);
    if let Some(mounted) = &mounted {
        shell.env("dir", &mounted.dir);
    }
    // Standard output belongs to the result.
    let status = shell.stdout(io::stderr()).status().context("--run: cannot start sh")?;
    mounted.map_or(Ok(()), Mounted::unmount).context("--run")?;
    server.shutdown()?;
    Ok(status)
}
