//! What of an image is allocated, as a device says it.

use std::ops::Range;

use freestone_core::device::{Extent, ExtentKind};

/// Most objects that are looked at for one question: each is asked for by itself.
const MAX_OBJECTS: u64 = 256;

/// What is asked of the library to answer `range` of an image with `image_size` bytes and objects of
/// `object_size`: whole objects, not too many.
pub fn asked(range: &Range<u64>, object_size: u64, image_size: u64) -> Range<u64> {
    let object = object_size.max(1);
    let start = range.start - range.start % object;
    let end = range.end.min(start.saturating_add(object.saturating_mul(MAX_OBJECTS)));
    start..end.next_multiple_of(object).min(image_size).max(start)
}

/// Tells what is allocated of `range`, in whole blocks, in order and without gaps; all else is holes.
/// Answers how many bytes were described.
pub fn rows(
    mut allocated: Vec<Range<u64>>,
    range: Range<u64>,
    block: u64,
    row: &mut dyn FnMut(Extent) -> bool,
) -> u64 {
    allocated.sort_unstable_by_key(|part| part.start);
    let mut at = range.start;
    let mut tell = |at: &mut u64, end: u64, kind| {
        let extent = Extent { offset: *at, len: end - *at, kind };
        *at = end;
        row(extent)
    };
    for part in allocated {
        let start = (part.start - part.start % block).clamp(at, range.end);
        let end = part.end.next_multiple_of(block).clamp(at, range.end);
        if start > at && !tell(&mut at, start, ExtentKind::Hole) {
            return at - range.start;
        }
        if end > at && !tell(&mut at, end, ExtentKind::Data) {
            return at - range.start;
        }
    }
    if at < range.end {
        tell(&mut at, range.end, ExtentKind::Hole);
    }
    at - range.start
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(allocated: &[Range<u64>], range: Range<u64>) -> Vec<(u64, u64, ExtentKind)> {
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
    fn parts_are_sorted_rounded_and_joined_by_holes() {
        use ExtentKind::{Data, Hole};
        assert_eq!(told(&[], 512..2048), [(512, 1536, Hole)]);
        assert_eq!(
            told(&[3000..3001, 0..700, 600..1000], 512..4096),
            [(512, 512, Data), (1024, 1536, Hole), (2560, 512, Data), (3072, 1024, Hole)]
        );
        assert_eq!(told(&[0..600, 600..1 << 40], 512..1024), [(512, 512, Data)]);
    }

    #[test]
    fn who_has_enough_is_told_no_more() {
        let mut rows_seen = 0;
        let described = rows(vec![512..1024, 2048..4096], 0..8192, 512, &mut |_| {
            rows_seen += 1;
            rows_seen < 2
        });
        assert_eq!((rows_seen, described), (2, 1024));
    }

    #[test]
    fn whole_objects_are_asked_for_and_not_too_many() {
        assert_eq!(asked(&(5000..6000), 4096, 1 << 20), 4096..8192);
        assert_eq!(asked(&(5000..1 << 40), 4096, 1 << 40), 4096..4096 + 256 * 4096);
        assert_eq!(asked(&(512..1024), 4096, 1000), 0..1000);
        assert_eq!(asked(&(8192..9216), 4096, 1000), 8192..8192);
    }
}
