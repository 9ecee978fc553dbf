//! Decompression of compressed clusters.

use flate2::{Decompress, FlushDecompress, Status};
use zstd_safe::{DCtx, DParameter, InBuffer, OutBuffer};

use freestone_core::device::{Error, Result};

use super::header::Compression;

/// Largest zstd window accepted, as a power of two: 8 MiB, which RFC 8878 requires of every
/// decoder. qemu's windows have at most 2 MiB, one cluster; a corrupt frame could require 128 MiB.
const MAX_WINDOW_LOG: u32 = 23;

/// Decompresses exactly one cluster from `packed`, which may have trailing bytes. Fails if `packed`
/// does not fill the cluster.
pub(super) fn inflate(kind: Compression, packed: &[u8], cluster: &mut [u8]) -> Result<()> {
    let whole = match kind {
        Compression::Deflate => deflated(packed, cluster),
        Compression::Zstd => zstd(packed, cluster)?,
    };
    if whole { Ok(()) } else { Err(Error::Media) }
}

fn deflated(packed: &[u8], cluster: &mut [u8]) -> bool {
    // The clusters are raw deflate streams, without a zlib header.
    let mut stream = Decompress::new(false);
    let size = cluster.len() as u64;
    loop {
        let before = (stream.total_in(), stream.total_out());
        let (input, output) = (&packed[before.0 as usize..], &mut cluster[before.1 as usize..]);
        // Do not use `Finish`: the decoder would treat missing input as zeroes, which may decode to
        // data.
        let status = stream.decompress(input, output, FlushDecompress::None);
        let now = (stream.total_in(), stream.total_out());
        // As in qemu, a full cluster is enough, even if the stream continues.
        if now.1 == size && status.is_ok() {
            return true;
        }
        if now == before || !matches!(status, Ok(Status::Ok | Status::BufError)) {
            return false;
        }
    }
}

fn zstd(packed: &[u8], cluster: &mut [u8]) -> Result<bool> {
    let mut context = DCtx::try_create().ok_or(Error::NoMemory)?;
    context.set_parameter(DParameter::WindowLogMax(MAX_WINDOW_LOG)).map_err(|_| Error::NoMemory)?;
    let size = cluster.len();
    let mut input = InBuffer::around(packed);
    let mut output = OutBuffer::around(cluster);
    while output.pos() < size {
        let before = (input.pos(), output.pos());
        let outcome = context.decompress_stream(&mut output, &mut input);
        if outcome.is_err() || (input.pos(), output.pos()) == before {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    const SIZE: usize = 64 << 10;

    fn deflate(data: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(data).unwrap();
        encoder.finish().unwrap()
    }

    fn squeeze(data: &[u8]) -> Vec<u8> {
        let mut packed = vec![0; zstd_safe::compress_bound(data.len())];
        let len = zstd_safe::compress(packed.as_mut_slice(), data, 3).unwrap();
        packed.truncate(len);
        packed
    }

    #[test]
    fn inflate_fills_exactly_one_cluster() {
        let one = vec![1; SIZE];
        let text: Vec<u8> = (0..SIZE).map(|i| (i / 3 % 251 * (i % 7)) as u8).collect();
        let mut out = vec![0; SIZE];
        for (kind, pack) in [
            (Compression::Deflate, deflate as fn(&[u8]) -> Vec<u8>),
            (Compression::Zstd, squeeze as fn(&[u8]) -> Vec<u8>),
        ] {
            for data in [&one, &text] {
                let mut packed = pack(data);
                let len = packed.len();
                // A compressed cluster has trailing bytes in its last sector.
                packed.extend([0xa5; 300]);
                assert_eq!(inflate(kind, &packed, &mut out), Ok(()));
                assert!(out == *data);
                // Truncated input fails. (A stream can be decoded without its end marker, so cuts
                // of the last bytes are not tested.)
                for cut in [0, 1, len / 4, len / 2, len * 3 / 4] {
                    assert_eq!(
                        inflate(kind, &packed[..cut], &mut out),
                        Err(Error::Media),
                        "{kind:?} {cut} of {len}"
                    );
                }
                // Content that is too short fails; content that is too long is truncated to a
                // cluster.
                assert_eq!(inflate(kind, &pack(&data[1..]), &mut out), Err(Error::Media));
                assert_eq!(inflate(kind, &pack(&[data.as_slice(), b"more"].concat()), &mut out), Ok(()));
            }
            assert_eq!(inflate(kind, &[0xff; 1000], &mut out), Err(Error::Media));
        }
    }

    /// A frame that requires a window of 128 MiB is refused.
    #[test]
    fn zstd_window_above_limit_is_refused() {
        // Magic number, descriptor without content size, window of 2^(10 + 17) bytes, and one RLE
        // block.
        let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, 17 << 3];
        let block: u32 = 1 | 1 << 1 | (SIZE as u32) << 3;
        frame.extend(&block.to_le_bytes()[..3]);
        frame.push(7);
        let mut out = vec![0; SIZE];
        assert_eq!(inflate(Compression::Zstd, &frame, &mut out), Err(Error::Media));
        frame[5] = 11 << 3;
        assert_eq!(inflate(Compression::Zstd, &frame, &mut out), Ok(()));
        assert!(out == vec![7; SIZE]);
    }
}
