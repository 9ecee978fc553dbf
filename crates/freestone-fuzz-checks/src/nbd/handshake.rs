//! NBD handshake of a client with arbitrary bytes.
//!
//! The input is one byte of options, then the bytes of the client. A reference parser finds the expected
//! reply to each option of the client. Properties:
//! * Every reply is well formed and belongs to the current option. Each option has exactly one final reply,
//!   of the expected type.
//! * The information about exports and contexts is correct.
//! * The handshake gets as far as the reference parser does, and the connection ends.

use std::sync::Arc;

use freestone::device::Device;
use freestone_nbd::{ExportOptions, MAX_OPTION_BYTES, MAX_SKIPPED_OPTION_BYTES, MAX_STRING_BYTES};
use freestone_testkit::Manner;
use freestone_testkit::nbd::prelude::*;

use super::Nbd;
use super::client::exchange_inline;
use super::device::{DeviceConfig, memory};
use super::replies::ReplyReader;

/// Largest accepted data of STARTTLS, in bytes.
const STARTTLS_BYTES_MAX: usize = 64 << 10;

const ALLOCATION: &[u8] = b"base:allocation";
const CHANGED: &[u8] = b"freestone:changed";

/// Exports of the server: name, size in bytes, true if read-only, true for the default export.
const EXPORTS: [(&str, u64, bool, bool); 3] = [
    ("disk", 9 * 512, false, true),
    ("read-only \u{fc}", 64 << 10, true, false),
    ("a", 1 << 20, false, false),
];
const DESCRIPTION: &str = "for people";

/// An option of a client, with the expected replies.
#[derive(Debug)]
struct ClientOption<'a> {
    kind: u32,
    data: &'a [u8],
    /// Type of the expected final reply.
    last: u32,
    /// Types and data of the expected replies before the final one.
    replies: Vec<(u32, Vec<u8>)>,
}

/// How the reference handshake ends.
#[derive(Debug, PartialEq)]
enum End {
    /// The connection ends without an export.
    Left,
    /// Transmission of the export with index `export` begins after `at` bytes of the client. `by_name` is
    /// true if the client used `EXPORT_NAME`.
    Chosen { at: usize, export: usize, by_name: bool },
}

impl Nbd {
    /// Checks one input. Returns true if the client selected an export.
    ///
    /// # Panics
    /// Panics if a property does not hold.
    pub fn handshake(&self, input: &[u8]) -> bool {
        let Some((&choices, client_bytes)) = input.split_first() else { return false };
        for (name, size, read_only, default) in EXPORTS {
            let device = memory(DeviceConfig { size, ..DEVICE }).device as Arc<dyn Device>;
            let description = if default { DESCRIPTION.to_owned() } else { String::new() };
            let options = ExportOptions { read_only, default, description, ..ExportOptions::default() };
            self.server.publish(&self.address, name, device, options).expect("the names are free");
        }
        let mut client_bytes = client_bytes.to_vec();
        // An input is too short for a very long option, so its data is appended here.
        if choices & 1 != 0 {
            client_bytes.resize(client_bytes.len() + (MAX_OPTION_BYTES + 4096), choices);
        }
        let reference = ReferenceHandshake::new(&client_bytes);
        let (options, end, no_zeroes, headers) =
            (reference.options, reference.end, reference.no_zeroes, reference.headers);
        let mut bytes = client_bytes.clone();
        if let End::Chosen { at, .. } = end {
            bytes.truncate(at);
            bytes.extend(headers.request(0, DISC, 0, 0, 0));
        }
        let most = 300 + options.iter().map(|option| 300 + option.data.len()).sum::<usize>();
        let serve = |socket| self.server.serve_socket(&self.address, socket);
        let received = exchange_inline(&bytes, (most, options.len() + 2), serve).unwrap_or_else(|| {
            panic!("a socket buffer holds {} and {most} bytes", bytes.len());
        });
        for (name, ..) in EXPORTS {
            self.server.unpublish(name, false).expect("it is published and unused");
        }
        self.assert_sound();

        let mut received = ReplyReader(&received);
        assert_eq!(received.bytes(18), b"NBDMAGICIHAVEOPT\0\x03");
        for option in &options {
            check_replies(option, &mut received);
        }
        if let End::Chosen { export, by_name: true, .. } = end {
            assert_eq!(received.u64(), EXPORTS[export].1);
            assert_eq!(received.u16(), flags(export, headers, false));
            if !no_zeroes {
                assert_eq!(received.bytes(124), [0; 124]);
            }
        }
        assert!(received.0.is_empty(), "{} bytes more", received.0.len());
        end != End::Left
    }
}

const DEVICE: DeviceConfig = DeviceConfig {
    size: 512,
    manner: Manner::Inline,
    late: false,
    zoned: false,
    bad: None,
    seed: 0,
    forgets: false,
    flushes: 0,
};

/// Returns the transmission flags that the server must report for an export.
fn flags(export: usize, headers: Headers, has_contexts: bool) -> u16 {
    // All exports: flags, flush, FUA, multi-conn, cache. Read-only exports: read-only. Writable exports:
    // trim, write zeroes, fast zeroes.
    let common = 1 | 1 << 2 | 1 << 3 | 1 << 8 | 1 << 10;
    let writes = if EXPORTS[export].2 { 1 << 1 } else { 1 << 5 | 1 << 6 | 1 << 11 };
    let chunks = match headers {
        Headers::Simple => 0,
        Headers::Extended if has_contexts => 1 << 7 | 1 << 12,
        Headers::Structured | Headers::Extended => 1 << 7,
    };
    common | writes | chunks
}

fn check_replies(option: &ClientOption<'_>, received: &mut ReplyReader<'_>) {
    let mut replies = option.replies.iter();
    loop {
        assert_eq!(received.u64(), OPTION_REPLY_MAGIC);
        assert_eq!(received.u32(), option.kind);
        let (kind, len) = (received.u32(), received.u32());
        let data = received.bytes(len as usize);
        if kind == ACK || kind >> 31 == 1 {
            assert_eq!(kind, option.last, "{option:?}");
            assert!(replies.next().is_none(), "{option:?} has fewer replies than expected");
            assert!(kind == ACK || !data.is_empty() && std::str::from_utf8(data).is_ok());
            assert!(kind != ACK || data.is_empty());
            return;
        }
        let expected =
            replies.next().unwrap_or_else(|| panic!("{option:?} has the unexpected reply {kind} {data:?}"));
        assert_eq!((kind, data), (expected.0, &expected.1[..]), "{option:?}");
    }
}

/// Reference parser of the client's side of the handshake.
struct ReferenceHandshake<'a> {
    options: Vec<ClientOption<'a>>,
    end: End,
    no_zeroes: bool,
    headers: Headers,
    /// Name of the export for which a context was selected.
    selected: Option<&'a [u8]>,
}

/// Reader of numbers and strings. The methods return None if the input is too short or invalid.
struct ByteReader<'a>(&'a [u8]);

impl<'a> ByteReader<'a> {
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

impl<'a> ReferenceHandshake<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        let mut reference = Self {
            options: Vec::new(),
            end: End::Left,
            no_zeroes: false,
            headers: Headers::Simple,
            selected: None,
        };
        // The parser returns None at the end of the input or at the first invalid byte.
        let _ = reference.read(bytes);
        reference
    }

    fn read(&mut self, bytes: &'a [u8]) -> Option<()> {
        let mut reader = ByteReader(bytes);
        let flags = reader.u32().filter(|flags| *flags < 4)?;
        self.no_zeroes = flags & 2 != 0;
        loop {
            if reader.bytes(8)? != OPTION_MAGIC {
                return None;
            }
            let (kind, len) = (reader.u32()?, reader.u32()? as usize);
            if kind == EXPORT_NAME {
                if self.headers == Headers::Extended {
                    return None;
                }
                let name = reader.bytes(len).filter(|_| len <= MAX_STRING_BYTES)?;
                let export = find(name)?;
                self.end = End::Chosen { at: bytes.len() - reader.0.len(), export, by_name: true };
                return Some(());
            }
            // The server does not support TLS, so it refuses the option.
            if kind == STARTTLS {
                reader.bytes(len).filter(|_| len <= STARTTLS_BYTES_MAX)?;
                let last = if len > 0 { ERR_INVALID } else { ERR_POLICY };
                self.options.push(ClientOption { kind, data: &[], last, replies: Vec::new() });
                continue;
            }
            if len > MAX_OPTION_BYTES {
                if len > MAX_SKIPPED_OPTION_BYTES {
                    return None;
                }
                reader.bytes(len)?;
                self.options.push(ClientOption { kind, data: &[], last: ERR_TOO_BIG, replies: Vec::new() });
                continue;
            }
            let data = reader.bytes(len)?;
            let mut replies = Vec::new();
            let (last, chosen) = self.answer(kind, data, &mut replies);
            self.options.push(ClientOption { kind, data, last, replies });
            if kind == ABORT {
                return None;
            }
            if let Some(export) = chosen {
                self.end = End::Chosen { at: bytes.len() - reader.0.len(), export, by_name: false };
                return Some(());
            }
        }
    }

    /// Returns the type of an option's final reply, and the index of the export that the option selected.
    /// Adds the earlier replies to `replies`.
    fn answer(
        &mut self,
        kind: u32,
        data: &'a [u8],
        replies: &mut Vec<(u32, Vec<u8>)>,
    ) -> (u32, Option<usize>) {
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
                    replies.push((SERVER, fact));
                }
                (ACK, None)
            }
            OPT_INFO | GO => {
                let Some((name, requested)) = info(data) else { return (ERR_INVALID, None) };
                let Some(export) = find(name) else { return (ERR_UNKNOWN, None) };
                self.facts(export, name, &requested, replies);
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
                        replies.push((META_CONTEXT, [&id.to_be_bytes(), context].concat()));
                    }
                }
                if !list && !replies.is_empty() {
                    self.selected = Some(name);
                }
                (ACK, None)
            }
            _ => (ERR_UNSUP, None),
        }
    }

    fn facts(&self, export: usize, named: &[u8], requested: &[u16], replies: &mut Vec<(u32, Vec<u8>)>) {
        let (name, size, _, default) = EXPORTS[export];
        let flags = flags(export, self.headers, self.selected == Some(named));
        replies.push((INFO, [&[0, 0], &size.to_be_bytes()[..], &flags.to_be_bytes()].concat()));
        let sizes = [1_u32, 4096, 64 << 20].map(u32::to_be_bytes).concat();
        replies.push((INFO, [&[0, 3], &sizes[..]].concat()));
        if requested.contains(&1) {
            replies.push((INFO, [&[0, 1], name.as_bytes()].concat()));
        }
        if requested.contains(&2) && default {
            replies.push((INFO, [&[0, 2], DESCRIPTION.as_bytes()].concat()));
        }
    }
}

fn find(name: &[u8]) -> Option<usize> {
    EXPORTS
        .iter()
        .position(|(export, .., default)| export.as_bytes() == name || (*default && name.is_empty()))
}

fn info(data: &[u8]) -> Option<(&[u8], Vec<u16>)> {
    let mut reader = ByteReader(data);
    let name = reader.string()?;
    let requested = (0..reader.u16()?).map(|_| reader.u16()).collect::<Option<_>>()?;
    reader.0.is_empty().then_some((name, requested))
}

fn contexts(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let mut reader = ByteReader(data);
    let name = reader.string()?;
    let queries = (0..reader.u32()?).map(|_| reader.string()).collect::<Option<_>>()?;
    reader.0.is_empty().then_some((name, queries))
}
