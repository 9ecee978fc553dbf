//! One connection of HTTP: a request, its answer, the end. Bytes and time are bounded.

use std::borrow::Cow;
use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::request::{HEAD_BYTES_MAX, Refusal, Request, head_end};

/// How long a client may take to say what it wants.
const ASK_MAX: Duration = Duration::from_secs(5);
/// How long it may take to read the answer.
const TAKE_MAX: Duration = Duration::from_secs(15);
/// What is sent at once: a client that takes it bit by bit does not get beyond its time.
const PIECE_BYTES: usize = 64 << 10;
/// How long, and how much, a client that sends on after its request is listened to, so that its
/// answer is not lost with what nobody reads.
const DRAIN_MAX: Duration = Duration::from_millis(500);
const DRAIN_BYTES_MAX: usize = 64 << 10;

/// What is answered.
pub struct Answer {
    /// As in `200 OK`.
    pub status: &'static str,
    /// What the body is to the client.
    pub content_type: &'static str,
    /// The body.
    pub body: Cow<'static, [u8]>,
}

impl Answer {
    /// What was asked for.
    pub fn ok(content_type: &'static str, body: impl Into<Cow<'static, [u8]>>) -> Self {
        Self { status: "200 OK", content_type, body: body.into() }
    }
}

/// Who has asked, while an answer is made.
pub struct Client<'a> {
    stream: &'a TcpStream,
    ending: &'a AtomicBool,
}

impl Client<'_> {
    /// Whether nobody waits for the answer any more: the client has left, or the server ends.
    pub fn is_gone(&self) -> bool {
        let look = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::net::recv(self.stream, &mut [0; 1][..], look) {
            Ok((_, 0)) => true,
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => self.ending.load(Ordering::SeqCst),
            Err(_) => true,
        }
    }
}

/// Reads a request and answers it with what `answer` says. `headers` are lines that all answers have,
/// each with its end.
///
/// # Errors
/// The client has left, or was too slow to take the answer.
pub fn serve(
    stream: &TcpStream,
    ending: &AtomicBool,
    check_host: bool,
    headers: &str,
    answer: impl FnOnce(&Request, &Client<'_>) -> Result<Answer, Refusal>,
) -> io::Result<()> {
    let asked = read(stream)?;
    let asked = asked.and_then(|asked| {
        if check_host {
            asked.check_host()?;
        }
        Ok(asked)
    });
    match asked {
        Err(refusal) => refuse(stream, headers, refusal),
        Ok(request) => match answer(&request, &Client { stream, ending }) {
            Err(refusal) => refuse(stream, headers, refusal),
            Ok(Answer { status, content_type, body }) => {
                let head = head(status, content_type, headers, body.len());
                write(stream, &head, if request.head_only { b"" } else { &body }, TAKE_MAX)
            }
        },
    }
}

/// Answers with a status.
fn refuse(stream: &TcpStream, headers: &str, refusal: Refusal) -> io::Result<()> {
    let status = refusal.status();
    let body = format!("{status}\n");
    let mut head = head(status, "text/plain; charset=utf-8", headers, body.len());
    if refusal == Refusal::Method {
        let end = head.len() - 2;
        head.insert_str(end, "Allow: GET, HEAD\r\n");
    }
    write(stream, &head, body.as_bytes(), ASK_MAX)
}

fn head(status: &str, content_type: &str, headers: &str, len: usize) -> String {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len}\r\n\
         X-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\n{headers}Connection: close\r\n\r\n"
    )
}

/// The head of a request.
fn read(mut stream: &TcpStream) -> io::Result<Result<Request, Refusal>> {
    let end = Instant::now() + ASK_MAX;
    let mut head = Vec::new();
    let mut piece = [0; 1024];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Err(Refusal::Timeout));
        }
        stream.set_read_timeout(Some(left))?;
        let got = match stream.read(&mut piece) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if is_timeout(&error) => return Ok(Err(Refusal::Timeout)),
            Err(error) => return Err(error),
        };
        head.extend_from_slice(&piece[..got]);
        if let Some(end) = head_end(&head).filter(|end| *end <= HEAD_BYTES_MAX) {
            return Ok(Request::parse(&head[..end]));
        }
        if head.len() > HEAD_BYTES_MAX {
            return Ok(Err(Refusal::TooLarge));
        }
    }
}

/// Sends it, and ends the connection.
fn write(mut stream: &TcpStream, head: &str, body: &[u8], most: Duration) -> io::Result<()> {
    let end = Instant::now() + most;
    for part in [head.as_bytes(), body] {
        for piece in part.chunks(PIECE_BYTES) {
            let mut rest = piece;
            while !rest.is_empty() {
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                stream.set_write_timeout(Some(left))?;
                match stream.write(rest) {
                    Ok(sent) => rest = &rest[sent..],
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
        }
    }
    stream.shutdown(Shutdown::Write)?;
    drain(stream);
    Ok(())
}

fn drain(mut stream: &TcpStream) {
    let end = Instant::now() + DRAIN_MAX;
    let (mut drained, mut piece) = (0, [0; 4096]);
    while drained < DRAIN_BYTES_MAX {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
            return;
        }
        match stream.read(&mut piece) {
            Ok(0) | Err(_) => return,
            Ok(got) => drained += got,
        }
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}
