//! Contents side by side.

/// Where two contents differ first, also where one goes on. Contents that are the same are compared
/// at once, not byte by byte, which a build for tests takes long for.
pub fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    if one == other {
        return None;
    }
    let both = one.iter().zip(other);
    Some(both.take_while(|(a, b)| a == b).count())
}

#[cfg(test)]
mod tests {
    use super::first_difference;

    #[test]
    fn the_first_is_found() {
        assert_eq!(first_difference(&[], &[]), None);
        assert_eq!(first_difference(&[1, 2, 3], &[1, 2, 3]), None);
        assert_eq!(first_difference(&[1, 2, 3], &[1, 5, 4]), Some(1));
        assert_eq!(first_difference(&[1, 2], &[1, 2, 3]), Some(2));
        assert_eq!(first_difference(&[1], &[]), Some(0));
    }
}
