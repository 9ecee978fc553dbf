//! What the C half calls; declared in `engine.h`, where each function is described.
#![expect(unsafe_code)]
// UNSAFETY: functions for C take addresses. The C half passes what `engine.h` says, and each job
// from one thread only.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::time::Duration;

use freestone::device::zoned::{ZoneCondition, ZoneOp, ZoneType};
use freestone::device::{Error, Flags, Op, Request, Result, Zoned};

use crate::devices;
use crate::job::{Job, Memory, Queued};

/// `FREESTONE_QUEUED`
const QUEUED: c_int = -1;
const NO_ERROR: c_int = 0;

/// `struct freestone_job`
pub struct Place {
    job: Job,
    words: String,
}

/// `struct freestone_traits`
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

/// `freestone_say`
pub type Say = extern "C" fn(*const c_char);
/// `freestone_is_ending`
pub type IsEnding = extern "C" fn(*mut c_void) -> bool;
/// `freestone_row`
pub type Row = extern "C" fn(*mut c_void, u64, u64, u64, u64, c_uint, c_uint);

/// # Safety
/// `words` is a C string, `place` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_attach(
    words: *const c_char,
    users: c_uint,
    place: *mut *mut Place,
    say: Say,
) -> c_int {
    let say = |sentence: &str| {
        // A zero byte can only come from the words, and these have none.
        if let Ok(sentence) = CString::new(sentence) {
            say(sentence.as_ptr());
        }
    };
    // SAFETY: the caller's promise.
    let words = unsafe { CStr::from_ptr(words) };
    let Ok(words) = words.to_str() else {
        say("device: is not UTF-8");
        return libc::EINVAL;
    };
    let shared = match devices::attach(words, users as usize, &say) {
        Ok(shared) => shared,
        Err(error) => {
            say(&error.sentence);
            return error.errno;
        }
    };
    let made = Place { job: Job::new(shared), words: words.to_owned() };
    // SAFETY: the caller's promise.
    unsafe { *place = Box::into_raw(Box::new(made)) };
    NO_ERROR
}

/// # Safety
/// `place` is from [`freestone_attach`] and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_detach(place: *mut Place) {
    // SAFETY: made by Box::into_raw, and given back once.
    let Place { job, words } = *unsafe { Box::from_raw(place) };
    drop(job);
    devices::job_gone(&words);
}

/// # Safety
/// `place` is from [`freestone_attach`], `traits` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_traits(place: *const Place, traits: *mut Traits) {
    // SAFETY: the caller's promise.
    let geometry = unsafe { &*place }.job.shared().device().geometry();
    let zones = geometry.zones;
    let found = Traits {
        size: geometry.size,
        logical_block: geometry.logical_block,
        max_open_zones: zones.map_or(0, |zones| zones.max_open),
        max_active_zones: zones.map_or(0, |zones| zones.max_active),
        zoned: u8::from(zones.is_some()),
        read_only: u8::from(geometry.read_only),
    };
    // SAFETY: the caller's promise.
    unsafe { traits.write(found) };
}

/// # Safety
/// `place` is from [`freestone_attach`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_label(place: *const Place) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { &*place }.job.shared().label().as_ptr()
}

/// # Safety
/// `place` is from [`freestone_attach`]; for reads and writes `buffer` has `len` bytes, which live
/// until the event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_queue(
    place: *mut Place,
    op: c_uint,
    fua: bool,
    offset: u64,
    buffer: *mut u8,
    len: u64,
    token: *mut c_void,
) -> c_int {
    // `enum freestone_op`, in its order.
    let op = match op {
        0 => Op::Read,
        1 => Op::Write,
        2 => Op::Discard,
        _ => Op::Flush,
    };
    let flags = if fua { Flags::FUA } else { Flags::empty() };
    let request = Request::new(op, offset, len).with(flags);
    let bytes = if matches!(op, Op::Read | Op::Write) { len as usize } else { 0 };
    // SAFETY: the caller's promise; fio initialises its buffers when it makes them.
    let memory = unsafe { Memory::new(buffer, bytes) };
    // SAFETY: the caller's promise.
    let place = unsafe { &mut *place };
    match place.job.queue(request, memory, token as usize) {
        Ok(Queued::Done) => NO_ERROR,
        Ok(Queued::OnItsWay) => QUEUED,
        Err(error) => error.errno(),
    }
}

/// # Safety
/// `place` is from [`freestone_attach`]; `is_ending` may be called with `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_getevents(
    place: *mut Place,
    min: c_uint,
    max: c_uint,
    timeout_ns: i64,
    is_ending: IsEnding,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    let place = unsafe { &mut *place };
    let timeout = u64::try_from(timeout_ns).ok().map(Duration::from_nanos);
    match place.job.wait(min as usize, max as usize, timeout, &|| is_ending(context)) {
        Ok(events) => events.len() as c_int,
        Err(_stuck) => -libc::ETIMEDOUT,
    }
}

/// # Safety
/// `place` is from [`freestone_attach`], `error` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_event(
    place: *const Place,
    event: c_uint,
    error: *mut c_int,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    let place = unsafe { &*place };
    let Some(event) = place.job.events().get(event as usize) else { return ptr::null_mut() };
    // SAFETY: the caller's promise.
    unsafe { *error = event.outcome.err().map_or(NO_ERROR, Error::errno) };
    ptr::with_exposed_provenance_mut(event.token)
}

/// # Safety
/// `place` is from [`freestone_attach`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_cancel(place: *mut Place, token: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    let place = unsafe { &mut *place };
    if place.job.cancel(token as usize) { NO_ERROR } else { libc::ENOENT }
}

/// # Safety
/// `place` is from [`freestone_attach`]; `row` may be called with `context` up to `most` times.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_report_zones(
    place: *const Place,
    offset: u64,
    most: c_uint,
    context: *mut c_void,
    row: Row,
) -> c_int {
    // SAFETY: the caller's promise.
    let place = unsafe { &*place };
    let mut left = most;
    let reported = zones(place, |zones| {
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
/// `place` is from [`freestone_attach`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freestone_change_zones(
    place: *const Place,
    finish: bool,
    offset: u64,
    len: u64,
) -> c_int {
    // SAFETY: the caller's promise.
    let place = unsafe { &*place };
    let op = if finish { ZoneOp::Finish } else { ZoneOp::Reset };
    let changed = zones(place, |zones| {
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

fn zones<T>(place: &Place, action: impl FnOnce(&dyn Zoned) -> Result<T>) -> Result<T> {
    action(place.job.shared().device().zoned().ok_or(Error::Unsupported)?)
}

/// The number of a type in the zoned block standards.
const fn kind(kind: ZoneType) -> c_uint {
    match kind {
        ZoneType::Conventional => 1,
        ZoneType::SequentialRequired => 2,
    }
}

/// The number of a condition in the zoned block standards.
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
