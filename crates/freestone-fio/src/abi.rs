//! Functions that the C half of the engine calls; `engine.h` declares and describes them.
#![expect(unsafe_code)]
// UNSAFETY: functions for C take raw pointers. The C half guarantees what `engine.h` requires, and
// calls each job from one thread only.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::time::Duration;

use freestone::device::zoned::{ZoneCondition, ZoneOp, ZoneType};
use freestone::device::{Error, Flags, Op, Request, Result, Zoned};

use crate::devices;
use crate::job::{Job, Memory, QueueResult};

/// `FREESTONE_QUEUED` in `engine.h`: the request is in flight.
const QUEUED: c_int = -1;
const NO_ERROR: c_int = 0;

/// `struct freestone_job` in `engine.h`, opaque to the C half.
pub struct JobHandle {
    job: Job,
    spec: String,
}

/// `struct freestone_traits` in `engine.h`; the layout must be the same.
#[repr(C)]
#[derive(Debug)]
pub struct Traits {
    size: u64,
    logical_block: u32,
    max_open_zones: u32,
    max_active_zones: u32,
    zoned: u8,
    read_only: u8,
}

/// `freestone_say` in `engine.h`: prints a message for the user.
pub type Say = extern "C" fn(*const c_char);
/// `freestone_is_ending` in `engine.h`: returns true if the job must end.
pub type IsEnding = extern "C" fn(*mut c_void) -> bool;
/// `freestone_row` in `engine.h`: receives one zone of a report.
pub type Row = extern "C" fn(*mut c_void, u64, u64, u64, u64, c_uint, c_uint);

/// # Safety
/// `spec` is a C string, `handle` is a valid pointer to write to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_attach(
    spec: *const c_char,
    users: c_uint,
    handle: *mut *mut JobHandle,
    say: Say,
) -> c_int {
    let say = |sentence: &str| {
        // A NUL could only come from the specification, which is a C string and contains none.
        if let Ok(sentence) = CString::new(sentence) {
            say(sentence.as_ptr());
        }
    };
    // SAFETY: guaranteed by the caller.
    let spec = unsafe { CStr::from_ptr(spec) };
    let Ok(spec) = spec.to_str() else {
        say("device: is not UTF-8");
        return libc::EINVAL;
    };
    let shared = match devices::attach(spec, users as usize, &say) {
        Ok(shared) => shared,
        Err(error) => {
            say(&error.sentence);
            return error.errno;
        }
    };
    let job_handle = JobHandle { job: Job::new(shared), spec: spec.to_owned() };
    // SAFETY: guaranteed by the caller.
    unsafe { *handle = Box::into_raw(Box::new(job_handle)) };
    NO_ERROR
}

/// # Safety
/// `handle` is from [`freestone_attach`] and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_detach(handle: *mut JobHandle) {
    // SAFETY: created by Box::into_raw, and passed back once.
    let JobHandle { job, spec } = *unsafe { Box::from_raw(handle) };
    drop(job);
    devices::release_job(&spec);
}

/// # Safety
/// `handle` is from [`freestone_attach`], `traits` is a valid pointer to write to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_traits(handle: *const JobHandle, traits: *mut Traits) {
    // SAFETY: guaranteed by the caller.
    let geometry = unsafe { &*handle }.job.shared().device().geometry();
    let zones = geometry.zones;
    let found = Traits {
        size: geometry.size,
        logical_block: geometry.logical_block,
        max_open_zones: zones.map_or(0, |zones| zones.max_open),
        max_active_zones: zones.map_or(0, |zones| zones.max_active),
        zoned: u8::from(zones.is_some()),
        read_only: u8::from(geometry.read_only),
    };
    // SAFETY: guaranteed by the caller.
    unsafe { traits.write(found) };
}

/// # Safety
/// `handle` is from [`freestone_attach`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_label(handle: *const JobHandle) -> *const c_char {
    // SAFETY: guaranteed by the caller.
    unsafe { &*handle }.job.shared().label().as_ptr()
}

/// # Safety
/// `handle` is from [`freestone_attach`]. For reads and writes, `buffer` has `len` bytes that live
/// until the event of the request, or until the request is cancelled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_queue(
    handle: *mut JobHandle,
    op: c_uint,
    fua: bool,
    offset: u64,
    buffer: *mut u8,
    len: u64,
    token: *mut c_void,
) -> c_int {
    // The order of `enum freestone_op` in `engine.h`.
    let op = match op {
        0 => Op::Read,
        1 => Op::Write,
        2 => Op::Discard,
        _ => Op::Flush,
    };
    let flags = if fua { Flags::FUA } else { Flags::empty() };
    let request = Request::new(op, offset, len).with(flags);
    let bytes = if matches!(op, Op::Read | Op::Write) { len as usize } else { 0 };
    // SAFETY: guaranteed by the caller; fio initialises its buffers at allocation.
    let memory = unsafe { Memory::new(buffer, bytes) };
    // SAFETY: guaranteed by the caller.
    let handle = unsafe { &mut *handle };
    match handle.job.queue(request, memory, token as usize) {
        Ok(QueueResult::Completed) => NO_ERROR,
        Ok(QueueResult::InFlight) => QUEUED,
        Err(error) => error.errno(),
    }
}

/// # Safety
/// `handle` is from [`freestone_attach`]; `is_ending` may be called with `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_getevents(
    handle: *mut JobHandle,
    min: c_uint,
    max: c_uint,
    timeout_ns: i64,
    is_ending: IsEnding,
    context: *mut c_void,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    let handle = unsafe { &mut *handle };
    let timeout = u64::try_from(timeout_ns).ok().map(Duration::from_nanos);
    match handle.job.wait(min as usize, max as usize, timeout, &|| is_ending(context)) {
        Ok(events) => events.len() as c_int,
        Err(_stuck) => -libc::ETIMEDOUT,
    }
}

/// # Safety
/// `handle` is from [`freestone_attach`], `error` is a valid pointer to write to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_event(
    handle: *const JobHandle,
    event: c_uint,
    error: *mut c_int,
) -> *mut c_void {
    // SAFETY: guaranteed by the caller.
    let handle = unsafe { &*handle };
    let Some(event) = handle.job.events().get(event as usize) else { return ptr::null_mut() };
    // SAFETY: guaranteed by the caller.
    unsafe { *error = event.outcome.err().map_or(NO_ERROR, Error::errno) };
    ptr::with_exposed_provenance_mut(event.token)
}

/// # Safety
/// `handle` is from [`freestone_attach`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_cancel(handle: *mut JobHandle, token: *mut c_void) -> c_int {
    // SAFETY: guaranteed by the caller.
    let handle = unsafe { &mut *handle };
    if handle.job.cancel(token as usize) { NO_ERROR } else { libc::ENOENT }
}

/// # Safety
/// `handle` is from [`freestone_attach`]; `row` may be called with `context` up to `most` times.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_report_zones(
    handle: *const JobHandle,
    offset: u64,
    most: c_uint,
    context: *mut c_void,
    row: Row,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    let handle = unsafe { &*handle };
    let mut left = most;
    let reported = zones(handle, |zones| {
        zones.report(offset, &mut |zone| {
            if left == 0 {
                return false;
            }
            left -= 1;
            let (kind, condition) = (kind(zone.kind), condition(zone.condition));
            row(context, zone.start, zone.len, zone.capacity, zone.write_pointer, kind, condition);
            left != 0
        })
    });
    reported.err().map_or(NO_ERROR, Error::errno)
}

/// # Safety
/// `handle` is from [`freestone_attach`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_change_zones(
    handle: *const JobHandle,
    finish: bool,
    offset: u64,
    len: u64,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    let handle = unsafe { &*handle };
    let op = if finish { ZoneOp::Finish } else { ZoneOp::Reset };
    let changed = zones(handle, |zones| {
        let mut starts = Vec::new();
        zones.report(offset, &mut |zone| {
            let inside = zone.start < offset.saturating_add(len);
            if inside && zone.start >= offset && zone.kind == ZoneType::SequentialRequired {
                starts.push(zone.start);
            }
            inside
        })?;
        starts.into_iter().try_for_each(|start| zones.zone_op(op, start))
    });
    changed.err().map_or(NO_ERROR, Error::errno)
}

fn zones<T>(handle: &JobHandle, action: impl FnOnce(&dyn Zoned) -> Result<T>) -> Result<T> {
    action(handle.job.shared().device().zones()?)
}

/// Returns the number that the zoned block standards (ZBC, ZAC) assign to a zone type.
const fn kind(kind: ZoneType) -> c_uint {
    match kind {
        ZoneType::Conventional => 1,
        ZoneType::SequentialRequired => 2,
    }
}

/// Returns the number that the zoned block standards (ZBC, ZAC) assign to a zone condition.
const fn condition(condition: ZoneCondition) -> c_uint {
    match condition {
        ZoneCondition::NotWritePointer => 0x0,
        ZoneCondition::Empty => 0x1,
        ZoneCondition::ImplicitOpen => 0x2,
        ZoneCondition::ExplicitOpen => 0x3,
        ZoneCondition::Closed => 0x4,
        ZoneCondition::ReadOnly => 0xd,
        ZoneCondition::Full => 0xe,
        ZoneCondition::Offline => 0xf,
    }
}
