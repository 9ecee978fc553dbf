//! Servers of the real program whose forks boot, and the traffic between them and the object store.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use freestone::device::{Blocking as _, IoBuf};
use freestone::store::format::CHUNK_BYTES;
use freestone::store::format::domain;
use freestone::store::store::{CHUNKS, MANIFESTS, MAPS, Store, TAGS, TRACES, chunk_key};
use tempfile::TempDir;

use super::model::{Fleet, Kind, RequestCounts, Start};
use super::remote::Remote;
use super::replay::{Read, reads, replay};
use super::requested_objects::RequestedObjects;
use super::test_image::{TAG, TestImage, deadline, image, pushed_image};
use crate::options::Options;
use crate::programs::run_dir::RunDir;
use crate::programs::server_process::{Served, Server, WaitLimits};
use crate::transport::nbd_client::Client;

/// Time limit and poll interval for servers that start together on a busy machine.
const READY: WaitLimits = WaitLimits { timeout: Duration::from_secs(120), pause: Duration::from_millis(2) };
const END_MAX: Duration = Duration::from_secs(60);
/// Time without transferred bytes after which the link counts as quiet.
const QUIET: Duration = Duration::from_millis(300);
const QUIET_MAX: Duration = Duration::from_secs(60);

type Requests = BTreeMap<(String, String), u64>;

pub struct Traffic {
    pub request_counts: RequestCounts,
    /// Largest number of times that any one chunk was fetched.
    pub max_fetches: u64,
    pub bytes: u64,
}

pub struct Bench<'a> {
    pub test_image: &'a TestImage,
    pub remote: &'a Remote,
    run_dir: &'a RunDir,
    freestone: &'a Path,
    prefix: String,
    pub reads: Vec<Read>,
    pub facts: RequestedObjects,
    image: String,
}

impl<'a> Bench<'a> {
    /// Pushes the test image and the trace of a boot to the image store.
    pub fn new(
        (test_image, remote): (&'a TestImage, &'a Remote),
        run_dir: &'a RunDir,
        freestone: &'a Path,
        options: &Options,
    ) -> Result<Self> {
        let mut reads = reads(options, test_image.data.bytes())?;
        if options.quick {
            spread_reads(&mut reads, test_image.data.bytes());
        }
        let prefix = format!("fleet-{}", std::process::id());
        let (store, is_new) = remote.store(&prefix)?;
        test_image.push(&store, is_new)?;
        record_trace(test_image, &store, &reads)?;
        let facts = RequestedObjects::of(&store, &reads)?;
        let image = pushed_image(&store)?.to_string();
        let bench = Self { test_image, remote, run_dir, freestone, prefix, reads, facts, image };
        bench.wait_until_quiet()?;
        Ok(bench)
    }

    /// Returns the description of a device over the image in the image store.
    pub fn device(&self, start: Start, cache: &Path, prefetch: bool, hedge: Option<&str>) -> String {
        let image = if start == Start::Known { format!("@{}", self.image) } else { format!(":{TAG}") };
        let (device, cache) = (self.remote.device(&self.prefix, &image), cache.display());
        let prefetch = if prefetch { "yes" } else { "no" };
        let hedge = hedge.map_or(String::new(), |time| format!(",hedge={time}"));
        format!("{device},cache={cache},prefetch={prefetch}{hedge}")
    }

    /// Starts all servers of a fleet, and boots each fork as soon as its server listens. Returns the seconds
    /// until all forks have booted.
    pub fn start(
        &self,
        fleet: Fleet,
        device: &dyn Fn(u64) -> String,
        pauses: Option<u32>,
    ) -> Result<(f64, Vec<Served>)> {
        let started = Instant::now();
        let mut servers = Vec::new();
        for host in 0..fleet.hosts {
            for _ in 0..fleet.servers {
                let dir = self.run_dir.server()?;
                let mut devices = vec![format!("golden={}", device(host))];
                devices.extend((0..fleet.forks).map(|fork| format!("{}=fork,base=golden", name(fork))));
                let server = Server::spawn(&dir.serve(self.freestone, devices))?;
                servers.push(Served { server, dir });
            }
        }
        self.boot(&mut servers, fleet.forks, pauses)?;
        Ok((started.elapsed().as_secs_f64(), servers))
    }

    /// Boots all forks of all servers, each with its own connection.
    pub fn boot(&self, servers: &mut [Served], forks: u64, pauses: Option<u32>) -> Result<()> {
        let fork = |socket: &Path, fork: u64| -> Result<()> {
            let mut client = Client::connect_to(socket, &name(fork))?;
            let mut buffer = Vec::new();
            replay(&self.reads, pauses, |offset, len| {
                buffer.resize(len, 0);
                client.read(offset, &mut buffer)
            })?;
            client.end()
        };
        let server = |running: &mut Served| -> Result<()> {
            let (socket, control) = (running.dir.socket("nbd"), running.dir.socket("control"));
            // The control socket is the last socket that a server opens, so all sockets listen once it does.
            running.server.wait_for(READY, &mut || UnixStream::connect(&control).ok())?;
            thread::scope(|scope| {
                let (fork, socket) = (&fork, &socket);
                let booting = (0..forks).map(|number| scope.spawn(move || fork(socket, number)));
                join_all(booting.collect())
            })
        };
        thread::scope(|scope| {
            let server = &server;
            join_all(servers.iter_mut().map(|running| scope.spawn(move || server(running))).collect())
        })
    }

    pub fn end_servers(servers: Vec<Served>) -> Result<()> {
        servers.into_iter().try_for_each(|running| running.server.end(END_MAX))
    }

    /// Waits until the link is quiet. Returns the requests and the received bytes so far.
    fn wait_until_quiet(&self) -> Result<(Requests, u64)> {
        let (started, mut since, mut bytes) = (Instant::now(), Instant::now(), self.remote.bytes());
        while since.elapsed() < QUIET {
            ensure!(started.elapsed() < QUIET_MAX, "the link to the store does not become quiet");
            thread::sleep(Duration::from_millis(10));
            let now = self.remote.bytes();
            if now != bytes {
                (bytes, since) = (now, Instant::now());
            }
        }
        Ok((self.remote.requests(&self.prefix), bytes.1))
    }

    /// Calls `run` and returns its result with the traffic that it caused.
    pub fn measure_traffic<T>(&self, run: impl FnOnce() -> Result<T>) -> Result<(T, Traffic)> {
        // All earlier activity ended in a call of `wait_until_quiet`.
        let (before, bytes_before) = (self.remote.requests(&self.prefix), self.remote.bytes().1);
        let done = run()?;
        let (after, bytes_after) = self.wait_until_quiet()?;
        let (mut request_counts, mut max_fetches) = (RequestCounts::new(), 0);
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
                max_fetches = max_fetches.max(count);
            }
            *request_counts.entry(kind).or_default() += count;
        }
        Ok((done, Traffic { request_counts, max_fetches, bytes: bytes_after - bytes_before }))
    }

    pub fn caches(&self, fleet: Fleet) -> Result<Vec<TempDir>> {
        (0..fleet.hosts).map(|_| self.test_image.empty_cache()).collect()
    }
}

fn name(fork: u64) -> String {
    format!("vm-{fork}")
}

/// Joins all threads and returns the first error.
fn join_all(threads: Vec<thread::ScopedJoinHandle<'_, Result<()>>>) -> Result<()> {
    let results =
        threads.into_iter().map(|thread| thread.join().unwrap_or(Err(anyhow!("a thread panicked"))));
    results.fold(Ok(()), Result::and)
}

/// Moves reads to every other chunk of the disk. Then no chunk follows another one, so no chunk is fetched
/// ahead, which would depend on timing. For a smoke run, in which all requests must match the model.
fn spread_reads(reads: &mut [Read], bytes: u64) {
    let block = CHUNK_BYTES as u64;
    let places = (bytes / block / 2).max(1);
    for read in reads {
        let offset_in_chunk = read.offset % block;
        read.offset = read.offset / block % places * 2 * block + offset_in_chunk;
        read.len = read.len.min((block - offset_in_chunk) as usize);
    }
}

/// Boots once and pushes the trace of the boot to the image store.
fn record_trace(test_image: &TestImage, store: &Arc<Store>, reads: &[Read]) -> Result<()> {
    let cache = test_image.empty_cache()?;
    let image = image(store, cache.path(), false)?;
    replay(reads, None, |offset, len| Ok(image.read_at(offset, &mut IoBuf::zeroed(len)?)?))?;
    image.push_trace(deadline())?;
    Ok(())
}
