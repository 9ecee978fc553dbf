//! One connection of HTTP: a request, its answer, the end. Bytes and time are bounded.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

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
    /// What the text is to the client.
    pub content_type: &'static str,
    /// The text.
    pub body: String,
}

/// Reads a request and answers it with what `answer` has at its path.
///
/// # Errors
/// The client has left, or was too slow to take the answer.
pub fn serve(
    stream: &TcpStream,
    check_host: bool,
    answer: impl FnOnce(&str) -> Result<Answer, Refusal>,
) -> io::Result<()> {
    let asked = read(stream)?;
    let asked = asked.and_then(|asked| {
        if check_host {
            asked.check_host()?;
        }
        Ok(asked)
    });
    match asked {
        Err(refusal) => refuse(stream, refusal),
        Ok(Request { head_only, path, .. }) => match answer(&path) {
            Err(refusal) => refuse(stream, refusal),
            Ok(Answer { content_type, body }) => {
                let head = head("200 OK", content_type, body.len());
                write(stream, &head, if head_only { "" } else { &body }, TAKE_MAX)
            }
        },
    }
}

/// Answers with a status.
pub fn refuse(stream: &TcpStream, refusal: Refusal) -> io::Result<()> {
    let status = refusal.status();
    let body = format!("{status}\n");
    let mut head = head(status, "text/plain; charset=utf-8", body.len());
    if refusal == Refusal::Method {
        let end = head.len() - 2;
        head.insert_str(end, "Allow: GET, HEAD\r\n");
    }
    write(stream, &head, &body, ASK_MAX)
}

fn head(status: &str, content_type: &str, len: usize) -> String {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len}\r\n\
         X-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
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
fn write(mut stream: &TcpStream, head: &str, body: &str, most: Duration) -> io::Result<()> {
    let end = Instant::now() + most;
    for text in [head, body] {
        for piece in text.as_bytes().chunks(PIECE_BYTES) {
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
