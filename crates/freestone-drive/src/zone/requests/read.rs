//! Reads of zoned devices, without locks: load the state word of the zone, read the data, and check
//! the word again. If the zone was reset meanwhile, the read is repeated.

use std::sync::Arc;

use crate::zone::table::word::Word;
use crate::zone::{Inner, ZoneCondition};
use freestone_core::device::{Buffer, Completion, Error, Flags, IoBuf, Request, Result, TryResult};

/// Byte returned for data beyond a write pointer, as a pattern different from zeroes.
pub const UNWRITTEN: u8 = 0xFF;
/// Maximum number of attempts of an inline read. If the zone was reset during each, the read must
/// be submitted.
const RESETS_MAX: u32 = 8;

impl Inner {
    // ---- tried ----------------------------------------------------------------------------------

    /// Reads as much as possible without waiting, up to the end of the first sequential zone or of
    /// all conventional zones.
    #[inline]
    pub fn try_read(&self, request: &Request, out: &mut [u8]) -> Result<TryResult> {
        let layout = &self.table.layout;
        let zone = layout.zone_of(request.offset);
        let end = if layout.is_sequential(zone) {
            layout.start(zone) + layout.len(zone)
        } else {
            self.conventional_end()
        };
        let here = end - request.offset;
        if request.len <= here {
            return self.try_read_zone(zone, request, out);
        }
        let part = Request { len: here, ..*request };
        Ok(match self.try_read_zone(zone, &part, &mut out[..here as usize])? {
            TryResult::Done => TryResult::Partly(here),
            other => other,
        })
    }

    #[inline]
    fn try_read_zone(&self, zone: u32, request: &Request, out: &mut [u8]) -> Result<TryResult> {
        for _ in 0..RESETS_MAX {
            let word = self.table.load(zone);
            let real = self.readable(zone, word, request.offset, request.len)?;
            // Reads of bad blocks must fail even beyond the write pointer, so the whole range is
            // read.
            let asked = if self.bad.is_some() { request.len } else { real };
            let tried = if asked == 0 {
                TryResult::Done
            } else {
                let part = Request { len: asked, ..*request };
                self.backing.try_io(&part, Buffer::Read(&mut out[..asked as usize]))?
            };
            let done = match tried {
                TryResult::Done => request.len,
                TryResult::Partly(bytes) => bytes,
                TryResult::WouldBlock => return Ok(tried),
            };
            if self.table.is_same_generation(zone, word) {
                if real < done && !request.flags.contains(Flags::UNREAD) {
                    out[real as usize..done as usize].fill(UNWRITTEN);
                }
                return Ok(tried);
            }
        }
        Ok(TryResult::WouldBlock)
    }

    /// Returns how many bytes of the range are read from the device under this layer. The rest lies
    /// beyond the write pointer. Fails if the zone is offline.
    #[inline]
    fn readable(&self, zone: u32, word: Word, offset: u64, len: u64) -> Result<u64> {
        match word.condition() {
            ZoneCondition::Offline => Err(Error::ZoneCondition),
            ZoneCondition::NotWritePointer | ZoneCondition::ReadOnly => Ok(len),
            _ if !self.stores => Ok(len),
            _ => Ok((self.table.layout.start(zone) + word.pointer()).saturating_sub(offset).min(len)),
        }
    }

    // ---- submitted ------------------------------------------------------------------------------

    pub fn submit_read(self: &Arc<Self>, request: Request, buffer: IoBuf, done: Completion) {
        if let Err(error) = self.start_threads().map_err(|_| Error::NoMemory) {
            self.ops.count_error();
            return done.complete(Err(error), buffer);
        }
        self.read(request, buffer, done);
    }

    fn read(self: &Arc<Self>, request: Request, buffer: IoBuf, done: Completion) {
        let first = self.table.layout.zone_of(request.offset);
        let last = self.table.layout.zone_of(request.offset + request.len - 1);
        let words: Vec<Word> = (first..=last).map(|zone| self.table.load(zone)).collect();
        if words.iter().any(|word| word.condition() == ZoneCondition::Offline) {
            self.ops.count_error();
            return done.complete(Err(Error::ZoneCondition), buffer);
        }
        let inner = Arc::clone(self);
        let done = Completion::new(move |outcome, mut buffer| {
            let still = |(zone, word): (u32, &Word)| inner.table.is_same_generation(zone, *word);
            if outcome.is_ok() && !(first..).zip(&words).all(still) {
                let again = Arc::clone(&inner);
                // If the queue has stopped, it drops the request, which then fails with
                // [`Error::Gone`].
                inner.work_queue.push(move || again.read(request, buffer, done));
                return;
            }
            if outcome.is_ok() {
                inner.fill_unwritten(&request, first, &words, &mut buffer);
            }
            inner.ops.count_completion(&request, &outcome);
            done.complete(outcome, buffer);
        });
        self.backing.submit(request, buffer, done);
    }

    /// Fills the parts of `out` that lie beyond write pointers with [`UNWRITTEN`]. `words` are the
    /// state words of the zones from `first` on.
    fn fill_unwritten(&self, request: &Request, first: u32, words: &[Word], out: &mut [u8]) {
        let layout = &self.table.layout;
        let end = request.offset + request.len;
        for (zone, &word) in (first..).zip(words) {
            let from = request.offset.max(layout.start(zone));
            let to = end.min(layout.start(zone) + layout.len(zone));
            // Offline zones were rejected before the read, so `readable` cannot fail.
            let real = self.readable(zone, word, from, to - from).unwrap_or(0);
            out[(from + real - request.offset) as usize..(to - request.offset) as usize].fill(UNWRITTEN);
        }
    }

    /// Returns the offset of the end of the conventional zones.
    #[inline]
    fn conventional_end(&self) -> u64 {
        self.table.layout.start(self.table.layout.conventional)
    }
}
