//! What a fleet asks of a store when all of it starts at once: a calculation, which `fleet.rs` checks against
//! what it counts.
//!
//! Of H hosts with S servers each, whose forks read C chunks of an image that M maps describe:
//!
//! | start | GET |
//! |---|---|
//! | nothing cached | H (C + M + 1) + H S (2 + p) |
//! | all cached | H S (2 + p) |
//! | all cached, and the image given by its hash, as in a server's state | H S p |
//! | nothing: all is open, and cached | 0 |
//!
//! Once a host: the chunks, the maps, the manifest. Once a server: `freestone.json` and the tag, and where p
//! is 1, with prefetch, the trace. How many forks there are does not matter, nor how often they read. Nothing
//! is listed or asked for by HEAD.
//!
//! What is fetched ahead of reads that go through an image in their order may not be read at last; it depends
//! on time, and is no part of this.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::facts::Facts;

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A chunk that is read.
    Chunk,
    /// One that nobody reads.
    Ahead,
    Map,
    Manifest,
    Trace,
    Tag,
    Domain,
    List,
    Head,
    /// What nobody who reads asks: writes.
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

/// Requests by what they ask for.
pub type Asked = BTreeMap<Kind, u64>;

/// How large a fleet is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fleet {
    pub hosts: u64,
    /// Of each host.
    pub servers: u64,
    /// Of each server.
    pub forks: u64,
}

/// How it starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Nothing is cached.
    Empty,
    /// All is cached.
    Cached,
    /// All is cached, and the image given by its hash.
    Known,
    /// It does not: all is open, and reads go on.
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
    /// GETs by what they ask for, and bytes of objects that come.
    pub fn asks(self, start: Start, prefetch: bool, facts: &Facts) -> (Asked, u64) {
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
        let asked = rows.iter().filter(|(_, count, _)| *count > 0).map(|(kind, count, _)| (*kind, *count));
        (asked.collect(), rows.iter().map(|(.., bytes)| bytes).sum())
    }
}

/// How many requests are not as they were to be, but for what is fetched ahead.
pub fn off(counted: &Asked, model: &Asked) -> u64 {
    let kinds = counted.keys().chain(model.keys()).collect::<BTreeSet<_>>();
    let of = |asked: &Asked, kind| asked.get(kind).copied().unwrap_or(0);
    kinds
        .into_iter()
        .filter(|kind| **kind != Kind::Ahead)
        .map(|kind| of(counted, kind).abs_diff(of(model, kind)))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::super::facts::Objects;
    use super::*;

    #[test]
    fn once_a_host_and_once_a_server() {
        let facts = Facts {
            read: BTreeMap::new(),
            chunks: Objects { count: 600, bytes: 60_000 },
            maps: Objects { count: 2, bytes: 100 },
            domain: 1,
            tag: 2,
            manifest: 3,
            trace: 4,
        };
        let fleet = Fleet { hosts: 1000, servers: 20, forks: 10 };
        let total = |start, prefetch| fleet.asks(start, prefetch, &facts).0.values().sum::<u64>();
        assert_eq!(total(Start::Empty, true), 1000 * 603 + 20_000 * 3);
        assert_eq!(total(Start::Empty, false), 1000 * 603 + 20_000 * 2);
        assert_eq!((total(Start::Cached, true), total(Start::Cached, false)), (60_000, 40_000));
        assert_eq!((total(Start::Known, true), total(Start::Known, false)), (20_000, 0));
        assert_eq!((total(Start::Running, true), total(Start::Running, false)), (0, 0));
        let (asked, bytes) = fleet.asks(Start::Empty, true, &facts);
        assert_eq!(bytes, 1000 * 60_103 + 20_000 * 7);
        assert_eq!(off(&asked, &asked), 0);
        let mut other = asked.clone();
        other.insert(Kind::Head, 3);
        other.insert(Kind::Ahead, 7);
        other.remove(&Kind::Manifest);
        assert_eq!((off(&other, &asked), off(&asked, &other)), (1003, 1003));
    }
}
