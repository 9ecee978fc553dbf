//! Conversion of an image's allocated ranges to extents.

use std::ops::Range;

use freestone_core::device::{Extent, ExtentKind};

/// Maximum number of RADOS objects per query. librbd queries each object separately, so this bounds
/// the time of a query.
const MAX_OBJECTS: u64 = 256;

/// Returns the byte range to query for `range` of an image of `image_size` bytes. The result covers
/// whole RADOS objects of `object_size` bytes, at most [`MAX_OBJECTS`], and ends at the end of the
/// image.
pub fn query_range(range: &Range<u64>, object_size: u64, image_size: u64) -> Range<u64> {
    let object = object_size.max(1);
    let start = range.start - range.start % object;
    let end = range.end.min(start.saturating_add(object.saturating_mul(MAX_OBJECTS)));
    start..end.next_multiple_of(object).min(image_size).max(start)
}

/// Passes `range` to `row` as extents of whole blocks, in order and without gaps: data where
/// `allocated` overlaps the block, holes elsewhere. Stops if `row` returns false. Returns the
/// number of bytes passed.
pub fn rows(
    mut allocated: Vec<Range<u64>>,
    range: Range<u64>,
    block: u64,
    row: &mut dyn FnMut(Extent) -> bool,
) -> u64 {
    allocated.sort_unstable_by_key(|part| part.start);
    let mut at = range.start;
    let mut emit = |at: &mut u64, end: u64, kind| {
        let extent = Extent { offset: *at, len: end - *at, kind };
        *at = end;
        row(extent)
    };
    for part in allocated {
        let start = (part.start - part.start % block).clamp(at, range.end);
        let end = part.end.next_multiple_of(block).clamp(at, range.end);
        if start > at && !emit(&mut at, start, ExtentKind::Hole) {
            return at - range.start;
        }
        if end > at && !emit(&mut at, end, ExtentKind::Data) {
            return at - range.start;
        }
    }
    if at < range.end {
        emit(&mut at, range.end, ExtentKind::Hole);
    }
    at - range.start
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collect_rows(allocated: &[Range<u64>], range: Range<u64>) -> Vec<(u64, u64, ExtentKind)> {
        let mut all = Vec::new();
        let len = range.end - range.start;
        let described = rows(allocated.to_vec(), range, 512, &mut |extent| {
            all.push((extent.offset, extent.len, extent.kind));
            true
        });
        assert_eq!(described, len);
        all
    }

    #[test]
    fn rows_are_sorted_rounded_and_filled_with_holes() {
        use ExtentKind::{Data, Hole};
        assert_eq!(collect_rows(&[], 512..2048), [(512, 1536, Hole)]);
        assert_eq!(
            collect_rows(&[3000..3001, 0..700, 600..1000], 512..4096),
            [(512, 512, Data), (1024, 1536, Hole), (2560, 512, Data), (3072, 1024, Hole)]
        );
        assert_eq!(collect_rows(&[0..600, 600..1 << 40], 512..1024), [(512, 512, Data)]);
    }

    #[test]
    fn rows_stop_when_callback_returns_false() {
        let mut rows_seen = 0;
        let described = rows(vec![512..1024, 2048..4096], 0..8192, 512, &mut |_| {
            rows_seen += 1;
            rows_seen < 2
        });
        assert_eq!((rows_seen, described), (2, 1024));
    }

    #[test]
    fn query_covers_limited_number_of_whole_objects() {
        assert_eq!(query_range(&(5000..6000), 4096, 1 << 20), 4096..8192);
        assert_eq!(query_range(&(5000..1 << 40), 4096, 1 << 40), 4096..4096 + 256 * 4096);
        assert_eq!(query_range(&(512..1024), 4096, 1000), 0..1000);
        assert_eq!(query_range(&(8192..9216), 4096, 1000), 8192..8192);
    }
}
