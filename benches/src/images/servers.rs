//! Servers of the program, whose forks boot, and what goes over the line meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use freestone::device::{Blocking as _, IoBuf};
use freestone::store::format::CHUNK_BYTES;
use freestone::store::format::domain;
use freestone::store::store::{CHUNKS, MANIFESTS, MAPS, Store, TAGS, TRACES, chunk_key};
use tempfile::TempDir;

use super::facts::Facts;
use super::kit::{Kit, TAG, image, pushed, until};
use super::model::{Asked, Fleet, Kind, Start};
use super::remote::Remote;
use super::replay::{Read, reads, replay};
use crate::nbd_client::Client;
use crate::options::Options;
use crate::place::{Own, Place};
use crate::served::{Patience, Server};

/// How long servers may take that start together on a busy machine.
const READY: Patience = Patience { most: Duration::from_secs(120), pause: Duration::from_millis(2) };
const END_MAX: Duration = Duration::from_secs(60);
/// Nothing is under way where nothing came for so long.
const QUIET: Duration = Duration::from_millis(300);
const QUIET_MAX: Duration = Duration::from_secs(60);

/// A server of the program, and where its socket is.
pub struct Running {
    own: Own,
    server: Server,
}

/// Requests by method and key.
type Requests = BTreeMap<(String, String), u64>;

/// What came over the line.
pub struct Counted {
    pub asked: Asked,
    /// The most that one chunk was asked for.
    pub most: u64,
    pub bytes: u64,
}

/// What all starts have in common.
pub struct Bench<'a> {
    pub kit: &'a Kit,
    pub remote: &'a Remote,
    place: &'a Place,
    freestone: &'a Path,
    prefix: String,
    pub reads: Vec<Read>,
    pub facts: Facts,
    image: String,
}

impl<'a> Bench<'a> {
    /// Pushes the image, and the trace of a boot.
    pub fn new(
        (kit, remote): (&'a Kit, &'a Remote),
        place: &'a Place,
        freestone: &'a Path,
        options: &Options,
    ) -> Result<Self> {
        let mut reads = reads(options, kit.data.bytes())?;
        if options.quick {
            apart(&mut reads, kit.data.bytes());
        }
        let prefix = format!("fleet-{}", std::process::id());
        let (store, is_new) = remote.store(&prefix)?;
        kit.push(&store, is_new)?;
        note_trace(kit, &store, &reads)?;
        let facts = Facts::of(&store, &reads)?;
        let image = pushed(&store)?.to_string();
        let bench = Self { kit, remote, place, freestone, prefix, reads, facts, image };
        bench.quiet()?;
        Ok(bench)
    }

    /// Words of a device over the store.
    pub fn device(&self, start: Start, cache: &Path, prefetch: bool, hedge: Option<&str>) -> String {
        let image = if start == Start::Known { format!("@{}", self.image) } else { format!(":{TAG}") };
        let (device, cache) = (self.remote.device(&self.prefix, &image), cache.display());
        let prefetch = if prefetch { "yes" } else { "no" };
        let hedge = hedge.map_or(String::new(), |time| format!(",hedge={time}"));
        format!("{device},cache={cache},prefetch={prefetch}{hedge}")
    }

    /// Begins all servers, and has each fork boot as soon as its server is there. How long it took until the
    /// last has.
    pub fn start(
        &self,
        fleet: Fleet,
        device: &dyn Fn(u64) -> String,
        pauses: Option<u32>,
    ) -> Result<(f64, Vec<Running>)> {
        let begun = Instant::now();
        let mut servers = Vec::new();
        for host in 0..fleet.hosts {
            for _ in 0..fleet.servers {
                let own = self.place.server()?;
                let mut command = Command::new(self.freestone);
                command.arg("serve").arg(format!("golden={}", device(host)));
                command.args((0..fleet.forks).map(|fork| format!("{}=fork,base=golden", name(fork))));
                command.arg("--nbd").arg(format!("unix:{}", own.socket("nbd").display()));
                command.arg("--control").arg(own.socket("control"));
                let server = Server::spawn(&command)?;
                servers.push(Running { own, server });
            }
        }
        self.boot(&mut servers, fleet.forks, pauses)?;
        Ok((begun.elapsed().as_secs_f64(), servers))
    }

    /// All forks of all servers boot, each with a connection of its own.
    pub fn boot(&self, servers: &mut [Running], forks: u64, pauses: Option<u32>) -> Result<()> {
        let fork = |socket: &Path, fork: u64| -> Result<()> {
            let mut client = Client::connect_to(socket, &name(fork))?;
            let mut buffer = Vec::new();
            replay(&self.reads, pauses, |offset, len| {
                buffer.resize(len, 0);
                client.read(offset, &mut buffer)
            })?;
            client.end()
        };
        let server = |running: &mut Running| -> Result<()> {
            let (socket, control) = (running.own.socket("nbd"), running.own.socket("control"));
            // It listens there last of all.
            running.server.wait_for(READY, &mut || UnixStream::connect(&control).ok())?;
            thread::scope(|scope| {
                let (fork, socket) = (&fork, &socket);
                let booting = (0..forks).map(|number| scope.spawn(move || fork(socket, number)));
                joined(booting.collect())
            })
        };
        thread::scope(|scope| {
            let server = &server;
            joined(servers.iter_mut().map(|running| scope.spawn(move || server(running))).collect())
        })
    }

    pub fn ended(servers: Vec<Running>) -> Result<()> {
        servers.into_iter().try_for_each(|running| running.server.end(END_MAX))
    }

    /// What was asked so far, when nothing is under way any more.
    fn quiet(&self) -> Result<(Requests, u64)> {
        let (begun, mut since, mut bytes) = (Instant::now(), Instant::now(), self.remote.bytes());
        while since.elapsed() < QUIET {
            ensure!(begun.elapsed() < QUIET_MAX, "the line does not become quiet");
            thread::sleep(Duration::from_millis(10));
            let now = self.remote.bytes();
            if now != bytes {
                (bytes, since) = (now, Instant::now());
            }
        }
        Ok((self.remote.requests(&self.prefix), bytes.1))
    }

    /// What came over the line while something was done.
    pub fn counted<T>(&self, run: impl FnOnce() -> Result<T>) -> Result<(T, Counted)> {
        // Whatever was done before has become quiet, too.
        let (before, bytes_before) = (self.remote.requests(&self.prefix), self.remote.bytes().1);
        let done = run()?;
        let (after, bytes_after) = self.quiet()?;
        let (mut asked, mut most) = (Asked::new(), 0);
        let read: BTreeSet<String> = self.facts.read.keys().map(chunk_key).collect();
        for (request, count) in after {
            let count = count - before.get(&request).copied().unwrap_or(0);
            if count == 0 {
                continue;
            }
            let (method, key) = &request;
            let kind = match method.as_str() {
                "GET" if key.is_empty() => Kind::List,
                "GET" if key == domain::KEY => Kind::Domain,
                "GET" if key.starts_with(TAGS) => Kind::Tag,
                "GET" if key.starts_with(MANIFESTS) => Kind::Manifest,
                "GET" if key.starts_with(MAPS) => Kind::Map,
                "GET" if key.starts_with(TRACES) => Kind::Trace,
                "GET" if read.contains(key) => Kind::Chunk,
                "GET" if key.starts_with(CHUNKS) => Kind::Ahead,
                "HEAD" => Kind::Head,
                _ => Kind::Other,
            };
            if matches!(kind, Kind::Chunk | Kind::Ahead) {
                most = most.max(count);
            }
            *asked.entry(kind).or_default() += count;
        }
        Ok((done, Counted { asked, most, bytes: bytes_after - bytes_before }))
    }

    pub fn caches(&self, fleet: Fleet) -> Result<Vec<TempDir>> {
        (0..fleet.hosts).map(|_| self.kit.empty_cache()).collect()
    }
}

/// The name of a fork.
fn name(fork: u64) -> String {
    format!("vm-{fork}")
}

/// What the first thread has that failed.
fn joined(threads: Vec<thread::ScopedJoinHandle<'_, Result<()>>>) -> Result<()> {
    let ended = threads.into_iter().map(|thread| thread.join().unwrap_or(Err(anyhow!("a thread panicked"))));
    ended.fold(Ok(()), Result::and)
}

/// Moves reads to every other chunk of the disk: none lies behind another then, and nothing is fetched ahead
/// which depends on time. For a smoke run, all of which is to be as the model says.
fn apart(reads: &mut [Read], bytes: u64) {
    let block = CHUNK_BYTES as u64;
    let places = (bytes / block / 2).max(1);
    for read in reads {
        let within = read.offset % block;
        read.offset = read.offset / block % places * 2 * block + within;
        read.len = read.len.min((block - within) as usize);
    }
}

/// Has the store know what a boot reads first.
fn note_trace(kit: &Kit, store: &Arc<Store>, reads: &[Read]) -> Result<()> {
    let cache = kit.empty_cache()?;
    let image = image(store, cache.path(), false)?;
    replay(reads, None, |offset, len| Ok(image.read_at(offset, &mut IoBuf::zeroed(len)?)?))?;
    image.push_trace(until())?;
    Ok(())
}
