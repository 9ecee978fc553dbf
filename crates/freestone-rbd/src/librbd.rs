//! Ceph's libraries: loaded when they are first needed, and what is used of them as safe calls.
//!
//! All negative results are given as positive error numbers.
#![expect(unsafe_code)]
// UNSAFETY: functions of C libraries that are loaded at run time are called, with handles and memory
// that they use until they call back.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;

use freestone_core::device::{IoBuf, Op};
use freestone_core::sync::Mutex;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::error::{Errno, SetupError};
use crate::job::Piece;

const RADOS: &str = "librados.so.2";
const RBD: &str = "librbd.so.1";
/// Zeroes have a place of their own (`RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`).
const THICK: c_int = 1;
/// Longest value of an option that is asked for, in bytes.
const OPTION_BYTES: usize = 64;
/// Most options of an image that are looked at.
const MAX_OPTIONS: usize = 1 << 12;
/// Most ranges that are kept of an answer after what is allocated.
const MAX_RANGES: usize = 1 << 16;

type Handle = *mut c_void;
type Answered = unsafe extern "C" fn(Handle, *mut c_void);
type Updated = unsafe extern "C" fn(*mut c_void);
type Differs = unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;

/// `rbd_image_info_t`.
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

/// `rbd_config_option_t`.
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
        /// The functions, under their names in C.
        struct Functions { $($name: unsafe extern "C" fn($($argument),*) -> $result,)* }

        impl Functions {
            fn find(rados: &Opened, rbd: &Opened) -> Result<Self, SetupError> {
                Ok(Self { $($name: {
                    let library = match stringify!($library) { "rados" => rados, _ => rbd };
                    // SAFETY: the function has this type in every version of the library that has it
                    // under this name and soname.
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
    rbd: rbd_update_watch(Handle, *mut u64, Updated, *mut c_void) -> c_int;
    rbd: rbd_update_unwatch(Handle, u64) -> c_int;
    rbd: rbd_diff_iterate2(Handle, *const c_char, u64, u64, u8, u8, Differs, *mut c_void) -> c_int;
    rbd: rbd_aio_create_completion(*mut c_void, Answered, *mut Handle) -> c_int;
    rbd: rbd_aio_get_return_value(Handle) -> isize;
    rbd: rbd_aio_release(Handle) -> ();
    rbd: rbd_aio_read(Handle, u64, usize, *mut c_char, Handle) -> c_int;
    rbd: rbd_aio_write(Handle, u64, usize, *const c_char, Handle) -> c_int;
    rbd: rbd_aio_discard(Handle, u64, u64, Handle) -> c_int;
    rbd: rbd_aio_write_zeroes(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
    rbd: rbd_aio_flush(Handle, Handle) -> c_int;
}

// ---- the libraries ------------------------------------------------------------------------------

struct Opened {
    name: String,
    library: Library,
}

impl Opened {
    fn open(directory: Option<&Path>, name: &str) -> Result<Self, SetupError> {
        let path = directory.map_or_else(|| PathBuf::from(name), |directory| directory.join(name));
        let name = path.display().to_string();
        // SAFETY: the library is Ceph's, whose constructors need nothing of us; it is never unloaded.
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

/// Both libraries.
pub struct Librbd(Functions);

/// What was loaded, by directory. Threads of the libraries run until the process ends, so they stay.
///
/// Lock order: innermost; held while a library is loaded, which waits for files only.
static LOADED: Mutex<Vec<(Option<PathBuf>, &'static Librbd)>> = Mutex::new(Vec::new());

impl Librbd {
    /// Loads them, if they are not there yet.
    ///
    /// # Errors
    /// They are not on this machine, or too old.
    pub fn load(directory: Option<&Path>) -> Result<&'static Self, SetupError> {
        let mut loaded = LOADED.lock();
        if let Some((_, library)) = loaded.iter().find(|(known, _)| known.as_deref() == directory) {
            return Ok(library);
        }
        let (rados, rbd) = (Opened::open(directory, RADOS)?, Opened::open(directory, RBD)?);
        let library = Self(Functions::find(&rados, &rbd)?);
        // The functions are to be there as long as the process is.
        std::mem::forget((rados.library, rbd.library));
        let library: &'static Self = Box::leak(Box::new(library));
        loaded.push((directory.map(Path::to_path_buf), library));
        Ok(library)
    }
}

fn checked(result: c_int) -> Result<(), Errno> {
    if result < 0 { Err(-result) } else { Ok(()) }
}

/// A name for C; one with a NUL in it is none.
fn text(text: &str) -> Result<CString, Errno> {
    CString::new(text).map_err(|_| libc::EINVAL)
}

fn or_null(text: Option<&CStr>) -> *const c_char {
    text.map_or(ptr::null(), CStr::as_ptr)
}

// ---- the cluster --------------------------------------------------------------------------------

/// A client of a cluster. It is ended when it is dropped, which may take as long as the cluster does.
pub struct Cluster {
    library: &'static Librbd,
    handle: Handle,
}

// SAFETY: librados' handles may be used by any threads at once.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// A client that is not connected yet.
    pub fn new(library: &'static Librbd, user: Option<&str>) -> Result<Self, Errno> {
        let user = user.map(text).transpose()?;
        let mut handle = ptr::null_mut();
        // SAFETY: a place for the handle, and a name that ends with a NUL, or none.
        checked(unsafe { (library.0.rados_create)(&raw mut handle, or_null(user.as_deref())) })?;
        Ok(Self { library, handle })
    }

    /// Reads a file of configuration, or that which Ceph finds.
    pub fn read_conf(&self, path: Option<&Path>) -> Result<(), Errno> {
        let path = path.map(|path| CString::new(path.as_os_str().as_bytes())).transpose();
        let path = path.map_err(|_| libc::EINVAL)?;
        // SAFETY: the handle is one of rados_create; a path that ends with a NUL, or none.
        checked(unsafe { (self.library.0.rados_conf_read_file)(self.handle, or_null(path.as_deref())) })
    }

    /// Sets an option.
    pub fn set(&self, name: &CStr, value: &str) -> Result<(), Errno> {
        let value = text(value)?;
        // SAFETY: the handle is one of rados_create; both texts end with a NUL.
        checked(unsafe { (self.library.0.rados_conf_set)(self.handle, name.as_ptr(), value.as_ptr()) })
    }

    /// The value of an option; `None` where there is none of that name.
    pub fn option(&self, name: &CStr) -> Option<String> {
        let mut value = [0_u8; OPTION_BYTES];
        // SAFETY: the handle is one of rados_create; at most as many bytes are written as are there.
        let result = unsafe {
            (self.library.0.rados_conf_get)(
                self.handle,
                name.as_ptr(),
                value.as_mut_ptr().cast(),
                value.len(),
            )
        };
        checked(result).ok()?;
        CStr::from_bytes_until_nul(&value).ok()?.to_str().ok().map(str::to_owned)
    }

    /// Connects. Waits.
    pub fn connect(&self) -> Result<(), Errno> {
        // SAFETY: the handle is one of rados_create.
        checked(unsafe { (self.library.0.rados_connect)(self.handle) })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: the handle is one of rados_create, and what was made with it is gone.
        unsafe { (self.library.0.rados_shutdown)(self.handle) };
    }
}

/// A pool of a cluster.
pub struct Pool {
    handle: Handle,
    cluster: Cluster,
}

// SAFETY: as the cluster's.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// Opens it. Waits.
    pub fn new(cluster: Cluster, pool: &str, namespace: &str) -> Result<Self, Errno> {
        let (pool, namespace) = (text(pool)?, text(namespace)?);
        let mut handle = ptr::null_mut();
        let functions = &cluster.library.0;
        // SAFETY: the handle is connected; a name that ends with a NUL, and a place for the new handle.
        checked(unsafe { (functions.rados_ioctx_create)(cluster.handle, pool.as_ptr(), &raw mut handle) })?;
        // SAFETY: the handle was just made; the name ends with a NUL.
        unsafe { (functions.rados_ioctx_set_namespace)(handle, namespace.as_ptr()) };
        Ok(Self { handle, cluster })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the handle is one of rados_ioctx_create, and no image is open with it.
        unsafe { (self.cluster.library.0.rados_ioctx_destroy)(self.handle) };
    }
}

// ---- an image -----------------------------------------------------------------------------------

/// What an image is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Info {
    /// Bytes.
    pub size: u64,
    /// Bytes of an object.
    pub object_size: u64,
}

type Notify = Box<dyn Fn() + Send + Sync>;

/// Who hears of a result: bytes or 0, or an error; and the buffer.
pub type Done = Box<dyn FnOnce(Result<u64, Errno>, IoBuf) + Send>;

/// An open image. It is closed when the last reference is dropped, which may take as long as the cluster
/// does, and must not be on a thread of the library: requests hold a reference until just before they
/// are answered, so who closes it keeps one until it has heard of all.
pub struct Image {
    handle: Handle,
    /// The number of the watch, and what it calls. Freed when the image is closed.
    watch: Option<(u64, *mut Notify)>,
    pool: Pool,
}

// SAFETY: librbd's handles may be used by any threads at once.
unsafe impl Send for Image {}
// SAFETY: as above; what the watch calls is Sync.
unsafe impl Sync for Image {}

/// A request that the library has.
struct Pending {
    image: Arc<Image>,
    buffer: IoBuf,
    done: Done,
}

impl Image {
    /// Opens an image, or a snapshot of it. Waits.
    pub fn open(pool: Pool, name: &str, snap: Option<&str>, read_only: bool) -> Result<Self, Errno> {
        let (name, snap) = (text(name)?, snap.map(text).transpose()?);
        let functions = &pool.cluster.library.0;
        let open = if read_only { functions.rbd_open_read_only } else { functions.rbd_open };
        let mut handle = ptr::null_mut();
        // SAFETY: the pool is open; names that end with a NUL, and a place for the handle.
        checked(unsafe { open(pool.handle, name.as_ptr(), &raw mut handle, or_null(snap.as_deref())) })?;
        Ok(Self { handle, watch: None, pool })
    }

    fn functions(&self) -> &'static Functions {
        &self.pool.cluster.library.0
    }

    /// The client that it was opened with.
    pub fn cluster(&self) -> &Cluster {
        &self.pool.cluster
    }

    /// What it is now. Waits.
    pub fn info(&self) -> Result<Info, Errno> {
        let mut info = ImageInfo {
            size: 0,
            object_size: 0,
            objects: 0,
            order: 0,
            block_name_prefix: [0; 24],
            parent_pool: 0,
            parent_name: [0; 96],
        };
        // SAFETY: the image is open, and the library fills in at most this many bytes.
        checked(unsafe { (self.functions().rbd_stat)(self.handle, &raw mut info, size_of::<ImageInfo>()) })?;
        Ok(Info { size: info.size, object_size: info.object_size })
    }

    /// An option as it is for this image: its own, its pool's, or else the client's. `None` where there is
    /// none of that name. Waits.
    pub fn option(&self, name: &CStr) -> Result<Option<String>, Errno> {
        let unset = ImageOption { name: ptr::null(), value: ptr::null(), source: 0 };
        // There are about a hundred; the library says how many where that is too few.
        let mut options = vec![unset; 256];
        let count = loop {
            let mut count = options.len() as c_int;
            // SAFETY: the image is open, and at most `count` options are written.
            let result = unsafe {
                (self.functions().rbd_config_image_list)(self.handle, options.as_mut_ptr(), &raw mut count)
            };
            let told = usize::try_from(count).unwrap_or_default();
            match checked(result) {
                Ok(()) => break told.min(options.len()),
                Err(libc::ERANGE) if options.len() < told && told <= MAX_OPTIONS => {
                    options.resize(told, unset);
                }
                Err(errno) => return Err(errno),
            }
        };
        let found = options[..count].iter().find(|option| {
            // SAFETY: the library has filled in so many options, whose texts end with a NUL.
            unsafe { CStr::from_ptr(option.name) == name }
        });
        // SAFETY: as above.
        let value =
            found.map(|option| unsafe { CStr::from_ptr(option.value) }.to_string_lossy().into_owned());
        // SAFETY: the texts of these options are the library's to free, and are not used any more.
        unsafe { (self.functions().rbd_config_image_list_cleanup)(options.as_mut_ptr(), count as c_int) };
        Ok(value)
    }

    /// Has `notify` called, on a thread of the library, whenever the image may have another size. Waits.
    pub fn watch(&mut self, notify: Notify) -> Result<(), Errno> {
        if self.watch.is_some() {
            return Err(libc::EBUSY);
        }
        let notify = Box::into_raw(Box::new(notify));
        let mut number = 0;
        // SAFETY: the image is open; `notify` stays until the watch is ended or the image closed.
        let result = unsafe {
            (self.functions().rbd_update_watch)(self.handle, &raw mut number, updated, notify.cast())
        };
        if let Err(errno) = checked(result) {
            // SAFETY: made above, and nobody else has it.
            drop(unsafe { Box::from_raw(notify) });
            return Err(errno);
        }
        self.watch = Some((number, notify));
        Ok(())
    }

    /// The ranges within `range` that are not holes, in any order; a snapshot's parent is looked at as
    /// well. Waits.
    pub fn allocated(&self, range: Range<u64>) -> Result<Vec<Range<u64>>, Errno> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let (offset, len) = (range.start, range.end - range.start);
        // SAFETY: the image is open; `ranges` is only used by the callback while the call lasts.
        let result = unsafe {
            (self.functions().rbd_diff_iterate2)(
                self.handle,
                ptr::null(),
                offset,
                len,
                1,
                0,
                differs,
                (&raw mut ranges).cast(),
            )
        };
        checked(result).map(|()| ranges)
    }

    /// Begins a part of a request. `done` is called once, on a thread of the library or on this one.
    pub fn begin(self: &Arc<Self>, piece: Piece, mut buffer: IoBuf, done: Done) {
        let Piece { op, may_free, offset, len, at } = piece;
        let data = match op {
            Op::Read | Op::Write => {
                let part = usize::try_from(len).ok().and_then(|len| buffer.get_mut(at..at.checked_add(len)?));
                let Some(part) = part else { return done(Err(libc::EINVAL), buffer) };
                part.as_mut_ptr().cast::<c_char>()
            }
            Op::Discard | Op::WriteZeroes | Op::Flush => ptr::null_mut(),
        };
        let functions = self.functions();
        let len_bytes = len as usize;
        let pending = Box::into_raw(Box::new(Pending { image: Arc::clone(self), buffer, done }));
        let mut completion = ptr::null_mut();
        // SAFETY: `pending` is given back by the callback, or below where that is not called.
        let made =
            unsafe { (functions.rbd_aio_create_completion)(pending.cast(), answered, &raw mut completion) };
        let begun = checked(made).and_then(|()| {
            let (image, zeroes) = (self.handle, if may_free { 0 } else { THICK });
            // SAFETY: the image is open, as `pending` has a reference; `data` are `len` bytes of the
            // buffer in `pending`, which stay where they are when it is moved, and which nobody else
            // uses until the callback.
            let result = unsafe {
                match op {
                    Op::Read => (functions.rbd_aio_read)(image, offset, len_bytes, data, completion),
                    Op::Write => (functions.rbd_aio_write)(image, offset, len_bytes, data, completion),
                    Op::Discard => (functions.rbd_aio_discard)(image, offset, len, completion),
                    Op::WriteZeroes => {
                        (functions.rbd_aio_write_zeroes)(image, offset, len_bytes, completion, zeroes, 0)
                    }
                    Op::Flush => (functions.rbd_aio_flush)(image, completion),
                }
            };
            checked(result).inspect_err(|_| {
                // SAFETY: it was made above; what was not begun does not use it.
                unsafe { (functions.rbd_aio_release)(completion) };
            })
        });
        if let Err(errno) = begun {
            // SAFETY: the library calls back only what it has begun.
            let Pending { image, buffer, done } = *unsafe { Box::from_raw(pending) };
            drop(image);
            done(Err(errno), buffer);
        }
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let functions = self.functions();
        if let Some((number, _)) = &self.watch {
            // SAFETY: the image is open, and the watch is one of it. It waits for calls under way; a
            // failure is of no account, as the image is closed next.
            unsafe { (functions.rbd_update_unwatch)(self.handle, *number) };
        }
        // SAFETY: the handle is one of rbd_open; each request under way would have a reference.
        let closed = checked(unsafe { (functions.rbd_close)(self.handle) });
        if let Err(errno) = closed {
            let why = crate::error::reason(errno);
            tracing::warn!("an image of RBD could not be closed as it should: {why}");
        }
        if let Some((_, notify)) = self.watch.take() {
            // SAFETY: made in `watch`; the image is closed, so nobody calls it any more.
            drop(unsafe { Box::from_raw(notify) });
        }
    }
}

/// A request is done.
unsafe extern "C" fn answered(completion: Handle, pending: *mut c_void) {
    // SAFETY: it is the box that was given with this completion, which is called back once.
    let Pending { image, buffer, done } = *unsafe { Box::from_raw(pending.cast::<Pending>()) };
    let functions = image.functions();
    // SAFETY: the completion is this request's, and is released once, after it was asked.
    let result = unsafe { (functions.rbd_aio_get_return_value)(completion) };
    // SAFETY: as above.
    unsafe { (functions.rbd_aio_release)(completion) };
    drop(image);
    let result = u64::try_from(result).map_err(|_| Errno::try_from(-result).unwrap_or(libc::EIO));
    done(result, buffer);
}

/// The image may have another size.
unsafe extern "C" fn updated(notify: *mut c_void) {
    // SAFETY: it is the box of the watch, which is there until the image is closed.
    let notify = unsafe { &*notify.cast::<Notify>() };
    notify();
}

/// A range is not what it was when there was no image.
unsafe extern "C" fn differs(offset: u64, len: usize, exists: c_int, ranges: *mut c_void) -> c_int {
    // SAFETY: it is the vector of the call that this is called from, by one thread at a time.
    let ranges = unsafe { &mut *ranges.cast::<Vec<Range<u64>>>() };
    if exists != 0
        && let Some(end) = offset.checked_add(len as u64)
    {
        if ranges.len() == MAX_RANGES {
            return -libc::ENOBUFS;
        }
        ranges.push(offset..end);
    }
    0
}
