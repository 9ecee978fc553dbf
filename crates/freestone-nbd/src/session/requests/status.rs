//! Block status: the extents of a range in each metadata context.

use freestone_core::bytes::Bytes;
use freestone_core::device::{Error, ExtentKind, Op, Request};
use zerocopy::IntoBytes;

use super::partial_request::ParsedHeader;
use crate::proto::{
    ChangedFlags, CommandFlags, Descriptor, ExtendedDescriptor, ExtendedStatus, StateFlags, chunk,
};
use crate::session::{ConnectionLost, Session, Step};
use crate::stream::replies::REPLY_BUFFER_BYTES;
use crate::wire::contexts::{self, Contexts};
use crate::wire::errno::{CommandGroup, Errno, Failure};
use crate::wire::headers::Headers;

/// Maximum number of descriptors of one context in a reply. The client requests the rest of the range again.
pub const MAX_DESCRIPTORS: usize = 8192;
/// Size in bytes of the first field of the payload, the length of the range. Context identifiers follow it.
const RANGE_BYTES: usize = size_of::<u64>();
const ID_BYTES: usize = size_of::<u32>();

const _: () = {
    let head = Headers::Extended.chunk_bytes() + size_of::<ExtendedStatus>();
    let context = head + MAX_DESCRIPTORS * size_of::<ExtendedDescriptor>();
    assert!(contexts::ALL.len() * context <= REPLY_BUFFER_BYTES, "a block status fits into the buffer");
};

impl Session<'_> {
    /// Replies with the status of the contexts named in the request's payload.
    pub(in crate::session) fn handle_block_status_of(
        &mut self,
        mut incoming: ParsedHeader,
    ) -> Result<Step, ConnectionLost> {
        let (header, len) = (self.header_bytes, incoming.len as usize);
        let ids = len.saturating_sub(RANGE_BYTES) / ID_BYTES;
        if ids == 0 || len != RANGE_BYTES + ids * ID_BYTES {
            let text = "the payload must be a length and context identifiers";
            return Ok(self.skip_payload(incoming, Failure::new(Errno::Inval, text)));
        }
        // More identifiers than contexts exist, so one is unknown or occurs twice.
        if ids > contexts::ALL.len() {
            return Ok(self.skip_payload(incoming, UNKNOWN_CONTEXT));
        }
        let payload = self.input.data().get(header..header + len);
        let Some((range, ids)) = payload.and_then(<[u8]>::split_first_chunk::<RANGE_BYTES>) else {
            return Ok(Step::NeedInput(header + len));
        };
        incoming.len = u64::from_be_bytes(*range);
        incoming.flags &= !CommandFlags::PAYLOAD_LEN.bits();
        let ids = ids.as_chunks::<ID_BYTES>().0.iter().map(|id| u32::from_be_bytes(*id));
        let named = self.contexts.by_ids(ids);
        self.accept_request();
        self.input.consume(len);
        let Some(contexts) = named else {
            self.reply_failure(incoming.tag, &UNKNOWN_CONTEXT)?;
            return Ok(Step::Done);
        };
        self.reply_status(incoming, contexts)
    }

    /// Replies with the status of all selected contexts.
    pub(in crate::session) fn handle_block_status(
        &mut self,
        incoming: ParsedHeader,
    ) -> Result<Step, ConnectionLost> {
        self.accept_request();
        self.reply_status(incoming, self.contexts)
    }

    /// Replies with one chunk for each of `contexts`.
    fn reply_status(&mut self, incoming: ParsedHeader, contexts: Contexts) -> Result<Step, ConnectionLost> {
        let (request, flags) =
            match self.validate(incoming, Op::Read, CommandFlags::REQ_ONE, CommandGroup::Plain) {
                Ok(vetted) => vetted,
                Err(failure) => {
                    self.reply_failure(incoming.tag, &failure)?;
                    return Ok(Step::Done);
                }
            };
        if contexts.is_empty() {
            return self.refuse(incoming, Errno::Inval, "no metadata context was negotiated");
        }
        let layout = Layout::of(self.headers);
        let most = if flags.contains(CommandFlags::REQ_ONE) { 1 } else { MAX_DESCRIPTORS };
        let room = most * layout.descriptor_bytes;
        self.replies.reserve(self.link.socket(), contexts::ALL.len() * (layout.head_bytes + room))?;
        // Descriptors are written first, behind the space for the header of their context, because an error
        // reply is still possible.
        let mut counts = [0; contexts::ALL.len()];
        let mut at = self.replies.position();
        for ((context, ..), count) in contexts::ALL.iter().zip(&mut counts) {
            if !contexts.contains(*context) {
                continue;
            }
            at += layout.head_bytes;
            match describe(&self.device, *context, request, self.replies.space(at, room), layout) {
                Ok(n) => *count = n,
                Err(error) => {
                    self.reply_failure(incoming.tag, &Failure::of(error, CommandGroup::Plain, &request))?;
                    return Ok(Step::Done);
                }
            }
            at += *count * layout.descriptor_bytes;
        }
        let mut left = contexts.names_and_ids().count();
        // `describe` writes at least one descriptor, so a count of zero means that the context was not
        // requested.
        for ((.., id), count) in contexts::ALL.iter().zip(counts).filter(|(_, count)| *count > 0) {
            left -= 1;
            let bytes = count * layout.descriptor_bytes;
            let len = layout.head_bytes - self.headers.chunk_bytes() + bytes;
            self.headers.put_chunk(&mut self.replies, incoming.tag, layout.kind, left == 0, len as u32);
            let status = ExtendedStatus { context: (*id).into(), count: (count as u32).into() };
            if self.headers == Headers::Extended {
                self.replies.put(&status);
            } else {
                self.replies.put(&status.context);
            }
            self.replies.commit(self.replies.position() + bytes);
        }
        self.tally.replies += 1;
        Ok(Step::Done)
    }
}

const UNKNOWN_CONTEXT: Failure = Failure::new(Errno::Inval, "unselected or duplicate metadata context");

#[derive(Debug, Clone, Copy)]
struct Layout {
    kind: u16,
    /// Length in bytes of the header before the descriptors.
    head_bytes: usize,
    descriptor_bytes: usize,
}

impl Layout {
    const fn of(headers: Headers) -> Self {
        let chunk = headers.chunk_bytes();
        match headers {
            Headers::Simple | Headers::Structured => Self {
                kind: chunk::BLOCK_STATUS,
                head_bytes: chunk + ID_BYTES,
                descriptor_bytes: size_of::<Descriptor>(),
            },
            Headers::Extended => Self {
                kind: chunk::BLOCK_STATUS_EXT,
                head_bytes: chunk + size_of::<ExtendedStatus>(),
                descriptor_bytes: size_of::<ExtendedDescriptor>(),
            },
        }
    }
}

/// Writes the extent descriptors of `range` for one metadata context, such as `base:allocation`, to `space`.
/// Returns the number of descriptors, at least one.
fn describe(
    device: &Bytes,
    context: Contexts,
    range: Request,
    space: &mut [u8],
    layout: Layout,
) -> Result<usize, Error> {
    let size = layout.descriptor_bytes;
    let mut runs =
        Runs { space, size, count: 0, at: range.offset, end: range.offset + range.len, open: None };
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

/// Converts the extents of a device to descriptors, and merges neighbors of the same kind.
struct Runs<'a> {
    space: &'a mut [u8],
    size: usize,
    count: usize,
    /// The expected offset of the next extent.
    at: u64,
    end: u64,
    /// Length in bytes and flags of the run that the next extent may continue.
    open: Option<(u64, u32)>,
}

impl Runs<'_> {
    /// Adds an extent. Returns true if the range needs more extents and there is room for them.
    fn push(&mut self, offset: u64, len: u64, flags: u32) -> bool {
        let len = len.min(self.end - self.at);
        if offset != self.at || len == 0 {
            // A gap or an empty extent violates the device's contract. The reply has only the extents before
            // it.
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

    /// Writes the descriptor of a run. Returns true if there is room for another.
    fn write(&mut self, len: u64, flags: u32) -> bool {
        let mut places = self.space.chunks_exact_mut(self.size).skip(self.count);
        let Some(place) = places.next() else { return false };
        if self.size == size_of::<ExtendedDescriptor>() {
            let descriptor = ExtendedDescriptor { len: len.into(), flags: u64::from(flags).into() };
            place.copy_from_slice(descriptor.as_bytes());
        } else {
            // Runs lie inside the request, whose length has 32 bits with compact headers.
            let descriptor = Descriptor { len: (len as u32).into(), flags: flags.into() };
            place.copy_from_slice(descriptor.as_bytes());
        }
        self.count += 1;
        places.next().is_some()
    }

    /// Writes the last run and returns the number of descriptors.
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
    fn invalid_extent_ends_descriptors() {
        let mut space = [0; 4 * size_of::<Descriptor>()];
        let mut runs = Runs { space: &mut space, size: 8, count: 0, at: 0, end: 100, open: None };
        assert!(runs.push(0, 10, 1));
        assert!(runs.push(10, 10, 1));
        assert!(!runs.push(30, 10, 1));
        assert!(!runs.push(20, 0, 0));
        assert!(!runs.push(20, 1000, 0));
        assert_eq!(runs.finish(), 2);
        assert_eq!(space[..16], [0, 0, 0, 20, 0, 0, 0, 1, 0, 0, 0, 80, 0, 0, 0, 0]);
    }
}
