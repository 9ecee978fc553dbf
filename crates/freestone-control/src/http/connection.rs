//! An HTTP connection: reads a request, sends the response, and closes the connection. Bytes and time are
//! limited.

use std::borrow::Cow;
use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::request::{HEAD_BYTES_MAX, Refusal, Request, head_end};
use crate::connections::Slot;

/// Time limit for receiving the head of a request, and for sending an error response.
const REQUEST_MAX: Duration = Duration::from_secs(5);
/// Time limit for sending a response.
const RESPONSE_MAX: Duration = Duration::from_secs(15);
/// Maximum number of bytes of one write. The deadline is checked between writes, so a slow reader cannot
/// exceed it by much.
const PIECE_BYTES: usize = 64 << 10;
/// Maximum time for which received bytes are discarded after the response. Closing a socket with unread bytes
/// resets the connection, and the client could lose the response.
const DRAIN_MAX: Duration = Duration::from_millis(500);
/// Maximum number of received bytes that are discarded after the response.
const DRAIN_BYTES_MAX: usize = 64 << 10;

/// An HTTP response.
pub struct Response {
    /// Status code and text, for example `200 OK`.
    pub status: &'static str,
    /// Value of `Content-Type`.
    pub content_type: &'static str,
    /// The body.
    pub body: Cow<'static, [u8]>,
}

impl Response {
    /// Returns a response with status 200.
    pub fn ok(content_type: &'static str, body: impl Into<Cow<'static, [u8]>>) -> Self {
        Self { status: "200 OK", content_type, body: body.into() }
    }
}

/// The client of a request, passed to the code that prepares the response.
pub struct Client<'a> {
    stream: &'a TcpStream,
    slot: &'a Slot,
}

impl Client<'_> {
    /// Returns true if the client has disconnected or the server is shutting down.
    pub fn has_disconnected(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::net::recv(self.stream, &mut [0; 1][..], flags) {
            Ok((_, 0)) => true,
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => self.slot.connections.is_closing(),
            Err(_) => true,
        }
    }
}

/// Reads a request and sends the response that `respond` returns. `check_host` enables the check of the
/// `Host` header. `headers` are the header lines of all responses, each with its line end.
///
/// # Errors
/// The client disconnected, or did not read the response in time.
pub fn serve(
    stream: &TcpStream,
    slot: &Slot,
    check_host: bool,
    headers: &str,
    respond: impl FnOnce(&Request, &Client<'_>) -> Result<Response, Refusal>,
) -> io::Result<()> {
    let request = read(stream)?;
    let request = request.and_then(|request| {
        if check_host {
            request.check_host()?;
        }
        Ok(request)
    });
    match request {
        Err(refusal) => refuse(stream, headers, refusal),
        Ok(request) => match respond(&request, &Client { stream, slot }) {
            Err(refusal) => refuse(stream, headers, refusal),
            Ok(Response { status, content_type, body }) => {
                let head = head(status, content_type, headers, body.len());
                write(stream, &head, if request.head_only { b"" } else { &body }, RESPONSE_MAX)
            }
        },
    }
}

/// Sends an error response.
fn refuse(stream: &TcpStream, headers: &str, refusal: Refusal) -> io::Result<()> {
    let status = refusal.status();
    let body = format!("{status}\n");
    let mut head = head(status, "text/plain; charset=utf-8", headers, body.len());
    if refusal == Refusal::Method {
        let end = head.len() - 2;
        head.insert_str(end, "Allow: GET, HEAD\r\n");
    }
    write(stream, &head, body.as_bytes(), REQUEST_MAX)
}

fn head(status: &str, content_type: &str, headers: &str, len: usize) -> String {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len}\r\n\
         X-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\n{headers}Connection: close\r\n\r\n"
    )
}

/// Reads the head of a request. The inner error is the reason for an error response, the outer one a failed
/// connection.
fn read(mut stream: &TcpStream) -> io::Result<Result<Request, Refusal>> {
    let end = Instant::now() + REQUEST_MAX;
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

/// Sends a response within the time `most`, and ends the connection.
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
