//! Reference parser of the replies of an NBD server.

use freestone_nbd_proto::command;

use super::facts::{Facts, number};
use super::requests::{Answer, SentRequest};

const SHUTDOWN: u32 = 108;
/// Maximum length of an error chunk that the client accepts, in bytes.
const ERROR_MAX: usize = 4 + 2 + 65_535 + 8;
/// Maximum length of a block status chunk that the client accepts, in bytes.
const STATUS_MAX: usize = 4 + (128 << 20) / 512 * 8;

/// A request, with the part of the reply that was received.
struct OpenRequest<'a> {
    request: &'a SentRequest,
    cookie: u64,
    data: Vec<u8>,
    /// True for each received byte of `data`.
    have: Vec<bool>,
    error: Option<u32>,
    status: Vec<(u32, u32)>,
    answer: Option<Answer>,
}

impl OpenRequest<'_> {
    fn store(&mut self, offset: u64, data: &[u8]) -> Option<()> {
        let from = usize::try_from(offset.checked_sub(self.request.offset)?).ok()?;
        let end = from.checked_add(data.len())?;
        let have = self.have.get_mut(from..end).filter(|have| !have.is_empty() && !have.contains(&true))?;
        have.fill(true);
        self.data[from..end].copy_from_slice(data);
        Some(())
    }

    /// Completes the request at its last chunk. Returns None, which ends the connection, if the reply is
    /// incomplete or the server shuts down.
    fn end(&mut self) -> Option<()> {
        let answer = match (self.error, self.request.command) {
            (Some(SHUTDOWN), _) => return None,
            (Some(errno), _) => Answer::Failed(errno),
            (None, command::READ) if self.have.contains(&false) => return None,
            (None, command::BLOCK_STATUS) if self.status.is_empty() => return None,
            (None, command::BLOCK_STATUS) => Answer::Status(std::mem::take(&mut self.status)),
            (None, _) => Answer::Done(std::mem::take(&mut self.data)),
        };
        self.answer = Some(answer);
        Some(())
    }
}

/// Parses the replies, and returns the answer to each request. `requests` has the requests with their
/// cookies.
pub fn read<'a>(facts: &Facts, requests: &'a [(SentRequest, u64)], replies: &[u8]) -> Vec<Answer> {
    let open = |(request, cookie): &'a (SentRequest, u64)| {
        let len = if request.command == command::READ { request.len as usize } else { 0 };
        let (data, have) = (vec![0; len], vec![false; len]);
        OpenRequest { request, cookie: *cookie, data, have, error: None, status: Vec::new(), answer: None }
    };
    let mut all: Vec<OpenRequest<'_>> = requests.iter().map(open).collect();
    let mut rest = replies;
    while reply(facts, &mut all, &mut rest).is_some() {}
    all.into_iter().map(|open| open.answer.unwrap_or(Answer::None)).collect()
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (taken, left) = rest.split_at_checked(len)?;
    *rest = left;
    Some(taken)
}

fn find<'a, 'b>(all: &'a mut [OpenRequest<'b>], cookie: u64) -> Option<&'a mut OpenRequest<'b>> {
    all.iter_mut().find(|open| open.answer.is_none() && open.cookie == cookie)
}

/// Parses a simple reply, or one chunk of a structured reply. Returns None if the client must end the
/// connection there.
fn reply(facts: &Facts, all: &mut [OpenRequest<'_>], rest: &mut &[u8]) -> Option<()> {
    let magic = number(take(rest, 4)?);
    if magic == 0x6744_6698 {
        let (errno, cookie) = (number(take(rest, 4)?) as u32, number(take(rest, 8)?));
        let open = find(all, cookie)?;
        let command = open.request.command;
        if facts.structured && matches!(command, command::READ | command::BLOCK_STATUS) {
            return None;
        }
        if errno != 0 {
            open.error = Some(errno);
        } else if command == command::READ {
            let data = take(rest, open.request.len as usize)?;
            open.store(open.request.offset, data)?;
        }
        return open.end();
    }
    if magic != 0x668e_33ef || !facts.structured {
        return None;
    }
    let header = take(rest, 16)?;
    let (flags, kind, len) = (number(&header[..2]), number(&header[2..4]), number(&header[12..]) as usize);
    let open = find(all, number(&header[4..12]))?;
    let is_last = flags & 1 != 0;
    match (kind, open.request.command) {
        (0, _) if len == 0 && is_last => {}
        (1, command::READ) => {
            // The client checks the length before it receives the whole chunk.
            let end = len.checked_sub(8).filter(|bytes| *bytes <= open.request.len as usize)?;
            let offset = number(take(rest, 8)?);
            open.store(offset, take(rest, end)?)?;
        }
        (2, command::READ) => {
            let body = take(rest, Some(len).filter(|len| *len == 12)?)?;
            let bytes = number(&body[8..]) as usize;
            if bytes > open.request.len as usize {
                return None;
            }
            open.store(number(&body[..8]), &vec![0; bytes])?;
        }
        (5, command::BLOCK_STATUS) if len <= STATUS_MAX => {
            let body = take(rest, len)?;
            if !open.status.is_empty() {
                return None;
            }
            open.status = status(facts, open.request, body)?;
        }
        (0x8000.., _) if len <= ERROR_MAX => {
            let body = take(rest, len)?;
            let errno = number(body.get(..4)?) as u32;
            let text = body.get(4..6).map(|len| number(len) as usize);
            let is_whole = match kind {
                0x8001 => text? + 6 == len,
                0x8002 => text? + 6 + 8 == len,
                _ => true,
            };
            if errno == 0 || !is_whole {
                return None;
            }
            open.error.get_or_insert(errno);
        }
        _ => return None,
    }
    if is_last { open.end() } else { Some(()) }
}

fn status(facts: &Facts, request: &SentRequest, body: &[u8]) -> Option<Vec<(u32, u32)>> {
    let (context, rows) = body.split_at_checked(4)?;
    if facts.context != Some(number(context) as u32) || rows.is_empty() || rows.len() % 8 != 0 {
        return None;
    }
    let rows = rows.chunks(8).map(|row| (number(&row[..4]) as u32, number(&row[4..]) as u32));
    let rows: Vec<(u32, u32)> = rows.collect();
    let before_last: u64 = rows.split_last()?.1.iter().map(|(len, _)| u64::from(*len)).sum();
    (rows.iter().all(|(len, _)| *len > 0) && before_last < u64::from(request.len)).then_some(rows)
}
