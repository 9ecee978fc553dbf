//! Block status replies, and their conversion to extents.

use freestone_core::device::{Extent, ExtentKind};
use freestone_nbd_proto::StateFlags;

use crate::requests::job::Status;

/// Largest range of a block status query in bytes.
pub const MAX_QUERY_BYTES: u64 = 128 << 20;
/// Size of a descriptor in bytes: length and flags.
pub const DESCRIPTOR_BYTES: usize = 8;
/// Maximum number of descriptors in a reply: one for each 512-byte block of the largest query.
pub const MAX_DESCRIPTORS: usize = (MAX_QUERY_BYTES / 512) as usize;

/// Parses a block status chunk.
pub fn parse(bytes: &[u8], context: Option<u32>, query_len: u32) -> Result<Vec<Status>, &'static str> {
    const LENGTH: &str = "block status has the wrong length";
    let (id, rest) = bytes.split_first_chunk::<4>().ok_or(LENGTH)?;
    if Some(u32::from_be_bytes(*id)) != context {
        return Err("block status of a context that was not negotiated");
    }
    if rest.is_empty() || !rest.len().is_multiple_of(DESCRIPTOR_BYTES) {
        return Err(LENGTH);
    }
    let mut described_bytes = 0_u64;
    let mut all = Vec::with_capacity(rest.len() / DESCRIPTOR_BYTES);
    for descriptor in rest.chunks_exact(DESCRIPTOR_BYTES) {
        let (Some(len), Some(flags)) = (descriptor.first_chunk::<4>(), descriptor.last_chunk::<4>()) else {
            return Err(LENGTH);
        };
        let len = u32::from_be_bytes(*len);
        if len == 0 {
            return Err("block status of length 0");
        }
        // Only the last descriptor may extend beyond the range.
        if described_bytes >= u64::from(query_len) {
            return Err("block status beyond the requested range");
        }
        described_bytes += u64::from(len);
        all.push((len, u32::from_be_bytes(*flags)));
    }
    Ok(all)
}

fn kind(flags: u32) -> ExtentKind {
    let flags = StateFlags::from_bits_truncate(flags);
    match (flags.contains(StateFlags::ZERO), flags.contains(StateFlags::HOLE)) {
        (true, true) => ExtentKind::Hole,
        (true, false) => ExtentKind::Zero,
        // A hole without the zero flag has undefined content.
        (false, _) => ExtentKind::Data,
    }
}

/// Converts the descriptors of a query of `query_len` bytes at `offset` to rows of whole blocks. A
/// block with several kinds is data if any of them is, and so is a block that the descriptors cover
/// only partly. Returns the number of bytes described, at least one block.
pub fn rows(
    all: &[Status],
    offset: u64,
    query_len: u64,
    block: u64,
    row: &mut dyn FnMut(Extent) -> bool,
) -> u64 {
    let merged = |one: ExtentKind, other: ExtentKind| match (one, other) {
        (ExtentKind::Hole, ExtentKind::Hole) => ExtentKind::Hole,
        (ExtentKind::Data, _) | (_, ExtentKind::Data) => ExtentKind::Data,
        _ => ExtentKind::Zero,
    };
    // If the query is not a multiple of the block, the export ends within its last block.
    let len = query_len.next_multiple_of(block);
    let mut described = 0;
    let mut emit = |from: u64, to: u64, kind: ExtentKind| {
        described = to;
        row(Extent { offset: offset + from, len: to - from, kind })
    };
    // Blocks before `done` have rows; `open` is the kind of the partial block that contains `at`.
    let (mut done, mut at) = (0_u64, 0_u64);
    let mut open: Option<ExtentKind> = None;
    for (length, flags) in all {
        let now = kind(*flags);
        let end = (at + u64::from(*length)).min(len);
        if let Some(before) = open {
            let both = merged(before, now);
            let edge = (done + block).min(len);
            if end < edge {
                (open, at) = (Some(both), end);
                continue;
            }
            if !emit(done, edge, both) {
                return described;
            }
            done = edge;
            open = None;
        }
        let whole = end - end % block;
        if whole > done {
            if !emit(done, whole, now) {
                return described;
            }
            done = whole;
        }
        if end > done {
            open = Some(now);
        }
        at = end;
        if at >= len {
            break;
        }
    }
    if let Some(kind) = open {
        emit(done, (done + block).min(len), if at < query_len { ExtentKind::Data } else { kind });
    }
    described
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(id: u32, all: &[Status]) -> Vec<u8> {
        let mut bytes = id.to_be_bytes().to_vec();
        for (len, flags) in all {
            bytes.extend(len.to_be_bytes());
            bytes.extend(flags.to_be_bytes());
        }
        bytes
    }

    #[test]
    fn invalid_block_status_is_refused() {
        let of = |all: &[Status]| parse(&bytes(7, all), Some(7), 4096);
        assert_eq!(of(&[(512, 0), (4096, 3)]), Ok(vec![(512, 0), (4096, 3)]));
        assert!(of(&[]).is_err());
        assert!(of(&[(0, 0)]).is_err());
        assert!(of(&[(4096, 0), (1, 0)]).is_err());
        assert!(parse(&bytes(8, &[(1, 0)]), Some(7), 4096).is_err());
        assert!(parse(&bytes(8, &[(1, 0)]), None, 4096).is_err());
        assert!(parse(&[0; 3], Some(0), 1).is_err() && parse(&[0; 11], Some(0), 1).is_err());
    }

    fn of(all: &[Status], len: u64, most: usize) -> (Vec<(u64, u64, ExtentKind)>, u64) {
        let mut found = Vec::new();
        let described = rows(all, 0, len, 512, &mut |row| {
            found.push((row.offset, row.len, row.kind));
            found.len() < most
        });
        (found, described)
    }

    #[test]
    fn block_status_rows_are_whole_blocks() {
        use ExtentKind::{Data, Hole, Zero};
        assert_eq!(of(&[(512, 0), (1024, 3)], 1536, 9), (vec![(0, 512, Data), (512, 1024, Hole)], 1536));
        // The last descriptor extends beyond the range.
        assert_eq!(of(&[(4096, 2)], 1024, 9), (vec![(0, 1024, Zero)], 1024));
        // Kinds that change within a block.
        assert_eq!(
            of(&[(700, 3), (100, 0), (100, 2), (3000, 3)], 2048, 9),
            (vec![(0, 512, Hole), (512, 512, Data), (1024, 1024, Hole)], 2048)
        );
        assert_eq!(of(&[(100, 3), (412, 2)], 512, 9), (vec![(0, 512, Zero)], 512));
        // The descriptors cover less than a block; the rest is unknown.
        assert_eq!(of(&[(100, 3)], 2048, 9), (vec![(0, 512, Data)], 512));
        // The export ends within the block.
        assert_eq!(of(&[(100, 3)], 100, 9), (vec![(0, 512, Hole)], 512));
        assert_eq!(of(&[(600, 0)], 2048, 9), (vec![(0, 512, Data), (512, 512, Data)], 1024));
        assert_eq!(of(&[(512, 0), (512, 3), (512, 0)], 1536, 2).1, 1024);
    }

    /// Rows cover only described bytes, and no data is reported as zeroes.
    #[test]
    fn block_status_never_reports_data_as_zeroes() {
        let mut seed = 1_u64;
        let mut next = |below: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) % below
        };
        for _ in 0..2000 {
            let all: Vec<Status> =
                (0..=next(6)).map(|_| (1 + next(1500) as u32, [0, 2, 3][next(3) as usize])).collect();
            let len = 512 * (1 + next(8));
            let (found, described) = of(&all, len, 99);
            let mut at = 0;
            for (offset, length, kind) in found {
                assert!(offset == at && length > 0 && length % 512 == 0);
                at += length;
                let mut from = 0;
                for (n, flags) in &all {
                    let overlaps = from < offset + length && offset < from + u64::from(*n);
                    assert!(!(overlaps && *flags == 0) || kind == ExtentKind::Data, "{all:?}");
                    from += u64::from(*n);
                }
            }
            assert!(at == described && described > 0 && described <= len);
        }
    }
}
