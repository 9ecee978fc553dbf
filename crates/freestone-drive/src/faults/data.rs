//! Random changes of data for fault injection: tears a write, chooses the offset of a misdirected
//! write, flips a bit.

use super::decide::hash;

/// Tears the write of `data` at `offset`: replaces some of its units of `unit` bytes with `old`, or
/// with zeroes if `old` is `None`. If the write touches two or more units, at least one keeps the
/// new data and at least one loses it. `word` is the random number.
pub fn tear(word: u64, unit: u64, offset: u64, data: &mut [u8], old: Option<&[u8]>) {
    let end = offset + data.len() as u64;
    let (first, units) = (offset / unit, end.div_ceil(unit) - offset / unit);
    // Unit number `lost` always loses the new data, and unit number `whole` always keeps it.
    let lost = word % units;
    let whole = (lost + 1 + (word >> 32) % units.saturating_sub(1).max(1)) % units;
    for index in 0..units {
        let arrives = index == whole || (index != lost && hash(word, [index, 0, 0, 0]) & 1 == 1);
        if arrives {
            continue;
        }
        let from = ((first + index) * unit).max(offset) - offset;
        let to = ((first + index + 1) * unit).min(end) - offset;
        let range = from as usize..to as usize;
        match old {
            Some(old) => data[range.clone()].copy_from_slice(&old[range]),
            None => data[range].fill(0),
        }
    }
}

/// Returns a random offset other than `offset` for a write of `len` bytes within `space` (first
/// byte, end). The offset is a multiple of `block` from the start of `space`. Returns `None` if
/// there is no other offset.
pub fn elsewhere(word: u64, offset: u64, len: u64, block: u64, space: (u64, u64)) -> Option<u64> {
    let (start, end) = space;
    // Number of possible offsets other than the correct one.
    let others = (end - start).checked_sub(len)? / block;
    if others == 0 {
        return None;
    }
    let place = start + word % others * block;
    Some(if place >= offset { place + block } else { place })
}

pub fn rot(word: u64, data: &mut [u8]) {
    if !data.is_empty() {
        let bit = word % (data.len() as u64 * 8);
        data[(bit / 8) as usize] ^= 1 << (bit % 8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tear_writes_some_units_only() {
        for word in 0..2000 {
            for (offset, len, unit) in [(0, 8192, 4096), (4096, 4096, 512), (512, 16 << 10, 16 << 10)] {
                let old = vec![1; len];
                let mut data = vec![2; len];
                tear(hash(word, [0; 4]), unit, offset, &mut data, Some(&old));
                let mut at = 0;
                let (mut arrived, mut lost) = (0, 0);
                while at < len {
                    let next = (((offset + at as u64) / unit + 1) * unit - offset).min(len as u64) as usize;
                    let part = &data[at..next];
                    assert!(part.iter().all(|byte| *byte == part[0]), "a unit is torn");
                    if part[0] == 2 {
                        arrived += 1;
                    } else {
                        lost += 1;
                    }
                    at = next;
                }
                assert!(arrived > 0 && lost > 0, "{arrived} arrived, {lost} lost");
            }
        }
    }

    #[test]
    fn tear_without_old_content_writes_zeroes() {
        let mut data = vec![2; 1024];
        tear(7, 512, 0, &mut data, None);
        assert!(data.contains(&0) && data.contains(&2));
    }

    #[test]
    fn tear_leaves_a_single_unit_whole() {
        let mut data = vec![2; 512];
        tear(7, 512, 512, &mut data, None);
        assert!(data.iter().all(|byte| *byte == 2));
    }

    #[test]
    fn elsewhere_reaches_every_offset_but_the_right_one() {
        let mut seen = [0; 8];
        for word in 0..700 {
            let place = elsewhere(hash(word, [0; 4]), 2 * 512, 512, 512, (0, 8 * 512)).unwrap();
            assert_eq!(place % 512, 0);
            seen[(place / 512) as usize] += 1;
        }
        assert_eq!(seen[2], 0);
        assert!(seen.iter().enumerate().all(|(at, n)| at == 2 || *n > 50), "{seen:?}");
        assert_eq!(elsewhere(3, 0, 4096, 512, (0, 4096)), None, "the write fills the device");
        assert_eq!(elsewhere(3, 512, 512, 512, (512, 1024)), None);
        assert_eq!(elsewhere(3, 0, 8192, 512, (0, 4096)), None);
        for word in 0..100 {
            let place = elsewhere(word, 4096, 1024, 512, (2048, 8192)).unwrap();
            assert!((2048..=8192 - 1024).contains(&place) && place != 4096);
        }
    }

    #[test]
    fn rot_flips_one_bit() {
        for word in 0..100 {
            let mut data = vec![0xa5; 512];
            rot(hash(word, [0; 4]), &mut data);
            assert_eq!(data.iter().map(|byte| (byte ^ 0xa5).count_ones()).sum::<u32>(), 1);
        }
        rot(5, &mut []);
    }
}
