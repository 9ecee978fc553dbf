//! An open image, and its requests.
#![expect(unsafe_code)]
// UNSAFETY: calls functions of C libraries that are loaded at run time, with handles and memory
// that they use until they call back.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use freestone_core::device::{IoBuf, Op};

use super::cluster::{Cluster, Pool};
use super::{Functions, Handle, ImageInfo, ImageOption, check, or_null, text};
use crate::error::Errno;
use crate::job::Piece;

/// Flag of `rbd_aio_write_zeroes` that allocates space instead of freeing the range
/// (`RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`).
const THICK: c_int = 1;
/// Maximum number of image options accepted from librbd; Ceph has about a hundred.
const MAX_OPTIONS: usize = 1 << 12;
/// Maximum number of allocated ranges per query, which bounds the memory of the result. Queries
/// with more ranges fail with `ENOBUFS`.
const MAX_RANGES: usize = 1 << 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Info {
    pub size: u64,
    pub object_size: u64,
}

type Notify = Box<dyn Fn() + Send + Sync>;

/// Callback for a finished librbd call. The arguments are the result (bytes read, 0 for other
/// operations, or the error number) and the buffer of the request.
pub type DoneCallback = Box<dyn FnOnce(Result<u64, Errno>, IoBuf) + Send>;

/// An open image. Dropping the last reference closes the image, which may block on the cluster and
/// must not happen on a librbd thread. Each request holds a reference until just before its
/// callback. The owner must therefore keep a reference until all requests have completed.
pub struct Image {
    handle: Handle,
    /// Id and callback of the watch for size changes. The callback is freed after the image is
    /// closed.
    watch: Option<(u64, *mut Notify)>,
    pool: Pool,
}

// SAFETY: librbd handles may be used from any thread concurrently.
unsafe impl Send for Image {}
// SAFETY: librbd handles may be used from any thread concurrently; the watch callback is Sync.
unsafe impl Sync for Image {}

/// A request submitted to librbd, which passes it to [`on_complete`].
struct Pending {
    image: Arc<Image>,
    buffer: IoBuf,
    done: DoneCallback,
}

impl Image {
    /// Opens the image `name`, or its snapshot `snap`. Blocks on the cluster.
    pub fn open(pool: Pool, name: &str, snap: Option<&str>, read_only: bool) -> Result<Self, Errno> {
        let (name, snap) = (text(name)?, snap.map(text).transpose()?);
        let functions = &pool.cluster.library.0;
        let open = if read_only { functions.rbd_open_read_only } else { functions.rbd_open };
        let mut handle = ptr::null_mut();
        // SAFETY: the pool is open, the names are NUL-terminated or null, and `handle` is a valid
        // out pointer.
        check(unsafe { open(pool.handle, name.as_ptr(), &raw mut handle, or_null(snap.as_deref())) })?;
        Ok(Self { handle, watch: None, pool })
    }

    fn functions(&self) -> &'static Functions {
        &self.pool.cluster.library.0
    }

    pub fn cluster(&self) -> &Cluster {
        &self.pool.cluster
    }

    /// Returns the current size of the image and the size of its RADOS objects, in bytes. Blocks on
    /// the cluster.
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
        // SAFETY: the image is open, and the library writes at most this many bytes.
        check(unsafe { (self.functions().rbd_stat)(self.handle, &raw mut info, size_of::<ImageInfo>()) })?;
        Ok(Info { size: info.size, object_size: info.object_size })
    }

    /// Returns the effective value of an option for this image. A value of the image overrides that
    /// of its pool, which overrides that of the client. Returns `None` if the option does not
    /// exist. Blocks on the cluster.
    pub fn option(&self, name: &CStr) -> Result<Option<String>, Errno> {
        let unset = ImageOption { name: ptr::null(), value: ptr::null(), source: 0 };
        // Ceph has about a hundred options. If the array is too small, librbd fails with `ERANGE`
        // and reports the number of options.
        let mut options = vec![unset; 256];
        let count = loop {
            let mut count = options.len() as c_int;
            // SAFETY: the image is open, and the library writes at most `count` options.
            let result = unsafe {
                (self.functions().rbd_config_image_list)(self.handle, options.as_mut_ptr(), &raw mut count)
            };
            let reported_count = usize::try_from(count).unwrap_or_default();
            match check(result) {
                Ok(()) => break reported_count.min(options.len()),
                Err(libc::ERANGE) if options.len() < reported_count && reported_count <= MAX_OPTIONS => {
                    options.resize(reported_count, unset);
                }
                Err(errno) => return Err(errno),
            }
        };
        let found = options[..count].iter().find(|option| {
            // SAFETY: the library has filled in `count` options with NUL-terminated strings.
            unsafe { CStr::from_ptr(option.name) == name }
        });
        // SAFETY: the library has filled in `count` options with NUL-terminated strings.
        let value =
            found.map(|option| unsafe { CStr::from_ptr(option.value) }.to_string_lossy().into_owned());
        // SAFETY: the library allocated the strings of these options, and they are not used any
        // more.
        unsafe { (self.functions().rbd_config_image_list_cleanup)(options.as_mut_ptr(), count as c_int) };
        Ok(value)
    }

    /// Registers `notify`, which is called on a librbd thread whenever the image's size may have
    /// changed. Fails with `EBUSY` if a callback is registered already. Blocks on the cluster.
    pub fn watch(&mut self, notify: Notify) -> Result<(), Errno> {
        if self.watch.is_some() {
            return Err(libc::EBUSY);
        }
        let notify = Box::into_raw(Box::new(notify));
        let mut number = 0;
        // SAFETY: the image is open; `notify` lives until the watch is removed or the image closed.
        let result = unsafe {
            (self.functions().rbd_update_watch)(self.handle, &raw mut number, on_update, notify.cast())
        };
        if let Err(errno) = check(result) {
            // SAFETY: the box was created above, and librbd does not use it, as the registration
            // failed.
            drop(unsafe { Box::from_raw(notify) });
            return Err(errno);
        }
        self.watch = Some((number, notify));
        Ok(())
    }

    /// Returns the allocated byte ranges within `range`, in any order. Ranges that a clone reads
    /// from its parent image count as allocated. Blocks on the cluster.
    pub fn allocated(&self, range: Range<u64>) -> Result<Vec<Range<u64>>, Errno> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let (offset, len) = (range.start, range.end - range.start);
        // SAFETY: the image is open; the callback uses `ranges` only during the call.
        let result = unsafe {
            (self.functions().rbd_diff_iterate2)(
                self.handle,
                ptr::null(),
                offset,
                len,
                1,
                0,
                on_diff,
                (&raw mut ranges).cast(),
            )
        };
        check(result).map(|()| ranges)
    }

    /// Submits a piece to librbd. `done` is called once, on a librbd thread or on the calling
    /// thread.
    pub fn submit(self: &Arc<Self>, piece: Piece, mut buffer: IoBuf, done: DoneCallback) {
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
        // SAFETY: the callback takes `pending` back, or the code below does if the callback will
        // not run.
        let created = unsafe {
            (functions.rbd_aio_create_completion)(pending.cast(), on_complete, &raw mut completion)
        };
        let submitted = check(created).and_then(|()| {
            let (image, zeroes) = (self.handle, if may_free { 0 } else { THICK });
            // SAFETY: `pending` holds a reference, so the image stays open. `data` points to `len`
            // bytes of the buffer in `pending`, which do not move with it and which nothing else
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
            check(result).inspect_err(|_| {
                // SAFETY: the completion was created above; a request that was not submitted does
                // not use it.
                unsafe { (functions.rbd_aio_release)(completion) };
            })
        });
        if let Err(errno) = submitted {
            // SAFETY: the library does not call back for a request that it did not accept.
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
            // SAFETY: the image is open, and the watch belongs to it. The call waits for running
            // callbacks. A failure does not matter, as the image is closed next.
            unsafe { (functions.rbd_update_unwatch)(self.handle, *number) };
        }
        // SAFETY: the handle is from rbd_open; a request in flight would hold a reference.
        let closed = check(unsafe { (functions.rbd_close)(self.handle) });
        if let Err(errno) = closed {
            let why = crate::error::reason(errno);
            tracing::warn!("closing an RBD image failed: {why}");
        }
        if let Some((_, notify)) = self.watch.take() {
            // SAFETY: the box was created in `watch`; the image is closed, so the library does not
            // call it any more.
            drop(unsafe { Box::from_raw(notify) });
        }
    }
}

/// Called by librbd, on one of its threads, when a request has finished.
unsafe extern "C" fn on_complete(completion: Handle, pending: *mut c_void) {
    // SAFETY: `pending` is the box passed with this completion, whose callback runs once.
    let Pending { image, buffer, done } = *unsafe { Box::from_raw(pending.cast::<Pending>()) };
    let functions = image.functions();
    // SAFETY: the completion belongs to this request, and is released once, after its result is
    // read.
    let result = unsafe { (functions.rbd_aio_get_return_value)(completion) };
    // SAFETY: the completion belongs to this request, and is not used after this.
    unsafe { (functions.rbd_aio_release)(completion) };
    drop(image);
    let result = u64::try_from(result).map_err(|_| Errno::try_from(-result).unwrap_or(libc::EIO));
    done(result, buffer);
}

/// Called by librbd, on one of its threads, when the image's size may have changed.
unsafe extern "C" fn on_update(notify: *mut c_void) {
    // SAFETY: `notify` is the watch's box, which lives until the image is closed.
    let notify = unsafe { &*notify.cast::<Notify>() };
    notify();
}

/// Called by librbd for each range in which the image differs from an empty one. `exists` is 0 if
/// the range was freed.
unsafe extern "C" fn on_diff(offset: u64, len: usize, exists: c_int, ranges: *mut c_void) -> c_int {
    // SAFETY: `ranges` is the vector of the enclosing call; the library calls from one thread at a
    // time.
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
