//! The pending replies of a connection: one reply buffer, and owned buffers with large data, sent at their
//! positions between its bytes. All are sent in one system call, as far as the socket accepts them.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

use freestone_core::device::IoBuf;
use freestone_core::mapped_buffer::MappedBuffer;
use freestone_core::plug::Plug;
use freestone_core::workers::BusyReader;
use rustix::net::{SendAncillaryBuffer, SendFlags, send, sendmsg};
use zerocopy::{Immutable, IntoBytes};

use crate::proto::DataChunk;
use crate::stream::buffers::Buffers;
use crate::stream::tls::sealer::Sealer;

/// Size in bytes at which the pending replies are sent, even if more received requests could be executed
/// first.
pub const SEND_THRESHOLD_BYTES: usize = 256 << 10;
/// Largest data copied or decoded into the buffer at once, in bytes.
pub const MAX_INLINE_BYTES: usize = 256 << 10;
/// Space for headers and messages in the reply buffer, in bytes, beside pending replies and inline data.
const HEADER_SPACE_BYTES: usize = 8 << 10;
/// Size of the reply buffer of a connection, in bytes.
pub const REPLY_BUFFER_BYTES: usize = SEND_THRESHOLD_BYTES + MAX_INLINE_BYTES + HEADER_SPACE_BYTES;
/// Largest owned data that is copied into the reply buffer, in bytes. Larger data is sent from its own
/// buffer.
const COPY_BYTES: usize = 16 << 10;
/// Maximum number of slices of one `sendmsg`, far below the kernel's `UIO_MAXIOV`.
const MAX_SLICES: usize = 64;

#[derive(Debug)]
pub struct Replies {
    buf: MappedBuffer,
    len: usize,
    /// Owned data buffers, each with the position in `buf` before which it is sent, ascending.
    owned: Vec<(usize, IoBuf)>,
    owned_bytes: usize,
    /// Spare buffers. Owned data moves here after it is sent.
    pub buffers: Buffers,
    /// Plug that batches the parts submitted in this turn. Released before a send, because a send may wait
    /// for the client while other threads wait for these parts.
    pub plug: Option<Plug>,
    /// Marks the thread as busy while it executes a large request. Released before a send, because a thread
    /// that waits for its client is not busy.
    pub at_work: Option<BusyReader>,
    pub sends: u64,
    pub sent_bytes: u64,
    /// Encrypts the sent bytes; `None` without TLS.
    sealer: Option<Box<Sealer>>,
}

impl Replies {
    /// Creates an empty buffer. The data behind a first header is page aligned, as in
    /// [`Input`](crate::stream::input).
    ///
    /// # Errors
    /// Out of memory.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            buf: MappedBuffer::new(REPLY_BUFFER_BYTES, size_of::<DataChunk>())?,
            len: 0,
            owned: Vec::new(),
            owned_bytes: 0,
            buffers: Buffers::default(),
            plug: None,
            at_work: None,
            sends: 0,
            sent_bytes: 0,
            sealer: None,
        })
    }

    /// Returns the memory of all buffers to the kernel. No reply may be pending.
    pub fn free_memory(&mut self) {
        debug_assert!(self.is_empty(), "replies would be lost");
        self.buf.clear();
        self.owned = Vec::new();
        self.buffers.clear();
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0 && self.owned.is_empty()
    }

    /// Returns true if the pending replies are large enough to send now.
    #[inline]
    pub fn is_due(&self) -> bool {
        self.len + self.owned_bytes >= SEND_THRESHOLD_BYTES
    }

    /// Makes room for `n` bytes in the buffer, and sends the pending replies if necessary.
    #[inline]
    pub fn reserve(&mut self, socket: BorrowedFd<'_>, n: usize) -> Result<(), rustix::io::Errno> {
        debug_assert!(n <= REPLY_BUFFER_BYTES, "more than the buffer holds");
        if self.len + n > self.buf.len() { self.send(socket) } else { Ok(()) }
    }

    #[inline]
    pub fn position(&self) -> usize {
        self.len
    }

    /// Returns the reserved `n` bytes at position `at` of the buffer. [`commit`](Self::commit) makes them
    /// part of the replies.
    #[inline]
    pub fn space(&mut self, at: usize, n: usize) -> &mut [u8] {
        &mut self.buf[at..at + n]
    }

    /// Makes all bytes before `end` part of the replies.
    #[inline]
    pub fn commit(&mut self, end: usize) {
        debug_assert!(end >= self.len, "replies do not shrink");
        self.len = end;
    }

    /// Appends a header or text. The caller has reserved the space.
    #[inline]
    pub fn put<T: IntoBytes + Immutable + ?Sized>(&mut self, part: &T) {
        let bytes = part.as_bytes();
        self.buf[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    /// Appends an owned data buffer. Small data is copied, and large data is kept until it is sent. Returns
    /// true if it was kept.
    pub fn put_owned(&mut self, data: IoBuf) -> bool {
        if data.len() <= COPY_BYTES {
            self.put(&data[..]);
            self.buffers.put_back(data);
            return false;
        }
        self.owned_bytes += data.len();
        self.owned.push((self.len, data));
        true
    }

    /// Returns the number of bytes that [`put_owned`](Self::put_owned) needs in the reply buffer for `n`
    /// bytes of data.
    pub fn space_for_owned(n: usize) -> usize {
        if n <= COPY_BYTES { n } else { 0 }
    }

    /// Returns the total size in bytes of the owned data that is kept.
    pub fn owned_bytes(&self) -> usize {
        self.owned_bytes
    }

    /// Sends the committed replies, and moves the uncommitted bytes `len .. len + open` to the front.
    pub fn send_around(&mut self, socket: BorrowedFd<'_>, open: usize) -> Result<(), rustix::io::Errno> {
        let start = self.len;
        if self.is_empty() {
            return Ok(());
        }
        self.send(socket)?;
        self.buf.copy_within(start..start + open, 0);
        Ok(())
    }

    /// Sends all replies, and blocks while the socket accepts no more. No reply is pending afterwards, even
    /// on error.
    pub fn send(&mut self, socket: BorrowedFd<'_>) -> Result<(), rustix::io::Errno> {
        freestone_core::trail::step!();
        if self.plug.is_some() || self.at_work.is_some() {
            self.release_plug();
        }
        if self.owned.is_empty() && self.sealer.is_none() {
            let result = self.send_plain(socket);
            self.len = 0;
            return result;
        }
        self.send_others(socket)
    }

    /// Sends replies with owned data, or with TLS. Not inlined, because most sends have neither.
    #[inline(never)]
    fn send_others(&mut self, socket: BorrowedFd<'_>) -> Result<(), rustix::io::Errno> {
        let result = if self.sealer.is_some() { self.send_sealed(socket) } else { self.send_mixed(socket) };
        self.len = 0;
        for (_, data) in self.owned.drain(..) {
            self.buffers.put_back(data);
        }
        self.owned_bytes = 0;
        result
    }

    #[cold]
    fn release_plug(&mut self) {
        (self.plug, self.at_work) = (None, None);
    }

    fn send_plain(&mut self, socket: BorrowedFd<'_>) -> Result<(), rustix::io::Errno> {
        let mut at = 0;
        while at < self.len {
            at += rustix::io::retry_on_intr(|| send(socket, &self.buf[at..self.len], SendFlags::NOSIGNAL))?;
            self.sends += 1;
        }
        self.sent_bytes += at as u64;
        Ok(())
    }

    /// Switches to TLS: `sealer` encrypts the replies sent from now on. No reply may be pending.
    pub fn start_tls(&mut self, sealer: Sealer) {
        debug_assert!(self.is_empty(), "plaintext replies are pending");
        self.sealer = Some(Box::new(sealer));
    }

    /// Sends the TLS close alert, if the connection uses TLS.
    pub fn send_close(&mut self, socket: BorrowedFd<'_>) {
        if let Some(sealer) = &mut self.sealer {
            sealer.close(socket);
        }
    }

    fn send_sealed(&mut self, socket: BorrowedFd<'_>) -> Result<(), rustix::io::Errno> {
        let Some(sealer) = &mut self.sealer else { return Ok(()) };
        let mut from = 0;
        let between = self.owned.iter().flat_map(|(at, data)| {
            let before = &self.buf[from..*at];
            from = *at;
            [before, &data[..]]
        });
        let rest = self.owned.last().map_or(0, |(at, _)| *at);
        let parts = between.chain(std::iter::once(&self.buf[rest..self.len]));
        self.sends += sealer.send(socket, parts)?;
        self.sent_bytes += (self.len + self.owned_bytes) as u64;
        Ok(())
    }

    fn send_mixed(&mut self, socket: BorrowedFd<'_>) -> Result<(), rustix::io::Errno> {
        // `parts` borrows from `buf` and `owned`, so the counters are updated at the end.
        let mut sends = 0;
        let mut parts: Vec<&[u8]> = Vec::with_capacity(self.owned.len() * 2 + 1);
        let mut from = 0;
        for (at, data) in &self.owned {
            parts.push(&self.buf[from..*at]);
            parts.push(data);
            from = *at;
        }
        parts.push(&self.buf[from..self.len]);
        parts.retain(|part| !part.is_empty());
        let total: usize = parts.iter().map(|part| part.len()).sum();
        let mut first = 0;
        while first < parts.len() {
            let slices: Vec<IoSlice<'_>> =
                parts[first..].iter().take(MAX_SLICES).map(|part| IoSlice::new(part)).collect();
            let mut sent = rustix::io::retry_on_intr(|| {
                sendmsg(socket, &slices, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)
            })?;
            sends += 1;
            while first < parts.len() && sent >= parts[first].len() {
                sent -= parts[first].len();
                first += 1;
            }
            if first < parts.len() {
                parts[first] = &parts[first][sent..];
            }
        }
        self.sends += sends;
        self.sent_bytes += total as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn send_keeps_order_of_owned_data() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut replies = Replies::new().unwrap();
        let mut wanted = Vec::new();
        for round in 0..100_u8 {
            replies.put(&[round; 3][..]);
            wanted.extend([round; 3]);
            let big = vec![round; if round % 2 == 0 { COPY_BYTES + 1 } else { 9 }];
            assert_eq!(replies.put_owned(IoBuf::copy_of(&big).unwrap()), round % 2 == 0);
            wanted.extend(big);
        }
        let reader = std::thread::spawn(move || {
            let mut got = Vec::new();
            theirs.read_to_end(&mut got).unwrap();
            got
        });
        replies.send(ours.as_fd()).unwrap();
        assert!(replies.is_empty());
        assert_eq!(replies.sent_bytes, wanted.len() as u64);
        drop(ours);
        assert!(reader.join().unwrap() == wanted);
    }

    #[test]
    fn send_around_keeps_uncommitted_bytes() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut replies = Replies::new().unwrap();
        replies.put(&b"ready"[..]);
        let at = replies.position();
        replies.space(at, 4).copy_from_slice(b"open");
        replies.send_around(ours.as_fd(), 4).unwrap();
        assert_eq!(replies.position(), 0);
        replies.commit(4);
        replies.send(ours.as_fd()).unwrap();
        drop(ours);
        let mut got = String::new();
        theirs.read_to_string(&mut got).unwrap();
        assert_eq!(got, "readyopen");
    }
}
