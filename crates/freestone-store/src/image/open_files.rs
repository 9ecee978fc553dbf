//! Open files of the cache, for all images of the process. The number of open files is limited to a part of
//! `RLIMIT_NOFILE`.

use crate::rt::sync::{Arc, LazyLock, Weak};
use freestone_core::sync::Mutex;
use std::collections::VecDeque;

use rustix::process::{Resource, getrlimit};

use super::segment::Segment;
use crate::cache::Entry;

/// The maximum number of open cache files is `1/PART` of `RLIMIT_NOFILE`, but not above `FILES_MAX`.
const PART: u64 = 4;
const FILES_MAX: u64 = 16 << 10;

/// Location of an open cache file: its segment, and the indexes of its map and chunk.
struct Open {
    segment: Weak<Segment>,
    map: usize,
    chunk: usize,
}

static OPEN: LazyLock<Mutex<VecDeque<Open>>> = LazyLock::new(Mutex::default);
static MOST: LazyLock<usize> = LazyLock::new(|| {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    (limit / PART).clamp(16, FILES_MAX) as usize
});

/// Keeps the cache file of a chunk open for later reads. If too many files are open, closes files that were
/// not read lately.
pub fn keep(segment: &Arc<Segment>, map: usize, chunk: usize, entry: Entry) {
    let slot = &segment.maps[map].entries[chunk];
    {
        let mut slot = slot.write();
        if slot.replace(entry).is_some() {
            // The slot had an open file before, so it is already in the list.
            return;
        }
    }
    let mut open = OPEN.lock();
    open.push_back(Open { segment: Arc::downgrade(segment), map, chunk });
    let mut looks = open.len();
    while open.len() > *MOST
        && let Some(oldest) = open.pop_front()
    {
        looks = looks.saturating_sub(1);
        let Some(segment) = oldest.segment.upgrade() else { continue };
        let slot = &segment.maps[oldest.map].entries[oldest.chunk];
        // A file whose slot is locked is in use, so it stays open.
        let closed = slot.try_write().is_some_and(|mut slot| {
            let is_idle = looks == 0 || slot.as_ref().is_none_or(|entry| !entry.was_used());
            if is_idle {
                *slot = None;
            }
            is_idle
        });
        if !closed {
            open.push_back(oldest);
            if looks == 0 {
                break;
            }
        }
    }
}
