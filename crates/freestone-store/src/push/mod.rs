//! A push: an image goes to a store, and a tag then says that it is there.
//!
//! Only what is not there yet is sent. Of an image that the tag had before, or that the device is a fork
//! of, the hashes of all pages are known; pages that differ are packed into chunks of their own, and the
//! rest is referred to. The tag is set last, with the condition that it is what it was: until then nobody
//! sees anything, and a push that ends early leaves only objects that a prune deletes.
//!
//! **Beside a prune.** A prune deletes objects that are older than the grace of the store and that no tag and
//! no young manifest refers to. So a push publishes its manifest within half of the grace, writes objects
//! again that are too old to be reused (`timing`), and stands only on an image that a tag refers to all the
//! time, or a manifest that the push has made young again.

mod changed;
mod guard;
mod segment;
mod sent;

use crate::rt::sync::atomic::{AtomicU64, Ordering};
use crate::rt::time::{Instant, UNIX_EPOCH};

use freestone_core::device::{Changes, Device};

use crate::format::manifest::{Manifest, Segment};
use crate::format::name::{Kind, Name};
use crate::format::tag::Tag;
use crate::format::{IMAGE_BYTES_MAX, SEGMENT_BYTES, VERSION};
use crate::objects::Until;
use crate::parallel;
use crate::store::{Error, MANIFESTS, Result, Store, TAGS};
use crate::timing::{self, Clock};
use guard::Guard;
use sent::Sent;

/// Segments that are worked on at once.
const SEGMENTS_AT_ONCE: usize = 4;
/// Requests under way at once, where nothing else was said.
pub const THREADS: usize = 32;

/// What is pushed. It must not change meanwhile.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    /// The device.
    pub device: &'a dyn Device,
    /// What people know it by.
    pub label: &'a str,
    /// What it changes, where it is over an image of the same store.
    pub over: Option<Over<'a>>,
}

/// A device over an image.
#[derive(Clone, Copy)]
pub struct Over<'a> {
    /// What it holds itself, and what that which lies between it and the image does.
    pub layers: &'a [Layer<'a>],
    /// The image.
    pub base: Name,
    /// The tag that said so.
    pub tag: Option<&'a str>,
}

/// A device that was made from another, which is not larger.
#[derive(Clone, Copy)]
pub struct Layer<'a> {
    pub(crate) changes: &'a dyn Changes,
    pub(crate) size: u64,
}

impl<'a> Layer<'a> {
    /// `None` where it does not know what it holds itself.
    pub fn of(device: &'a dyn Device) -> Option<Self> {
        Some(Self { changes: device.changes()?, size: device.geometry().size })
    }
}

/// How it is pushed.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// The tag that is to say where it is.
    pub tag: &'a str,
    /// Refer to nothing that was there before, but for chunks with the same content.
    pub full: bool,
    /// Requests under way at once.
    pub threads: usize,
    /// The store was begun for this push, so nothing is in it.
    pub is_new: bool,
}

/// What was pushed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// The image.
    pub manifest: Name,
    /// How often the tag was set.
    pub generation: u64,
    /// Whether the tag says it anew: not, where the same image was there.
    pub is_new: bool,
    /// Pages that differ from what was there before; all that are no zeroes, where nothing was.
    pub changed_pages: u64,
    /// Chunks that were sent, and their bytes.
    pub sent: (u64, u64),
    /// Chunks that were there already.
    pub reused: u64,
}

/// One push.
struct Work<'a> {
    store: &'a Store,
    source: Source<'a>,
    options: Options<'a>,
    until: Until<'a>,
    sent: Sent<'a>,
    changed_pages: AtomicU64,
    done: AtomicU64,
    note: &'a (dyn Fn(u64, u64) + Sync),
}

/// Pushes. `note` is told how many bytes of the device are done, and of how many; never the same twice
/// at one time.
///
/// # Errors
/// What the store or the device answers; [`Error::TagMoved`], [`Error::TooSlow`] and others that say
/// what to do. The tag is what it was then, but for an answer that never came.
pub fn push(
    store: &Store,
    source: Source<'_>,
    options: Options<'_>,
    note: &(dyn Fn(u64, u64) + Sync),
    until: Until<'_>,
) -> Result<Pushed> {
    let grace = store.domain().grace;
    let time_max = timing::push_time_max(grace);
    let begun = store.uptime();
    let until = Until { deadline: until.deadline.min(Instant::now() + time_max), ..until };
    let is_late = |error| {
        if store.uptime().saturating_sub(begun) >= time_max { Error::TooSlow(grace) } else { error }
    };
    let clock = Clock::start(store, until).map_err(is_late)?;
    let before = store.tag(options.tag, until)?;
    let generation = before.as_ref().map_or(0, |before| before.tag.generation);
    let generation = generation.checked_add(1).ok_or_else(|| {
        let why = "it was set as often as can be counted; remove it and push again".to_owned();
        Error::Damaged(format!("{TAGS}{}", options.tag), why)
    })?;
    let parent = match &before {
        _ if options.full => None,
        Some(before) => Some(before.tag.manifest),
        None => source.over.map(|over| over.base),
    };
    let guard = match (&before, parent, source.over) {
        (None, Some(_), Some(over)) => Guard::keep(store, over.base, over.tag, &clock, until)?,
        // That the tag still is what it was shows that what it refers to was never without one.
        _ => Guard::Tag,
    };
    let load = |name: &Name| store.manifest(name, until);
    let parent_image = parent.as_ref().map(load).transpose()?;
    let base_image = match source.over {
        Some(over) if parent == Some(over.base) => parent_image.clone(),
        // Without it all of the device is read.
        Some(over) if parent.is_some() => load(&over.base).ok(),
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
        until,
        sent: Sent::new(options.is_new, &clock),
        changed_pages: AtomicU64::new(0),
        done: AtomicU64::new(0),
        note,
    };
    let segments = work.segments(size, parent_image.as_ref(), base_image.as_ref());
    let segments = segments.map_err(|error| match (&guard, &parent) {
        (Guard::Young | Guard::OtherTag(..), Some(parent)) if error.is_missing() => {
            Error::ParentGoes(format!("{MANIFESTS}{parent}"))
        }
        _ => is_late(error),
    })?;
    let pushed = |manifest, generation, is_new| Pushed {
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
    // A manifest that comes too late may refer to what was deleted.
    if clock.elapsed() >= time_max {
        return Err(Error::TooSlow(grace));
    }
    let now = crate::rt::time_of_day().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let manifest =
        Manifest { format: VERSION, size, pushed: now, source: source.label.to_owned(), parent, segments };
    let manifest = store.write_meta(MANIFESTS, Kind::Manifest, &manifest.bytes(), until).map_err(is_late)?;
    work.sent.check_renewed(store, options.threads, until).map_err(is_late)?;
    guard.check(store, until)?;
    if clock.elapsed_at_store(until).map_err(is_late)?.max(clock.elapsed()) >= time_max {
        return Err(Error::TooSlow(grace));
    }
    let tag = Tag::new(store.domain(), options.tag, manifest, generation, now);
    store.set_tag(options.tag, before.as_ref(), &tag, until)?;
    // The tag has to be there before the manifest is too old to be a root.
    if clock.elapsed() >= grace {
        return Err(Error::SetLate(options.tag.to_owned()));
    }
    Ok(pushed(manifest, generation, true))
}

impl Work<'_> {
    fn segments(
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
