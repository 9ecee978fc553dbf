//! Size classes: object sizes are rounded up to a multiple of 16 bytes. Each class uses the span
//! length that wastes the least memory.
//!
//! Spans have up to 32 pages (8 by default in zsmalloc), so less memory is lost at the ends of
//! spans. The largest class that saves memory is therefore 3968 bytes: 32 objects in 31 pages.

/// Alignment of objects, and size difference of neighbouring classes, in bytes.
pub const CLASS_STEP_BYTES: usize = 16;
/// Number of size classes: 16, 32, ... 4096 bytes.
pub const CLASSES: usize = freestone_core::PAGE_BYTES / CLASS_STEP_BYTES;
/// Address space of a span in bytes. A class uses only the first [`Class::pages`] pages.
pub const SPAN_BYTES: u64 = 128 << 10;
/// Number of pages in the address space of a span.
pub const SPAN_PAGES: usize = SPAN_BYTES as usize / freestone_core::PAGE_BYTES;
/// Maximum number of objects in a span, which is the number of bits in its bitmap.
pub const SPAN_OBJECTS: usize = 256;

/// Span layout of a size class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Class {
    /// Size of each object in bytes.
    pub bytes: u32,
    pub pages: u32,
    pub objects: u32,
    /// Reciprocal of the object size, for dividing an offset in 16-byte units without a division;
    /// see [`Class::index_at`].
    reciprocal: u32,
}

const RECIPROCAL_SHIFT: u32 = 24;

impl Class {
    const fn new(index: usize) -> Self {
        let bytes = (index + 1) * CLASS_STEP_BYTES;
        let mut best = 0;
        let mut best_objects = 0;
        let mut pages = 1;
        while pages <= SPAN_PAGES {
            let objects = pages * freestone_core::PAGE_BYTES / bytes;
            // Compare used bytes per page by cross-multiplication. On a tie prefer more pages, for
            // fewer spans.
            if objects <= SPAN_OBJECTS && (best == 0 || objects * best >= best_objects * pages) {
                best = pages;
                best_objects = objects;
            }
            pages += 1;
        }
        Self {
            bytes: bytes as u32,
            pages: best as u32,
            objects: best_objects as u32,
            reciprocal: ((1 << RECIPROCAL_SHIFT) / (index + 1) + 1) as u32,
        }
    }

    /// Returns the index of the object that begins `units` units of 16 bytes into the span.
    #[inline]
    pub const fn index_at(&self, units: u64) -> usize {
        // Exact, as units < 2^13 and the relative error of the reciprocal is below 2^-16.
        ((units * self.reciprocal as u64) >> RECIPROCAL_SHIFT) as usize
    }

    /// Returns the memory per object in bytes: the size of a span divided by its number of objects.
    const fn cost_bytes(&self) -> usize {
        (self.pages as usize * freestone_core::PAGE_BYTES).div_ceil(self.objects as usize)
    }
}

/// All size classes, by index.
pub static CLASS: [Class; CLASSES] = {
    let mut all = [Class::new(0); CLASSES];
    let mut index = 0;
    while index < CLASSES {
        all[index] = Class::new(index);
        index += 1;
    }
    all
};

/// Returns the index of the size class for an object of `bytes` bytes (1 to the page size).
#[inline]
pub const fn class_of(bytes: usize) -> usize {
    debug_assert!(bytes >= 1 && bytes <= freestone_core::PAGE_BYTES);
    (bytes - 1) / CLASS_STEP_BYTES
}

/// Size in bytes of the largest object that is stored compressed. A larger object uses as much
/// memory as a whole page, because of the unused end of its class's spans. Such a page is stored
/// uncompressed, as with zsmalloc's `huge_class_size`.
pub const HUGE_LINE_BYTES: usize = {
    let mut index = CLASSES - 1;
    while Class::new(index).cost_bytes() >= freestone_core::PAGE_BYTES {
        index -= 1;
    }
    (index + 1) * CLASS_STEP_BYTES
};
#[cfg(not(loom))]
const _: () = assert!(HUGE_LINE_BYTES == crate::codec::Scratch::BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn class_waste_is_below_3_percent() {
        for (index, class) in CLASS.iter().enumerate() {
            let span = class.pages as usize * freestone_core::PAGE_BYTES;
            let used = class.objects as usize * class.bytes as usize;
            assert!(used <= span && class.objects as usize <= SPAN_OBJECTS, "{class:?}");
            // Above the threshold an object costs a whole page, so only uncompressed pages are
            // stored there.
            if class.bytes as usize <= HUGE_LINE_BYTES {
                assert!((span - used) * 100 <= span * 3, "class {index} wastes over 3 %: {class:?}");
            }
        }
        assert_eq!((CLASS[CLASSES - 1].pages, CLASS[CLASSES - 1].objects), (32, 32));
    }

    #[test]
    fn class_index_at_inverts_offset() {
        for class in &CLASS {
            for object in 0..class.objects {
                let units = u64::from(object * class.bytes) / CLASS_STEP_BYTES as u64;
                assert_eq!(class.index_at(units), object as usize, "{class:?}");
            }
        }
    }

    #[test]
    fn class_of_rounds_up() {
        for bytes in 1..=freestone_core::PAGE_BYTES {
            let class = &CLASS[class_of(bytes)];
            assert!(class.bytes as usize >= bytes && (class.bytes as usize) < bytes + CLASS_STEP_BYTES);
        }
    }

    #[test]
    fn huge_threshold_is_3968() {
        assert_eq!(HUGE_LINE_BYTES, 3968);
    }
}
