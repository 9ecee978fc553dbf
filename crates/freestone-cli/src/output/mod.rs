//! Standard output and standard error. A server writes to both through an [`OutputBuffer`], and continues if nobody
//! reads them. Other commands write directly.

mod buffer;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, Write};
use std::sync::OnceLock;
use std::time::Duration;
use std::{panic, thread};

use anyhow::{Context as _, Result};
use rustix::stdio::{stderr, stdout};

use self::buffer::OutputBuffer;

/// Size of the buffer for log lines, in bytes: room for about ten thousand lines.
const LOG_BYTES: usize = 1 << 20;
/// Size of the buffer for standard output, in bytes. The announcement of the exports may be larger: an empty buffer
/// accepts it whole.
const OUT_BYTES: usize = 64 << 10;
/// Longest wait at exit until the text for a stream is written.
const END_PATIENCE: Duration = Duration::from_secs(1);

static LOG: OnceLock<OutputBuffer> = OnceLock::new();
static OUT: OnceLock<OutputBuffer> = OnceLock::new();

/// Standard error. Each call of `write` must pass whole lines, because the buffer drops and counts lines.
pub struct Stderr;

/// Detaches the server from its standard output and error: afterwards no thread hangs on a stream that is not read.
/// Panic messages are written through the same buffer.
///
/// # Errors
/// Fails if a writer thread cannot be started.
pub fn detach() -> Result<()> {
    let report = |lines| tracing::error!(lines, "log lines were dropped: standard error is not read in time");
    let log = OutputBuffer::start("log", stderr(), LOG_BYTES, report)
        .context("cannot start the thread of the log")?;
    // Nothing is dropped and reported: the announcement is the only text, and an empty buffer accepts any size.
    let out = OutputBuffer::start("stdout", stdout(), OUT_BYTES, |_| {})
        .context("cannot start the thread of standard output")?;
    let _ = (LOG.set(log), OUT.set(out));
    panic::set_hook(Box::new(|info| {
        let thread = thread::current();
        let name = thread.name().unwrap_or("<unnamed>");
        let backtrace = Backtrace::capture();
        let text = match backtrace.status() {
            BacktraceStatus::Captured => format!("thread '{name}' {info}\nstack backtrace:\n{backtrace}"),
            _ => format!("thread '{name}' {info}\n"),
        };
        let _ = Stderr.write_all(text.as_bytes());
    }));
    Ok(())
}

/// Prints text on the standard output of a detached server. Does nothing before [`detach`].
pub fn print(text: &str) {
    if let Some(out) = OUT.get() {
        out.push(text.as_bytes());
    }
}

/// Waits until everything is written, for at most [`END_PATIENCE`] per stream. Called before the process exits.
pub fn flush() {
    for outlet in [&OUT, &LOG].into_iter().filter_map(OnceLock::get) {
        outlet.flush(END_PATIENCE);
    }
}

/// [Flushes](flush) when dropped, including during a panic of the main thread.
pub struct FlushAtEnd;

impl Drop for FlushAtEnd {
    fn drop(&mut self) {
        flush();
    }
}

impl Write for Stderr {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        match LOG.get() {
            Some(log) => log.push(text),
            None => io::stderr().write_all(text)?,
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
