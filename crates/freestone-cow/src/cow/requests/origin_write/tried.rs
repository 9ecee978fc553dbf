//! Writes of an origin that need no new exceptions, on the thread of the caller.

use super::STEP_CHUNKS;
use crate::cow::exceptions::Exception;
use crate::cow::state::{OriginCore, Snap, View};
use freestone_core::device::{Buffer, Error, Request, Result, TryResult};
use freestone_core::freeze_gate::WorkGuard;

/// Counts a write at the gate if the origin has no snapshots; otherwise returns `None`. No snapshot
/// is attached before the guard is dropped.
pub(in crate::cow) fn without_snapshots(core: &OriginCore) -> Option<WorkGuard<'_, View>> {
    freestone_core::trail::step!();
    let without = core.gate.enter(|view| {
        let without = view.is_some_and(|view| view.snapshots.is_empty() && view.merging.is_none());
        if without {
            core.gate.begin();
            core.content_version.mark_written();
        }
        without
    });
    without.then(|| core.gate.work_guard())
}

/// Executes as much of a write as possible without new exceptions and without waiting. The caller
/// must have checked the range.
pub(in crate::cow) fn try_write(
    core: &OriginCore,
    request: &Request,
    buffer: Buffer<'_>,
) -> Result<TryResult> {
    let safe = core.gate.enter(|view| {
        let safe = match view {
            Some(view @ View { merging: None, .. }) => safe_bytes(view, request),
            // The gate is closed, or a snapshot is being merged.
            _ => 0,
        };
        if safe > 0 {
            core.gate.begin();
            core.content_version.mark_written();
        }
        safe
    });
    if safe == 0 {
        return Ok(TryResult::WouldBlock);
    }
    // Counted until the device has completed the write, so that no snapshot is attached meanwhile.
    let _work = core.gate.work_guard();
    let buffer = match buffer {
        Buffer::Write(data) => Buffer::Write(data.get(..safe as usize).ok_or(Error::Misaligned)?),
        buffer => buffer,
    };
    match core.device.try_io(&Request { len: safe, ..*request }, buffer)? {
        TryResult::Done if safe < request.len => Ok(TryResult::Partly(safe)),
        tried => Ok(tried),
    }
}

/// Returns the number of bytes at the start of a request without missing exceptions.
pub(super) fn safe_bytes(view: &View, request: &Request) -> u64 {
    let end = request.offset + request.len;
    let active = view.snapshots.iter().filter(|snap| snap.is_active());
    active.fold(end, |end, snap| complete_until(snap, request.offset, end)) - request.offset
}

/// Returns the offset up to which all chunks from offset `at` on have exceptions in `snap` or need
/// none, at most `end`.
fn complete_until(snap: &Snap, at: u64, end: u64) -> u64 {
    if snap.is_invalid() && at < snap.size {
        return at;
    }
    let chunk = snap.chunk();
    let last = end.min(snap.size).div_ceil(chunk).min(at / chunk + STEP_CHUNKS);
    for number in at / chunk..last {
        if !matches!(snap.exceptions.get(number), Exception::Complete(_)) {
            return (number * chunk).clamp(at, end);
        }
    }
    if last * chunk >= snap.size { end } else { (last * chunk).clamp(at, end) }
}
