//! The request path of a disk, fork or snapshot, and how far one call of it goes.

use super::below::Below;
use super::chain::View;
use super::job::Part;

use super::parent::{Look, Parent};
use super::read::{PageResult, Waits};
use super::removals::Hope;
use super::stats::counter;
use super::write::Patched;
use super::{Inner, LOGICAL_BLOCK_BYTES, PAGE, next_multiple, piece};
use crate::codec::Page;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{self, Buffer, Error, Flags, Geometry, Op, Request, Tried};
use freestone_core::handoff::progress;
use freestone_core::pin;
use freestone_core::slot::{LEAF_SLOTS, Table, Word};

/// Pages that one `try_io` reads, to keep its work bounded: about a millisecond. (For writes the
/// algorithm says.)
const TRY_READ_PAGES: u64 = 256;
/// Leaves (of 512 pages) that one `try_io` frees: about a millisecond where every page has an
/// object.
const TRY_FREE_LEAVES: u32 = 2;

/// What an attempt at a request came to.
pub(super) enum Attempt {
    Tried(Tried),
    /// It changes content, and writers are held up while a snapshot begins.
    Frozen,
    /// It found no memory, and a removed device is about to give back its own.
    Removing,
    /// It found no room, and is to wait until there is some.
    Full,
}

/// How far a change came under one pin.
enum Step {
    Tried(Tried),
    /// It changes a part of its first page, which lies on a base: that is read with nothing pinned.
    OverBase,
}

/// Writers are held up.
struct Frozen;

impl Inner {
    pub(super) fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size(),
            logical_block: LOGICAL_BLOCK_BYTES,
            physical_block: PAGE_BYTES as u32,
            io_min: PAGE_BYTES as u32,
            io_opt: PAGE_BYTES as u32,
            discard_granularity: PAGE_BYTES as u32,
            fast_zeroes: true,
            volatile_cache: false,
            padding: 0,
            volatile_media: true,
            rotational: false,
            max_request: 0,
            read_only: self.is_snapshot,
            zones: None,
        }
    }

    pub(super) fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> device::Result<Tried> {
        self.attempt(request, buffer, &Below::default()).map(|attempt| match attempt {
            Attempt::Tried(tried) => tried,
            Attempt::Frozen | Attempt::Removing | Attempt::Full => Tried::WouldBlock,
        })
    }

    /// Whether a request lies on the device.
    #[inline]
    pub(super) fn check(&self, request: &Request) -> device::Result<()> {
        let checked = request.check_place(self.size(), LOGICAL_BLOCK_BYTES);
        checked.inspect_err(|_| self.counters.add(counter::INVALID_IO, 1))
    }

    /// As much of a request as can be done at once.
    #[expect(clippy::inline_always, reason = "a request in memory is one function")]
    #[inline(always)]
    pub(super) fn attempt(
        &self,
        request: &Request,
        buffer: Buffer<'_>,
        below: &Below,
    ) -> device::Result<Attempt> {
        self.check(request)?;
        let offset = request.offset;
        match (request.op, buffer) {
            (Op::Read, Buffer::Read(into)) if into.len() as u64 == request.len => {
                let read = if self.is_plain() {
                    pin::pinned(|pin| self.read(self.view.load(pin).layer.table(), offset, into))
                } else {
                    let len = request.len;
                    self.read_through(offset, into).map(|(done, _)| progress(done as u64, len))
                };
                let read = read.inspect_err(|_| self.counters.add(counter::FAILED_READS, 1));
                read.map(Attempt::Tried)
            }
            (Op::Flush, _) => Ok(Attempt::Tried(Tried::Done)),
            (Op::Read, _) => Err(Error::Misaligned),
            _ if self.is_snapshot => Err(Error::ReadOnly),
            (Op::Write, Buffer::Write(data)) if data.len() as u64 == request.len => {
                self.change(request, data, |view| self.write(view, offset, data))
            }
            (Op::Write, _) => Err(Error::Misaligned),
            // That may wait for a disk.
            (Op::Discard | Op::WriteZeroes, _) if self.looks_below(request, below) => {
                Ok(Attempt::Tried(Tried::WouldBlock))
            }
            (Op::Discard, _) => {
                let freed = self.change(request, &[], |view| self.free(view, request, false, below));
                freed.inspect(|_| self.room_came())
            }
            (Op::WriteZeroes, _) if request.flags.contains(Flags::MAY_FREE) => {
                let freed = self.change(request, &[], |view| self.free(view, request, true, below));
                freed.inspect(|_| self.room_came())
            }
            (Op::WriteZeroes, _) => {
                let freed = self.change(request, &[], |view| self.fill(view, offset, request.len));
                freed.inspect(|_| self.room_came())
            }
        }
    }

    /// Does what changes content, when no snapshot is just beginning.
    #[expect(clippy::inline_always, reason = "a write in memory is one function")]
    #[inline(always)]
    fn change(
        &self,
        request: &Request,
        data: &[u8],
        mut change: impl FnMut(&View) -> device::Result<Step>,
    ) -> device::Result<Attempt> {
        let mut ended = 0;
        loop {
            let changed = pin::pinned(|pin| {
                let view = self.view.load(pin);
                if view.is_frozen() { Err(Frozen) } else { Ok(change(view)) }
            });
            let error = match changed {
                Ok(Ok(Step::Tried(tried))) => return Ok(Attempt::Tried(tried)),
                Err(Frozen) => return Ok(Attempt::Frozen),
                Ok(Ok(Step::OverBase)) => match self.change_over(request, data) {
                    Ok(None) => continue,
                    Ok(Some(tried)) => return Ok(Attempt::Tried(tried)),
                    Err(error) => error,
                },
                Ok(Err(error)) => error,
            };
            match if error == Error::NoSpace { self.hope(&mut ended) } else { Hope::None } {
                Hope::Again => {}
                Hope::Later => return Ok(Attempt::Removing),
                Hope::None => return self.no_hope(error),
            }
        }
    }

    /// What becomes of a change that failed.
    #[cold]
    fn no_hope(&self, error: Error) -> device::Result<Attempt> {
        match if error == Error::NoSpace { self.no_room() } else { Err(error) } {
            Ok(()) => Ok(Attempt::Full),
            Err(error) => {
                self.counters.add(counter::FAILED_WRITES, 1);
                Err(error)
            }
        }
    }

    /// What becomes of a request that found no room: it waits, or fails so.
    #[cold]
    pub(super) fn no_room(&self) -> device::Result<()> {
        if self.pages.full.waits(&self.limits.room) { Ok(()) } else { Err(Error::NoSpace) }
    }

    /// What waits for room may have some now.
    fn room_came(&self) {
        if self.pages.full.waiters.is_wanted() {
            self.pages.room_came();
        }
    }

    /// What a write that found no memory can hope for. `ended`: see
    /// [`Removals::hope`](super::removals::Removals::hope).
    #[cold]
    pub(super) fn hope(&self, ended: &mut u64) -> Hope {
        self.pages.removals.hope(ended)
    }

    #[expect(clippy::inline_always, reason = "a hit in memory is one function")]
    #[inline(always)]
    fn read(&self, table: &Table, offset: u64, into: &mut [u8]) -> device::Result<Tried> {
        let len = into.len() as u64;
        let target = len.min(TRY_READ_PAGES * PAGE);
        let mut done = 0;
        while done < target {
            let leaf_end = next_multiple(offset + done, LEAF_SLOTS * PAGE) - offset;
            let stop = leaf_end.min(target);
            match table.leaf((offset + done) / PAGE) {
                None => into[done as usize..stop as usize].fill(0),
                Some(leaf) => {
                    while done < stop {
                        let (slot, from, n) = piece(offset + done, stop - done);
                        let part = &mut into[done as usize..][..n];
                        match self.pages.read_slot(leaf.lock(slot), from, part) {
                            Ok(result) => result?,
                            Err(Waits) => return Ok(progress(done, len)),
                        }
                        done += n as u64;
                    }
                }
            }
            done = stop;
        }
        Ok(progress(done, len))
    }

    /// Reads pages of a device that lies over something, or of a snapshot: what is in memory under
    /// a pin, what lies on a base without one. A page that was on the base at the look is still
    /// what the device had then when the base is read: a base does not change. Returns how many
    /// bytes that were, and what has to be waited for then.
    fn read_through(&self, offset: u64, into: &mut [u8]) -> device::Result<(usize, Look<'_>)> {
        let target = into.len().min((TRY_READ_PAGES * PAGE) as usize);
        let mut done = 0;
        while done < target {
            let at = offset + done as u64;
            let (read, look) = pin::pinned(|pin| self.look(pin, at, &mut into[done..target]))?;
            done += read;
            match look {
                Look::All => {}
                // A file is never read at once.
                Look::Waits | Look::Staged(..) => return Ok((done, look)),
                Look::Base(base, bytes) => {
                    let read = base.read(offset + done as u64, &mut into[done..][..bytes])?;
                    done += read;
                    if read == 0 {
                        return Ok((done, look));
                    }
                }
            }
        }
        Ok((done, Look::All))
    }

    /// Reads as much as can be read at once. Returns how many bytes that were, and what has to be
    /// waited for then.
    pub(super) fn read_some(&self, offset: u64, into: &mut [u8]) -> device::Result<(usize, Look<'_>)> {
        let len = into.len();
        let read = if self.is_plain() {
            pin::pinned(|pin| self.read(self.view.load(pin).layer.table(), offset, into)).map(|tried| {
                match tried {
                    Tried::Done => (len, Look::All),
                    Tried::Partly(bytes) => (bytes as usize, Look::All),
                    Tried::WouldBlock => (0, Look::Waits),
                }
            })
        } else {
            self.read_through(offset, into)
        };
        read.inspect_err(|_| self.counters.add(counter::FAILED_READS, 1))
    }

    fn write(&self, view: &View, offset: u64, data: &[u8]) -> device::Result<Step> {
        let len = data.len() as u64;
        let target = len.min(self.pages.codecs.primary().pages_per_millisecond() * PAGE);
        let mut done = 0;
        while done < target {
            let (slot, from, n) = piece(offset + done, target - done);
            let data = &data[done as usize..][..n];
            let leaf =
                view.layer.table().leaf(slot).map_or_else(|| self.pages.new_leaf(view, slot, data), Ok);
            let written = match leaf {
                Ok(leaf) => match <&Page>::try_from(data) {
                    Ok(page) => self.pages.write_page(view, leaf, slot, page),
                    Err(_) => match self.pages.patch_page(view, leaf, slot, from, Part::Data(data)) {
                        Ok(Ok(Patched::OnBase)) => return Ok(over_base(done, len)),
                        patched => patched.map(|result| result.map(drop)),
                    },
                },
                Err(error) => self.pages.refused(error),
            };
            match written {
                Ok(result) => result?,
                Err(Waits) => return Ok(Step::Tried(progress(done, len))),
            }
            done += n as u64;
        }
        Ok(Step::Tried(progress(done, len)))
    }

    /// Writes zeroes that are no hole: same-filled pages.
    #[cold]
    fn fill(&self, view: &View, offset: u64, len: u64) -> device::Result<Step> {
        let target = len.min(TRY_READ_PAGES * PAGE);
        let mut done = 0;
        while done < target {
            let (slot, from, n) = piece(offset + done, target - done);
            let filled = if n == PAGE_BYTES {
                self.pages.fill_page(view, slot)
            } else {
                let leaf = view.layer.table().leaf_or_new(slot)?;
                match self.pages.patch_page(view, leaf, slot, from, Part::Zeroes(n)) {
                    Ok(Ok(Patched::OnBase)) => return Ok(over_base(done, len)),
                    patched => patched.map(|result| result.map(drop)),
                }
            };
            match filled {
                Ok(result) => result?,
                Err(Waits) => return Ok(Step::Tried(progress(done, len))),
            }
            done += n as u64;
        }
        Ok(Step::Tried(progress(done, len)))
    }

    /// Empties the whole pages of a range, the last one of the device among them, also where the
    /// device ends within it; over a base they become pages of zeroes, unless the base has zeroes
    /// there. The parts of pages at its ends are zeroed where the range must be `exact` (write zeroes)
    /// and skipped where it is a hint (discard), as in the kernel. Goes as far as is known what lies
    /// `below`.
    fn free(&self, view: &View, request: &Request, exact: bool, below: &Below) -> device::Result<Step> {
        let table = view.layer.table();
        let (offset, len) = (request.offset, request.len);
        let end = if matches!(self.parent, Parent::Nothing) { offset + len } else { below.known_until };
        let mut at = offset;
        let mut leaves = 0;
        while at < end {
            let slot = at / PAGE;
            let page_end = next_multiple(at, PAGE);
            if !at.is_multiple_of(PAGE) || page_end > end {
                let stop = page_end.min(end);
                if at.is_multiple_of(PAGE) && end == self.size() {
                    match self
                        .pages
                        .free_end(view, slot, below.end_of_zeroes(at) >= end, || end == self.size())
                    {
                        Ok(Ok(Some(freed))) => {
                            self.counters.add(counter::NOTIFY_FREE, i64::from(freed));
                            at = stop;
                            continue;
                        }
                        // It has grown.
                        Ok(Ok(None)) => {}
                        Ok(Err(error)) => return Err(error),
                        Err(Waits) => return Ok(Step::Tried(progress(at - offset, len))),
                    }
                }
                if exact {
                    match self.zero_part(view, at, stop, below)? {
                        Ok(Patched::Done) => {}
                        Ok(Patched::OnBase) => return Ok(over_base(at - offset, len)),
                        Err(Waits) => return Ok(Step::Tried(progress(at - offset, len))),
                    }
                }
                at = stop;
                continue;
            }
            let last = end / PAGE;
            // Pages with zeroes below need nothing where the device has nothing of its own.
            let zeroes_end = (below.end_of_zeroes(at) / PAGE).min(last);
            let is_bare = zeroes_end > slot;
            let (last, present) = if is_bare {
                (zeroes_end, table.next_present(slot, zeroes_end))
            } else {
                (last, view.parent.next_reached(slot, last, || table.next_present(slot, last)))
            };
            let Some(present) = present else {
                at = last * PAGE;
                continue;
            };
            at = present * PAGE;
            if leaves == TRY_FREE_LEAVES {
                break;
            }
            leaves += 1;
            let stop = next_multiple(present, LEAF_SLOTS).min(last);
            for slot in present..stop {
                let freed = match self.pages.free_page(view, slot, is_bare, exact) {
                    Ok(Ok(freed)) => freed,
                    Ok(Err(error)) => return Err(error),
                    Err(Waits) => return Ok(Step::Tried(progress(slot * PAGE - offset, len))),
                };
                self.counters.add(counter::NOTIFY_FREE, i64::from(freed));
            }
            if !is_bare && stop - present == LEAF_SLOTS && view.parent.reaches(present) {
                table.count_as_marks(present);
            }
            at = stop * PAGE;
        }
        Ok(Step::Tried(progress(at - offset, len)))
    }

    /// Zeroes a part of one page, if it holds anything.
    fn zero_part(
        &self,
        view: &View,
        from: u64,
        to: u64,
        below: &Below,
    ) -> device::Result<Result<Patched, Waits>> {
        let slot = from / PAGE;
        let leaf = if view.parent.reaches(slot) && below.end_of_zeroes(from) < to {
            Some(view.layer.table().leaf_or_new(slot)?)
        } else {
            view.layer.table().leaf(slot).filter(|leaf| leaf.peek(slot) != Word::EMPTY)
        };
        let Some(leaf) = leaf else { return Ok(Ok(Patched::Done)) };
        let zeroes = Part::Zeroes((to - from) as usize);
        match self.pages.patch_page(view, leaf, slot, (from % PAGE) as usize, zeroes) {
            Ok(result) => result.map(Ok),
            Err(waits) => Ok(Err(waits)),
        }
    }

    /// Changes a part of a page that lies on a base: the head of a request. `None`: it does not lie
    /// there any more, or writers are held up.
    fn change_over(&self, request: &Request, data: &[u8]) -> device::Result<Option<Tried>> {
        let (slot, from, len) = piece(request.offset, request.len);
        let mut page = [0; PAGE_BYTES];
        if self.parent.read_page(slot, &mut page)? < PAGE_BYTES {
            return Ok(Some(Tried::WouldBlock));
        }
        data.get(..len).map_or(Part::Zeroes(len), Part::Data).put(from, &mut page);
        match self.put_over(slot, &page) {
            None => Ok(None),
            Some(Err(Waits)) => Ok(Some(Tried::WouldBlock)),
            Some(Ok(put)) => put.map(|()| Some(progress(len as u64, request.len))),
        }
    }

    /// Puts a page where it lies below the device until now. `None`: it does not any more, or
    /// writers are held up.
    pub(super) fn put_over(&self, slot: u64, page: &Page) -> Option<PageResult> {
        pin::pinned(|pin| {
            let view = self.view.load(pin);
            if view.is_frozen() {
                return None;
            }
            let leaf = match view.layer.table().leaf_or_new(slot) {
                Ok(leaf) => leaf,
                Err(error) => return Some(Ok(Err(error))),
            };
            let guard = leaf.lock(slot);
            (guard.word() == Word::EMPTY).then(|| self.pages.put_page(view, slot, guard, page))
        })
    }
}

/// A change stopped, after `done` of `len` bytes, at a page that lies on a base.
fn over_base(done: u64, len: u64) -> Step {
    if done == 0 { Step::OverBase } else { Step::Tried(progress(done, len)) }
}
