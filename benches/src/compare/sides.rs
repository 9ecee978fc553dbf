//! Servers of the comparison, the commands that start them, and the groups of equivalent ones.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::ValueEnum;
use rustix::fs::MemfdFlags;

use super::peers::Peers;
use crate::programs::run_dir::{RunDir, ServerDir, fd_path};
use crate::programs::server_process::Server;
use crate::programs::tool;

/// A server under comparison, with one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Ram,
    RamZstd,
    RamStore,
    Sparse,
    Malloc,
    Zstd,
    Raw,
    Null,
    NbdkitNull,
    NullCo,
    Fork,
    Cow,
    Qcow2,
}

/// Directories, programs, image and device size with which servers are started.
pub struct Starter<'a> {
    pub run_dir: &'a RunDir,
    pub peers: &'a Peers,
    pub freestone: &'a Path,
    /// Path of the image that is the base of overlays. Every device has the size of the image.
    pub image: &'a Path,
    pub bytes: u64,
    /// Directory of certificates, for servers with TLS; None for servers without TLS.
    pub tls: Option<&'a Path>,
}

/// A running server and its files. Drop ends the server, then deletes the files.
pub struct Running {
    pub server: Server,
    pub socket: PathBuf,
    /// Command that started the server, without directories of this machine.
    pub command: String,
    _memory: Option<File>,
    _server_dir: ServerDir,
}

impl Side {
    pub fn name(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::RamZstd => "ram zstd",
            Self::RamStore => "ram store",
            Self::Sparse => "nbdkit memory sparse",
            Self::Malloc => "nbdkit memory malloc",
            Self::Zstd => "nbdkit memory zstd",
            Self::Raw => "qemu-nbd raw in tmpfs",
            Self::Null => "null",
            Self::NbdkitNull => "nbdkit null",
            Self::NullCo => "qemu-nbd null-co",
            Self::Fork => "fork",
            Self::Cow => "nbdkit cow",
            Self::Qcow2 => "qemu-nbd qcow2 overlay",
        }
    }

    pub fn is_ours(self) -> bool {
        matches!(self, Self::Ram | Self::RamZstd | Self::RamStore | Self::Null | Self::Fork)
    }
}

impl Starter<'_> {
    pub fn start(&self, side: Side) -> Result<Running> {
        match side {
            // io_uring is not qemu-nbd's default, but uses the least CPU time. Some kernels do not
            // support it; then threads are used.
            Side::Raw | Side::Qcow2 => {
                self.start_with(side, "--aio=io_uring").or_else(|_| self.start_with(side, "--aio=threads"))
            }
            _ => self.start_with(side, ""),
        }
    }

    /// Starts a server. `aio` is qemu-nbd's option for access to files; other servers ignore it.
    fn start_with(&self, side: Side, aio: &str) -> Result<Running> {
        let server_dir = self.run_dir.server()?;
        let socket = server_dir.socket("nbd");
        let bytes = self.bytes;
        let mut memory = None;
        let command = match side {
            Side::Ram => self.ours(&server_dir, &[format!("d=ram,disksize={}", mib(bytes))]),
            Side::RamZstd | Side::RamStore => {
                let algorithm = if side == Side::RamZstd { "zstd" } else { "store" };
                self.ours(&server_dir, &[format!("d=ram,disksize={},comp_algorithm={algorithm}", mib(bytes))])
            }
            Side::Null => self.ours(&server_dir, &[format!("d=null,size={}", mib(bytes))]),
            Side::Fork => {
                let base = format!("base=file,path={},readonly=yes,publish=no", self.image.display());
                self.ours(&server_dir, &[base, "d=fork,base=base".into()])
            }
            Side::Sparse | Side::Malloc | Side::Zstd => {
                let allocator = match side {
                    Side::Sparse => "sparse",
                    Side::Malloc => "malloc",
                    _ => "zstd",
                };
                let mut command = self.nbdkit(&socket);
                command.args([self.peers.plugin("memory"), mib(bytes), format!("allocator={allocator}")]);
                command
            }
            Side::NbdkitNull => {
                let mut command = self.nbdkit(&socket);
                command.args([self.peers.plugin("null"), mib(bytes)]);
                command
            }
            Side::Cow => {
                let mut file = OsString::from("file=");
                file.push(self.image);
                let mut command = self.nbdkit(&socket);
                command.arg(format!("--filter={}", self.peers.filter("cow")));
                command.arg(self.peers.plugin("file")).arg(file).env("TMPDIR", server_dir.path());
                command
            }
            Side::Raw => {
                // A memfd is in memory whatever file systems the machine has. The memory is freed
                // when this process and the server have ended.
                let file = File::from(rustix::fs::memfd_create("freestone-compare", MemfdFlags::CLOEXEC)?);
                file.set_len(bytes)?;
                let path = server_dir.image("tmpfs.img");
                symlink(fd_path(&file).trim_end_matches('/'), &path)?;
                memory = Some(file);
                let mut command = self.qemu_nbd(&socket);
                command.args([aio, "--format=raw"]).arg(path);
                command
            }
            Side::NullCo => {
                let mut command = self.qemu_nbd(&socket);
                command.args(["--image-opts", &format!("driver=null-co,size={bytes}")]);
                command
            }
            Side::Qcow2 => {
                let path = server_dir.image("overlay.qcow2");
                self.make_overlay(&path)?;
                let mut command = self.qemu_nbd(&socket);
                command.args([aio, "--format=qcow2"]).arg(path);
                command
            }
        };
        let shown = self.shown(&command, &server_dir);
        let server = Server::start(&command, &socket)?;
        Ok(Running { server, socket, command: shown, _memory: memory, _server_dir: server_dir })
    }

    fn ours(&self, server_dir: &ServerDir, devices: &[String]) -> Command {
        let mut command = server_dir.serve(self.freestone, devices);
        if let Some(tls) = self.tls {
            command.arg("--tls=require");
            command.arg(format!("--tls-cert={}", tls.join("server-cert.pem").display()));
            command.arg(format!("--tls-key={}", tls.join("server-key.pem").display()));
        }
        command
    }

    fn nbdkit(&self, socket: &Path) -> Command {
        let mut command = self.peers.program("nbdkit");
        command.args(["--foreground", "--unix"]).arg(socket);
        if let Some(tls) = self.tls {
            command.arg("--tls=require").arg(format!("--tls-certificates={}", tls.display()));
        }
        command
    }

    fn qemu_nbd(&self, socket: &Path) -> Command {
        let mut command = self.peers.program("qemu-nbd");
        command.args(["--persistent", "--shared=8", "--socket"]).arg(socket);
        if let Some(tls) = self.tls {
            let dir = tls.display();
            let object = format!("--object=tls-creds-x509,id=tls,dir={dir},endpoint=server,verify-peer=no");
            command.args([&object[..], "--tls-creds=tls"]);
        }
        command
    }

    fn make_overlay(&self, path: &Path) -> Result<()> {
        let mut make = self.peers.program("qemu-img");
        make.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(self.image).arg(path);
        // The command may start with the loader, so the error names the program.
        tool::run(&mut make, "qemu-utils").map(drop).context("qemu-img")
    }

    /// Returns a command line as a user would type it, without the names of directories of this run
    /// and of this machine.
    fn shown(&self, command: &Command, server_dir: &ServerDir) -> String {
        let program = command.get_program();
        let program = if program == self.freestone { "freestone".into() } else { program.to_string_lossy() };
        let mut words = Vec::new();
        for (key, value) in command.get_envs() {
            words.push(format!("{}={}", key.to_string_lossy(), value.unwrap_or_default().to_string_lossy()));
        }
        words.push(program.into_owned());
        words.extend(command.get_args().map(|word| word.to_string_lossy().into_owned()));
        self.peers.shown(&self.run_dir.shown(&words.join(" "), server_dir))
    }
}

/// Formats a size, a multiple of 1 MiB, in the notation that all programs accept.
fn mib(bytes: u64) -> String {
    format!("{}M", bytes >> 20)
}

/// Equivalent devices of Freestone and its peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Group {
    /// RAM disks: ram beside nbdkit memory and qemu-nbd on a file in tmpfs.
    Memory,
    /// Devices that discard writes: null beside nbdkit null and qemu-nbd null-co.
    Null,
    /// Overlays of an image: fork beside nbdkit cow and qemu-nbd on qcow2.
    Overlay,
}

impl Group {
    pub fn sides(self) -> &'static [Side] {
        match self {
            Self::Memory => &[
                Side::Ram,
                Side::RamZstd,
                Side::RamStore,
                Side::Sparse,
                Side::Malloc,
                Side::Zstd,
                Side::Raw,
                Side::Null,
            ],
            Self::Null => &[Side::Null, Side::NbdkitNull, Side::NullCo],
            Self::Overlay => &[Side::Fork, Side::Cow, Side::Qcow2, Side::Null],
        }
    }

    /// Returns the side that is compared with the upper bound, Freestone's with lz4. Returns None
    /// for null devices, which use no codec.
    pub fn bounded(self) -> Option<Side> {
        match self {
            Self::Memory => Some(Side::Ram),
            Self::Overlay => Some(Side::Fork),
            Self::Null => None,
        }
    }

    /// Returns the pairs of a Freestone side and the peer that it is compared with.
    pub fn pairs(self) -> &'static [(Side, Side)] {
        match self {
            Self::Memory => &[
                (Side::Ram, Side::Sparse),
                (Side::Ram, Side::Malloc),
                (Side::Ram, Side::Zstd),
                (Side::RamZstd, Side::Zstd),
                (Side::Ram, Side::Raw),
                (Side::RamStore, Side::Malloc),
            ],
            Self::Null => &[(Side::Null, Side::NbdkitNull), (Side::Null, Side::NullCo)],
            Self::Overlay => &[(Side::Fork, Side::Cow), (Side::Fork, Side::Qcow2)],
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "compare: disks in memory over NBD",
            Self::Null => "compare: null drives over NBD",
            Self::Overlay => "compare: overlays of a raw image over NBD",
        }
    }
}
