//! Default paths of sockets: in `$XDG_RUNTIME_DIR/freestone`, or else in a private directory in /tmp.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use freestone_nbd::Address;
use freestone_spec::path_text;
use tempfile::TempDir;

/// File name of the NBD socket in the directory of the sockets.
pub const NBD_SOCKET: &str = "nbd.sock";
/// File name of the control socket in the directory of the sockets.
pub const CONTROL_SOCKET: &str = "control.sock";

/// Environment variable with the path of the control socket, used without `--control`.
pub const CONTROL_VARIABLE: &str = "FREESTONE_CONTROL";

/// Returns the path in [`CONTROL_VARIABLE`], or `None` if the variable is unset or empty.
pub fn control_of_environment() -> Option<PathBuf> {
    std::env::var_os(CONTROL_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Returns the directory of the sockets, without creating it.
///
/// # Errors
/// Fails if the directory exists but is not private to this user: other users could replace the sockets.
pub fn runtime_dir() -> Result<PathBuf> {
    let dir = std::env::var_os("XDG_RUNTIME_DIR")
        .map(PathBuf::from)
        .filter(|dir| dir.is_absolute() && dir.is_dir())
        .map_or_else(|| fallback(Path::new("/tmp")), |dir| dir.join("freestone"));
    match check_private(&dir) {
        Err(e) if is_missing(&e) => Ok(dir),
        Err(e) => Err(e),
        Ok(()) => Ok(dir),
    }
}

fn fallback(tmp: &Path) -> PathBuf {
    tmp.join(format!("freestone-{}", rustix::process::geteuid().as_raw()))
}

/// Creates a temporary directory for the sockets of `serve --run`, which serves only its command.
pub fn private_dir() -> Result<TempDir> {
    tempfile::Builder::new()
        .prefix("freestone-")
        .permissions(Permissions::from_mode(0o700))
        .tempdir()
        .context("cannot create a directory for the sockets")
}

/// Parses an NBD address. A relative path starts at `base`, or else at the working directory.
pub fn parse_address(text: &str, base: Option<&Path>) -> Result<Address, String> {
    match text.parse::<Address>().map_err(|e| e.to_string())? {
        Address::Unix(path) => {
            let path = path_text::path(&path.to_string_lossy());
            let path = base.map_or_else(|| path.clone(), |base| base.join(&path));
            std::path::absolute(&path).map(Address::Unix).map_err(|e| format!("{}: {e}", path.display()))
        }
        other @ (Address::Tcp { .. } | Address::Stdin) => Ok(other),
    }
}

/// Returns an address as text that [`parse_address`] accepts. The path of a Unix socket may contain any
/// bytes.
pub fn address_text(address: &Address) -> String {
    match address {
        Address::Unix(path) => format!("unix:{}", path_text::text(path)),
        other @ (Address::Tcp { .. } | Address::Stdin) => other.to_string(),
    }
}

/// Creates `dir` with mode 0700. Fails if it exists and is not private to this user.
pub fn create_private(dir: &Path) -> Result<()> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            Err(e).with_context(|| format!("{}: cannot create the directory for the sockets", dir.display()))
        }
        _ => check_private(dir),
    }
}

/// Fails unless `dir` is a directory (not a symbolic link) of this user that no other user can enter.
fn check_private(dir: &Path) -> Result<()> {
    let at = dir.display();
    let meta = fs::symlink_metadata(dir).with_context(|| format!("{at}: cannot examine the directory"))?;
    if !meta.is_dir() {
        bail!("{at}: not a directory; rename it, or choose other paths with --nbd and --control");
    }
    if meta.uid() != rustix::process::geteuid().as_raw() {
        bail!("{at}: belongs to another user ({}); choose other paths with --nbd and --control", meta.uid());
    }
    if meta.mode() & 0o077 != 0 {
        bail!("{at}: others may enter it (mode {:04o}); chmod 700 it", meta.mode() & 0o7777);
    }
    Ok(())
}

fn is_missing(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::NotFound)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::{check_private, create_private, fallback};

    #[test]
    fn create_private_rejects_open_mode_and_symlink() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = fallback(tmp.path());
        create_private(&dir).unwrap();
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        create_private(&dir).unwrap();

        fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
        let error = create_private(&dir).unwrap_err().to_string();
        assert_eq!(error, format!("{}: others may enter it (mode 0755); chmod 700 it", dir.display()));

        let link = tmp.path().join("link");
        symlink(&dir, &link).unwrap();
        assert!(check_private(&link).unwrap_err().to_string().contains("not a directory"));
    }
}
