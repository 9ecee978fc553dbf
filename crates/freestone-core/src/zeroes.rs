//! Memory that is all zeroes: some to write from, and whether other is.

/// Bytes of [`ZEROES`].
pub const ZEROES_BYTES: usize = 64 << 10;

/// Bytes aligned for direct I/O.
#[repr(align(4096))]
pub struct Zeroes(pub [u8; ZEROES_BYTES]);

/// Zeroes to write from. They lie in the program's file, so it has them once.
pub static ZEROES: Zeroes = Zeroes([0; ZEROES_BYTES]);

/// Whether all bytes are 0. What is not mostly ends with something else than zeroes, or begins so,
/// and is then told from a look at both ends.
#[inline]
pub fn are_zeroes(bytes: &[u8]) -> bool {
    let (lines, rest) = bytes.as_chunks::<64>();
    let is_zero = |line: &[u8; 64]| line.iter().fold(0, |all, byte| all | byte) == 0;
    rest.iter().all(|byte| *byte == 0) && lines.last().is_none_or(is_zero) && lines.iter().all(is_zero)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_anywhere_is_found() {
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
