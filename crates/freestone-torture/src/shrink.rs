//! Shortens a failing run by removing ops.

/// Removes ops as long as the run still fails, and returns the ops left. Tries long pieces first,
/// then shorter pieces, then single ops, until every op left is needed.
pub fn shrink<T: Clone>(ops: &[T], mut fails: impl FnMut(&[T]) -> bool) -> Vec<T> {
    let mut left = ops.to_vec();
    let mut piece = left.len().div_ceil(2).max(1);
    loop {
        let before = left.len();
        // Start at the end: ops after the failure are removed first.
        let mut end = left.len();
        while end > 0 {
            let start = end.saturating_sub(piece);
            let mut without = left.clone();
            without.drain(start..end);
            if fails(&without) {
                left = without;
            }
            end = start;
        }
        match piece {
            1 if left.len() == before => return left,
            1 => {}
            _ => piece = piece.div_ceil(2),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::shrink;
    use crate::ops::draw;

    #[test]
    fn shrink_keeps_exactly_the_needed_ops() {
        let ops = draw(3, 200);
        let needed = [&ops[17], &ops[93], &ops[94], &ops[180]];
        let mut tries = 0;
        let short = shrink(&ops, |ops| {
            tries += 1;
            let mut needed = needed.iter();
            let mut next = needed.next();
            for op in ops {
                if next.is_some_and(|next| op == *next) {
                    next = needed.next();
                }
            }
            next.is_none()
        });
        assert_eq!(short.iter().collect::<Vec<_>>(), needed);
        assert!(tries < 150, "{tries} tries");
        assert!(shrink(&ops, |_| true).is_empty());
    }
}
