//! Everything that a client says before it is in transmission.
//!
//! The input is one byte of choices, and then what the client says, as it is. A plain reading of it
//! says what the server must answer to each option:
//! * Every reply is well formed and belongs to the option at hand; exactly one is the last of its
//!   option, with the type that the plain reading gives.
//! * What is told of an export is true, each context with its identifier.
//! * The handshake goes as far as the plain reading does, and the connection ends.

use std::sync::Arc;

use freestone::device::Device;
use freestone_nbd::{ExportOptions, MAX_OPTION_BYTES, MAX_SKIPPED_OPTION_BYTES, MAX_STRING_BYTES};

use super::Nbd;
use super::client::talk_alone;
use super::device::{Manner, Memory, Shape};
use super::replies::Heard;
use super::requests::{DISC, Headers, header};

const MAGIC: &[u8] = b"IHAVEOPT";
const EXPORT_NAME: u32 = 1;
const ABORT: u32 = 2;
const LIST: u32 = 3;
const STARTTLS: u32 = 5;
/// More in that option is no client's.
const STARTTLS_BYTES_MAX: usize = 64 << 10;
const INFO: u32 = 6;
const GO: u32 = 7;
const STRUCTURED_REPLY: u32 = 8;
const LIST_META_CONTEXT: u32 = 9;
const SET_META_CONTEXT: u32 = 10;
const EXTENDED_HEADERS: u32 = 11;

const ACK: u32 = 1;
const SERVER: u32 = 2;
const FACT: u32 = 3;
const META_CONTEXT: u32 = 4;
const ERR_UNSUP: u32 = (1 << 31) + 1;
const ERR_POLICY: u32 = (1 << 31) + 2;
const ERR_INVALID: u32 = (1 << 31) + 3;
const ERR_UNKNOWN: u32 = (1 << 31) + 6;
const ERR_TOO_BIG: u32 = (1 << 31) + 9;
const ERR_EXT_HEADER_REQD: u32 = (1 << 31) + 10;

const ALLOCATION: &[u8] = b"base:allocation";
const CHANGED: &[u8] = b"freestone:changed";

/// What is published: name, size, read-only, default.
const EXPORTS: [(&str, u64, bool, bool); 3] = [
    ("disk", 9 * 512, false, true),
    ("read-only \u{fc}", 64 << 10, true, false),
    ("a", 1 << 20, false, false),
];
const DESCRIPTION: &str = "for people";

/// A client's option as the plain reading finds it.
#[derive(Debug)]
struct Asked<'a> {
    kind: u32,
    data: &'a [u8],
    /// The type of its last reply, and what comes before that.
    last: u32,
    told: Vec<(u32, Vec<u8>)>,
}

/// How the plain reading ends.
#[derive(Debug, PartialEq)]
enum End {
    /// What follows is not read, or not there.
    Left,
    /// In transmission, after so many bytes, of this export; with a reply to `EXPORT_NAME`.
    Chosen { at: usize, export: usize, by_name: bool },
}

impl Nbd {
    /// Checks one input; true: the client got to an export.
    ///
    /// # Panics
    /// Something does not hold.
    pub fn handshake(&self, input: &[u8]) -> bool {
        let Some((&choices, said)) = input.split_first() else { return false };
        for (name, size, read_only, default) in EXPORTS {
            let device = Arc::new(Memory::new(Shape { size, ..SHAPE })) as Arc<dyn Device>;
            let description = if default { DESCRIPTION.to_owned() } else { String::new() };
            let options = ExportOptions { read_only, default, description, ..ExportOptions::default() };
            self.server.publish(&self.address, name, device, options).expect("nothing else is published");
        }
        let mut said = said.to_vec();
        // Of a very long option only the beginning is in the input.
        if choices & 1 != 0 {
            said.resize(said.len() + (MAX_OPTION_BYTES + 4096), choices);
        }
        let plain = Plain::new(&said);
        let (options, end, no_zeroes, headers) = (plain.options, plain.end, plain.no_zeroes, plain.headers);
        let mut bytes = said.clone();
        if let End::Chosen { at, .. } = end {
            bytes.truncate(at);
            bytes.extend(header(headers, 0, DISC, 0, 0, 0));
        }
        let most = 300 + options.iter().map(|option| 300 + option.data.len()).sum::<usize>();
        let serve = |socket| self.server.serve_here(&self.address, socket);
        let heard = talk_alone(&bytes, (most, options.len() + 2), serve).unwrap_or_else(|| {
            panic!("a socket takes {} and {most} bytes", bytes.len());
        });
        for (name, ..) in EXPORTS {
            self.server.unpublish(name, false).expect("it is published, and nobody uses it");
        }
        self.assert_sound();

        let mut heard = Heard(&heard);
        assert_eq!(heard.bytes(18), b"NBDMAGICIHAVEOPT\0\x03");
        for option in &options {
            judge(option, &mut heard);
        }
        if let End::Chosen { export, by_name: true, .. } = end {
            assert_eq!(heard.u64(), EXPORTS[export].1);
            assert_eq!(heard.u16(), flags(export, headers, false));
            if !no_zeroes {
                assert_eq!(heard.bytes(124), [0; 124]);
            }
        }
        assert!(heard.0.is_empty(), "{} bytes more", heard.0.len());
        end != End::Left
    }
}

const SHAPE: Shape =
    Shape { size: 512, manner: Manner::Inline, zoned: false, bad: None, seed: 0, forgets: false, flushes: 0 };

/// What clients are told that they may do with an export.
fn flags(export: usize, headers: Headers, has_contexts: bool) -> u16 {
    // Flags, flush, FUA, multi-conn, cache; then what only a writable export has: trim, zeroes,
    // fast zeroes.
    let common = 1 | 1 << 2 | 1 << 3 | 1 << 8 | 1 << 10;
    let writes = if EXPORTS[export].2 { 1 << 1 } else { 1 << 5 | 1 << 6 | 1 << 11 };
    let chunks = match headers {
        Headers::Simple => 0,
        Headers::Extended if has_contexts => 1 << 7 | 1 << 12,
        Headers::Structured | Headers::Extended => 1 << 7,
    };
    common | writes | chunks
}

fn judge(option: &Asked<'_>, heard: &mut Heard<'_>) {
    let mut told = option.told.iter();
    loop {
        assert_eq!(heard.u64(), 0x0003_e889_0455_65a9);
        assert_eq!(heard.u32(), option.kind);
        let (kind, len) = (heard.u32(), heard.u32());
        let data = heard.bytes(len as usize);
        if kind == ACK || kind >> 31 == 1 {
            assert_eq!(kind, option.last, "{option:?}");
            assert!(told.next().is_none(), "{option:?} is told less");
            assert!(kind == ACK || !data.is_empty() && std::str::from_utf8(data).is_ok());
            assert!(kind != ACK || data.is_empty());
            return;
        }
        let wanted = told.next().unwrap_or_else(|| panic!("{option:?} is told {kind} {data:?}"));
        assert_eq!((kind, data), (wanted.0, &wanted.1[..]), "{option:?}");
    }
}

/// The plain reading.
struct Plain<'a> {
    options: Vec<Asked<'a>>,
    end: End,
    no_zeroes: bool,
    headers: Headers,
    /// The export for which at least one context was selected.
    selected: Option<&'a [u8]>,
}

/// Numbers and strings from the front; `None`: there is no such thing.
struct Said<'a>(&'a [u8]);

impl<'a> Said<'a> {
    fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(bytes)
    }

    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(self.bytes(2)?.try_into().ok()?))
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_be_bytes(self.bytes(4)?.try_into().ok()?))
    }

    fn string(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()? as usize;
        let bytes = self.bytes(len)?;
        (len <= MAX_STRING_BYTES && std::str::from_utf8(bytes).is_ok()).then_some(bytes)
    }
}

impl<'a> Plain<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        let mut plain = Self {
            options: Vec::new(),
            end: End::Left,
            no_zeroes: false,
            headers: Headers::Simple,
            selected: None,
        };
        // `None` is the end of what was said, or of what may be said.
        let _ = plain.read(bytes);
        plain
    }

    fn read(&mut self, bytes: &'a [u8]) -> Option<()> {
        let mut said = Said(bytes);
        let flags = said.u32().filter(|flags| *flags < 4)?;
        self.no_zeroes = flags & 2 != 0;
        loop {
            if said.bytes(8)? != MAGIC {
                return None;
            }
            let (kind, len) = (said.u32()?, said.u32()? as usize);
            if kind == EXPORT_NAME {
                if self.headers == Headers::Extended {
                    return None;
                }
                let name = said.bytes(len).filter(|_| len <= MAX_STRING_BYTES)?;
                let export = find(name)?;
                self.end = End::Chosen { at: bytes.len() - said.0.len(), export, by_name: true };
                return Some(());
            }
            // The server has no TLS.
            if kind == STARTTLS {
                said.bytes(len).filter(|_| len <= STARTTLS_BYTES_MAX)?;
                let last = if len > 0 { ERR_INVALID } else { ERR_POLICY };
                self.options.push(Asked { kind, data: &[], last, told: Vec::new() });
                continue;
            }
            if len > MAX_OPTION_BYTES {
                if len > MAX_SKIPPED_OPTION_BYTES {
                    return None;
                }
                said.bytes(len)?;
                self.options.push(Asked { kind, data: &[], last: ERR_TOO_BIG, told: Vec::new() });
                continue;
            }
            let data = said.bytes(len)?;
            let mut told = Vec::new();
            let (last, chosen) = self.answer(kind, data, &mut told);
            self.options.push(Asked { kind, data, last, told });
            if kind == ABORT {
                return None;
            }
            if let Some(export) = chosen {
                self.end = End::Chosen { at: bytes.len() - said.0.len(), export, by_name: false };
                return Some(());
            }
        }
    }

    /// The type of an option's last reply, and the export that it chose.
    fn answer(&mut self, kind: u32, data: &'a [u8], told: &mut Vec<(u32, Vec<u8>)>) -> (u32, Option<usize>) {
        match kind {
            ABORT => (ACK, None),
            LIST | STRUCTURED_REPLY | EXTENDED_HEADERS if !data.is_empty() => (ERR_INVALID, None),
            STRUCTURED_REPLY if self.headers == Headers::Extended => (ERR_EXT_HEADER_REQD, None),
            STRUCTURED_REPLY => {
                self.headers = Headers::Structured;
                (ACK, None)
            }
            EXTENDED_HEADERS => {
                self.headers = Headers::Extended;
                (ACK, None)
            }
            LIST => {
                for (name, .., default) in EXPORTS {
                    let mut fact = (name.len() as u32).to_be_bytes().to_vec();
                    fact.extend(name.as_bytes());
                    fact.extend(if default { DESCRIPTION.as_bytes() } else { b"" });
                    told.push((SERVER, fact));
                }
                (ACK, None)
            }
            INFO | GO => {
                let Some((name, wanted)) = info(data) else { return (ERR_INVALID, None) };
                let Some(export) = find(name) else { return (ERR_UNKNOWN, None) };
                self.facts(export, name, &wanted, told);
                (ACK, (kind == GO).then_some(export))
            }
            LIST_META_CONTEXT | SET_META_CONTEXT => {
                let list = kind == LIST_META_CONTEXT;
                if !list {
                    self.selected = None;
                }
                let contexts = contexts(data).filter(|_| self.headers != Headers::Simple);
                let Some((name, queries)) = contexts else { return (ERR_INVALID, None) };
                if find(name).is_none() {
                    return (ERR_UNKNOWN, None);
                }
                for (context, namespace, id) in
                    [(ALLOCATION, b"base:".as_slice(), 1_u32), (CHANGED, b"freestone:", 2)]
                {
                    let asked = |query: &&[u8]| *query == context || (list && *query == namespace);
                    if queries.iter().any(asked) || (list && queries.is_empty()) {
                        let id = if list { 0 } else { id };
                        told.push((META_CONTEXT, [&id.to_be_bytes(), context].concat()));
                    }
                }
                if !list && !told.is_empty() {
                    self.selected = Some(name);
                }
                (ACK, None)
            }
            _ => (ERR_UNSUP, None),
        }
    }

    fn facts(&self, export: usize, named: &[u8], wanted: &[u16], told: &mut Vec<(u32, Vec<u8>)>) {
        let (name, size, _, default) = EXPORTS[export];
        let flags = flags(export, self.headers, self.selected == Some(named));
        told.push((FACT, [&[0, 0], &size.to_be_bytes()[..], &flags.to_be_bytes()].concat()));
        let sizes = [1_u32, 4096, 64 << 20].map(u32::to_be_bytes).concat();
        told.push((FACT, [&[0, 3], &sizes[..]].concat()));
        if wanted.contains(&1) {
            told.push((FACT, [&[0, 1], name.as_bytes()].concat()));
        }
        if wanted.contains(&2) && default {
            told.push((FACT, [&[0, 2], DESCRIPTION.as_bytes()].concat()));
        }
    }
}

fn find(name: &[u8]) -> Option<usize> {
    EXPORTS
        .iter()
        .position(|(export, .., default)| export.as_bytes() == name || (*default && name.is_empty()))
}

fn info(data: &[u8]) -> Option<(&[u8], Vec<u16>)> {
    let mut said = Said(data);
    let name = said.string()?;
    let wanted = (0..said.u16()?).map(|_| said.u16()).collect::<Option<_>>()?;
    said.0.is_empty().then_some((name, wanted))
}

fn contexts(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let mut said = Said(data);
    let name = said.string()?;
    let queries = (0..said.u32()?).map(|_| said.string()).collect::<Option<_>>()?;
    said.0.is_empty().then_some((name, queries))
}
