//! Which bytes of a read have come. Chunks may come in any order; together they are to be the read,
//! and no byte comes twice.

/// Most runs that do not touch: a server that sends crumbs is not remembered without end.
const MAX_RUNS: usize = 4096;

/// Runs of bytes, ascending, none of which touch.
#[derive(Debug, Default)]
pub struct Covered(Vec<(u32, u32)>);

impl Covered {
    /// Adds the bytes from `start` to before `end`.
    ///
    /// # Errors
    /// What the server did wrong.
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

    /// Whether these are the first `len` bytes, and no others.
    pub fn is_all(&self, len: u32) -> bool {
        self.0 == [(0, len)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_in_any_order_are_the_whole() {
        let mut covered = Covered::default();
        for (start, end) in [(8, 16), (0, 4), (24, 32), (16, 24), (4, 8)] {
            assert!(!covered.is_all(32));
            covered.add(start, end).unwrap();
        }
        assert!(covered.is_all(32) && !covered.is_all(33));
    }

    #[test]
    fn no_byte_comes_twice() {
        for (start, end) in [(8, 16), (8, 9), (15, 16), (0, 9), (15, 20), (0, 32), (10, 11)] {
            let mut covered = Covered::default();
            covered.add(8, 16).unwrap();
            assert!(covered.add(start, end).is_err(), "{start} {end}");
        }
    }

    #[test]
    fn crumbs_are_not_remembered_without_end() {
        let mut covered = Covered::default();
        let failed = (0..10_000).find(|n| covered.add(n * 2, n * 2 + 1).is_err());
        assert_eq!(failed, Some(MAX_RUNS as u32));
    }
}
