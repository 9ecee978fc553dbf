//! Block status: the extents of a range in each metadata context.

use freestone_core::bytes::Bytes;
use freestone_core::device::{Error, ExtentKind, Op, Request};
use zerocopy::IntoBytes;

use crate::contexts::{self, Contexts};
use crate::errno::{Action, Errno, Failure};
use crate::proto::{ChangedFlags, Chunk, CommandFlags, Descriptor, StateFlags, StatusChunk, chunk};
use crate::replies::MAX_INLINE_BYTES;
use crate::session::{Lost, Session, Step};
use crate::stream::Incoming;

/// Most descriptors of one context in one block status reply; the client asks again from where they
/// end.
pub const MAX_DESCRIPTORS: usize = 8192;

const _: () = {
    // A block status fits into the space that a piece of a read has.
    let context = size_of::<StatusChunk>() + MAX_DESCRIPTORS * size_of::<Descriptor>();
    assert!(contexts::ALL.len() * context <= MAX_INLINE_BYTES);
};

impl Session<'_> {
    /// Answers with one chunk for each context.
    pub(crate) fn block_status(&mut self, incoming: Incoming) -> Result<Step, Lost> {
        self.accept();
        let (request, flags) = match self.vet(incoming, Op::Read, CommandFlags::REQ_ONE, Action::Plain) {
            Ok(vetted) => vetted,
            Err(failure) => {
                self.reply_failure(incoming.cookie, &failure)?;
                return Ok(Step::Done);
            }
        };
        if self.contexts.is_empty() {
            return self.refuse(incoming, Errno::Inval, "no metadata context was negotiated");
        }
        let most = if flags.contains(CommandFlags::REQ_ONE) { 1 } else { MAX_DESCRIPTORS };
        let room = most * size_of::<Descriptor>();
        self.replies.reserve(self.link.socket(), contexts::ALL.len() * (size_of::<StatusChunk>() + room))?;
        // The descriptors first, each context's behind the place of its header: an error may still
        // come.
        let mut counts = [0; contexts::ALL.len()];
        let mut at = self.replies.position();
        for ((context, ..), count) in contexts::ALL.iter().zip(&mut counts) {
            if !self.contexts.contains(*context) {
                continue;
            }
            at += size_of::<StatusChunk>();
            match describe(&self.device, *context, request, self.replies.space(at, room)) {
                Ok(n) => *count = n,
                Err(error) => {
                    self.reply_failure(incoming.cookie, &Failure::of(error, Action::Plain, &request))?;
                    return Ok(Step::Done);
                }
            }
            at += *count * size_of::<Descriptor>();
        }
        let mut left = self.contexts.named().count();
        // `describe` gives at least one descriptor, so what has none was not negotiated.
        for ((.., id), count) in contexts::ALL.iter().zip(counts).filter(|(_, count)| *count > 0) {
            left -= 1;
            let bytes = count * size_of::<Descriptor>();
            let len = size_of::<u32>() + bytes;
            self.replies.put(&StatusChunk {
                chunk: Chunk::new(incoming.cookie, chunk::BLOCK_STATUS, left == 0, len as u32),
                context: (*id).into(),
            });
            self.replies.commit(self.replies.position() + bytes);
        }
        self.tally.replies += 1;
        Ok(Step::Done)
    }
}

/// Fills `space` with descriptors of the range; returns how many, at least one.
fn describe(device: &Bytes, context: Contexts, range: Request, space: &mut [u8]) -> Result<usize, Error> {
    let mut runs = Runs { space, count: 0, at: range.offset, end: range.offset + range.len, open: None };
    let result = if context == Contexts::CHANGED {
        device.changes(range.offset, range.len, &mut |row| {
            let flags = if row.own { ChangedFlags::OWN } else { ChangedFlags::empty() };
            runs.push(row.offset, row.len, flags.bits())
        })
    } else {
        device.extents(range.offset, range.len, &mut |row| {
            let flags = match row.kind {
                ExtentKind::Data => StateFlags::empty(),
                ExtentKind::Zero => StateFlags::ZERO,
                ExtentKind::Hole => StateFlags::ZERO | StateFlags::HOLE,
            };
            runs.push(row.offset, row.len, flags.bits())
        })
    };
    match (runs.finish(), result) {
        (count @ 1.., _) => Ok(count),
        (0, Err(error)) => Err(error),
        (0, Ok(_)) => Err(Error::Media),
    }
}

/// Rows of a device on their way to descriptors: neighbours of one kind become one.
struct Runs<'a> {
    space: &'a mut [u8],
    /// Descriptors that were written.
    count: usize,
    /// Where the next row begins.
    at: u64,
    end: u64,
    /// Length and flags of the run that may go on.
    open: Option<(u64, u32)>,
}

impl Runs<'_> {
    /// Takes a row; true: more are wanted.
    fn push(&mut self, offset: u64, len: u64, flags: u32) -> bool {
        let len = len.min(self.end - self.at);
        if offset != self.at || len == 0 {
            // A gap or an empty row breaks the device's contract: only the rows before it are
            // answered.
            return false;
        }
        self.at += len;
        match &mut self.open {
            Some((run, kind)) if *kind == flags => *run += len,
            _ => {
                if let Some((run, kind)) = self.open.replace((len, flags))
                    && !self.write(run, kind)
                {
                    return false;
                }
            }
        }
        self.at < self.end
    }

    /// Writes a run; true: there is room for more.
    fn write(&mut self, len: u64, flags: u32) -> bool {
        let mut places = self.space.chunks_exact_mut(size_of::<Descriptor>()).skip(self.count);
        let Some(place) = places.next() else { return false };
        // Runs lie inside the request, whose length has 32 bits.
        let descriptor = Descriptor { len: (len as u32).into(), flags: flags.into() };
        place.copy_from_slice(descriptor.as_bytes());
        self.count += 1;
        places.next().is_some()
    }

    /// Descriptors, the last run's too.
    fn finish(mut self) -> usize {
        if let Some((run, kind)) = self.open.take() {
            self.write(run, kind);
        }
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_break_the_contract_end_the_answer() {
        let mut space = [0; 4 * size_of::<Descriptor>()];
        let mut runs = Runs { space: &mut space, count: 0, at: 0, end: 100, open: None };
        assert!(runs.push(0, 10, 1));
        assert!(runs.push(10, 10, 1));
        assert!(!runs.push(30, 10, 1));
        assert!(!runs.push(20, 0, 0));
        assert!(!runs.push(20, 1000, 0));
        assert_eq!(runs.finish(), 2);
        assert_eq!(space[..16], [0, 0, 0, 20, 0, 0, 0, 1, 0, 0, 0, 80, 0, 0, 0, 0]);
    }
}
