//! The listening socket and its file.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, fchmod};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use thiserror::Error;

/// Frontends that wait for the one before.
const BACKLOG: i32 = 16;

/// Why a device cannot be exported at a path.
#[derive(Debug, Error)]
pub enum ListenError {
    /// Somebody accepts connections there.
    #[error("{0}: another server listens there")]
    InUse(PathBuf),
    /// Something that is no socket; it is left alone.
    #[error("{0}: the path is taken by something that is no socket")]
    NotASocket(PathBuf),
    /// Anything else.
    #[error("{path}: {source}")]
    Other {
        /// Where.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

/// The file of a socket; removed on drop.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // By now the path may be another's.
        let metadata = fs::symlink_metadata(&self.path);
        if metadata.is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.identity)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "the socket could not be removed");
        }
    }
}

/// Listens at a path; a socket at which nobody accepts any more is replaced.
pub fn bind_to(path: &Path) -> Result<(OwnedFd, SocketFile), ListenError> {
    let other = |source: io::Error| ListenError::Other { path: path.to_path_buf(), source };
    let fail = |errno: Errno| other(errno.into());
    let name = SocketAddrUnix::new(path).map_err(fail)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let new_socket = || socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let socket = new_socket().map_err(fail)?;
    // The file gets the mode of the socket, so at no moment may others connect.
    fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(fail)?;
    match bind(&socket, &name) {
        Err(Errno::ADDRINUSE) => {
            let is_socket = fs::symlink_metadata(path).map_err(other)?.file_type().is_socket();
            if !is_socket {
                return Err(ListenError::NotASocket(path.to_path_buf()));
            }
            match connect(new_socket().map_err(fail)?, &name) {
                Err(Errno::CONNREFUSED) => fs::remove_file(path).map_err(other)?,
                _ => return Err(ListenError::InUse(path.to_path_buf())),
            }
            bind(&socket, &name).map_err(fail)?;
        }
        bound => bound.map_err(fail)?,
    }
    let metadata = fs::symlink_metadata(path).map_err(other)?;
    let file = SocketFile { path: path.to_path_buf(), identity: (metadata.dev(), metadata.ino()) };
    listen(&socket, BACKLOG).map_err(fail)?;
    Ok((socket, file))
}
