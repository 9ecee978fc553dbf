//! Arbitrary contents of a driver's memory: rings, descriptors, headers, data.
//!
//! * Nothing panics, and no queue hangs. A queue completes each chain once, and notifies the driver if
//!   requested. At an invalid chain, the queue completes the chains before it, stops and reports that.
//! * An invalid request completes with an appropriate status. A valid request succeeds unless the device
//!   fails.
//! * Read data and the final content of the device equal those of a byte vector, or of another zoned device, that
//!   executes the same requests.
//! * The memory changes only in the buffers of requests and in the used ring.
//! * A stopped queue continues where it was. Truncated memory ends the connection.
//!
//! Only the first property is checked, without the completions, if results are unpredictable: if the device writes to
//! memory that it also reads, like a ring or a chain of the same batch, or if the queue resubmits the inflight
//! requests of another server.

use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use freestone::device::Device;

use super::VhostUser;
use super::chain::{self, ParsedRequest, places, total};
use super::device::{Disk, disk};
use super::driver::{AVAIL, DESC, Driver, USED};
use super::expected::Expected;
use super::requests::{BATCH, Offer, Raw, Script};
use super::wire::{FLUSHES, INDIRECT, OK};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Completed,
    /// The queue stopped at an invalid chain.
    Stopped,
    Unpredictable,
}

struct Rings<'a> {
    script: &'a Script,
    driver: Driver,
    expected: Expected,
    /// Index of the available ring at which the queue continues.
    next_avail: u16,
    /// True if a request other than a flush succeeded.
    done: bool,
}

impl VhostUser {
    /// Checks one input. Returns true if at least one request other than a flush succeeded.
    ///
    /// # Panics
    /// Panics if a property does not hold.
    pub fn rings(&self, input: &[u8]) -> bool {
        let Some(script) = Script::new(input) else { return false };
        let disk = Arc::new(disk(script.disk));
        let (ours, theirs) = UnixStream::pair().expect("a descriptor is left");
        let done = std::thread::scope(|scope| {
            let device = Arc::clone(&disk.device) as Arc<dyn Device>;
            scope.spawn(|| self.serve(device, script.read_only, theirs.into()));
            let driver = Driver::new(ours, script.driver, Arc::clone(&disk));
            let expected = Expected::new(script.disk, script.read_only);
            let next_avail = script.driver.base;
            Rings { script: &script, driver, expected, next_avail, done: false }.run(&disk)
        });
        self.assert_sound();
        done
    }
}

fn overlap(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}

impl Rings<'_> {
    fn run(mut self, disk: &Disk) -> bool {
        let (mut rest, mut end) = (&self.script.requests[..], End::Completed);
        if rest.is_empty() {
            return false;
        }
        while end == End::Completed && !rest.is_empty() {
            let (offered, how) = self.batch(rest);
            (rest, end) = (&rest[offered..], how);
            if self.script.driver.inherited.is_some() {
                end = End::Unpredictable;
            }
            if self.script.stops && end == End::Completed {
                self.stop();
                self.driver.start(self.next_avail);
            }
        }
        if end == End::Unpredictable {
            disk.release_all();
            self.driver.stop();
            return self.done;
        }
        assert_eq!(
            self.driver.has_ended(),
            end == End::Stopped,
            "a queue stops if and only if a chain is invalid"
        );
        self.stop();
        self.driver.assert_nothing_in_flight();
        self.expected.compare(&disk.content());
        if self.script.cuts && end == End::Completed {
            self.driver.start(self.next_avail);
            self.driver.cut_off();
        }
        self.done
    }

    fn stop(&mut self) {
        assert_eq!(self.driver.stop(), u32::from(self.next_avail), "a queue continues where it was");
    }

    /// Makes a batch of requests available to the queue. Returns the number of these requests, and how the
    /// batch ended.
    fn batch(&mut self, requests: &[Raw]) -> (usize, End) {
        let shape = &self.script.driver;
        let indirect = shape.features & INDIRECT != 0;
        let old = self.driver.next;
        let (mut offered, mut first, mut heads) = (0, 0, Vec::new());
        let (mut broken, mut unreadable, mut too_much) = (false, false, false);
        for raw in requests.iter().take(BATCH) {
            let Some((used, offer)) = raw.put(&mut self.driver, shape, offered, first) else {
                // A request that does not fit even into an empty batch is skipped.
                offered += usize::from(offered == 0);
                break;
            };
            (offered, first) = (offered + 1, first + used);
            let (Offer::Chain(head) | Offer::TooMuch(head)) = offer;
            self.driver.offer(head);
            too_much = matches!(offer, Offer::TooMuch(_));
            let request = chain::read(&self.driver.memory, shape.size, indirect, head);
            heads.push(head);
            unreadable = request.is_err();
            broken = too_much || request.map_or(true, |request| request.status.is_none());
            if broken || raw.ends_batch() {
                break;
            }
        }
        if self.driver.next == old {
            return (offered, End::Completed);
        }
        if too_much {
            // The queue detects the invalid index before it reads any request.
            heads.clear();
            unreadable = false;
        }
        // Later requests may have overwritten earlier requests in the memory, so parse all of them again.
        let (mut chains, mut torn) = (Vec::new(), None);
        for head in &heads {
            match chain::read(&self.driver.memory, shape.size, indirect, *head) {
                Ok(request) => chains.push(request),
                Err(reads) => {
                    torn = Some(reads);
                    break;
                }
            }
        }
        let lost = chains.iter().position(|request| request.status.is_none());
        if shape.inherited.is_some()
            || torn.is_some() != unreadable
            || chains.len() + usize::from(unreadable) < heads.len()
            || lost.is_some_and(|lost| lost + 1 < heads.len())
            || self.is_unpredictable(&chains, &torn.unwrap_or_default())
        {
            self.driver.publish_only(self.driver.next);
            return (offered, End::Unpredictable);
        }
        for request in &chains {
            let mut status = request.status.into_iter();
            if let Some(at) = status.find(|at| !request.reads.iter().any(|range| range.contains(at))) {
                self.driver.put(at as u64, &[0xff]);
            }
        }
        let index = if too_much { self.driver.next.wrapping_add(shape.size) } else { self.driver.next };
        self.driver.publish(old, index, chains.len() as u16, broken);
        self.next_avail = self.next_avail.wrapping_add(chains.len() as u16);
        self.check_completions(&chains);
        if broken {
            self.driver.wait_ended();
        }
        (offered, if broken { End::Stopped } else { End::Completed })
    }

    /// Returns true if memory that is written for one chain may be read for another chain or as a ring. Also
    /// returns true if memory that is read for a chain overlaps a ring. `torn` has the ranges read for an
    /// invalid chain.
    fn is_unpredictable(&self, chains: &[ParsedRequest], torn: &[Range<usize>]) -> bool {
        let size = usize::from(self.script.driver.size);
        let ring = |at: u64, bytes: usize| at as usize..at as usize + bytes;
        let (avail, used) = (ring(AVAIL, 6 + size * 2), ring(USED, 6 + size * 8));
        let rings = [ring(DESC, size * 16), avail.clone(), used.clone()];
        let is_ring = |read: &Range<usize>| overlap(read, &avail) || overlap(read, &used);
        if torn.iter().any(is_ring) {
            return true;
        }
        chains.iter().enumerate().any(|(number, request)| {
            let others = chains.iter().enumerate().filter(|(other, _)| *other != number);
            let others = others.flat_map(|(_, other)| other.reads.iter().chain(&other.writes));
            let mut all = rings.iter().chain(torn).chain(others);
            all.any(|range| request.writes.iter().any(|written| overlap(range, written)))
                || request.reads.iter().any(is_ring)
        })
    }

    /// Checks the completions of the chains and the content of the whole guest memory.
    fn check_completions(&mut self, chains: &[ParsedRequest]) {
        let actual = self.driver.read_memory();
        let size = u64::from(self.script.driver.size);
        let mut lens = Vec::new();
        for _ in chains {
            let at = (USED + 4 + 8 * (u64::from(self.driver.used_seen) % size)) as usize;
            self.driver.memory[at..at + 8].copy_from_slice(&actual[at..at + 8]);
            lens.push(self.driver.used(&actual));
        }
        for request in chains {
            let mine = |used: &&(u32, u32)| used.0 == u32::from(request.head);
            let (answer, more) = (lens.iter().find(mine), lens.iter().filter(mine).count());
            assert_eq!(more, 1, "{request:?} is completed {more} times");
            self.follow(request, answer.map_or(0, |used| used.1), &actual);
        }
        // The queue also writes its notification settings, which may have any value, and its used index.
        let index = self.driver.used_seen.to_le_bytes();
        let memory = &mut self.driver.memory;
        for at in [USED as usize, (USED + 4 + 8 * size) as usize] {
            memory[at..at + 2].copy_from_slice(&actual[at..at + 2]);
        }
        memory[USED as usize + 2..USED as usize + 4].copy_from_slice(&index);
        if *memory != actual {
            let at = memory.iter().zip(&actual).position(|(one, other)| one != other).unwrap_or_default();
            panic!("{at:#x} is {:#x}, not {:#x}: {chains:#?}", actual[at], memory[at]);
        }
    }

    /// Checks the completion of one request.
    fn follow(&mut self, request: &ParsedRequest, len: u32, actual: &[u8]) {
        let status = request.status.map(|at| actual[at]);
        let done = status == Some(OK);
        let memory = &mut self.driver.memory;
        let expected = self.expected.follow(request, memory, "disk", done);
        if let Some(status) = status {
            let wanted = &expected.statuses;
            assert!(wanted.contains(&status), "{request:?} has the status {status}, not one of {wanted:?}");
        }
        if done {
            assert_eq!(u64::from(len), expected.data.len() as u64 + 1, "the length of {request:?}");
            let places = places(memory, &request.writable, expected.data.len()).expect("it is done");
            for (at, byte) in places.into_iter().zip(&expected.data) {
                memory[at] = byte.unwrap_or(actual[at]);
            }
        } else {
            assert!(
                (1..=total(&request.writable) + 1).contains(&u64::from(len)),
                "the length of {request:?}"
            );
            for range in &request.writes {
                memory[range.clone()].copy_from_slice(&actual[range.clone()]);
            }
        }
        if let (Some(at), Some(status)) = (request.status, status) {
            memory[at] = status;
        }
        self.done |= done && request.kind != FLUSHES;
    }
}
