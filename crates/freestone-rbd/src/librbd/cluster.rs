//! A client of a Ceph cluster, and its pools.
#![expect(unsafe_code)]
// UNSAFETY: calls functions of C libraries that are loaded at run time, with handles and memory
// that they use until they call back.

use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use super::{Handle, Librbd, check, or_null, text};
use crate::error::Errno;

/// Buffer size in bytes for the value of a configuration option, including the NUL. Longer values
/// are treated as missing.
const OPTION_BYTES: usize = 64;

/// A client of a Ceph cluster. Dropping the client disconnects it, which may block on the cluster.
pub struct Cluster {
    pub(super) library: &'static Librbd,
    handle: Handle,
}

// SAFETY: librados handles may be used from any thread concurrently.
unsafe impl Send for Cluster {}
// SAFETY: librados handles may be used from any thread concurrently.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// Creates a client for `user`, or for Ceph's default user. The client is not connected yet.
    pub fn new(library: &'static Librbd, user: Option<&str>) -> Result<Self, Errno> {
        let user = user.map(text).transpose()?;
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is a valid out pointer; the name is NUL-terminated or null.
        check(unsafe { (library.0.rados_create)(&raw mut handle, or_null(user.as_deref())) })?;
        Ok(Self { library, handle })
    }

    /// Reads the configuration file `path`, or the one on Ceph's search path if `path` is `None`.
    pub fn read_conf(&self, path: Option<&Path>) -> Result<(), Errno> {
        let path = path.map(|path| CString::new(path.as_os_str().as_bytes())).transpose();
        let path = path.map_err(|_| libc::EINVAL)?;
        // SAFETY: the handle is from rados_create; the path is NUL-terminated or null.
        check(unsafe { (self.library.0.rados_conf_read_file)(self.handle, or_null(path.as_deref())) })
    }

    pub fn set(&self, name: &CStr, value: &str) -> Result<(), Errno> {
        let value = text(value)?;
        // SAFETY: the handle is from rados_create; both strings are NUL-terminated.
        check(unsafe { (self.library.0.rados_conf_set)(self.handle, name.as_ptr(), value.as_ptr()) })
    }

    /// Returns the value of a configuration option, or `None` if the option does not exist or its
    /// value is too long.
    pub fn option(&self, name: &CStr) -> Option<String> {
        let mut value = [0_u8; OPTION_BYTES];
        // SAFETY: the handle is from rados_create; at most `value.len()` bytes are written.
        let result = unsafe {
            (self.library.0.rados_conf_get)(
                self.handle,
                name.as_ptr(),
                value.as_mut_ptr().cast(),
                value.len(),
            )
        };
        check(result).ok()?;
        CStr::from_bytes_until_nul(&value).ok()?.to_str().ok().map(str::to_owned)
    }

    /// Connects to the cluster. Blocks until the cluster replies or Ceph's timeout has passed.
    pub fn connect(&self) -> Result<(), Errno> {
        // SAFETY: the handle is from rados_create.
        check(unsafe { (self.library.0.rados_connect)(self.handle) })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: the handle is from rados_create, and everything created with it has been dropped.
        unsafe { (self.library.0.rados_shutdown)(self.handle) };
    }
}

pub struct Pool {
    pub(super) handle: Handle,
    pub(super) cluster: Cluster,
}

// SAFETY: librados handles may be used from any thread concurrently.
unsafe impl Send for Pool {}
// SAFETY: librados handles may be used from any thread concurrently.
unsafe impl Sync for Pool {}

impl Pool {
    /// Opens a pool with a namespace (empty for the default one). Blocks on the cluster.
    pub fn new(cluster: Cluster, pool: &str, namespace: &str) -> Result<Self, Errno> {
        let (pool, namespace) = (text(pool)?, text(namespace)?);
        let mut handle = ptr::null_mut();
        let functions = &cluster.library.0;
        // SAFETY: the cluster handle is connected, the name is NUL-terminated, and `handle` is a
        // valid out pointer.
        check(unsafe { (functions.rados_ioctx_create)(cluster.handle, pool.as_ptr(), &raw mut handle) })?;
        // SAFETY: the handle was just created; the name is NUL-terminated.
        unsafe { (functions.rados_ioctx_set_namespace)(handle, namespace.as_ptr()) };
        Ok(Self { handle, cluster })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the handle is from rados_ioctx_create, and no image is open with it.
        unsafe { (self.cluster.library.0.rados_ioctx_destroy)(self.handle) };
    }
}
