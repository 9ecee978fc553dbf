//! Objects of an image that the fetch threads read from the object store.

use super::content::{Content, FetchedPages};
use super::fetches::{AHEAD_MAX, FetchError, Source};
use super::stat::ImageCounters;
use crate::format::name::Name;
use crate::objects::CallLimits;
use crate::rt::time::Duration;
use crate::store;

/// Object of an image to fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// Trace of the image.
    Trace,
    /// Maps of the segment with this number.
    Segment(u32),
    /// All pages of a chunk.
    Chunk(Name),
    /// Pages of one unit of a chunk, by the index of the unit.
    Unit(Name, usize),
}

impl Source for Content {
    type Key = Key;
    /// Fetched pages; `None` for a trace, a segment, or a chunk that is already cached.
    type Value = Option<FetchedPages>;

    fn fetch(
        &self,
        key: Key,
        is_wanted: bool,
        ahead: &mut Vec<Key>,
    ) -> Result<Option<FetchedPages>, FetchError> {
        freestone_core::trail::step!();
        let is_cancelled = || self.is_closed();
        let limits = CallLimits { is_cancelled: &is_cancelled, ..CallLimits::within(self.config.timeout) };
        let outcome = match key {
            Key::Trace => {
                // Without a trace, chunks are fetched when they are first read.
                let names = self.store.trace(&self.name, limits).unwrap_or_else(|error| {
                    tracing::info!("{}: {error}", self.store.url());
                    Vec::new()
                });
                ahead.extend(names.into_iter().map(Key::Chunk));
                Ok(None)
            }
            Key::Chunk(name) if !is_wanted && self.cache().is_some_and(|cache| cache.has(&name)) => Ok(None),
            Key::Segment(number) => self.load(number, limits).map(|_| None),
            Key::Chunk(name) => Content::fetch(self, &name, limits).map(Some),
            Key::Unit(name, unit) => self.fetch_unit(&name, unit, limits).map(Some),
        };
        if !is_wanted && matches!(&outcome, Ok(Some(_))) {
            ImageCounters::add(&self.stats.prefetched, 1);
        }
        outcome.map_err(|error| {
            let is_hanging = matches!(&error, store::Error::Object { fault, .. } if fault.is_retryable());
            FetchError { error: self.record_failure(&error), is_hanging }
        })
    }

    fn timeout(&self) -> Duration {
        self.config.timeout
    }
}

const _: () = assert!(store::CHUNKS_MAX <= AHEAD_MAX);
