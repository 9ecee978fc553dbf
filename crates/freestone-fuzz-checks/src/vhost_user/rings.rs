//! What a driver writes to its memory: rings, descriptors, headers, data.
//!
//! * Nothing panics, and no queue hangs: it answers each chain once, and tells the driver where that
//!   wants to be told, or it ends and says so, after what it had taken.
//! * What is wrong with a request is answered with a status that fits; what is right is done, except
//!   where the device fails.
//! * Data is what a byte vector holds, or another zoned device; and the device ends as that does.
//! * No byte of the memory is changed but those that a request is answered with, and the used ring.
//! * A queue that is stopped goes on where it was; memory that is cut off ends the connection.
//!
//! Where what the device writes is what it reads elsewhere, as in a ring or in a chain that is shown
//! with it, or where the queue does again what another server has left, only the first of these is
//! checked, without the answers.

use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use freestone::device::Device;

use super::VhostUser;
use super::device::Disk;
use super::driver::{AVAIL, DESC, Driver, USED};
use super::expected::Expected;
use super::plain::{self, Asked, places, total};
use super::requests::{BATCH, Offer, Raw, Script};
use super::wire::{FLUSHES, INDIRECT, OK};

/// How a batch of requests ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// All are answered.
    Goes,
    /// The queue has ended.
    Broken,
    /// Nobody knows what the queue reads.
    Wild,
}

/// A session with one queue.
struct Rings<'a> {
    script: &'a Script,
    driver: Driver,
    expected: Expected,
    /// Where the queue goes on.
    taken: u16,
    /// Something was done, flushes apart.
    done: bool,
}

impl VhostUser {
    /// Checks one input; true: at least one request was done, flushes apart.
    ///
    /// # Panics
    /// Something does not hold.
    pub fn rings(&self, input: &[u8]) -> bool {
        let Some(script) = Script::new(input) else { return false };
        let disk = Arc::new(Disk::new(script.disk));
        let (ours, theirs) = UnixStream::pair().expect("a descriptor is left");
        let done = std::thread::scope(|scope| {
            let device = Arc::clone(&disk) as Arc<dyn Device>;
            scope.spawn(|| self.serve(device, script.read_only, theirs.into()));
            let driver = Driver::new(ours, script.driver, Arc::clone(&disk));
            let expected = Expected::new(script.disk, script.read_only);
            let taken = script.driver.base;
            Rings { script: &script, driver, expected, taken, done: false }.run(&disk)
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
        let (mut rest, mut end) = (&self.script.requests[..], End::Goes);
        if rest.is_empty() {
            return false;
        }
        while end == End::Goes && !rest.is_empty() {
            let (put, how) = self.batch(rest);
            (rest, end) = (&rest[put..], how);
            if self.script.driver.left.is_some() {
                end = End::Wild;
            }
            if self.script.stops && end == End::Goes {
                self.stop();
                self.driver.start(self.taken);
            }
        }
        if end == End::Wild {
            disk.let_go();
            self.driver.stop();
            return self.done;
        }
        assert_eq!(self.driver.has_ended(), end == End::Broken, "a queue ends if it must");
        self.stop();
        self.driver.assert_nothing_noted();
        self.expected.compare(&disk.content());
        if self.script.cuts && end == End::Goes {
            self.driver.start(self.taken);
            self.driver.cut_off();
        }
        self.done
    }

    fn stop(&mut self) {
        assert_eq!(self.driver.stop(), u32::from(self.taken), "a queue goes on where it was");
    }

    /// Shows the queue some requests; how many, and how that ended.
    fn batch(&mut self, requests: &[Raw]) -> (usize, End) {
        let shape = &self.script.driver;
        let indirect = shape.features & INDIRECT != 0;
        let old = self.driver.next;
        let (mut put, mut first, mut heads) = (0, 0, Vec::new());
        let (mut broken, mut unreadable, mut too_much) = (false, false, false);
        for raw in requests.iter().take(BATCH) {
            let Some((used, offer)) = raw.put(&mut self.driver, shape, put, first) else {
                // One that never fits is left out.
                put += usize::from(put == 0);
                break;
            };
            (put, first) = (put + 1, first + used);
            let (Offer::Chain(head) | Offer::TooMuch(head)) = offer;
            self.driver.offer(head);
            too_much = matches!(offer, Offer::TooMuch(_));
            let asked = plain::read(&self.driver.memory, shape.size, indirect, head);
            heads.push(head);
            unreadable = asked.is_err();
            broken = too_much || asked.map_or(true, |asked| asked.status.is_none());
            if broken || raw.ends_batch() {
                break;
            }
        }
        if self.driver.next == old {
            return (put, End::Goes);
        }
        if too_much {
            // That is seen before any request.
            heads.clear();
            unreadable = false;
        }
        // What was put later may be a part of what was put first.
        let (mut chains, mut torn) = (Vec::new(), None);
        for head in &heads {
            match plain::read(&self.driver.memory, shape.size, indirect, *head) {
                Ok(asked) => chains.push(asked),
                Err(reads) => {
                    torn = Some(reads);
                    break;
                }
            }
        }
        let lost = chains.iter().position(|asked| asked.status.is_none());
        if shape.left.is_some()
            || torn.is_some() != unreadable
            || chains.len() + usize::from(unreadable) < heads.len()
            || lost.is_some_and(|lost| lost + 1 < heads.len())
            || self.is_wild(&chains, &torn.unwrap_or_default())
        {
            self.driver.show_only(self.driver.next);
            return (put, End::Wild);
        }
        for asked in &chains {
            let mut status = asked.status.into_iter();
            if let Some(at) = status.find(|at| !asked.reads.iter().any(|range| range.contains(at))) {
                self.driver.put(at as u64, &[0xff]);
            }
        }
        let index = if too_much { self.driver.next.wrapping_add(shape.size) } else { self.driver.next };
        self.driver.show(old, index, chains.len() as u16, broken);
        self.taken = self.taken.wrapping_add(chains.len() as u16);
        self.judge(&chains);
        if broken {
            self.driver.wait_ended();
        }
        (put, if broken { End::Broken } else { End::Goes })
    }

    /// Whether something that is written for one chain may be read for another, or as a ring; or what
    /// is read for one is written as a ring. `torn` is what is read for one that breaks the rules.
    fn is_wild(&self, chains: &[Asked], torn: &[Range<usize>]) -> bool {
        let size = usize::from(self.script.driver.size);
        let ring = |at: u64, bytes: usize| at as usize..at as usize + bytes;
        let (avail, used) = (ring(AVAIL, 6 + size * 2), ring(USED, 6 + size * 8));
        let rings = [ring(DESC, size * 16), avail.clone(), used.clone()];
        let is_ring = |read: &Range<usize>| overlap(read, &avail) || overlap(read, &used);
        if torn.iter().any(is_ring) {
            return true;
        }
        chains.iter().enumerate().any(|(number, asked)| {
            let others = chains.iter().enumerate().filter(|(other, _)| *other != number);
            let others = others.flat_map(|(_, other)| other.reads.iter().chain(&other.writes));
            let mut all = rings.iter().chain(torn).chain(others);
            all.any(|range| asked.writes.iter().any(|written| overlap(range, written)))
                || asked.reads.iter().any(is_ring)
        })
    }

    /// What was answered, and what is in the memory now.
    fn judge(&mut self, chains: &[Asked]) {
        let actual = self.driver.look();
        let size = u64::from(self.script.driver.size);
        let mut lens = Vec::new();
        for _ in chains {
            let at = (USED + 4 + 8 * (u64::from(self.driver.seen) % size)) as usize;
            self.driver.memory[at..at + 8].copy_from_slice(&actual[at..at + 8]);
            lens.push(self.driver.used(&actual));
        }
        for asked in chains {
            let mine = |used: &&(u32, u32)| used.0 == u32::from(asked.head);
            let (answer, more) = (lens.iter().find(mine), lens.iter().filter(mine).count());
            assert_eq!(more, 1, "{asked:?} is answered {more} times");
            self.follow(asked, answer.map_or(0, |used| used.1), &actual);
        }
        // Where the queue says whether it wants to be told, and how much is used.
        let index = self.driver.seen.to_le_bytes();
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

    /// What one request was answered.
    fn follow(&mut self, asked: &Asked, len: u32, actual: &[u8]) {
        let status = asked.status.map(|at| actual[at]);
        let done = status == Some(OK);
        let memory = &mut self.driver.memory;
        let told = self.expected.follow(asked, memory, "disk", done);
        if let Some(status) = status {
            let wanted = &told.statuses;
            assert!(wanted.contains(&status), "{asked:?} is answered {status}, not one of {wanted:?}");
        }
        if done {
            assert_eq!(u64::from(len), told.data.len() as u64 + 1, "the length of {asked:?}");
            let places = places(memory, &asked.writable, told.data.len()).expect("it is done");
            for (at, byte) in places.into_iter().zip(&told.data) {
                memory[at] = byte.unwrap_or(actual[at]);
            }
        } else {
            assert!((1..=total(&asked.writable) + 1).contains(&u64::from(len)), "the length of {asked:?}");
            for range in &asked.writes {
                memory[range.clone()].copy_from_slice(&actual[range.clone()]);
            }
        }
        if let (Some(at), Some(status)) = (asked.status, status) {
            memory[at] = status;
        }
        self.done |= done && asked.kind != FLUSHES;
    }
}
