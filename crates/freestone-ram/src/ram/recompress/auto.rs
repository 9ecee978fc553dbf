//! Automatic recompression of pages that were not accessed for long. Uses zstd with a dictionary
//! trained on pages of the family (devices that share a memory pool).
//!
//! A page of 4 KiB is too short for a compressor to learn much from. A dictionary provides what the
//! compressor would learn from other pages. The dictionary is trained once, on a sample of pages
//! that are old enough. The family keeps the dictionary for its lifetime, as objects compressed
//! with the dictionary need it.
//!
//! All work is done in bounded [steps](AutoRecompress::step). Idle marks are set and read by the
//! user only; automatic recompression neither uses nor changes them. A page that does not shrink is
//! marked incompressible, so that later steps skip it.

use std::sync::Arc;
use std::time::Duration;

use super::cursor::Cursor;
use super::sample::AutoState;
use super::space::{Attempt, RecompressSpace};
use super::target::Target;
use crate::codec::{Algorithm, Dictionary, PRIORITIES, Page, Params, Scratch, Streams, StreamsError};
use crate::pool::class::{CLASSES, class_of};
use crate::pool::redo::RedoError;
use crate::ram::geometry::PAGE;
use crate::ram::memory::layer::Layer;
use crate::ram::memory::pages::Pages;
use freestone_core::PAGE_BYTES;
use freestone_core::slot::{AGES, Kind, Word};
use freestone_core::sync::{AtomicU64, Instant, Mutex, Ordering};

use freestone_core::clock;

/// Maximum duration of a step.
const STEP: Duration = Duration::from_millis(100);
/// Minimum compressed bytes of old pages before a dictionary is trained.
const TRAINING_BYTES_MIN: u64 = 4 << 20;
/// A sample page in this many is excluded from training, to evaluate the dictionary.
const HELD_OUT: usize = 8;
/// Size of the dictionary in bytes. On real data a dictionary of 64 KiB compresses 0.7 % worse. A
/// dictionary of 256 KiB compresses 0.1 % better and needs 2.3 MiB more memory.
const DICTIONARY_BYTES: usize = 112 << 10;
/// Lowest zstd level that makes good use of a dictionary. On real data a dictionary gains nothing
/// at level 3 and 5 % at level 6. Level 12 gains only 0.7 % more in three times the time.
const LEVEL: i32 = 6;
/// Pause before the next attempt after a failed training, in milliseconds.
const RETRY_MS: u64 = 600_000;

/// Statistics of automatic recompression.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AutoRecompressStat {
    /// Number of pages that were replaced by smaller objects.
    pub pages: u64,
    /// Bytes by which the objects of these pages shrank.
    pub saved_bytes: u64,
    /// Size of the dictionary in bytes; 0 before training, or if a dictionary does not help on this
    /// disk.
    pub dictionary_bytes: u64,
}

/// Automatic recompression of a family.
///
/// Lock order: [`Pages::background`], then `state`, then the locks of the request path.
pub(in crate::ram) struct AutoRecompress {
    pages: Arc<Pages>,
    /// Minimum time without access before a page is recompressed; `None` if automatic recompression
    /// is off.
    age: Option<Duration>,
    state: Mutex<AutoState>,
    /// Statistics: number of recompressed pages, and the bytes saved.
    shrunk: AtomicU64,
    saved_bytes: AtomicU64,
}

impl AutoRecompress {
    pub fn new(pages: Arc<Pages>, age: Option<Duration>) -> Self {
        Self {
            pages,
            age,
            state: Mutex::default(),
            shrunk: AtomicU64::new(0),
            saved_bytes: AtomicU64::new(0),
        }
    }

    pub fn stat(&self) -> AutoRecompressStat {
        let streams = self.age.and_then(|_| self.pages.codecs.get(PRIORITIES));
        AutoRecompressStat {
            // Relaxed: statistics that order nothing.
            pages: self.shrunk.load(Ordering::Relaxed),
            saved_bytes: self.saved_bytes.load(Ordering::Relaxed),
            dictionary_bytes: streams.map_or(0, |streams| dictionary_of(streams).len() as u64),
        }
    }

    pub fn is_on(&self) -> bool {
        self.age.is_some()
    }

    /// Runs a step of at most about 100 ms; a training runs on another thread. Called about once a
    /// second by the keeper thread. Does nothing while other background work is running.
    pub fn step(&self) {
        let Some(age) = self.age else { return };
        let Some(_one) = self.pages.background.try_lock() else { return };
        let now_ms = clock::now_ms();
        let old = self.pages.ages.untouched_since(now_ms.saturating_sub(clock::millis(age)));
        let mut state = self.state.lock();
        match self.pages.codecs.get(PRIORITIES) {
            Some(streams) => self.shrink(&mut state, streams, &old),
            None => self.learn(&mut state, now_ms, &old),
        }
    }

    pub fn clear(&self) {
        // Relaxed: statistics that order nothing.
        self.shrunk.store(0, Ordering::Relaxed);
        self.saved_bytes.store(0, Ordering::Relaxed);
    }

    // ---- the dictionary -------------------------------------------------------------------------

    fn learn(&self, state: &mut AutoState, now_ms: u64, old: &[bool; AGES]) {
        if let Some(training) = state.training.take_if(|training| training.is_finished()) {
            let trained = training.join().ok().flatten();
            if let Some(streams) = trained.filter(|streams| self.store_dictionary(streams).is_ok()) {
                let bytes = dictionary_of(&streams).len();
                tracing::info!(bytes, "auto_recompress: trained a dictionary on the disk's pages");
                // The priority is unused: creation fails for a disk with another algorithm there.
                let set = self.pages.codecs.set(PRIORITIES, Arc::new(streams));
                debug_assert!(set.is_ok(), "{set:?}");
            } else {
                tracing::warn!("auto_recompress: dictionary training failed; will retry later");
                state.retry_ms = now_ms + RETRY_MS;
            }
        }
        if state.training.is_some() || now_ms < state.retry_ms {
            return;
        }
        let wanted = |word: Word| is_sample(word) && old[usize::from(word.age())];
        let sample = &mut state.sample;
        let over = self.walk(&mut state.cursor, &wanted, |layer, slot, word| {
            sample.offer((layer.id(), slot), word);
            true
        });
        if !over {
            return;
        }
        let sample = std::mem::take(&mut state.sample);
        if sample.bytes < TRAINING_BYTES_MIN {
            return;
        }
        let pages = self.read_sample(sample.pages);
        let thread = freestone_core::sync::thread::Builder::new().name("freestone-train".into());
        match thread.spawn(move || train(&pages)) {
            Ok(training) => state.training = Some(training),
            Err(error) => {
                tracing::warn!(%error, "auto_recompress: cannot start a thread to train a dictionary; will retry later");
                state.retry_ms = now_ms + RETRY_MS;
            }
        }
    }

    /// Stores the dictionary for a process that adopts the family.
    pub fn store_dictionary(&self, streams: &Streams) -> Result<(), RedoError> {
        let redo = self.pages.redo.as_ref();
        redo.map_or(Ok(()), |redo| redo.store_dictionary(PRIORITIES, dictionary_of(streams)))
    }

    /// Reads the sample pages, given as layer id and slot. Omits pages that were freed or moved to
    /// the backing device meanwhile.
    fn read_sample(&self, mut pages: Vec<(u32, u64)>) -> Vec<Page> {
        pages.sort_unstable();
        let read = |(layer, slot)| {
            let layer: Arc<Layer> = self.pages.layers.get(layer)?;
            let mut page = [0; PAGE_BYTES];
            let guard = layer.table().leaf(slot)?.lock(slot);
            let word = guard.word();
            let object = is_sample(word).then(|| self.pages.pool.object(&guard))?;
            self.pages.codecs.decompress(word.algorithm(), object, &mut page).ok().map(|()| page)
        };
        pages.into_iter().filter_map(read).collect()
    }

    // ---- the pages ------------------------------------------------------------------------------

    fn shrink(&self, state: &mut AutoState, streams: &Streams, old: &[bool; AGES]) {
        let began = Instant::now();
        if !state.compaction.run(&self.pages, || began.elapsed() < STEP) {
            return;
        }
        let target =
            Target { priority: PRIORITIES as u8, streams, is_last: true, threshold: 0, clears_idle: false };
        let wants = |word: Word| target.may_shrink(word) && old[usize::from(word.age())];
        let AutoState { cursor, space, .. } = &mut *state;
        let mut damaged = 0_u32;
        let over = self.walk(cursor, &wants, |layer, slot, _| {
            let Ok(mut attempt) = target.recompress(&self.pages, layer, slot, &wants) else {
                // The page is damaged, which its readers report. A step skips at most 16 such
                // pages, as every scan finds them again.
                damaged += 1;
                return damaged < 16;
            };
            if attempt == Attempt::NoSpace && space.is_worth_compacting() && self.pages.compact() > 0 {
                attempt = target.recompress(&self.pages, layer, slot, &wants).unwrap_or(Attempt::NoSpace);
            }
            if let Attempt::Shrunk { from, to } = attempt {
                // Relaxed: statistics that order nothing.
                self.shrunk.fetch_add(1, Ordering::Relaxed);
                self.saved_bytes.fetch_add((from - to) as u64, Ordering::Relaxed);
            }
            space.count(attempt);
            attempt != Attempt::Reset && !space.is_exhausted() && began.elapsed() < STEP
        });
        if space.is_exhausted() {
            space.reset_refusals();
        }
        if over && space.is_compaction_due(self.pages.pool.pages() * PAGE) {
            state.compaction.start();
            state.space = RecompressSpace::default();
        }
    }

    /// Visits pages with a `wanted` word from the cursor on, until `visit` returns false or the step
    /// ends. Returns true after the last layer.
    fn walk(
        &self,
        cursor: &mut Cursor,
        wanted: &impl Fn(Word) -> bool,
        mut visit: impl FnMut(&Layer, u64, Word) -> bool,
    ) -> bool {
        cursor.walk(&self.pages.layers, wanted, |layer, found| {
            found.iter().find(|&&(slot, word)| !visit(layer, slot, word)).map(|(slot, _)| slot + 1)
        })
    }
}

/// Returns true if the page is useful for training: it is compressed. Incompressible pages are
/// mostly noise.
fn is_sample(word: Word) -> bool {
    word.kind() == Kind::Compressed
}

/// Returns the dictionary of compression streams; empty if they have none.
fn dictionary_of(streams: &Streams) -> &[u8] {
    streams.dictionary().map_or(&[], Dictionary::bytes)
}

/// Returns compression streams with a dictionary that another process has trained; without one if it is empty.
///
/// # Errors
/// Fails if memory is short.
pub(in crate::ram) fn trained_streams(dictionary: &[u8]) -> Result<Streams, StreamsError> {
    let dictionary = Dictionary::trained(dictionary);
    Streams::new(Algorithm::Zstd, &Params { level: Some(LEVEL), dictionary, ..Params::default() })
}

/// Trains a dictionary and returns compression streams that use it, or streams without a dictionary
/// if it does not help. `None` if memory is short.
fn train(pages: &[Page]) -> Option<Streams> {
    let (mut learned, mut kept) = (Vec::new(), Vec::new());
    learned.try_reserve_exact(pages.len() * PAGE_BYTES).ok()?;
    for (index, page) in pages.iter().enumerate() {
        if index % HELD_OUT == 0 { kept.push(page) } else { learned.extend_from_slice(page) }
    }
    let plain = Params { level: Some(LEVEL), ..Params::default() };
    let without = Streams::new(Algorithm::Zstd, &plain).ok()?;
    let sizes = vec![PAGE_BYTES; learned.len() / PAGE_BYTES];
    let Some(dictionary) = Dictionary::train(&learned, &sizes, DICTIONARY_BYTES) else {
        return Some(without);
    };
    let with = Streams::new(Algorithm::Zstd, &Params { dictionary: Some(dictionary), ..plain }).ok()?;
    let classes = |streams: &Streams| -> usize {
        let mut scratch = Scratch::new();
        let class =
            |page: &&Page| streams.compress(page, &mut scratch).map_or(CLASSES, |o| class_of(o.len()));
        kept.iter().map(class).sum()
    };
    if classes(&with) < classes(&without) { Some(with) } else { Some(without) }
}

#[cfg(test)]
#[path = "auto_tests.rs"]
mod tests;
