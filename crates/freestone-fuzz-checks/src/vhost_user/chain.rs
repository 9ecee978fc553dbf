//! Reference parser of a descriptor chain in constant memory.

use std::ops::Range;

use super::wire::{GUEST, NEXT, TABLE, WRITE};

/// Maximum number of descriptors of a chain, including the descriptors of indirect tables.
const MOST: usize = 1024;

/// A buffer of a request: guest address and length in bytes. The buffer can be outside of the guest memory.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    pub addr: u64,
    pub len: u64,
}

#[derive(Debug)]
pub struct ParsedRequest {
    pub head: u16,
    pub kind: u32,
    pub sector: u64,
    /// Readable buffers with the data after the 16-byte request header.
    pub readable: Vec<Piece>,
    /// Writable buffers before the status byte.
    pub writable: Vec<Piece>,
    /// Offset of the status byte in the guest memory; None if it is outside of the memory.
    pub status: Option<usize>,
    /// Ranges of the guest memory that are read for the request.
    pub reads: Vec<Range<usize>>,
    /// Ranges of the guest memory that may be written for the request.
    pub writes: Vec<Range<usize>>,
}

/// Returns the total length of all pieces in bytes.
pub fn total(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|piece| piece.len).sum()
}

/// Returns the offset of a guest address in the memory, or None if the address is outside of the memory.
pub fn at(memory: &[u8], addr: u64) -> Option<usize> {
    let at = usize::try_from(addr.checked_sub(GUEST)?).ok()?;
    (at < memory.len()).then_some(at)
}

/// Returns the part of a buffer that is in the memory, or None if the buffer starts outside of the memory.
fn range(memory: &[u8], piece: &Piece) -> Option<Range<usize>> {
    let from = at(memory, piece.addr)?;
    Some(from..memory.len().min(from.saturating_add(piece.len as usize)))
}

/// Returns the memory offsets of the first `most` bytes of the pieces, or None if some of them are outside of
/// the memory.
pub fn places(memory: &[u8], pieces: &[Piece], most: usize) -> Option<Vec<usize>> {
    let mut places = Vec::new();
    for piece in pieces {
        for byte in 0..piece.len {
            if places.len() == most {
                return Some(places);
            }
            places.push(at(memory, piece.addr.checked_add(byte)?)?);
        }
    }
    Some(places)
}

/// Returns the content of the first `most` bytes of the pieces, or None if some of them are outside of the
/// memory.
pub fn bytes(memory: &[u8], pieces: &[Piece], most: usize) -> Option<Vec<u8>> {
    Some(places(memory, pieces, most)?.into_iter().map(|at| memory[at]).collect())
}

/// Returns the pieces without the first `front` and the last `back` bytes.
fn inner(pieces: &[Piece], front: u64, back: u64) -> Vec<Piece> {
    let end = total(pieces) - back;
    let (mut from, mut rest) = (0, Vec::new());
    for piece in pieces {
        let (first, last) = (front.max(from), end.min(from + piece.len));
        if first < last {
            rest.push(Piece { addr: piece.addr.wrapping_add(first - from), len: last - first });
        }
        from += piece.len;
    }
    rest
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("there are as many")
}

/// Parses the chain at `head` of a ring of `size` descriptors at the beginning of the memory. An error means
/// that the chain is invalid, so the queue stops. The error has the memory ranges that were read until then.
pub fn read(memory: &[u8], size: u16, indirect: bool, head: u16) -> Result<ParsedRequest, Vec<Range<usize>>> {
    let mut reads = Vec::new();
    match walk(memory, size, indirect, head, &mut reads) {
        Some(parsed) => Ok(ParsedRequest { reads, ..parsed }),
        None => Err(reads),
    }
}

fn walk(
    memory: &[u8],
    size: u16,
    indirect: bool,
    head: u16,
    reads: &mut Vec<Range<usize>>,
) -> Option<ParsedRequest> {
    let (mut readable, mut writable): (Vec<Piece>, Vec<Piece>) = (Vec::new(), Vec::new());
    let (mut table, mut count, mut index) = (GUEST, usize::from(size), usize::from(head));
    let mut is_table = false;
    for seen in 0.. {
        if index >= count || seen == MOST {
            return None;
        }
        let entry = Piece { addr: table.checked_add(index as u64 * 16)?, len: 16 };
        let raw = bytes(memory, &[entry], 16)?;
        reads.extend(range(memory, &entry));
        let (addr, len) = (u64::from_le_bytes(number(&raw, 0)), u32::from_le_bytes(number(&raw, 8)));
        let (flags, next) = (u16::from_le_bytes(number(&raw, 12)), u16::from_le_bytes(number(&raw, 14)));
        if flags & TABLE != 0 {
            let entries = len as usize / 16;
            if !indirect || is_table || flags & NEXT != 0 || len % 16 != 0 || entries == 0 || entries > MOST {
                return None;
            }
            (table, count, index, is_table) = (addr, entries, 0, true);
            continue;
        }
        let piece = Piece { addr, len: len.into() };
        if flags & WRITE == 0 {
            if !writable.is_empty() {
                return None;
            }
            readable.push(piece);
        } else if len > 0 {
            writable.push(piece);
        }
        if flags & NEXT == 0 {
            break;
        }
        index = next.into();
    }
    reads.extend(readable.iter().filter_map(|piece| range(memory, piece)));
    if total(&readable) < 16 || total(&writable) == 0 {
        return None;
    }
    let header = bytes(memory, &readable, 16)?;
    let kind = u32::from_le_bytes(number(&header, 0));
    let last = writable.last()?;
    let status = at(memory, last.addr.wrapping_add(last.len - 1));
    let mut writes: Vec<_> = writable.iter().filter_map(|piece| range(memory, piece)).collect();
    writes.extend(status.map(|at| at..at + 1));
    Some(ParsedRequest {
        head,
        kind,
        sector: u64::from_le_bytes(number(&header, 8)),
        readable: inner(&readable, 16, 0),
        writable: inner(&writable, 0, 1),
        status,
        reads: Vec::new(),
        writes,
    })
}
