//! The part of the request path of disks, forks and snapshots that runs without waiting.

use crate::ram::device::chain::View;
use crate::ram::waiting::job::Part;
use crate::ram::waiting::parent_zeroes::ParentZeroes;

use super::write::PatchOutcome;
use crate::codec::Page;
use crate::ram::device::Inner;
use crate::ram::device::parent::{Parent, ReadEnd};
use crate::ram::device::stats::counter;
use crate::ram::geometry::{LOGICAL_BLOCK_BYTES, PAGE, next_multiple, piece};
use crate::ram::memory::read::{MustWait, PageResult};
use crate::ram::waiting::removals::SpaceRetry;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{self, Buffer, Error, Flags, Geometry, Op, Request, TryResult};
use freestone_core::handoff::try_result;
use freestone_core::pin;
use freestone_core::slot::{LEAF_SLOTS, Table, Word};

/// Maximum pages that one `try_io` reads: about a millisecond of work. For writes the maximum
/// depends on the compression algorithm.
const TRY_READ_PAGES: u64 = 256;
/// Maximum slot table leaves (512 pages each) that one `try_io` frees: about a millisecond of work
/// if every page has an object.
const TRY_FREE_LEAVES: u32 = 2;

pub(in crate::ram) enum Attempt {
    Tried(TryResult),
    /// The request changes content, and writers are frozen while a snapshot is being taken.
    Frozen,
    /// No memory is free, but a removal (of a device or of rewound content) is about to free some.
    Removing,
    /// No space is free: the request must wait until space is freed.
    Full,
}

/// Result of the part of a content change that is made under one pin.
enum Step {
    Tried(TryResult),
    /// The request changes part of a page that is on a base: read the page without a pin first, as
    /// that calls another device.
    OverBase,
}

/// Error: writers are frozen, as a snapshot is being taken.
struct Frozen;

impl Inner {
    pub(in crate::ram) fn geometry(&self) -> Geometry {
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
            ignores_data: false,
            zones: None,
        }
    }

    /// Returns an error if a request is misaligned or not within the device.
    #[inline]
    pub(in crate::ram) fn check(&self, request: &Request) -> device::Result<()> {
        let checked = request.check_range(self.size(), LOGICAL_BLOCK_BYTES);
        checked.inspect_err(|_| self.counters.add(counter::INVALID_IO, 1))
    }

    /// Runs as much of a request as is possible without waiting. `below`: zeroes of the parent that
    /// the request has looked up.
    #[expect(clippy::inline_always, reason = "a request in memory is one function")]
    #[inline(always)]
    pub(in crate::ram) fn attempt(
        &self,
        request: &Request,
        buffer: Buffer<'_>,
        below: &ParentZeroes,
    ) -> device::Result<Attempt> {
        freestone_core::trail::step!();
        self.check(request)?;
        let offset = request.offset;
        match (request.op, buffer) {
            (Op::Read, Buffer::Read(into)) if into.len() as u64 == request.len => {
                let read = if self.is_plain() {
                    let participant = pin::participant();
                    let pin = participant.pin();
                    self.read(self.view.load(&pin).layer.table(), offset, into)
                } else {
                    let len = request.len;
                    self.read_through(offset, into).map(|(done, _)| try_result(done as u64, len))
                };
                let read = read.inspect_err(|_| self.counters.add(counter::FAILED_READS, 1));
                read.map(Attempt::Tried)
            }
            (Op::Flush, _) => Ok(Attempt::Tried(TryResult::Done)),
            (Op::Read, _) => Err(Error::Misaligned),
            _ if self.is_snapshot => Err(Error::ReadOnly),
            (Op::Write, Buffer::Write(data)) if data.len() as u64 == request.len => {
                self.change(request, data, |view| self.write(view, offset, data))
            }
            (Op::Write, _) => Err(Error::Misaligned),
            // Looking up zeroes of the parent may wait for a disk.
            (Op::Discard | Op::WriteZeroes, _) if self.needs_parent_check(request, below) => {
                Ok(Attempt::Tried(TryResult::WouldBlock))
            }
            (Op::Discard, _) => {
                let freed = self.change(request, &[], |view| self.free_range(view, request, false, below));
                freed.inspect(|_| self.wake_space_waiters())
            }
            (Op::WriteZeroes, _) if request.flags.contains(Flags::MAY_FREE) => {
                let freed = self.change(request, &[], |view| self.free_range(view, request, true, below));
                freed.inspect(|_| self.wake_space_waiters())
            }
            (Op::WriteZeroes, _) => {
                let freed =
                    self.change(request, &[], |view| self.write_zero_pages(view, offset, request.len));
                freed.inspect(|_| self.wake_space_waiters())
            }
        }
    }

    /// Runs `change`, a content change of a request, unless writers are frozen. Retries the change
    /// when memory was freed.
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
                Ok(Ok(Step::OverBase)) => match self.change_over_base(request, data) {
                    Ok(None) => continue,
                    Ok(Some(tried)) => return Ok(Attempt::Tried(tried)),
                    Err(error) => error,
                },
                Ok(Err(error)) => error,
            };
            match if error == Error::NoSpace { self.space_retry(&mut ended) } else { SpaceRetry::No } {
                SpaceRetry::Now => {}
                SpaceRetry::AfterRemoval => return Ok(Attempt::Removing),
                SpaceRetry::No => return self.apply_full_policy(error),
            }
        }
    }

    /// Handles a change that failed. Returns [`Attempt::Full`] if the request may wait for space,
    /// else the error.
    #[cold]
    fn apply_full_policy(&self, error: Error) -> device::Result<Attempt> {
        match if error == Error::NoSpace { self.check_may_wait() } else { Err(error) } {
            Ok(()) => Ok(Attempt::Full),
            Err(error) => {
                self.counters.add(counter::FAILED_WRITES, 1);
                Err(error)
            }
        }
    }

    /// Returns `Ok` if a request that found no space may wait until space is freed, else
    /// [`Error::NoSpace`].
    #[cold]
    pub(super) fn check_may_wait(&self) -> device::Result<()> {
        if self.pages.full.may_wait(&self.limits.space) { Ok(()) } else { Err(Error::NoSpace) }
    }

    /// Retries requests that wait for space, if any.
    fn wake_space_waiters(&self) {
        if self.pages.full.waiters.is_wanted() {
            self.pages.wake_space_waiters();
        }
    }

    /// Returns how a write that found no memory proceeds. For `ended` see
    /// [`Removals::space_retry`](crate::ram::waiting::removals::Removals::space_retry).
    #[cold]
    pub(in crate::ram) fn space_retry(&self, ended: &mut u64) -> SpaceRetry {
        self.pages.removals.space_retry(ended)
    }

    #[expect(clippy::inline_always, reason = "a hit in memory is one function")]
    #[inline(always)]
    fn read(&self, table: &Table, offset: u64, into: &mut [u8]) -> device::Result<TryResult> {
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
                            Err(MustWait) => return Ok(try_result(done, len)),
                        }
                        done += n as u64;
                    }
                }
            }
            done = stop;
        }
        Ok(try_result(done, len))
    }

    /// Reads pages of a snapshot or of a device with a parent: content in memory under a pin,
    /// content on a base without a pin. Reading the base after the lookup is correct because a base
    /// does not change. Returns the number of bytes read and the reason why the read ended.
    fn read_through(&self, offset: u64, into: &mut [u8]) -> device::Result<(usize, ReadEnd<'_>)> {
        let target = into.len().min((TRY_READ_PAGES * PAGE) as usize);
        let mut done = 0;
        while done < target {
            let at = offset + done as u64;
            let (read, read_end) = pin::pinned(|pin| self.read_resident(pin, at, &mut into[done..target]))?;
            done += read;
            match read_end {
                ReadEnd::Complete => {}
                // A file of pages not loaded yet is read asynchronously only.
                ReadEnd::MustWait | ReadEnd::Staged(..) => return Ok((done, read_end)),
                ReadEnd::Base(base, bytes) => {
                    let read = base.read(offset + done as u64, &mut into[done..][..bytes])?;
                    done += read;
                    if read == 0 {
                        return Ok((done, read_end));
                    }
                }
            }
        }
        Ok((done, ReadEnd::Complete))
    }

    /// Reads as much of a range as is possible without waiting. Returns the number of bytes read
    /// and the reason why the read ended.
    pub(super) fn read_some(&self, offset: u64, into: &mut [u8]) -> device::Result<(usize, ReadEnd<'_>)> {
        freestone_core::trail::step!();
        let len = into.len();
        let read = if self.is_plain() {
            pin::pinned(|pin| self.read(self.view.load(pin).layer.table(), offset, into)).map(|tried| {
                match tried {
                    TryResult::Done => (len, ReadEnd::Complete),
                    TryResult::Partly(bytes) => (bytes as usize, ReadEnd::Complete),
                    TryResult::WouldBlock => (0, ReadEnd::MustWait),
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
                        Ok(Ok(PatchOutcome::OnBase)) => return Ok(stop_at_base(done, len)),
                        patched => patched.map(|result| result.map(drop)),
                    },
                },
                Err(error) => self.pages.wait_for_eviction_or_error(error),
            };
            match written {
                Ok(result) => result?,
                Err(MustWait) => return Ok(Step::Tried(try_result(done, len))),
            }
            done += n as u64;
        }
        Ok(Step::Tried(try_result(done, len)))
    }

    /// Writes zeroes as same-filled pages, not as holes: the client did not allow to free the
    /// range.
    #[cold]
    fn write_zero_pages(&self, view: &View, offset: u64, len: u64) -> device::Result<Step> {
        let target = len.min(TRY_READ_PAGES * PAGE);
        let mut done = 0;
        while done < target {
            let (slot, from, n) = piece(offset + done, target - done);
            let filled = if n == PAGE_BYTES {
                self.pages.fill_page(view, slot)
            } else {
                let leaf = view.layer.table().leaf_or_new(slot)?;
                match self.pages.patch_page(view, leaf, slot, from, Part::Zeroes(n)) {
                    Ok(Ok(PatchOutcome::OnBase)) => return Ok(stop_at_base(done, len)),
                    patched => patched.map(|result| result.map(drop)),
                }
            };
            match filled {
                Ok(result) => result?,
                Err(MustWait) => return Ok(Step::Tried(try_result(done, len))),
            }
            done += n as u64;
        }
        Ok(Step::Tried(try_result(done, len)))
    }

    /// Empties the whole pages of a request's range. The last page of the device counts as whole
    /// even if the device ends within it. Over a base, pages become zero pages unless the base has
    /// zeroes there. Partial pages at both ends are zeroed if the request is `exact` (write
    /// zeroes), and skipped if it is a hint (discard). Stops at [`ParentZeroes::known_until`],
    /// behind which the parent's zeroes are unknown.
    fn free_range(
        &self,
        view: &View,
        request: &Request,
        exact: bool,
        below: &ParentZeroes,
    ) -> device::Result<Step> {
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
                        .free_last_page(view, slot, below.end_of_zeroes(at) >= end, || end == self.size())
                    {
                        Ok(Ok(Some(freed))) => {
                            self.counters.add(counter::NOTIFY_FREE, i64::from(freed));
                            at = stop;
                            continue;
                        }
                        // The device has grown meanwhile: this page is not its last page any more.
                        Ok(Ok(None)) => {}
                        Ok(Err(error)) => return Err(error),
                        Err(MustWait) => return Ok(Step::Tried(try_result(at - offset, len))),
                    }
                }
                if exact {
                    match self.zero_part(view, at, stop, below)? {
                        Ok(PatchOutcome::Done) => {}
                        Ok(PatchOutcome::OnBase) => return Ok(stop_at_base(at - offset, len)),
                        Err(MustWait) => return Ok(Step::Tried(try_result(at - offset, len))),
                    }
                }
                at = stop;
                continue;
            }
            let last = end / PAGE;
            // A page over zeroes of the parent needs no work if the device has no slot for that
            // page.
            let zeroes_end = (below.end_of_zeroes(at) / PAGE).min(last);
            let over_zeroes = zeroes_end > slot;
            let (last, present) = if over_zeroes {
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
                let freed = match self.pages.free_page(view, slot, over_zeroes, exact) {
                    Ok(Ok(freed)) => freed,
                    Ok(Err(error)) => return Err(error),
                    Err(MustWait) => return Ok(Step::Tried(try_result(slot * PAGE - offset, len))),
                };
                self.counters.add(counter::NOTIFY_FREE, i64::from(freed));
            }
            if !over_zeroes && stop - present == LEAF_SLOTS && view.parent.reaches(present) {
                table.count_as_same_filled(present);
            }
            at = stop * PAGE;
        }
        Ok(Step::Tried(try_result(at - offset, len)))
    }

    /// Zeroes the bytes `[from, to)`, a part of one page, unless they already read as zeroes.
    fn zero_part(
        &self,
        view: &View,
        from: u64,
        to: u64,
        below: &ParentZeroes,
    ) -> device::Result<Result<PatchOutcome, MustWait>> {
        let slot = from / PAGE;
        let leaf = if view.parent.reaches(slot) && below.end_of_zeroes(from) < to {
            Some(view.layer.table().leaf_or_new(slot)?)
        } else {
            view.layer.table().leaf(slot).filter(|leaf| leaf.peek(slot) != Word::EMPTY)
        };
        let Some(leaf) = leaf else { return Ok(Ok(PatchOutcome::Done)) };
        let zeroes = Part::Zeroes((to - from) as usize);
        match self.pages.patch_page(view, leaf, slot, (from % PAGE) as usize, zeroes) {
            Ok(result) => result.map(Ok),
            Err(waits) => Ok(Err(waits)),
        }
    }

    /// Changes a part of the first page of a request, which is on a base. Returns `None` if the
    /// request must be retried: the page is no longer on the base, or writers are frozen.
    fn change_over_base(&self, request: &Request, data: &[u8]) -> device::Result<Option<TryResult>> {
        let (slot, from, len) = piece(request.offset, request.len);
        let mut page = [0; PAGE_BYTES];
        if self.parent.read_page(slot, &mut page)? < PAGE_BYTES {
            return Ok(Some(TryResult::WouldBlock));
        }
        data.get(..len).map_or(Part::Zeroes(len), Part::Data).put(from, &mut page);
        match self.put_over_parent(slot, &page) {
            None => Ok(None),
            Some(Err(MustWait)) => Ok(Some(TryResult::WouldBlock)),
            Some(Ok(put)) => put.map(|()| Some(try_result(len as u64, request.len))),
        }
    }

    /// Stores a page that the device read from its parent until now. Returns `None` without storing
    /// the page if the slot is no longer empty, or writers are frozen.
    pub(super) fn put_over_parent(&self, slot: u64, page: &Page) -> Option<PageResult> {
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

/// Returns the result of a change that reached a page on a base after `done` of `len` bytes. Bytes
/// already done are reported first; the rest of the request then begins at that page.
fn stop_at_base(done: u64, len: u64) -> Step {
    if done == 0 { Step::OverBase } else { Step::Tried(try_result(done, len)) }
}
