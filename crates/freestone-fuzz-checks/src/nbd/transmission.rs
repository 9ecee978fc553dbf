//! A stream of requests to a connection in transmission.
//!
//! * The connection ends when the client says no more, and nothing panics.
//! * Every request is answered once, with data or errors that are well formed; only after a client
//!   that leaves, or something that is no request, answers may be missing, and then the last ones.
//! * What is wrong is refused with an error that fits, what is right is done, except where the
//!   device fails.
//! * Data is what a byte vector holds, status what the device knows, and the device ends as the
//!   byte vector does.
//! * The device never holds more than is promised.

use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use freestone::device::{Device, ExtentKind};
use freestone_nbd::{Address, ExportOptions};

use super::Nbd;
use super::client::{Manners, talk, talk_alone};
use super::device::{BLOCK, Manner, Memory};
use super::replies::{Answer, Heard, answers};
use super::requests::{
    Asked, BLOCK_STATUS, CACHE, DISC, FLUSH, Headers, PAYLOAD_LEN, Payload, READ, Script, TRIM, WRITE,
    WRITE_ZEROES,
};

const EPERM: u32 = 1;
const EIO: u32 = 5;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EOVERFLOW: u32 = 75;
const ENOTSUP: u32 = 95;
const ESHUTDOWN: u32 = 108;

const FUA: u16 = 1;
const NO_HOLE: u16 = 2;
const DF: u16 = 4;
const REQ_ONE: u16 = 8;
const FAST_ZERO: u16 = 16;

const MAX_PAYLOAD_BYTES: u64 = 64 << 20;
/// Of a chunk that is one piece, and of a write to zones.
const MAX_PIECE_BYTES: u64 = 32 << 20;

impl Nbd {
    /// Checks one input; true: at least one request was done, flushes apart.
    ///
    /// # Panics
    /// Something does not hold.
    pub fn transmission(&self, input: &[u8]) -> bool {
        let Some(script) = Script::new(input) else { return false };
        let device = Arc::new(Memory::new(script.shape));
        let options = ExportOptions {
            read_only: script.read_only,
            without_fua: script.without_fua,
            ..ExportOptions::default()
        };
        let published = Arc::clone(&device) as Arc<dyn Device>;
        self.server.publish(&self.address, "disk", published, options).expect("nothing else is published");
        let (mut bytes, greeting) = handshake(&script);
        bytes.extend_from_slice(&script.bytes);
        let alone = || {
            let most = (greeting + script.most_heard(), script.most_messages());
            talk_alone(&bytes, most, |socket| self.server.serve_here(&self.address, socket))
        };
        let heard = if script.alone { None } else { alone() }.unwrap_or_else(|| {
            let Address::Unix(path) = &self.address else { panic!("a Unix address") };
            let stream = UnixStream::connect(path).expect("the server listens");
            talk(&stream, &bytes, &Manners { device: Some(&device), leaves: script.leaves })
        });
        device.let_go();
        // Waits for the connection's end.
        self.server.unpublish("disk", true).expect("it is published");
        assert_eq!(self.server.connections("disk"), 0, "the connection did not end");
        self.assert_sound();
        if script.leaves {
            return false;
        }
        let mut heard = Heard(&heard);
        heard.bytes(greeting);
        judge(&script, &device, heard.0)
    }
}

/// What a client says until it is in transmission, and how many bytes it hears.
fn handshake(script: &Script) -> (Vec<u8>, usize) {
    let mut bytes = 3_u32.to_be_bytes().to_vec();
    let mut heard = 18;
    let mut option = |kind: u32, data: &[u8]| {
        bytes.extend(*b"IHAVEOPT");
        bytes.extend(kind.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
    };
    let asked = match script.headers {
        Headers::Simple => None,
        Headers::Structured => Some(8),
        Headers::Extended => Some(11),
    };
    if let Some(kind) = asked {
        option(kind, &[]);
        heard += 20;
    }
    if !script.contexts.is_empty() {
        let mut data = b"\0\0\0\x04disk\0\0\0".to_vec();
        data.push(script.contexts.len() as u8);
        for context in &script.contexts {
            data.extend((context.len() as u32).to_be_bytes());
            data.extend(context.as_bytes());
            heard += 20 + 4 + context.len();
        }
        option(10, &data);
        heard += 20;
    }
    option(7, b"\0\0\0\x04disk\0\0");
    (bytes, heard + 20 + 12 + 20 + 14 + 20)
}

/// A context's identifier.
fn id_of(name: &str) -> u32 {
    if name == "base:allocation" { 1 } else { 2 }
}

/// What is known of the device without having asked it.
struct Expected {
    data: Vec<u8>,
    /// Of each block; `None`: a request for it failed, and may have done a part of it.
    kinds: Vec<Option<ExtentKind>>,
    own: Vec<bool>,
}

fn judge(script: &Script, device: &Memory, heard: &[u8]) -> bool {
    let asked = &script.asked;
    let known = |index: usize| {
        let asked = &asked[index];
        (asked.offset, (asked.command == READ).then_some(asked.len as usize))
    };
    let answers = answers(heard, asked.len(), script.headers, &known);
    let size = script.shape.size;
    let blocks = (size / BLOCK) as usize;
    let mut expected = Expected {
        data: vec![0; size as usize],
        kinds: vec![Some(ExtentKind::Hole); blocks],
        own: vec![false; blocks],
    };
    let mut done = false;
    for (index, (asked, answer)) in asked.iter().zip(&answers).enumerate() {
        if asked.command == DISC {
            assert!(answer.outcome.is_none() && index + 1 == answers.len());
            break;
        }
        let Some(outcome) = answer.outcome else { panic!("{asked:?} is not answered") };
        let faults = faults(script, asked);
        if faults.is_empty() {
            let mut must_fail = false;
            if let Some(bad) = script.shape.bad
                && touched(asked).contains(&(bad / BLOCK))
                && ![CACHE, BLOCK_STATUS].contains(&asked.command)
            {
                must_fail = true;
            }
            let manner = script.shape.manner;
            let may_fail = script.shape.forgets && !matches!(manner, Manner::Inline | Manner::Partly(_));
            match outcome {
                0 => assert!(!must_fail, "{asked:?} is done on a bad block"),
                EIO => assert!(must_fail, "{asked:?} fails without a cause"),
                ESHUTDOWN => assert!(may_fail, "{asked:?} is gone without a cause"),
                other => panic!("{asked:?} is answered {other}"),
            }
            done |= outcome == 0 && asked.command != FLUSH;
            expected.follow(script, index, asked, answer, outcome == 0);
        } else {
            assert!(faults.contains(&outcome), "{asked:?} is answered {outcome}, not one of {faults:?}");
            assert!(answer.is_plain());
        }
    }
    expected.compare(script, device);
    done
}

/// The errors one of which the request must get.
fn faults(script: &Script, asked: &Asked) -> Vec<u32> {
    let mut faults = Vec::new();
    let mut asked = *asked;
    if script.headers == Headers::Extended {
        match (asked.command, asked.payload) {
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
        asked.flags &= !PAYLOAD_LEN;
    }
    let asked = &asked;
    let fua = if script.without_fua { 0 } else { FUA };
    let (flags, writes) = match asked.command {
        READ if script.headers != Headers::Simple => (DF, false),
        READ | CACHE | FLUSH => (0, false),
        WRITE | TRIM => (0, true),
        WRITE_ZEROES => (NO_HOLE | FAST_ZERO, true),
        BLOCK_STATUS => (REQ_ONE, false),
        _ => return vec![EINVAL],
    };
    if asked.flags & !(flags | fua) != 0 {
        faults.push(EINVAL);
    }
    if writes && script.read_only {
        faults.push(EPERM);
    }
    if asked.command == FLUSH {
        if asked.offset != 0 || asked.len != 0 {
            faults.push(EINVAL);
        }
    } else {
        let parts = !(asked.offset | asked.len).is_multiple_of(BLOCK);
        if asked.len == 0 || (script.shape.zoned && parts) {
            faults.push(EINVAL);
        }
        let end = asked.offset.checked_add(asked.len);
        if end.is_none_or(|end| end > script.shape.size) {
            faults.push(if matches!(asked.command, WRITE | WRITE_ZEROES) { ENOSPC } else { EINVAL });
        }
    }
    let most = |piece| if piece { MAX_PIECE_BYTES } else { MAX_PAYLOAD_BYTES };
    match asked.command {
        READ if asked.len > most(asked.flags & DF != 0) => faults.push(EOVERFLOW),
        WRITE if asked.len > most(script.shape.zoned) => faults.push(EINVAL),
        _ => {}
    }
    if asked.command == WRITE_ZEROES && asked.flags & (NO_HOLE | FAST_ZERO) == NO_HOLE | FAST_ZERO {
        faults.push(ENOTSUP);
    }
    if asked.command == BLOCK_STATUS && script.contexts.is_empty() {
        faults.push(EINVAL);
    }
    faults
}

/// Whole blocks of what was asked for.
fn whole(asked: &Asked) -> Range<u64> {
    let start = asked.offset.div_ceil(BLOCK);
    start..(asked.end() / BLOCK).max(start)
}

/// The blocks that the device is asked for: a trim leaves those out of which it has a part only.
fn touched(asked: &Asked) -> Range<u64> {
    match asked.command {
        TRIM => whole(asked),
        FLUSH => 0..0,
        _ => asked.offset / BLOCK..asked.end().div_ceil(BLOCK),
    }
}

impl Expected {
    fn follow(&mut self, script: &Script, index: usize, asked: &Asked, answer: &Answer<'_>, done: bool) {
        match asked.command {
            READ => self.read(script, asked, answer, done),
            BLOCK_STATUS => self.status(script, asked, answer),
            WRITE | TRIM | WRITE_ZEROES => {
                assert!(answer.is_plain());
                let (blocks, whole) = (touched(asked), whole(asked));
                // Parts are written by a thread of the server's, so what follows may come before.
                let later = !matches!(script.shape.manner, Manner::Inline | Manner::Partly(_));
                let unknown = |block: u64| self.kinds[block as usize].is_none();
                let known = done && !(later && (blocks != whole || blocks.clone().any(unknown)));
                for block in blocks {
                    let part = !whole.contains(&block);
                    let kind = match asked.command {
                        _ if !known || (part && self.kinds[block as usize].is_none()) => None,
                        WRITE_ZEROES if !part && asked.flags & NO_HOLE != 0 => Some(ExtentKind::Zero),
                        WRITE_ZEROES | TRIM if !part => Some(ExtentKind::Hole),
                        _ => Some(ExtentKind::Data),
                    };
                    self.kinds[block as usize] = kind;
                    self.own[block as usize] = true;
                }
                match asked.command {
                    WRITE => {
                        let bytes = asked.offset as usize..asked.end() as usize;
                        Asked::payload(index, asked.offset, &mut self.data[bytes]);
                    }
                    TRIM => self.data[(whole.start * BLOCK) as usize..(whole.end * BLOCK) as usize].fill(0),
                    _ => self.data[asked.offset as usize..asked.end() as usize].fill(0),
                }
            }
            _ => assert!(answer.is_plain()),
        }
    }

    fn read(&self, script: &Script, asked: &Asked, answer: &Answer<'_>, done: bool) {
        let mut ranges = Vec::new();
        for (offset, data) in &answer.data {
            let end = offset + data.len() as u64;
            assert!(asked.offset <= *offset && end <= asked.end(), "data of another place");
            ranges.push(*offset..end);
            for block in *offset / BLOCK..end.div_ceil(BLOCK) {
                let (from, to) = ((block * BLOCK).max(*offset), ((block + 1) * BLOCK).min(end));
                let told = &data[(from - offset) as usize..(to - offset) as usize];
                if self.kinds[block as usize].is_some() {
                    assert!(self.data[from as usize..to as usize] == *told, "block {block} has other data");
                }
            }
        }
        for (offset, len) in &answer.holes {
            let end = offset + u64::from(*len);
            assert!(asked.offset <= *offset && end <= asked.end(), "a hole in another place");
            ranges.push(*offset..end);
            for block in *offset / BLOCK..end.div_ceil(BLOCK) {
                let (from, to) = ((block * BLOCK).max(*offset), ((block + 1) * BLOCK).min(end));
                if self.kinds[block as usize].is_some() {
                    let held = &self.data[from as usize..to as usize];
                    assert!(held.iter().all(|byte| *byte == 0), "block {block} is no hole");
                }
            }
        }
        ranges.sort_unstable_by_key(|range| range.start);
        assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start), "data twice");
        if done {
            let told: u64 = ranges.iter().map(|range| range.end - range.start).sum();
            assert_eq!(told, asked.len, "not all of the data");
        }
        let one = script.headers == Headers::Simple || asked.flags & DF != 0;
        assert!(!one || ranges.len() <= 1, "more than one chunk");
    }

    fn status(&self, script: &Script, asked: &Asked, answer: &Answer<'_>) {
        assert!(answer.data.is_empty() && answer.holes.is_empty());
        let contexts: Vec<u32> = answer.status.iter().map(|(context, _)| *context).collect();
        let mut wanted: Vec<u32> = script.contexts.iter().map(|name| id_of(name)).collect();
        if let Payload::Contexts { ids, count, .. } = asked.payload {
            wanted.retain(|id| ids[..count].contains(id));
        }
        assert_eq!(contexts, wanted);
        for (context, rows) in &answer.status {
            assert!(asked.flags & REQ_ONE == 0 || rows.len() == 1);
            let mut at = asked.offset;
            for (number, &(len, flags)) in rows.iter().enumerate() {
                let end = at + len;
                assert!(len > 0 && (end.is_multiple_of(BLOCK) || end == asked.end()));
                assert!(end <= asked.end(), "status of what was not asked for");
                assert!(number == 0 || rows[number - 1].1 != flags, "neighbours of one kind");
                for block in (at / BLOCK) as usize..end.div_ceil(BLOCK) as usize {
                    let wanted = match (context, self.kinds[block]) {
                        // A part of a request that failed may have been done.
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
            let whole = asked.flags & REQ_ONE != 0 || rows.len() >= freestone_nbd::MAX_DESCRIPTORS;
            assert!(whole || at == asked.end(), "status ends early");
        }
    }

    fn compare(&self, script: &Script, device: &Memory) {
        // A request that was cut off may have been begun: then only what was asked for before is
        // known.
        let asked: usize = script.asked.iter().map(|asked| asked.wire_bytes(script.headers)).sum();
        if asked < script.bytes.len() {
            return;
        }
        let state = device.lock();
        for (block, kind) in self.kinds.iter().enumerate().filter(|(_, kind)| kind.is_some()) {
            assert_eq!(Some(state.kinds[block]), *kind, "block {block}");
            if *kind == Some(ExtentKind::Data) {
                let bytes = block * BLOCK as usize..(block + 1) * BLOCK as usize;
                assert!(self.data[bytes.clone()] == state.data[bytes], "block {block}");
            }
        }
    }
}
