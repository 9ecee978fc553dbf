//! Splits a byte range into whole blocks and partial blocks.

/// A run of whole blocks, or a part of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Offset of the first byte on the device.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// True for a run of whole blocks, false for a part of one block.
    pub whole: bool,
}

/// Returns the pieces of a byte range in order: at most one partial block, a run of whole blocks, and another
/// partial block.
pub fn pieces(offset: u64, len: u64, block: u64) -> impl Iterator<Item = Piece> {
    let end = offset + len;
    let mut at = offset;
    std::iter::from_fn(move || {
        let (left, in_block) = (end - at, at % block);
        let whole = in_block == 0 && left >= block;
        let len = if whole { left - left % block } else { left.min(block - in_block) };
        let piece = Piece { offset: at, len, whole };
        at += len;
        (len > 0).then_some(piece)
    })
}

/// Returns the start and the exclusive end, in bytes, of the blocks that a range touches.
pub fn cover(offset: u64, len: u64, block: u64) -> (u64, u64) {
    (offset - offset % block, (offset + len).next_multiple_of(block))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_is_split_at_blocks() {
        let cut = |offset, len| {
            let all: Vec<_> = pieces(offset, len, 512).map(|p| (p.offset, p.len, p.whole)).collect();
            assert_eq!(all.iter().map(|piece| piece.1).sum::<u64>(), len);
            all
        };
        assert_eq!(cut(0, 1024), [(0, 1024, true)]);
        assert_eq!(cut(1, 10), [(1, 10, false)]);
        assert_eq!(cut(511, 2), [(511, 1, false), (512, 1, false)]);
        assert_eq!(cut(100, 1500), [(100, 412, false), (512, 1024, true), (1536, 64, false)]);
        assert_eq!(cut(512, 513), [(512, 512, true), (1024, 1, false)]);
        assert_eq!(cut(3, 509), [(3, 509, false)]);
        assert_eq!((cover(511, 2, 512), cover(512, 512, 512)), ((0, 1024), (512, 1024)));
    }
}
