//! Comparison of byte contents.

/// Returns the index of the first byte that differs, or the end of the shorter content. `None` if
/// both are equal. Equal contents are compared as slices first, since a byte loop is slow in test
/// builds.
pub fn first_difference(left: &[u8], right: &[u8]) -> Option<usize> {
    if left == right {
        return None;
    }
    let both = left.iter().zip(right);
    Some(both.take_while(|(a, b)| a == b).count())
}

#[cfg(test)]
mod tests {
    use super::first_difference;

    #[test]
    fn first_difference_is_found() {
        assert_eq!(first_difference(&[], &[]), None);
        assert_eq!(first_difference(&[1, 2, 3], &[1, 2, 3]), None);
        assert_eq!(first_difference(&[1, 2, 3], &[1, 5, 4]), Some(1));
        assert_eq!(first_difference(&[1, 2], &[1, 2, 3]), Some(2));
        assert_eq!(first_difference(&[1], &[]), Some(0));
    }
}
