//! Reads of a qcow2 image with arbitrary content.
//!
//! An input is one byte of options, then the file. The corpus has images with clusters of 512 bytes, which
//! are small. Properties:
//! * The error of a refused image is one sentence.
//! * Every sector at the beginning and the end of the disk reads as the reference parser returns it, or both
//!   fail, for inline and for submitted reads. Extents tile the disk, and only sectors that read as zeroes
//!   are reported as zero.

use std::io::Read as _;
use std::sync::mpsc;

use flate2::read::DeflateDecoder;
use freestone::device::{Buffer, Completion, Device, Error, ExtentKind, IoBuf, Request, TryResult};
use freestone::qcow2::{Config, Image};

use crate::nbd::WAIT;
use crate::scratch::Scratch;

const SECTOR: u64 = 512;
/// Number of bytes that the check reads at the beginning and at the end of a disk.
const LOOK_BYTES: u64 = 24 << 10;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

struct ReferenceImage<'a> {
    bytes: &'a [u8],
    cluster: u64,
    version: u64,
    size: u64,
    zstd: bool,
}

impl<'a> ReferenceImage<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        let mut reference = ReferenceImage { bytes, cluster: 0, version: 0, size: 0, zstd: false };
        reference.version = reference.number(4, 4);
        reference.cluster = 1 << reference.number(20, 4);
        reference.size = reference.number(24, 8) / SECTOR * SECTOR;
        reference.zstd = reference.version > 2 && reference.number(72, 8) & 8 != 0;
        reference
    }

    /// Returns the big-endian number of `bytes` bytes at offset `at` of the file. Bytes beyond the end of the
    /// file count as zeroes.
    fn number(&self, at: u64, bytes: u64) -> u64 {
        let byte = |at: u64| usize::try_from(at).ok().and_then(|at| self.bytes.get(at)).copied().unwrap_or(0);
        (at..at + bytes).fold(0, |number, at| number << 8 | u64::from(byte(at)))
    }

    /// Returns the sector at offset `at` of the disk. `Err(false)`: reading must fail. `Err(true)`: the
    /// result is unknown.
    fn sector(&self, at: u64) -> Result<Vec<u8>, bool> {
        let len = self.bytes.len() as u64;
        let zeroes = Ok(vec![0; SECTOR as usize]);
        let entries = self.cluster / 8;
        let number = at / self.cluster;
        let table = self.number(self.number(40, 8) + number / entries * 8, 8) & OFFSET;
        if table == 0 {
            return zeroes;
        }
        // The image driver reads tables in pieces of a page, so the whole piece must be inside the file.
        let piece = self.cluster.min(4096);
        let place = number % entries * 8;
        if !table.is_multiple_of(self.cluster) || table + place / piece * piece + piece > len {
            return Err(false);
        }
        let entry = self.number(table + place, 8);
        if entry >> 62 & 1 == 1 {
            return self.packed(entry, at % self.cluster);
        }
        let host = entry & OFFSET;
        if entry & 1 == 1 {
            return if self.version < 3 { Err(false) } else { zeroes };
        }
        if host == 0 {
            return zeroes;
        }
        // The rest of the last cluster of the file reads as zeroes. Reads of clusters beyond it fail.
        if !host.is_multiple_of(self.cluster) || host >= len.next_multiple_of(self.cluster) {
            return Err(false);
        }
        let from = host + at % self.cluster;
        Ok((from..from + SECTOR).map(|at| self.number(at, 1) as u8).collect())
    }

    fn packed(&self, entry: u64, within: u64) -> Result<Vec<u8>, bool> {
        let shift = 62 - (self.cluster.ilog2() - 8);
        let host = entry & ((1 << shift) - 1);
        let sectors = (entry & ((1 << 62) - 1)) >> shift;
        let len = self.bytes.len() as u64;
        let end = (host + (sectors + 1) * 512 - host % 512).min(len);
        if host >= end {
            return Err(false);
        }
        if self.zstd {
            return Err(true);
        }
        let mut cluster = vec![0; self.cluster as usize];
        let mut decoder = DeflateDecoder::new(&self.bytes[host as usize..end as usize]);
        decoder.read_exact(&mut cluster).map_err(|_| false)?;
        Ok(cluster[within as usize..(within + SECTOR) as usize].to_vec())
    }
}

/// Reads a byte range of the disk. If `inline` is true, reads inline as far as possible, and submits the
/// rest.
fn read(image: &Image, offset: u64, len: u64, inline: bool) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0; len as usize];
    let mut done = 0;
    while inline && done < len {
        let request = Request::read(offset + done, len - done);
        match image.try_io(&request, Buffer::Read(&mut bytes[done as usize..]))? {
            TryResult::Done => done = len,
            TryResult::Partly(n) => done += n,
            TryResult::WouldBlock => break,
        }
    }
    if done < len {
        let buffer = IoBuf::zeroed((len - done) as usize).expect("a little memory");
        let (reported, answer) = mpsc::channel();
        let completion = Completion::new(move |outcome, buffer| {
            let _ = reported.send((outcome, buffer));
        });
        image.submit(Request::read(offset + done, len - done), buffer, completion);
        let (outcome, buffer) = answer.recv_timeout(WAIT).expect("the read completes");
        outcome?;
        bytes[done as usize..].copy_from_slice(&buffer);
    }
    Ok(bytes)
}

/// Checks one input. Returns true if the image was opened.
///
/// # Panics
/// Panics if a property does not hold.
pub fn check(scratch: &Scratch, input: &[u8]) -> bool {
    let Some((&options, bytes)) = input.split_first() else { return false };
    // A standalone image cannot open other files, which an arbitrary input must not choose.
    let config = Config { standalone: true, ..Config::new(scratch.file(bytes)) };
    let image = match Image::open(&config) {
        Ok(image) => image,
        Err(error) => {
            let text = error.to_string();
            assert!(!text.is_empty() && !text.contains('\n'), "{text:?}");
            return false;
        }
    };
    let reference = ReferenceImage::new(bytes);
    let size = image.geometry().size;
    assert_eq!(size, reference.size);
    let look = size.min(LOOK_BYTES);
    // The options byte selects the length of a read request.
    let step = SECTOR << (options & 7).min(6);
    for begin in [0, size - look] {
        for offset in (begin..begin + look).step_by(step as usize) {
            let len = step.min(begin + look - offset);
            let expected: Vec<_> =
                (offset..offset + len).step_by(SECTOR as usize).map(|at| reference.sector(at)).collect();
            if expected.contains(&Err(true)) {
                let found = read(&image, offset, len, options & 8 != 0);
                assert!(matches!(found, Ok(_) | Err(Error::Media)), "{offset}: {found:?}");
                continue;
            }
            let whole: Result<Vec<_>, _> = expected.into_iter().collect();
            match (read(&image, offset, len, options & 8 != 0), whole) {
                (Ok(found), Ok(expected)) => assert!(found == expected.concat(), "{offset} reads other data"),
                (Err(Error::Media), Err(_)) => {}
                (found, expected) => panic!("{offset}: {:?}, expected {:?}", found.err(), expected.err()),
            }
        }
        extents(&image, &reference, begin, look);
    }
    true
}

fn extents(image: &Image, reference: &ReferenceImage<'_>, begin: u64, len: u64) {
    let mut at = begin;
    while at < begin + len {
        let mut next = at;
        let reported = image.extents(at, begin + len - at, &mut |row| {
            assert_eq!(row.offset, next);
            assert!(row.len > 0);
            next += row.len;
            if row.kind != ExtentKind::Data {
                for sector in (row.offset..next).step_by(SECTOR as usize) {
                    let zero =
                        reference.sector(sector).is_ok_and(|sector| sector.iter().all(|&byte| byte == 0));
                    assert!(zero, "{sector} is reported as zero");
                }
            }
            true
        });
        match reported {
            Ok(reported) => {
                assert!(reported > 0 && at + reported == next && next <= begin + len);
                at = next;
            }
            Err(error) => {
                assert_eq!(error, Error::Media);
                // The call fails only if the status of the first sector of the range is unreadable.
                assert!(reference.sector(at).is_err(), "{at}: {error}");
                at += SECTOR;
            }
        }
    }
}
