//! Size classes: objects are rounded up to a multiple of 16 bytes, and each class packs its objects
//! into spans of as many pages as waste least.

/// Objects begin at multiples of this, and classes are this far apart.
pub const CLASS_STEP_BYTES: usize = 16;
/// Number of classes: 16, 32, ... 4096 bytes.
pub const CLASSES: usize = freestone_core::PAGE_BYTES / CLASS_STEP_BYTES;
/// Address space of a span. How much of it a class uses is its `pages`.
pub const SPAN_BYTES: u64 = 128 << 10;
/// Pages in a span's address space.
pub const SPAN_PAGES: usize = SPAN_BYTES as usize / freestone_core::PAGE_BYTES;
/// Most objects of a span: what its bitmap holds.
pub const SPAN_OBJECTS: usize = 256;

/// How one class lays out its spans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Class {
    /// Bytes of an object's place.
    pub bytes: u32,
    /// Pages of a span.
    pub pages: u32,
    /// Objects in a span.
    pub objects: u32,
    /// For the division of an offset (in 16-byte units) by the object's size; see
    /// [`Class::index_at`].
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
            // Bytes that hold objects, per page, compared crosswise. On a tie more pages: fewer
            // spans to keep.
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

    /// The number of the object that begins `units` (of 16 bytes) into the span.
    #[inline]
    pub const fn index_at(&self, units: u64) -> usize {
        // Exact: units < 2^13 and the reciprocal is too large by less than one part in 2^24 / 2^8.
        ((units * self.reciprocal as u64) >> RECIPROCAL_SHIFT) as usize
    }

    /// Bytes that one object really takes: the span divided by its objects.
    const fn cost_bytes(&self) -> usize {
        (self.pages as usize * freestone_core::PAGE_BYTES).div_ceil(self.objects as usize)
    }
}

/// All classes, by number.
pub static CLASS: [Class; CLASSES] = {
    let mut all = [Class::new(0); CLASSES];
    let mut index = 0;
    while index < CLASSES {
        all[index] = Class::new(index);
        index += 1;
    }
    all
};

/// The class of an object of `bytes`, 1 to a page.
#[inline]
pub const fn class_of(bytes: usize) -> usize {
    debug_assert!(bytes >= 1 && bytes <= freestone_core::PAGE_BYTES);
    (bytes - 1) / CLASS_STEP_BYTES
}

/// The class-waste line: an object larger than this takes as much memory as a whole page, because
/// of what its class leaves unused at the end of each span. Such a page is stored uncompressed
/// (zsmalloc's `huge_class_size` has the same meaning).
pub const HUGE_LINE_BYTES: usize = {
    let mut index = CLASSES - 1;
    while Class::new(index).cost_bytes() >= freestone_core::PAGE_BYTES {
        index -= 1;
    }
    (index + 1) * CLASS_STEP_BYTES
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_waste_little() {
        for (index, class) in CLASS.iter().enumerate() {
            let span = class.pages as usize * freestone_core::PAGE_BYTES;
            let used = class.objects as usize * class.bytes as usize;
            assert!(used <= span && class.objects as usize <= SPAN_OBJECTS, "{class:?}");
            // Above the line a place costs a page; that is why nothing is stored there but whole
            // pages.
            if class.bytes as usize <= HUGE_LINE_BYTES {
                assert!((span - used) * 100 <= span * 3, "class {index} wastes over 3 %: {class:?}");
            }
        }
        assert_eq!((CLASS[CLASSES - 1].pages, CLASS[CLASSES - 1].objects), (32, 32));
    }

    #[test]
    fn every_object_finds_its_number() {
        for class in &CLASS {
            for object in 0..class.objects {
                let units = u64::from(object * class.bytes) / CLASS_STEP_BYTES as u64;
                assert_eq!(class.index_at(units), object as usize, "{class:?}");
            }
        }
    }

    #[test]
    fn sizes_round_up_to_their_class() {
        for bytes in 1..=freestone_core::PAGE_BYTES {
            let class = &CLASS[class_of(bytes)];
            assert!(class.bytes as usize >= bytes && (class.bytes as usize) < bytes + CLASS_STEP_BYTES);
        }
    }

    #[test]
    fn the_line_is_where_the_waste_says() {
        assert_eq!(HUGE_LINE_BYTES, 3968);
    }
}
