//! Model of the requests that a fleet sends to an object store when all its servers start at once. `fleet.rs`
//! compares the model with the requests that it counts.
//!
//! For H hosts with S servers each, whose forks read C chunks of an image with M page maps:
//!
//! | state of the caches | GET requests |
//! |---|---|
//! | empty | H (C + M + 1) + H S (2 + p) |
//! | full | H S (2 + p) |
//! | full, and the image given by its hash, as in a server's state | H S p |
//! | full, and all servers running | 0 |
//!
//! Each host fetches chunks, page maps and manifest once. Each server fetches `freestone.json` and the tag, and with
//! prefetch (p = 1) the trace. The number of forks and of their reads does not matter. Nothing is listed, and
//! HEAD is not used.
//!
//! The model excludes chunks that are fetched ahead of sequential reads: whether they are read in the end
//! depends on timing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::requested_objects::RequestedObjects;

/// Kind of a request by its object or method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A chunk that the reads need.
    Chunk,
    /// A chunk that no read needs, fetched ahead of sequential reads.
    Ahead,
    Map,
    Manifest,
    Trace,
    Tag,
    Domain,
    List,
    Head,
    /// Anything that readers never send, such as a write.
    Other,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Chunk => "chunks",
            Self::Ahead => "chunks not read",
            Self::Map => "maps",
            Self::Manifest => "manifests",
            Self::Trace => "traces",
            Self::Tag => "tags",
            Self::Domain => "freestone.json",
            Self::List => "LIST",
            Self::Head => "HEAD",
            Self::Other => "others",
        }
    }
}

pub type RequestCounts = BTreeMap<Kind, u64>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fleet {
    pub hosts: u64,
    pub servers: u64,
    pub forks: u64,
}

/// State of the caches when the servers start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Empty caches.
    Empty,
    /// Full caches, and servers that resolve the image's tag.
    Cached,
    /// Full caches, and servers that know the image by its hash.
    Known,
    /// Full caches, and running servers that read again.
    Running,
}

impl Start {
    pub fn name(self) -> &'static str {
        match self {
            Self::Empty => "nothing cached",
            Self::Cached => "all cached",
            Self::Known => "all cached, by hash",
            Self::Running => "running",
        }
    }
}

impl fmt::Display for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { hosts, servers, forks } = self;
        let s = |count: &u64| if *count == 1 { "" } else { "s" };
        write!(f, "{hosts} host{}, {servers} server{}, {forks} fork{}", s(hosts), s(servers), s(forks))
    }
}

impl Fleet {
    /// Returns the expected number of GET requests by kind, and the total bytes of the fetched objects.
    pub fn expected_requests(
        self,
        start: Start,
        prefetch: bool,
        facts: &RequestedObjects,
    ) -> (RequestCounts, u64) {
        let of_hosts = if start == Start::Empty { self.hosts } else { 0 };
        let all = self.hosts * self.servers;
        let by_tag = if matches!(start, Start::Empty | Start::Cached) { all } else { 0 };
        let traces = if prefetch && start != Start::Running { all } else { 0 };
        let rows = [
            (Kind::Chunk, of_hosts * facts.chunks.count, of_hosts * facts.chunks.bytes),
            (Kind::Map, of_hosts * facts.maps.count, of_hosts * facts.maps.bytes),
            (Kind::Manifest, of_hosts, of_hosts * facts.manifest),
            (Kind::Trace, traces, traces * facts.trace),
            (Kind::Tag, by_tag, by_tag * facts.tag),
            (Kind::Domain, by_tag, by_tag * facts.domain),
        ];
        let request_counts =
            rows.iter().filter(|(_, count, _)| *count > 0).map(|(kind, count, _)| (*kind, *count));
        (request_counts.collect(), rows.iter().map(|(.., bytes)| bytes).sum())
    }
}

/// Returns the number of requests by which two counts differ, ignoring chunks fetched ahead.
pub fn mismatches(counted: &RequestCounts, model: &RequestCounts) -> u64 {
    let kinds = counted.keys().chain(model.keys()).collect::<BTreeSet<_>>();
    let of = |request_counts: &RequestCounts, kind| request_counts.get(kind).copied().unwrap_or(0);
    kinds
        .into_iter()
        .filter(|kind| **kind != Kind::Ahead)
        .map(|kind| of(counted, kind).abs_diff(of(model, kind)))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::super::requested_objects::Objects;
    use super::*;

    #[test]
    fn requests_scale_with_hosts_and_servers() {
        let facts = RequestedObjects {
            read: BTreeMap::new(),
            chunks: Objects { count: 600, bytes: 60_000 },
            maps: Objects { count: 2, bytes: 100 },
            domain: 1,
            tag: 2,
            manifest: 3,
            trace: 4,
        };
        let fleet = Fleet { hosts: 1000, servers: 20, forks: 10 };
        let total =
            |start, prefetch| fleet.expected_requests(start, prefetch, &facts).0.values().sum::<u64>();
        assert_eq!(total(Start::Empty, true), 1000 * 603 + 20_000 * 3);
        assert_eq!(total(Start::Empty, false), 1000 * 603 + 20_000 * 2);
        assert_eq!((total(Start::Cached, true), total(Start::Cached, false)), (60_000, 40_000));
        assert_eq!((total(Start::Known, true), total(Start::Known, false)), (20_000, 0));
        assert_eq!((total(Start::Running, true), total(Start::Running, false)), (0, 0));
        let (request_counts, bytes) = fleet.expected_requests(Start::Empty, true, &facts);
        assert_eq!(bytes, 1000 * 60_103 + 20_000 * 7);
        assert_eq!(mismatches(&request_counts, &request_counts), 0);
        let mut other = request_counts.clone();
        other.insert(Kind::Head, 3);
        other.insert(Kind::Ahead, 7);
        other.remove(&Kind::Manifest);
        assert_eq!((mismatches(&other, &request_counts), mismatches(&request_counts, &other)), (1003, 1003));
    }
}
