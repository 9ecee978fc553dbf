//! Compression of arbitrary pages by lz4.
//!
//! An input is one byte for the level and then the page, as pieces that `build` reads. Properties:
//! * The compressed page is a block of the LZ4 format, by the reference decoder below, and decodes to the page.
//! * The program's decompressor, which is liblz4's, returns the page as well.
//! * A truncated block is refused.
//!
//! The check returns false for a page that does not fit into a scratch buffer.

use std::sync::{Arc, LazyLock};

use freestone::codec::{Algorithm, Page, Params, Scratch, Streams};

const PAGE_BYTES: usize = size_of::<Page>();
/// Levels (accelerations) of lz4 that are checked.
const LEVELS: [u32; 4] = [1, 2, 17, 65537];

/// Builds a page. Each piece begins with a byte: a length in the upper six bits, and in the lower two bits what
/// follows: that many bytes, a run of the next byte, or a copy from earlier bytes at a distance of one or two bytes.
fn build(mut input: &[u8]) -> Page {
    let mut page = Vec::with_capacity(PAGE_BYTES + 64);
    let mut take = || {
        let (&byte, rest) = input.split_first()?;
        input = rest;
        Some(byte)
    };
    while page.len() < PAGE_BYTES {
        let Some(piece) = take() else { break };
        let len = usize::from(piece >> 2) + 1;
        match piece & 3 {
            0 => page.extend((0..len).map_while(|_| take())),
            1 => page.extend(std::iter::repeat_n(take().unwrap_or_default(), len * 8)),
            kind => {
                let high = if kind == 3 { take().unwrap_or_default() } else { 0 };
                let distance = usize::from(u16::from_be_bytes([high, take().unwrap_or_default()])) + 1;
                for _ in 0..len {
                    let byte = page.len().checked_sub(distance).map_or(0, |at| page[at]);
                    page.push(byte);
                }
            }
        }
    }
    page.resize(PAGE_BYTES, 0);
    page.try_into().expect("the size of a page")
}

/// Decodes a block as its specification says, including the rules for the end of a block.
fn decode(block: &[u8]) -> Vec<u8> {
    let mut out: Vec<u8> = Vec::with_capacity(PAGE_BYTES);
    let mut at = 0;
    let length = |at: &mut usize, token: u8| {
        let mut length = usize::from(token);
        if token == 15 {
            loop {
                let byte = block[*at];
                *at += 1;
                length += usize::from(byte);
                if byte < 255 {
                    break;
                }
            }
        }
        length
    };
    let mut last_match = 0;
    loop {
        let token = block[at];
        at += 1;
        let literals = length(&mut at, token >> 4);
        out.extend(&block[at..at + literals]);
        at += literals;
        if at == block.len() {
            assert!(token.trailing_zeros() >= 4, "the last sequence has a match");
            assert!(last_match == 0 || literals >= 5, "the last {literals} bytes are literals, fewer than 5");
            assert!(last_match == 0 || out.len() - last_match >= 12, "a match starts in the last 12 bytes");
            return out;
        }
        let distance = usize::from(u16::from_le_bytes([block[at], block[at + 1]]));
        at += 2;
        assert!((1..=out.len()).contains(&distance), "distance {distance} at {}", out.len());
        last_match = out.len();
        for _ in 0..length(&mut at, token & 15) + 4 {
            out.push(out[out.len() - distance]);
        }
    }
}

/// Checks the page of an input. Returns true if the page could be compressed.
pub fn check(input: &[u8]) -> bool {
    static STREAMS: LazyLock<[Arc<Streams>; LEVELS.len()]> = LazyLock::new(|| {
        LEVELS.map(|level| {
            let params = Params::parse(&format!("level={level}")).expect("a level of lz4");
            Streams::shared(Algorithm::Lz4, &params).expect("streams")
        })
    });
    let Some((&level, pieces)) = input.split_first() else { return false };
    let streams = &STREAMS[usize::from(level) % LEVELS.len()];
    let page = build(pieces);
    let mut scratch = Scratch::new();
    let Some(block) = streams.compress(&page, &mut scratch) else { return false };
    assert!(decode(block) == page, "the block is another page");
    let mut back = [1; PAGE_BYTES];
    streams.decompress(block, &mut back).expect("the block is valid");
    assert!(back == page, "the decompressed page differs");
    assert!(
        streams.decompress(&block[..block.len() - 1], &mut back).is_err(),
        "a truncated block is accepted"
    );
    true
}
