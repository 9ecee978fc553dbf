//! Output to a stream that may not be read: a bounded buffer, and the thread that writes its text to the
//! stream.
//!
//! Threads of the server only append to the buffer, so none of them hangs on a full pipe or a hung disk
//! behind the stream. Text that does not fit is dropped and counted.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use std::{io, mem, thread};

use freestone_core::sync::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// Longest wait of a thread for its text to be written. A healthy stream accepts text at once, so a log line
/// is written before the client receives its response. A stalled stream costs this time once.
const STALLED_AFTER: Duration = Duration::from_millis(10);

/// The buffer of one stream. The writer thread runs until the process ends.
pub struct OutputBuffer {
    shared: Arc<Shared>,
}

struct Shared {
    /// Largest number of bytes that wait for the writer thread.
    capacity: usize,
    /// The lock is held only to copy text, never across a system call that writes.
    state: Mutex<State>,
    /// Signaled when text is appended, and when the writer thread has written all text.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: Vec<u8>,
    /// Number of lines dropped since the writer thread last emptied the buffer.
    dropped: u64,
    /// Number of texts (calls of `push`) appended so far.
    appended: u64,
    /// Number of texts that the writer thread has written so far.
    written: u64,
    /// True if the stream is stalled: appending threads do not wait until the writer thread makes progress.
    is_stalled: bool,
}

impl OutputBuffer {
    /// Starts the thread `name`, which writes to `stream`. The thread calls `report_dropped` with the
    /// number of dropped lines, at the place in the text where the lines are missing.
    ///
    /// # Errors
    /// Fails if the thread cannot be started.
    pub fn start(
        name: &str,
        stream: impl AsFd + Send + 'static,
        capacity: usize,
        report_dropped: impl Fn(u64) + Send + 'static,
    ) -> io::Result<Self> {
        // The memory is reserved here, so that appending a line does not allocate.
        let state = State { waiting: Vec::with_capacity(capacity), ..State::default() };
        let shared = Arc::new(Shared { capacity, state: Mutex::new(state), changed: Condvar::new() });
        let writer = Arc::clone(&shared);
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || write_all_text(&writer, &stream, &report_dropped))?;
        Ok(Self { shared })
    }

    /// Appends text, or drops it if it does not fit. An empty buffer accepts text of any size. Waits for a
    /// stream that is not known to be stalled, for at most [`STALLED_AFTER`].
    pub fn push(&self, text: &[u8]) {
        let mut state = self.shared.state.lock();
        let has_room = state.waiting.is_empty() || state.waiting.len() + text.len() <= self.shared.capacity;
        // After a dropped line all later lines are dropped too, until the writer thread has reported the gap.
        if state.dropped > 0 || !has_room {
            state.dropped += count_lines(text);
            return;
        }
        state.waiting.extend_from_slice(text);
        state.appended += 1;
        let number = state.appended;
        self.shared.changed.notify_all();
        let is_pending = |state: &mut State| !state.is_stalled && state.written < number;
        let (mut state, timed_out) = self.shared.changed.wait_timeout_while(state, STALLED_AFTER, is_pending);
        state.is_stalled |= timed_out;
    }

    /// Waits until all text is written, for at most `patience`.
    pub fn flush(&self, patience: Duration) {
        let is_pending = |state: &mut State| state.written < state.appended;
        // On a timeout the rest of the text stays unwritten.
        drop(self.shared.changed.wait_timeout_while(self.shared.state.lock(), patience, is_pending));
    }
}

fn write_all_text(shared: &Shared, stream: &impl AsFd, report_dropped: &dyn Fn(u64)) -> ! {
    let mut text = Vec::with_capacity(shared.capacity);
    // Number of lines that the stream has refused. They are reported only after a write succeeds: an earlier
    // report would be refused as well, and counted again.
    let mut refused = 0;
    let mut taken = 0;
    loop {
        let dropped = {
            let mut state = shared.state.lock();
            (state.written, state.is_stalled) = (taken, false);
            shared.changed.notify_all();
            state = shared.changed.wait_while(state, |state| state.waiting.is_empty());
            mem::swap(&mut state.waiting, &mut text);
            taken = state.appended;
            // This thread itself logs the report through `push`, which must not wait for this thread.
            state.is_stalled |= state.dropped > 0 || refused > 0;
            mem::take(&mut state.dropped)
        };
        if dropped > 0 {
            report_dropped(dropped);
        }
        match write_text(stream, &text) {
            0 if refused > 0 => report_dropped(mem::take(&mut refused)),
            unwritten => refused += unwritten,
        }
        text.clear();
    }
}

/// Writes the text. Returns the number of lines that the stream has refused.
fn write_text(stream: &impl AsFd, mut text: &[u8]) -> u64 {
    while !text.is_empty() {
        match rustix::io::write(stream, text) {
            Ok(written) => text = &text[written..],
            Err(Errno::INTR) => {}
            // Another process has made the open file non-blocking.
            Err(Errno::AGAIN) => {
                let _ = poll(&mut [PollFd::new(stream, PollFlags::OUT)], None);
            }
            Err(_) => return count_lines(text),
        }
    }
    0
}

fn count_lines(text: &[u8]) -> u64 {
    text.split(|byte| *byte == b'\n').count() as u64 - 1
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read as _, Write as _};
    use std::os::fd::OwnedFd;
    use std::sync::mpsc::{self, Receiver};

    use rustix::fs::{OFlags, fcntl_setfl};

    use super::*;

    const CAPACITY: usize = 1000;
    const LINE: &[u8] = b"123456789\n";
    const DROPPED: usize = 50;
    const PATIENCE: Duration = Duration::from_secs(60);

    fn start(stream: OwnedFd) -> (OutputBuffer, Receiver<u64>) {
        let (sender, reports) = mpsc::channel();
        let outlet = OutputBuffer::start("writer", stream, CAPACITY, move |lines| _ = sender.send(lines));
        (outlet.unwrap(), reports)
    }

    /// Returns reader and writer of a full pipe, and the number of bytes in the pipe.
    fn full_pipe() -> (OwnedFd, OwnedFd, usize) {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        fcntl_setfl(&writer, OFlags::NONBLOCK).unwrap();
        let mut file = File::from(writer.try_clone().unwrap());
        let mut filled = 0;
        while let Ok(written) = file.write(&[b'x'; 512]) {
            filled += written;
        }
        (reader, writer, filled)
    }

    #[test]
    fn push_to_full_pipe_drops_lines_and_counts_them() {
        for is_blocking in [true, false] {
            let (reader, writer, filled) = full_pipe();
            if is_blocking {
                fcntl_setfl(&writer, OFlags::empty()).unwrap();
            }
            let (outlet, reports) = start(writer);
            outlet.push(LINE);
            // Waits until the writer thread has taken the first line and is blocked on the pipe.
            while !outlet.shared.state.lock().waiting.is_empty() {
                thread::yield_now();
            }
            for _ in 0..DROPPED + CAPACITY / LINE.len() {
                outlet.push(LINE);
            }
            outlet.flush(Duration::from_millis(1));
            let mut reader = File::from(reader);
            reader.read_exact(&mut vec![0; filled]).unwrap();
            assert_eq!(reports.recv_timeout(PATIENCE), Ok(DROPPED as u64));
            outlet.push(b"end\n");
            outlet.flush(PATIENCE);
            let mut text = vec![0; LINE.len() + CAPACITY + 4];
            reader.read_exact(&mut text).unwrap();
            assert!(text.ends_with(b"9\nend\n"));
        }
    }

    #[test]
    fn push_larger_than_capacity_is_written_whole() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let (outlet, reports) = start(writer);
        outlet.push(&[b'x'; 3 * CAPACITY]);
        outlet.flush(PATIENCE);
        File::from(reader).read_exact(&mut [0; 3 * CAPACITY]).unwrap();
        assert!(reports.try_recv().is_err());
    }

    #[test]
    fn push_to_closed_pipe_is_not_reported() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        drop(reader);
        let (outlet, reports) = start(writer);
        for _ in 0..10 {
            outlet.push(LINE);
            outlet.flush(PATIENCE);
        }
        assert!(reports.try_recv().is_err());
    }
}
