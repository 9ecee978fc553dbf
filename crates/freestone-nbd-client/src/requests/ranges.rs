//! Tracks the received byte ranges of a read. Chunks may arrive in any order; together they must
//! cover the read, without overlap.

/// Maximum number of separate ranges, which bounds the memory for a server that sends tiny chunks.
const MAX_RUNS: usize = 4096;

/// Received byte ranges (start, end), ascending, not adjacent.
#[derive(Debug, Default)]
pub struct ReceivedRanges(Vec<(u32, u32)>);

impl ReceivedRanges {
    /// Adds the bytes `start..end`.
    ///
    /// # Errors
    /// The protocol violation: the bytes overlap a received range, or there are too many ranges.
    pub fn add(&mut self, start: u32, end: u32) -> Result<(), &'static str> {
        let runs = &mut self.0;
        let next = runs.partition_point(|run| run.0 < start);
        if next > 0 && runs[next - 1].1 > start || next < runs.len() && runs[next].0 < end {
            return Err("two chunks of a reply overlap");
        }
        let joins_last = next > 0 && runs[next - 1].1 == start;
        let joins_next = next < runs.len() && runs[next].0 == end;
        match (joins_last, joins_next) {
            (true, true) => {
                runs[next - 1].1 = runs[next].1;
                runs.remove(next);
            }
            (true, false) => runs[next - 1].1 = end,
            (false, true) => runs[next].0 = start,
            (false, false) if runs.len() == MAX_RUNS => return Err("a reply comes in too many pieces"),
            (false, false) => runs.insert(next, (start, end)),
        }
        Ok(())
    }

    /// Returns true if exactly the bytes `0..len` were received.
    pub fn is_complete(&self, len: u32) -> bool {
        self.0 == [(0, len)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_in_any_order_merge() {
        let mut received = ReceivedRanges::default();
        for (start, end) in [(8, 16), (0, 4), (24, 32), (16, 24), (4, 8)] {
            assert!(!received.is_complete(32));
            received.add(start, end).unwrap();
        }
        assert!(received.is_complete(32) && !received.is_complete(33));
    }

    #[test]
    fn overlapping_ranges_are_refused() {
        for (start, end) in [(8, 16), (8, 9), (15, 16), (0, 9), (15, 20), (0, 32), (10, 11)] {
            let mut received = ReceivedRanges::default();
            received.add(8, 16).unwrap();
            assert!(received.add(start, end).is_err(), "{start} {end}");
        }
    }

    #[test]
    fn number_of_ranges_is_limited() {
        let mut received = ReceivedRanges::default();
        let failed = (0..10_000).find(|n| received.add(n * 2, n * 2 + 1).is_err());
        assert_eq!(failed, Some(MAX_RUNS as u32));
    }
}
