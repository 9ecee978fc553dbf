//! Zeroed memory, checks for zeroes, and ranges of devices that read as zeroes.

use crate::device::{Extent, ExtentKind, Result};

/// Size of [`ZEROES`] in bytes.
pub const ZEROES_BYTES: usize = 64 << 10;

/// An array of bytes aligned for direct I/O.
#[repr(align(4096))]
pub struct Zeroes(pub [u8; ZEROES_BYTES]);

/// Source buffer for writing zeroes, in read-only program memory shared by all users.
pub static ZEROES: Zeroes = Zeroes([0; ZEROES_BYTES]);

/// Returns true if all bytes are 0. Checks the last bytes first, because other data is usually non-zero at
/// its start or end.
#[inline]
pub fn are_zeroes(bytes: &[u8]) -> bool {
    let (lines, rest) = bytes.as_chunks::<64>();
    let is_zero = |line: &[u8; 64]| line.iter().fold(0, |all, byte| all | byte) == 0;
    rest.iter().all(|byte| *byte == 0) && lines.last().is_none_or(is_zero) && lines.iter().all(is_zero)
}

/// Returns the end of the zeroes at the start of `[at, end)`, and the end of the data that is known to follow
/// these zeroes. `describe` reports the extents of a range as
/// [`Device::extents`](crate::device::Device::extents) does; a range that `describe` cannot describe counts
/// as data. May wait for a disk.
pub fn leading_zeroes(
    at: u64,
    end: u64,
    mut describe: impl FnMut(u64, u64, &mut dyn FnMut(Extent) -> bool) -> Result<()>,
) -> (u64, u64) {
    let (mut zeroes_until, mut data_until) = (at, at);
    while data_until == zeroes_until && zeroes_until < end {
        let from = zeroes_until;
        let described = describe(from, end - from, &mut |row| {
            let row_end = (row.offset + row.len).min(end);
            match row.kind {
                ExtentKind::Data => data_until = row_end,
                _ if data_until == zeroes_until => (zeroes_until, data_until) = (row_end, row_end),
                ExtentKind::Zero | ExtentKind::Hole => return false,
            }
            true
        });
        if described.is_err() || data_until == from {
            return (zeroes_until, end);
        }
    }
    (zeroes_until, data_until)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Error;

    #[test]
    fn leading_zeroes_end_at_data_and_unknown() {
        use ExtentKind::{Data, Hole, Zero};
        // A fake `describe` that reports at most two extents for each call.
        let look = |kinds: &[ExtentKind], at: u64| {
            leading_zeroes(at, kinds.len() as u64, |from, len, row| {
                for offset in (from..from + len).take(2) {
                    if !row(Extent { offset, len: 1, kind: kinds[offset as usize] }) {
                        break;
                    }
                }
                Ok(())
            })
        };
        assert_eq!(look(&[Hole, Zero, Hole, Data, Data, Hole], 0), (3, 4));
        assert_eq!(look(&[Data, Data, Hole], 0), (0, 2));
        assert_eq!(look(&[Data, Hole, Zero], 1), (3, 3));
        assert_eq!(leading_zeroes(2, 9, |_, _, _| Err(Error::Media)), (2, 9));
        assert_eq!(leading_zeroes(2, 9, |_, _, _| Ok(())), (2, 9));
    }

    #[test]
    fn any_nonzero_byte_is_found() {
        for len in [0, 1, 63, 64, 65, 200, 4096] {
            let mut bytes = vec![0; len];
            assert!(are_zeroes(&bytes), "{len}");
            for at in 0..len {
                bytes[at] = 0x80;
                assert!(!are_zeroes(&bytes), "byte {at} of {len}");
                bytes[at] = 0;
            }
        }
    }
}
