//! Transmission phase of an NBD connection with a stream of requests. Properties:
//!
//! * The connection ends after the last byte of the client, and nothing panics.
//! * Every request has one well-formed reply. Only after a client that disconnects early, or an invalid
//!   request, the last replies may be missing.
//! * An invalid request fails with an appropriate error. A valid request succeeds unless the device fails.
//! * Read data equals the content of a byte vector to which the same requests are applied. Block status
//!   equals the device's extents, and the final content of the device equals the byte vector.
//! * The device never holds more requests than the server's limit.

use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use freestone::device::{Device, ExtentKind};
use freestone_nbd::{Address, ExportOptions};
use freestone_testkit::Manner;
use freestone_testkit::nbd::prelude::*;

use super::Nbd;
use super::client::{ClientBehaviour, exchange, exchange_inline};
use super::device::{BLOCK, Memory, memory};
use super::replies::{Answer, ReplyReader, answers};
use super::requests::{Payload, Script, SentRequest};

const MAX_PAYLOAD_BYTES: u64 = 64 << 20;
/// Maximum length in bytes of a read that must not be split (`DF`), and of a write to a zoned device.
const MAX_PIECE_BYTES: u64 = 32 << 20;

impl Nbd {
    /// Checks one input. Returns true if at least one request other than a flush succeeded.
    ///
    /// # Panics
    /// Panics if a property does not hold.
    pub fn transmission(&self, input: &[u8]) -> bool {
        let Some(script) = Script::new(input) else { return false };
        let device = memory(script.device);
        let options = ExportOptions {
            read_only: script.read_only,
            without_fua: script.without_fua,
            ..ExportOptions::default()
        };
        let published = Arc::clone(&device.device) as Arc<dyn Device>;
        self.server.publish(&self.address, "disk", published, options).expect("the name is free");
        let (mut bytes, greeting) = handshake(&script);
        bytes.extend_from_slice(&script.bytes);
        let run_inline = || {
            let most = (greeting + script.max_reply_bytes(), script.max_reply_messages());
            exchange_inline(&bytes, most, |socket| self.server.serve_socket(&self.address, socket))
        };
        let received = if script.own_thread { None } else { run_inline() }.unwrap_or_else(|| {
            let Address::Unix(path) = &self.address else { panic!("a Unix address") };
            let stream = UnixStream::connect(path).expect("the server listens");
            exchange(&stream, &bytes, &ClientBehaviour { device: Some(&device), leaves: script.leaves })
        });
        device.release_all();
        // The call also waits until the connection has ended.
        self.server.unpublish("disk", true).expect("it is published");
        assert_eq!(self.server.connections("disk"), 0, "the connection did not end");
        self.assert_sound();
        if script.leaves {
            return false;
        }
        let mut received = ReplyReader(&received);
        received.bytes(greeting);
        check_replies(&script, &device, received.0)
    }
}

/// Returns the client's side of a valid handshake, and the number of bytes that the server sends in it.
fn handshake(script: &Script) -> (Vec<u8>, usize) {
    let mut bytes = CLIENT_FLAGS.to_be_bytes().to_vec();
    let mut received = 18;
    if let Some(kind) = script.headers.option() {
        bytes.extend(option(kind, &[]));
        received += 20;
    }
    if !script.contexts.is_empty() {
        received += script.contexts.iter().map(|context| 20 + 4 + context.len()).sum::<usize>() + 20;
        bytes.extend(option(SET_META_CONTEXT, &context_data("disk", &script.contexts)));
    }
    bytes.extend(option(GO, &info_data("disk", &[])));
    (bytes, received + 20 + 12 + 20 + 14 + 20)
}

fn id_of(name: &str) -> u32 {
    if name == "base:allocation" { 1 } else { 2 }
}

/// Expected state of the device after the same requests.
struct Expected {
    data: Vec<u8>,
    /// Extent kind of each block. None if the kind is unknown, because a request failed and may have had an
    /// effect.
    kinds: Vec<Option<ExtentKind>>,
    own: Vec<bool>,
}

fn check_replies(script: &Script, device: &Memory, received: &[u8]) -> bool {
    let requests = &script.requests;
    let known = |index: usize| {
        let request = &requests[index];
        (request.offset, (request.command == READ).then_some(request.len as usize))
    };
    let answers = answers(received, requests.len(), script.headers, &known);
    let size = script.device.size;
    let blocks = (size / BLOCK) as usize;
    let mut expected = Expected {
        data: vec![0; size as usize],
        kinds: vec![Some(ExtentKind::Hole); blocks],
        own: vec![false; blocks],
    };
    let mut done = false;
    for (index, (request, answer)) in requests.iter().zip(&answers).enumerate() {
        if request.command == DISC {
            assert!(answer.outcome.is_none() && index + 1 == answers.len());
            break;
        }
        let Some(outcome) = answer.outcome else { panic!("{request:?} has no reply") };
        let faults = faults(script, request);
        if faults.is_empty() {
            let mut must_fail = false;
            if let Some(bad) = script.device.bad
                && touched(request).contains(&(bad / BLOCK))
                && ![CACHE, BLOCK_STATUS].contains(&request.command)
            {
                must_fail = true;
            }
            let manner = script.device.manner;
            let may_fail = script.device.forgets && !matches!(manner, Manner::Inline | Manner::Partly(_));
            match outcome {
                0 => assert!(!must_fail, "{request:?} succeeds on a bad block"),
                EIO => assert!(must_fail, "{request:?} fails without a cause"),
                ESHUTDOWN => assert!(may_fail, "{request:?} fails with ESHUTDOWN without a cause"),
                other => panic!("{request:?} has the outcome {other}"),
            }
            done |= outcome == 0 && request.command != FLUSH;
            expected.follow(script, index, request, answer, outcome == 0);
        } else {
            assert!(
                faults.contains(&outcome),
                "{request:?} has the outcome {outcome}, not one of {faults:?}"
            );
            assert!(answer.is_plain());
        }
    }
    expected.compare(script, device);
    done
}

/// Returns the errors with one of which the request must fail. Returns none for a valid request.
fn faults(script: &Script, request: &SentRequest) -> Vec<u32> {
    let mut faults = Vec::new();
    let mut request = *request;
    if script.headers == Headers::Extended {
        match (request.command, request.payload) {
            (BLOCK_STATUS, Payload::Contexts { ids, count, extra }) => {
                let ids = &ids[..count];
                let known = |id: &u32| script.contexts.iter().any(|name| id_of(name) == *id);
                let twice = (1..count).any(|at| ids[..at].contains(&ids[at]));
                if count == 0 || extra != 0 || twice || !ids.iter().all(known) {
                    return vec![EINVAL];
                }
            }
            (WRITE, _) | (_, Payload::None) => {}
            _ => return vec![EINVAL],
        }
        request.flags &= !PAYLOAD_LEN;
    }
    let request = &request;
    let fua = if script.without_fua { 0 } else { FUA };
    let (flags, writes) = match request.command {
        READ if script.headers != Headers::Simple => (DF, false),
        READ | CACHE | FLUSH => (0, false),
        WRITE | TRIM => (0, true),
        WRITE_ZEROES => (NO_HOLE | FAST_ZERO, true),
        BLOCK_STATUS => (REQ_ONE, false),
        _ => return vec![EINVAL],
    };
    if request.flags & !(flags | fua) != 0 {
        faults.push(EINVAL);
    }
    if writes && script.read_only {
        faults.push(EPERM);
    }
    if request.command == FLUSH {
        if request.offset != 0 || request.len != 0 {
            faults.push(EINVAL);
        }
    } else {
        let parts = !(request.offset | request.len).is_multiple_of(BLOCK);
        if request.len == 0 || (script.device.zoned && parts) {
            faults.push(EINVAL);
        }
        let end = request.offset.checked_add(request.len);
        if end.is_none_or(|end| end > script.device.size) {
            faults.push(if matches!(request.command, WRITE | WRITE_ZEROES) { ENOSPC } else { EINVAL });
        }
    }
    let most = |piece| if piece { MAX_PIECE_BYTES } else { MAX_PAYLOAD_BYTES };
    match request.command {
        READ if request.len > most(request.flags & DF != 0) => faults.push(EOVERFLOW),
        WRITE if request.len > most(script.device.zoned) => faults.push(EINVAL),
        _ => {}
    }
    if request.command == WRITE_ZEROES && request.flags & (NO_HOLE | FAST_ZERO) == NO_HOLE | FAST_ZERO {
        faults.push(ENOTSUP);
    }
    if request.command == BLOCK_STATUS && script.contexts.is_empty() {
        faults.push(EINVAL);
    }
    faults
}

/// Returns the blocks that are completely inside the range of a request.
fn whole(request: &SentRequest) -> Range<u64> {
    let start = request.offset.div_ceil(BLOCK);
    start..(request.end() / BLOCK).max(start)
}

/// Returns the blocks that a request reads or changes, at least in part. A trim skips incomplete blocks.
fn touched(request: &SentRequest) -> Range<u64> {
    match request.command {
        TRIM => whole(request),
        FLUSH => 0..0,
        _ => request.offset / BLOCK..request.end().div_ceil(BLOCK),
    }
}

impl Expected {
    fn follow(
        &mut self,
        script: &Script,
        index: usize,
        request: &SentRequest,
        answer: &Answer<'_>,
        done: bool,
    ) {
        match request.command {
            READ => self.read(script, request, answer, done),
            BLOCK_STATUS => self.status(script, request, answer),
            WRITE | TRIM | WRITE_ZEROES => {
                assert!(answer.is_plain());
                let (blocks, whole) = (touched(request), whole(request));
                // A server thread writes incomplete blocks, so later requests can overtake them.
                let later = !matches!(script.device.manner, Manner::Inline | Manner::Partly(_));
                let unknown = |block: u64| self.kinds[block as usize].is_none();
                let known = done && !(later && (blocks != whole || blocks.clone().any(unknown)));
                for block in blocks {
                    let part = !whole.contains(&block);
                    let kind = match request.command {
                        _ if !known || (part && self.kinds[block as usize].is_none()) => None,
                        WRITE_ZEROES if !part && request.flags & NO_HOLE != 0 => Some(ExtentKind::Zero),
                        WRITE_ZEROES | TRIM if !part => Some(ExtentKind::Hole),
                        _ => Some(ExtentKind::Data),
                    };
                    self.kinds[block as usize] = kind;
                    self.own[block as usize] = true;
                }
                match request.command {
                    WRITE => {
                        let bytes = request.offset as usize..request.end() as usize;
                        SentRequest::payload(index, request.offset, &mut self.data[bytes]);
                    }
                    TRIM => self.data[(whole.start * BLOCK) as usize..(whole.end * BLOCK) as usize].fill(0),
                    _ => self.data[request.offset as usize..request.end() as usize].fill(0),
                }
            }
            _ => assert!(answer.is_plain()),
        }
    }

    fn read(&self, script: &Script, request: &SentRequest, answer: &Answer<'_>, done: bool) {
        let mut ranges = Vec::new();
        for (offset, data) in &answer.data {
            let end = offset + data.len() as u64;
            assert!(request.offset <= *offset && end <= request.end(), "data outside of the request");
            ranges.push(*offset..end);
            for block in *offset / BLOCK..end.div_ceil(BLOCK) {
                let (from, to) = ((block * BLOCK).max(*offset), ((block + 1) * BLOCK).min(end));
                let reply_data = &data[(from - offset) as usize..(to - offset) as usize];
                if self.kinds[block as usize].is_some() {
                    assert!(
                        self.data[from as usize..to as usize] == *reply_data,
                        "block {block} has other data"
                    );
                }
            }
        }
        for (offset, len) in &answer.holes {
            let end = offset + u64::from(*len);
            assert!(request.offset <= *offset && end <= request.end(), "a hole outside of the request");
            ranges.push(*offset..end);
            for block in *offset / BLOCK..end.div_ceil(BLOCK) {
                let (from, to) = ((block * BLOCK).max(*offset), ((block + 1) * BLOCK).min(end));
                if self.kinds[block as usize].is_some() {
                    let held = &self.data[from as usize..to as usize];
                    assert!(held.iter().all(|byte| *byte == 0), "block {block} is not a hole");
                }
            }
        }
        ranges.sort_unstable_by_key(|range| range.start);
        assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start), "data twice");
        if done {
            let reply_data: u64 = ranges.iter().map(|range| range.end - range.start).sum();
            assert_eq!(reply_data, request.len, "not all of the data");
        }
        let one = script.headers == Headers::Simple || request.flags & DF != 0;
        assert!(!one || ranges.len() <= 1, "more than one chunk");
    }

    fn status(&self, script: &Script, request: &SentRequest, answer: &Answer<'_>) {
        assert!(answer.data.is_empty() && answer.holes.is_empty());
        let contexts: Vec<u32> = answer.status.iter().map(|(context, _)| *context).collect();
        let mut wanted: Vec<u32> = script.contexts.iter().map(|name| id_of(name)).collect();
        if let Payload::Contexts { ids, count, .. } = request.payload {
            wanted.retain(|id| ids[..count].contains(id));
        }
        assert_eq!(contexts, wanted);
        for (context, rows) in &answer.status {
            assert!(request.flags & REQ_ONE == 0 || rows.len() == 1);
            let mut at = request.offset;
            for (number, &(len, flags)) in rows.iter().enumerate() {
                let end = at + len;
                assert!(len > 0 && (end.is_multiple_of(BLOCK) || end == request.end()));
                assert!(end <= request.end(), "status beyond the requested range");
                assert!(number == 0 || rows[number - 1].1 != flags, "neighbours of one kind");
                for block in (at / BLOCK) as usize..end.div_ceil(BLOCK) as usize {
                    let wanted = match (context, self.kinds[block]) {
                        // A failed request may have changed a part of its range, so the status of its blocks
                        // is unknown.
                        (_, None) => continue,
                        (1, Some(ExtentKind::Data)) => 0,
                        (1, Some(ExtentKind::Zero)) => 2,
                        (1, Some(ExtentKind::Hole)) => 3,
                        _ => u64::from(self.own[block]),
                    };
                    assert_eq!(flags, wanted, "block {block} in context {context}");
                }
                at = end;
            }
            let whole = request.flags & REQ_ONE != 0 || rows.len() >= freestone_nbd::MAX_DESCRIPTORS;
            assert!(whole || at == request.end(), "status ends early");
        }
    }

    fn compare(&self, script: &Script, device: &Memory) {
        // A truncated request may have begun, so the final state is unknown.
        let complete: usize = script.requests.iter().map(|request| request.wire_bytes(script.headers)).sum();
        if complete < script.bytes.len() {
            return;
        }
        let (kinds, data) = (device.device.kinds(), device.device.content());
        for (block, kind) in self.kinds.iter().enumerate().filter(|(_, kind)| kind.is_some()) {
            assert_eq!(Some(kinds[block]), *kind, "block {block}");
            if *kind == Some(ExtentKind::Data) {
                let bytes = block * BLOCK as usize..(block + 1) * BLOCK as usize;
                assert!(self.data[bytes.clone()] == data[bytes], "block {block}");
            }
        }
    }
}
