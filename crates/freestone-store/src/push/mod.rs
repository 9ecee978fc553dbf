//! Push: uploads the content of a device as an image, and sets a tag to the image.
//!
//! A push sends only new content. The page hashes of the parent image are known: the previous image of the
//! tag, or the image that the device is a fork of. Pages that differ are packed into new chunks, and the new
//! image refers to existing chunks for the rest. The tag is set last, on condition that the tag is unchanged.
//! Until then the push is invisible, and an interrupted push leaves only objects that a prune deletes.
//!
//! A delta consists of packed pages and one map for each segment, so scattered writes do not send a chunk
//! each. A segment has at most eight maps. The page hashes (16 bytes a page) are stored beside the maps, and
//! only pushes read them. So a push of a fork need not read the image.
//!
//! **Concurrent prunes.** A prune deletes objects older than the grace period of the store that no tag and no
//! young manifest refers to. So a push publishes its manifest within half of the grace period, and rewrites
//! objects that are too old to be reused (`timing`). Its parent image must have a tag for the whole push, or
//! a young manifest, which the push rewrites if necessary.

mod changed;
mod guard;
mod segment;
mod uploads;

use crate::rt::sync::atomic::{AtomicU64, Ordering};
use crate::rt::time::{Instant, UNIX_EPOCH};

use freestone_core::device::{Changes, Device};

use crate::clock::Clock;
use crate::format::manifest::{Manifest, Segment};
use crate::format::name::{Kind, Name};
use crate::format::tag::Tag;
use crate::format::{IMAGE_BYTES_MAX, SEGMENT_BYTES, VERSION};
use crate::objects::CallLimits;
use crate::parallel;
use crate::store::{Error, MANIFESTS, Result, Store, TAGS};
use crate::timing;
use guard::Guard;
use uploads::Uploads;

/// Maximum number of segments that a push processes at the same time.
const SEGMENTS_AT_ONCE: usize = 4;
/// Default maximum number of requests of a push in flight.
pub const THREADS: usize = 32;

/// Device to push. The content must not change during the push.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    /// The device to read.
    pub device: &'a dyn Device,
    /// Name of the device to record in the manifest.
    pub label: &'a str,
    /// Base image, if the device is a fork of an image in the same store.
    pub base_image: Option<BaseImage<'a>>,
}

/// Base image of a fork, and the layers between the device and the image.
#[derive(Clone, Copy)]
pub struct BaseImage<'a> {
    /// The pushed device, and the forks and snapshots between the device and the base image.
    pub layers: &'a [Layer<'a>],
    /// Name of the base image.
    pub name: Name,
    /// Tag from which the base image was opened.
    pub tag: Option<&'a str>,
}

/// The pushed device, or a fork or snapshot between it and the base image, with its own changes.
#[derive(Clone, Copy)]
pub struct Layer<'a> {
    pub(crate) changes: &'a dyn Changes,
    pub(crate) size: u64,
}

impl<'a> Layer<'a> {
    /// Returns the layer of a device, or `None` if the device does not track its own changes.
    pub fn of(device: &'a dyn Device) -> Option<Self> {
        Some(Self { changes: device.changes()?, size: device.geometry().size })
    }
}

/// Settings of a push.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// Name of the tag to set to the pushed image.
    pub tag: &'a str,
    /// Whether to read the whole device and ignore earlier images. Stored chunks with equal content are still
    /// reused.
    pub full: bool,
    /// Maximum number of requests of the push in flight.
    pub threads: usize,
    /// True if the store was created for this push, so it has no objects to reuse.
    pub is_new: bool,
}

/// Result of a push.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PushReport {
    /// Name of the pushed image, or of the unchanged image of the tag.
    pub manifest: Name,
    /// Number of times that the tag was set since it was created.
    pub generation: u64,
    /// True if the tag was set; false if the tag already referred to an equal image.
    pub is_new: bool,
    /// Number of pages that differ from the parent image. In segments that are stored as a whole, the number
    /// of nonzero pages.
    pub changed_pages: u64,
    /// Number of chunks sent, and their total stored size in bytes.
    pub sent: (u64, u64),
    /// Number of chunks that already existed and were not sent.
    pub reused: u64,
}

/// State of one push.
struct Work<'a> {
    store: &'a Store,
    source: Source<'a>,
    options: Options<'a>,
    limits: CallLimits<'a>,
    sent: Uploads<'a>,
    changed_pages: AtomicU64,
    done: AtomicU64,
    note: &'a (dyn Fn(u64, u64) + Sync),
}

/// Pushes a device. `note` receives the number of bytes that are already processed, and the total number of
/// bytes.
///
/// # Errors
/// Errors of requests to the object store and of the device; [`Error::TagMoved`], [`Error::TooSlow`] and
/// others. The tag is unchanged after an error, unless the response to setting it was lost or came too late
/// ([`Error::SetLate`]).
pub fn push(
    store: &Store,
    source: Source<'_>,
    options: Options<'_>,
    note: &(dyn Fn(u64, u64) + Sync),
    limits: CallLimits<'_>,
) -> Result<PushReport> {
    let grace = store.domain().grace;
    let time_max = timing::push_time_max(grace);
    let begun = store.uptime();
    let limits = CallLimits { deadline: limits.deadline.min(Instant::now() + time_max), ..limits };
    let is_late = |error| {
        if store.uptime().saturating_sub(begun) >= time_max { Error::TooSlow(grace) } else { error }
    };
    let clock = Clock::start(store, limits).map_err(is_late)?;
    let before = store.tag(options.tag, limits)?;
    let generation = before.as_ref().map_or(0, |before| before.tag.generation);
    let generation = generation.checked_add(1).ok_or_else(|| {
        let why = "it was set as often as can be counted; remove it and push again".to_owned();
        Error::Damaged(format!("{TAGS}{}", options.tag), why)
    })?;
    let parent = match &before {
        _ if options.full => None,
        Some(before) => Some(before.tag.manifest),
        None => source.base_image.map(|base_image| base_image.name),
    };
    let guard = match (&before, parent, source.base_image) {
        (None, Some(_), Some(base_image)) => {
            Guard::keep(store, base_image.name, base_image.tag, &clock, limits)?
        }
        // The conditional write of the tag shows that the parent image had this tag during the whole push.
        _ => Guard::Tag,
    };
    let load = |name: &Name| store.manifest(name, limits);
    let parent_image = parent.as_ref().map(load).transpose()?;
    let base_image = match source.base_image {
        Some(base_image) if parent == Some(base_image.name) => parent_image.clone(),
        // If the base image cannot be read, the push reads the whole device.
        Some(base_image) if parent.is_some() => load(&base_image.name).ok(),
        _ => None,
    };
    let size = source.device.geometry().size - u64::from(source.device.geometry().padding);
    let size = size.next_multiple_of(512);
    if size == 0 || size > IMAGE_BYTES_MAX {
        return Err(Error::Local("an image has a byte at least, and 256 TiB at most".into()));
    }
    let work = Work {
        store,
        source,
        options,
        limits,
        sent: Uploads::new(options.is_new, &clock),
        changed_pages: AtomicU64::new(0),
        done: AtomicU64::new(0),
        note,
    };
    let segments = work.push_segments(size, parent_image.as_ref(), base_image.as_ref());
    let segments = segments.map_err(|error| match (&guard, &parent) {
        (Guard::Young | Guard::OtherTag(..), Some(parent)) if error.is_missing() => {
            Error::ParentExpiring(format!("{MANIFESTS}{parent}"))
        }
        _ => is_late(error),
    })?;
    let pushed = |manifest, generation, is_new| PushReport {
        manifest,
        generation,
        is_new,
        changed_pages: work.changed_pages.load(Ordering::SeqCst),
        sent: work.sent.sent(),
        reused: work.sent.reused(),
    };
    if let (Some(before), Some(parent)) = (&before, &parent_image)
        && (parent.size, &parent.segments) == (size, &segments)
    {
        return Ok(pushed(before.tag.manifest, before.tag.generation, false));
    }
    // If the push took too long, a prune may have deleted objects that the manifest would refer to.
    if clock.elapsed() >= time_max {
        return Err(Error::TooSlow(grace));
    }
    let now = crate::rt::time_of_day().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let manifest =
        Manifest { format: VERSION, size, pushed: now, source: source.label.to_owned(), parent, segments };
    let manifest = store.write_meta(MANIFESTS, Kind::Manifest, &manifest.bytes(), limits).map_err(is_late)?;
    work.sent.check_renewed(store, options.threads, limits).map_err(is_late)?;
    guard.check(store, limits)?;
    if clock.elapsed_at_store(limits).map_err(is_late)?.max(clock.elapsed()) >= time_max {
        return Err(Error::TooSlow(grace));
    }
    let tag = Tag::new(store.domain(), options.tag, manifest, generation, now);
    store.set_tag(options.tag, before.as_ref(), &tag, limits)?;
    // The tag must be set before the manifest is older than the grace period.
    if clock.elapsed() >= grace {
        return Err(Error::SetLate(options.tag.to_owned()));
    }
    Ok(pushed(manifest, generation, true))
}

impl Work<'_> {
    fn push_segments(
        &self,
        size: u64,
        parent: Option<&Manifest>,
        base: Option<&Manifest>,
    ) -> Result<Vec<Segment>> {
        let count = size.div_ceil(SEGMENT_BYTES) as usize;
        let at_once = SEGMENTS_AT_ONCE.min(count).min(self.options.threads).max(1);
        let threads = self.options.threads.div_ceil(at_once);
        let maps: Vec<_> = (0..count).map(|_| crate::rt::sync::OnceLock::new()).collect();
        (self.note)(0, size);
        parallel::for_each(at_once, count, |number| {
            let start = number as u64 * SEGMENT_BYTES;
            let len = SEGMENT_BYTES.min(size - start);
            let task = segment::Task {
                work: self,
                start,
                len,
                threads,
                parent: parent.map_or(&[], |image| image.maps(number as u32)),
                base: base.map(|image| image.maps(number as u32)),
            };
            let pushed = task.push()?;
            let _ = maps[number].set(pushed);
            let done = self.done.fetch_add(len, Ordering::SeqCst) + len;
            (self.note)(done, size);
            Ok::<(), Error>(())
        })?;
        let maps = maps.into_iter().zip(0_u32..);
        let made = maps.map(|(maps, number)| Segment { number, maps: maps.into_inner().unwrap_or_default() });
        Ok(made.filter(|segment| !segment.maps.is_empty()).collect())
    }
}
