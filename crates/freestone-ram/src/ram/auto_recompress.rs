//! Recompression that runs by itself: pages that nobody touched for long are compressed again, with
//! zstd and a dictionary trained on the disk's own pages.
//!
//! Pages of 4 KiB are too short for a compressor to learn much from each alone; a dictionary is
//! what it would have learned from the others. It is trained once, on a sample of pages that are
//! old enough, and stays for the life of the disk: objects that were made with it need it.
//!
//! All of it happens in [steps](AutoRecompress::step) of bounded work. The idle marks of pages,
//! which are the user's, are neither used nor changed; as always, a page that does not get smaller
//! with the highest priority is marked incompressible, so that it is not tried again and again.

use std::sync::Arc;
use std::time::Duration;

use super::layer::Layer;
use super::pages::Pages;
use super::recompress::Target;
use super::room::{Attempt, Room};
use super::sample::{AutoState, Cursor};
use super::{PAGE, Ram};
use crate::codec::{Algorithm, Dictionary, PRIORITIES, Page, Params, Scratch, Streams};
use crate::pool::class::{CLASSES, class_of};
use freestone_core::PAGE_BYTES;
use freestone_core::slot::{AGES, Kind, MAX_SLOTS, Word};
use freestone_core::sync::{AtomicU64, Instant, Mutex, Ordering};

use crate::clock;

/// Time that a step takes.
const STEP: Duration = Duration::from_millis(100);
/// Leaves (2 MiB of disk each) that a step looks at.
const STEP_LEAVES: u32 = 1024;
/// Bytes of old objects without which no dictionary is trained.
const LEAST_BYTES: u64 = 4 << 20;
/// Of so many pages of a sample one is kept to see what the dictionary is worth.
const HELD_OUT: usize = 8;
/// On real data 64 KiB pack 0.7 % worse, and 256 KiB, which take 2.3 MiB more memory, 0.1 % better.
const DICTIONARY_BYTES: usize = 112 << 10;
/// The first level at which zstd makes good use of a dictionary: on real data level 3 gains nothing
/// by it, 6 gains 5 %, and 12 only 0.7 % more in three times the time.
const LEVEL: i32 = 6;
/// After a training that failed.
const RETRY_MS: u64 = 600_000;

/// What the automatic mode has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AutoRecompressed {
    /// Pages that it has stored smaller.
    pub pages: u64,
    /// Bytes by which their objects became smaller.
    pub saved_bytes: u64,
    /// The dictionary's size; 0 as long as there is none, or where one is of no use on this disk's
    /// pages.
    pub dictionary_bytes: u64,
}

impl Ram {
    /// What the automatic mode has done; nothing where `auto_recompress` is not set.
    pub fn auto_recompressed(&self) -> AutoRecompressed {
        let auto = &self.0.family.auto;
        let streams = auto.age.and_then(|_| self.0.pages.codecs.get(PRIORITIES));
        let dictionary = streams.and_then(Streams::dictionary);
        AutoRecompressed {
            // Relaxed: statistics.
            pages: auto.shrunk.load(Ordering::Relaxed),
            saved_bytes: auto.saved_bytes.load(Ordering::Relaxed),
            dictionary_bytes: dictionary.map_or(0, |dictionary| dictionary.bytes().len() as u64),
        }
    }
}

/// The automatic mode of a family.
///
/// Lock order: `background` of the family, then `state`; under them as requests do.
pub(super) struct AutoRecompress {
    pages: Arc<Pages>,
    /// How long what is to be recompressed was not touched; `None`: the mode is off.
    age: Option<Duration>,
    state: Mutex<AutoState>,
    /// Pages.
    shrunk: AtomicU64,
    saved_bytes: AtomicU64,
}

impl AutoRecompress {
    /// Nothing was done yet.
    pub fn new(pages: Arc<Pages>, age: Option<Duration>) -> Self {
        Self {
            pages,
            age,
            state: Mutex::default(),
            shrunk: AtomicU64::new(0),
            saved_bytes: AtomicU64::new(0),
        }
    }

    /// Whether pages are recompressed.
    pub fn is_on(&self) -> bool {
        self.age.is_some()
    }

    /// One step of the automatic mode, of about 100 ms at most (training goes on beside it). To be
    /// called about once a second. Does nothing while others are at work in the background.
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

    /// Sets what the automatic mode has counted to zero.
    pub fn clear(&self) {
        // Relaxed: statistics.
        self.shrunk.store(0, Ordering::Relaxed);
        self.saved_bytes.store(0, Ordering::Relaxed);
    }

    // ---- the dictionary -------------------------------------------------------------------------

    fn learn(&self, state: &mut AutoState, now_ms: u64, old: &[bool; AGES]) {
        if let Some(training) = state.training.take_if(|training| training.is_finished()) {
            if let Ok(Some(streams)) = training.join() {
                let bytes = streams.dictionary().map_or(0, |dictionary| dictionary.bytes().len());
                tracing::info!(bytes, "auto_recompress: a dictionary was trained on the disk's pages");
                // A disk that has something at this priority is not made.
                let set = self.pages.codecs.set(PRIORITIES, Arc::new(streams));
                debug_assert!(set.is_ok(), "{set:?}");
            } else {
                tracing::warn!("auto_recompress: no dictionary could be trained; it is tried again later");
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
        if sample.bytes < LEAST_BYTES {
            return;
        }
        let pages = self.read_sample(sample.pages);
        let thread = freestone_core::sync::thread::Builder::new().name("freestone-train".into());
        match thread.spawn(move || train(&pages)) {
            Ok(training) => state.training = Some(training),
            Err(error) => {
                tracing::warn!(%error, "auto_recompress: no thread to train a dictionary; it is tried again later");
                state.retry_ms = now_ms + RETRY_MS;
            }
        }
    }

    /// The content of those pages that are still there.
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
        // What is freed lies scattered: it becomes pages only by packing, a class at a time.
        while state.compacting > 0 {
            state.compacting -= 1;
            self.pages.compact_class(state.compacting);
            if began.elapsed() >= STEP {
                return;
            }
        }
        let target =
            Target { priority: PRIORITIES as u8, streams, is_last: true, threshold: 0, clears_idle: false };
        let wants = |word: Word| target.may_shrink(word) && old[usize::from(word.age())];
        let AutoState { cursor, room, .. } = &mut *state;
        let mut damaged = 0_u32;
        let over = self.walk(cursor, &wants, |layer, slot, _| {
            let Ok(mut attempt) = target.recompress(&self.pages, layer, slot, &wants) else {
                // Its readers learn of it; here it would be found again and again.
                damaged += 1;
                return damaged < 16;
            };
            if attempt == Attempt::NoRoom && room.is_worth_compacting() && self.pages.compact() > 0 {
                attempt = target.recompress(&self.pages, layer, slot, &wants).unwrap_or(Attempt::NoRoom);
            }
            if let Attempt::Shrunk { from, to } = attempt {
                // Relaxed: statistics.
                self.shrunk.fetch_add(1, Ordering::Relaxed);
                self.saved_bytes.fetch_add((from - to) as u64, Ordering::Relaxed);
            }
            room.count(attempt);
            attempt != Attempt::Reset && !room.is_hopeless() && began.elapsed() < STEP
        });
        if room.is_hopeless() {
            room.hope();
        }
        if over && room.is_compaction_due(self.pages.pool.pages() * PAGE) {
            state.compacting = CLASSES;
            state.room = Room::default();
        }
    }

    /// Shows candidates from the cursor on, which goes with them, until `visit` has enough, or
    /// enough was looked at; true where the last layer's end was reached, and the cursor is at the
    /// beginning again.
    fn walk(
        &self,
        cursor: &mut Cursor,
        wanted: &impl Fn(Word) -> bool,
        mut visit: impl FnMut(&Layer, u64, Word) -> bool,
    ) -> bool {
        let mut found = Vec::new();
        for _ in 0..STEP_LEAVES {
            let Some(layer) = self.pages.layers.at_or_after(cursor.layer) else {
                *cursor = Cursor::default();
                return true;
            };
            if layer.id() != cursor.layer {
                *cursor = Cursor { layer: layer.id(), slot: 0 };
            }
            let Some(next) = layer.peek_leaf(cursor.slot, MAX_SLOTS - 1, wanted, &mut found) else {
                *cursor = Cursor { layer: layer.id() + 1, slot: 0 };
                continue;
            };
            for &(slot, word) in &found {
                if !visit(&layer, slot, word) {
                    cursor.slot = slot + 1;
                    return false;
                }
            }
            cursor.slot = next;
        }
        false
    }
}

/// Pages that something can be learned from: what does not compress is mostly noise.
fn is_sample(word: Word) -> bool {
    word.kind() == Kind::Compressed
}

/// Trains a dictionary on pages and makes streams with it; without one where it is of no use.
/// `None`: no memory.
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
#[path = "auto_recompress_tests.rs"]
mod tests;
