//! Metadata of spans in a table whose entries never move. The table grows in chunks, each twice as
//! long as the previous one, so the table of a small pool is small.

#[cfg(loom)]
pub use model::SpanTable;
#[cfg(not(loom))]
pub use real::SpanTable;

#[cfg(not(loom))]
mod real {
    use zerocopy::FromZeros;

    use crate::pool::class::SPAN_BYTES;
    use freestone_core::slot::LOCATION_BITS;
    use freestone_core::sync::OnceLock;

    /// Number of spans in the first chunk.
    const FIRST: usize = 64;
    const SPANS: usize = ((16 << LOCATION_BITS) / SPAN_BYTES) as usize;
    const CHUNKS: usize = ((SPANS + FIRST).ilog2() - FIRST.ilog2() + 1) as usize;

    /// Table with a `T` per span, initially all zero bytes.
    pub struct SpanTable<T>([OnceLock<Box<[T]>>; CHUNKS]);

    impl<T> SpanTable<T> {
        pub fn new() -> Self {
            Self(std::array::from_fn(|_| OnceLock::new()))
        }

        /// Returns the entry of a span for which [`get_or_new`](Self::get_or_new) was called
        /// before.
        #[inline]
        pub fn get(&self, span: u32) -> &T {
            let (chunk, at) = place(span);
            match self.0[chunk].get() {
                Some(chunk) => &chunk[at],
                None => unreachable!("span {span} was never adopted"),
            }
        }

        /// Iterates over the entries of all allocated chunks, including entries of unused spans.
        pub fn iter(&self) -> impl Iterator<Item = &T> {
            self.0.iter().filter_map(OnceLock::get).flatten()
        }

        pub fn bytes(&self) -> u64 {
            let chunks: usize =
                self.0.iter().filter_map(|chunk| chunk.get()).map(|chunk| size_of_val(&**chunk)).sum();
            (size_of_val(self) + chunks) as u64
        }
    }

    impl<T: FromZeros> SpanTable<T> {
        pub fn get_or_new(&self, span: u32) -> &T {
            let (chunk, at) = place(span);
            &self.0[chunk].get_or_init(|| zeroed(FIRST << chunk))[at]
        }
    }

    /// Returns the chunk of a span and the index in that chunk.
    #[inline]
    const fn place(span: u32) -> (usize, usize) {
        let number = span as usize + FIRST;
        let log = number.ilog2();
        ((log - FIRST.ilog2()) as usize, number ^ 1 << log)
    }

    /// Allocates a zeroed chunk. The pages of a long chunk become resident only when they are used.
    #[cold]
    fn zeroed<T: FromZeros>(len: usize) -> Box<[T]> {
        match <[T]>::new_box_zeroed_with_elems(len) {
            Ok(chunk) => chunk,
            Err(_) => std::alloc::handle_alloc_error(std::alloc::Layout::new::<T>()),
        }
    }
}

#[cfg(loom)]
mod model {
    /// Table for loom models, whose pool has two spans.
    pub struct SpanTable<T>([T; 2]);

    impl<T: Default> SpanTable<T> {
        pub fn new() -> Self {
            Self(std::array::from_fn(|_| T::default()))
        }

        pub fn get(&self, span: u32) -> &T {
            &self.0[span as usize]
        }

        pub fn get_or_new(&self, span: u32) -> &T {
            self.get(span)
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::SpanTable;
    use freestone_core::sync::{AtomicU64, Ordering::SeqCst};

    #[test]
    fn span_table_entries_are_distinct_and_stable() {
        let table = SpanTable::<AtomicU64>::new();
        assert!(table.bytes() < 1024);
        let spans: Vec<u32> = (0..1000).chain([(1 << 23) - 1, 1 << 22, (1 << 20) - 64]).collect();
        let places: Vec<*const AtomicU64> = spans
            .iter()
            .map(|&span| {
                let place = table.get_or_new(span);
                assert_eq!(place.swap(u64::from(span) + 1, SeqCst), 0, "span {span}");
                std::ptr::from_ref(place)
            })
            .collect();
        for (&span, place) in spans.iter().zip(places) {
            assert_eq!(table.get(span).load(SeqCst), u64::from(span) + 1);
            assert!(std::ptr::eq(table.get(span), place));
        }
        assert_eq!(table.iter().filter(|word| word.load(SeqCst) != 0).count(), spans.len());
    }
}
