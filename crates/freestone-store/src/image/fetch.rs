//! Objects of an image that the fetch threads read from the store.

use super::content::{Content, FetchedPages};
use super::fetches::{AHEAD_MAX, FetchError, Source};
use super::stat::Stats;
use crate::format::name::Name;
use crate::objects::Until;
use crate::rt::time::Duration;
use crate::store;

/// Object to fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// Trace of the image.
    Trace,
    /// Maps of a segment.
    Segment(u32),
    /// All pages of a chunk.
    Chunk(Name),
    /// Pages of one unit of a chunk.
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
        let is_over = || self.is_closed();
        let until = Until { is_over: &is_over, ..Until::within(self.config.timeout) };
        let outcome = match key {
            Key::Trace => {
                // Without a trace, chunks are fetched when they are first read.
                let names = self.store.trace(&self.name, until).unwrap_or_else(|error| {
                    tracing::info!("{}: {error}", self.store.url());
                    Vec::new()
                });
                ahead.extend(names.into_iter().map(Key::Chunk));
                Ok(None)
            }
            Key::Chunk(name) if !is_wanted && self.cache().is_some_and(|cache| cache.has(&name)) => Ok(None),
            Key::Segment(number) => self.load(number, until).map(|_| None),
            Key::Chunk(name) => Content::fetch(self, &name, until).map(Some),
            Key::Unit(name, unit) => self.fetch_unit(&name, unit, until).map(Some),
        };
        if !is_wanted && matches!(&outcome, Ok(Some(_))) {
            Stats::add(&self.stats.ahead, 1);
        }
        outcome.map_err(|error| {
            let is_hanging = matches!(&error, store::Error::Object { fault, .. } if fault.may_pass());
            FetchError { error: self.record_failure(&error), is_hanging }
        })
    }

    fn timeout(&self) -> Duration {
        self.config.timeout
    }
}

const _: () = assert!(store::CHUNKS_MAX <= AHEAD_MAX);
