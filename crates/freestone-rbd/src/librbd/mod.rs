//! Safe bindings to librbd and librados, Ceph's client libraries, which are loaded on first use.
//!
//! Negative results of C functions are converted to positive error numbers.
//! This module loads the functions. [`cluster`] and [`image`] own the handles of the libraries. Only the worker
//! and the device's shared state use them.
#![expect(unsafe_code)]
// UNSAFETY: calls functions of C libraries that are loaded at run time, with handles and memory
// that they use until they call back.

pub mod cluster;
pub mod image;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

use freestone_core::sync::Mutex;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::error::{Errno, SetupError};

const RADOS: &str = "librados.so.2";
const RBD: &str = "librbd.so.1";

type Handle = *mut c_void;
type AioCallback = unsafe extern "C" fn(Handle, *mut c_void);
type UpdateCallback = unsafe extern "C" fn(*mut c_void);
type DiffCallback = unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;

/// C structure `rbd_image_info_t` of librbd, filled in by `rbd_stat`.
#[repr(C)]
struct ImageInfo {
    size: u64,
    object_size: u64,
    objects: u64,
    order: c_int,
    block_name_prefix: [c_char; 24],
    parent_pool: i64,
    parent_name: [c_char; 96],
}

const _: () = assert!(size_of::<ImageInfo>() == 160);

/// C structure `rbd_config_option_t` of librbd, filled in by `rbd_config_image_list`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ImageOption {
    name: *const c_char,
    value: *const c_char,
    source: c_int,
}

const _: () = assert!(size_of::<ImageOption>() == 24);

macro_rules! functions {
    ($($library:ident: $name:ident($($argument:ty),*) -> $result:ty;)*) => {
        /// Functions of librados and librbd, under their C names.
        struct Functions { $($name: unsafe extern "C" fn($($argument),*) -> $result,)* }

        impl Functions {
            fn find(rados: &LoadedLibrary, rbd: &LoadedLibrary) -> Result<Self, SetupError> {
                Ok(Self { $($name: {
                    let library = match stringify!($library) { "rados" => rados, _ => rbd };
                    // SAFETY: the function has this type in every version of the library that
                    // exports it under this name and soname.
                    let symbol = unsafe { library.library.get(concat!(stringify!($name), "\0").as_bytes()) };
                    *symbol.map_err(|_| SetupError::OldLibrary {
                        library: library.name.clone(),
                        function: stringify!($name),
                    })?
                },)* })
            }
        }
    };
}

functions! {
    rados: rados_create(*mut Handle, *const c_char) -> c_int;
    rados: rados_conf_read_file(Handle, *const c_char) -> c_int;
    rados: rados_conf_set(Handle, *const c_char, *const c_char) -> c_int;
    rados: rados_conf_get(Handle, *const c_char, *mut c_char, usize) -> c_int;
    rados: rados_connect(Handle) -> c_int;
    rados: rados_shutdown(Handle) -> ();
    rados: rados_ioctx_create(Handle, *const c_char, *mut Handle) -> c_int;
    rados: rados_ioctx_set_namespace(Handle, *const c_char) -> ();
    rados: rados_ioctx_destroy(Handle) -> ();
    rbd: rbd_open(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd: rbd_open_read_only(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd: rbd_close(Handle) -> c_int;
    rbd: rbd_stat(Handle, *mut ImageInfo, usize) -> c_int;
    rbd: rbd_config_image_list(Handle, *mut ImageOption, *mut c_int) -> c_int;
    rbd: rbd_config_image_list_cleanup(*mut ImageOption, c_int) -> ();
    rbd: rbd_update_watch(Handle, *mut u64, UpdateCallback, *mut c_void) -> c_int;
    rbd: rbd_update_unwatch(Handle, u64) -> c_int;
    rbd: rbd_diff_iterate2(Handle, *const c_char, u64, u64, u8, u8, DiffCallback, *mut c_void) -> c_int;
    rbd: rbd_aio_create_completion(*mut c_void, AioCallback, *mut Handle) -> c_int;
    rbd: rbd_aio_get_return_value(Handle) -> isize;
    rbd: rbd_aio_release(Handle) -> ();
    rbd: rbd_aio_read(Handle, u64, usize, *mut c_char, Handle) -> c_int;
    rbd: rbd_aio_write(Handle, u64, usize, *const c_char, Handle) -> c_int;
    rbd: rbd_aio_discard(Handle, u64, u64, Handle) -> c_int;
    rbd: rbd_aio_write_zeroes(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
    rbd: rbd_aio_flush(Handle, Handle) -> c_int;
}

struct LoadedLibrary {
    name: String,
    library: Library,
}

impl LoadedLibrary {
    fn open(directory: Option<&Path>, name: &str) -> Result<Self, SetupError> {
        let path = directory.map_or_else(|| PathBuf::from(name), |directory| directory.join(name));
        let name = path.display().to_string();
        // SAFETY: the constructors of Ceph's libraries have no preconditions; the library is never
        // unloaded.
        match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => Ok(Self { name, library }),
            Err(error) => {
                let why =
                    std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                Err(SetupError::NoLibrary { library: name, why })
            }
        }
    }
}

pub struct Librbd(Functions);

/// Loaded libraries, by the directory they were loaded from. The libraries are never unloaded,
/// because their threads run until the process ends.
///
/// Lock order: innermost. The lock is held while a library is loaded, which waits only for files.
static LOADED: Mutex<Vec<(Option<PathBuf>, &'static Librbd)>> = Mutex::new(Vec::new());

impl Librbd {
    /// Loads librados and librbd from `directory`, or returns them if they are loaded already.
    ///
    /// # Errors
    /// librados or librbd is missing or too old.
    pub fn load(directory: Option<&Path>) -> Result<&'static Self, SetupError> {
        let mut loaded = LOADED.lock();
        if let Some((_, library)) = loaded.iter().find(|(known, _)| known.as_deref() == directory) {
            return Ok(library);
        }
        let (rados, rbd) = (LoadedLibrary::open(directory, RADOS)?, LoadedLibrary::open(directory, RBD)?);
        let library = Self(Functions::find(&rados, &rbd)?);
        // Dropping the handles would unload the libraries.
        std::mem::forget((rados.library, rbd.library));
        let library: &'static Self = Box::leak(Box::new(library));
        loaded.push((directory.map(Path::to_path_buf), library));
        Ok(library)
    }
}

fn check(result: c_int) -> Result<(), Errno> {
    if result < 0 { Err(-result) } else { Ok(()) }
}

/// Converts `text` to a C string. Fails with `EINVAL` if it contains a NUL.
fn text(text: &str) -> Result<CString, Errno> {
    CString::new(text).map_err(|_| libc::EINVAL)
}

fn or_null(text: Option<&CStr>) -> *const c_char {
    text.map_or(ptr::null(), CStr::as_ptr)
}
