//! Data sets: the source of pages for all benchmarks, and the order in which loops use them.

mod made;
pub(crate) mod zipf;

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use freestone::PAGE_BYTES;
use freestone::codec::Page;
use freestone::device::IoBuf;

use crate::options::{Options, Set};

/// Seed of all random numbers.
const SEED: u64 = 0x5EED_0FF4_EE57;

/// Directories of the `real` data set, and the percentage that each contributes: programs, headers,
/// documents and data, libraries and sources. If a directory has too little data, the next ones
/// contribute more.
const REAL: [(&str, u64); 4] = [("/usr/bin", 12), ("/usr/include", 8), ("/usr/share", 25), ("/usr/lib", 55)];
const COPY_BYTES: usize = 1 << 20;

/// A data set: a sequence of pages, numbered from 0.
pub struct Data {
    /// Content and origin of the data, for the report.
    pub description: String,
    pub pages: u64,
    source: Source,
}

enum Source {
    Fio,
    File(File),
}

impl Data {
    /// Opens at most `bytes` bytes of the data set `set`.
    pub fn open(set: Set, bytes: u64, options: &Options) -> Result<Self> {
        match (set, &options.data) {
            (Set::Fio, _) => Ok(Self {
                description:
                    "fio: 60 % compressible (buffer_compress_percentage=60, buffer_compress_chunk=4096)"
                        .into(),
                pages: bytes / PAGE_BYTES as u64,
                source: Source::Fio,
            }),
            (Set::Real, Some(path)) => Self::file(path, bytes, format!("real: {}", path.display())),
            (Set::Real, None) => {
                let path = real_file(&options.data_dir, bytes)?;
                let parts = REAL.map(|(dir, share)| format!("{dir} {share} %")).join(", ");
                Self::file(&path, bytes, format!("real: tar of {parts}"))
            }
            (Set::Debian, _) => {
                let what = "debian: disk of a Debian 13 guest, ext4".into();
                Self::file(&made::debian(&options.data_dir)?, bytes, what)
            }
            (Set::Postgresql, _) => {
                let what = "postgresql: disk with a PostgreSQL server after pgbench -i, ext4".into();
                Self::file(&made::postgresql(&options.data_dir, bytes)?, bytes, what)
            }
            (Set::Guest, _) => {
                let what = "guest: memory of a Debian 13 guest with 512 MiB after its boot".into();
                Self::file(&made::guest(&options.data_dir)?, bytes, what)
            }
        }
    }

    fn file(path: &Path, bytes: u64, description: String) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("{}", path.display()))?;
        let pages = file.metadata()?.len().min(bytes) / PAGE_BYTES as u64;
        ensure!(pages >= 256, "{}: a data set has at least 1 MiB", path.display());
        Ok(Self { description, pages, source: Source::File(file) })
    }

    /// Fills `into` (whole pages) with the pages of the data set from number `page` on.
    pub fn read(&self, page: u64, into: &mut [u8]) -> Result<()> {
        match &self.source {
            Source::File(file) => file.read_exact_at(into, page * PAGE_BYTES as u64)?,
            Source::Fio => {
                for (number, into) in (page..).zip(into.chunks_exact_mut(PAGE_BYTES)) {
                    fio_page(number, into);
                }
            }
        }
        Ok(())
    }

    /// Reads all pages into one buffer, which also allocates its memory before a measurement.
    pub fn load(&self) -> Result<IoBuf> {
        let mut all = IoBuf::zeroed(self.pages as usize * PAGE_BYTES)?;
        for (index, piece) in all.chunks_mut(COPY_BYTES).enumerate() {
            self.read((index * COPY_BYTES / PAGE_BYTES) as u64, piece)?;
        }
        Ok(all)
    }

    /// Writes all pages to an existing file, from the start of the file.
    pub fn save(&self, path: &Path) -> Result<()> {
        let context = || format!("{}", path.display());
        let mut file = File::options().write(true).open(path).with_context(context)?;
        let mut buffer = IoBuf::zeroed(COPY_BYTES)?;
        let step = COPY_BYTES / PAGE_BYTES;
        for first in (0..self.pages).step_by(step) {
            let part = &mut buffer[..(self.pages - first).min(step as u64) as usize * PAGE_BYTES];
            self.read(first, part)?;
            file.write_all(part).with_context(context)?;
        }
        file.sync_all().with_context(context)
    }

    pub fn bytes(&self) -> u64 {
        self.pages * PAGE_BYTES as u64
    }
}

/// Fills a page as fio 3.33 does with the options in the description of the data set: the first 40
/// % (1638 bytes) are random words, the rest zeroes. The generator differs from fio's; its output
/// is as incompressible.
pub fn fio_page(number: u64, page: &mut [u8]) {
    let (noise, rest) = page.split_at_mut(PAGE_BYTES * 40 / 100);
    let mut random = Random::new(number);
    for word in noise.chunks_mut(8) {
        word.copy_from_slice(&random.next_u64().to_le_bytes()[..word.len()]);
    }
    rest.fill(0);
}

pub fn whole_pages(pages: &[u8]) -> impl ExactSizeIterator<Item = &Page> {
    pages.as_chunks().0.iter()
}

#[inline]
pub fn page_at(pages: &[u8], number: u32) -> &Page {
    &pages.as_chunks().0[number as usize]
}

/// Returns the cached file of the `real` data set; creates it if it does not exist.
fn real_file(dir: &Path, bytes: u64) -> Result<PathBuf> {
    let path = dir.join(format!("real-{}M.tar", bytes >> 20));
    if path.exists() {
        return Ok(path);
    }
    std::fs::create_dir_all(dir).with_context(|| format!("{}", dir.display()))?;
    eprintln!("making {} from this machine's files", path.display());
    let partial = dir.join(format!("real-{}M.{}.partial", bytes >> 20, std::process::id()));
    let mut file = File::create(&partial).with_context(|| format!("{}", partial.display()))?;
    let mut left = bytes;
    let mut shares = 100;
    for (from, share) in REAL {
        // Shares of the remaining bytes: if a directory had too little data, the next ones
        // contribute more.
        let want = left / shares * share;
        shares -= share;
        left -= copy_tar(from, if shares == 0 { left } else { want }, &mut file)?;
    }
    drop(file);
    std::fs::rename(&partial, &path)?;
    Ok(path)
}

/// Writes at most `limit` bytes of a tar archive of `dir`, sorted by name, to `into`. Returns the
/// number of bytes written.
fn copy_tar(dir: &str, limit: u64, into: &mut File) -> Result<u64> {
    let mut tar = Command::new("tar")
        .args(["--create", "--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner"])
        .args(["--directory=/", "--ignore-failed-read", dir.trim_start_matches('/')])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("cannot start tar")?;
    let Some(output) = tar.stdout.take() else { bail!("tar has no output") };
    let mut output = output.take(limit);
    let mut buffer = vec![0; COPY_BYTES];
    let mut copied = 0;
    loop {
        let n = output.read(&mut buffer)?;
        if n == 0 {
            break;
        }
        into.write_all(&buffer[..n])?;
        copied += n as u64;
    }
    // The archive may be longer than the limit. Then tar fails to write the rest, so its exit
    // status is ignored.
    drop(output);
    tar.wait()?;
    Ok(copied)
}

/// Random number generator (`SplitMix64`) with numbered streams, each a sequence of its own.
pub struct Random(u64);

impl Random {
    /// Creates the generator of stream `number`.
    pub fn new(number: u64) -> Self {
        Self(SEED ^ number.wrapping_mul(0xD134_2543_DE82_EF95))
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns the numbers below `count` in random order.
    pub fn permutation(&mut self, count: u64) -> Vec<u32> {
        let mut all: Vec<u32> = (0..count as u32).collect();
        for end in (1..all.len()).rev() {
            all.swap(end, (self.next_u64() % (end as u64 + 1)) as usize);
        }
        all
    }
}

/// Endless random sequence of numbers from a range, reproducible from its seed. The order never
/// repeats: freeing objects in the order of their allocation would be too easy for a pool.
#[derive(Clone, Copy)]
pub struct Order {
    seed: u64,
    first: u32,
    count: u32,
}

impl Order {
    /// Creates a sequence of the numbers `first..first + count`.
    pub fn new(seed: u64, first: u32, count: u32) -> Self {
        Self { seed: Random::new(seed).next_u64(), first, count }
    }

    /// Returns the elements `from..from + count` of the sequence.
    pub fn choices(self, from: u64, count: u64) -> impl Iterator<Item = u32> {
        (from..from + count).map(move |at| self.choice(at))
    }

    /// Returns element `at` of the sequence.
    pub fn choice(self, at: u64) -> u32 {
        let random = Random(self.seed.wrapping_add(at.wrapping_mul(0x9E37_79B9_7F4A_7C15))).next_u64() >> 32;
        self.first + ((random * u64::from(self.count)) >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_page_is_two_fifths_noise() {
        let mut page = [1; PAGE_BYTES];
        fio_page(7, &mut page);
        let zeroes = page.iter().rev().take_while(|byte| **byte == 0).count();
        assert!((2458..2462).contains(&zeroes), "{zeroes}");
        let mut other = [1; PAGE_BYTES];
        fio_page(8, &mut other);
        assert_ne!(page, other);
    }

    #[test]
    fn order_is_reproducible_and_covers_its_range() {
        let order = Order::new(1, 100, 50);
        let mut all: Vec<u32> = order.choices(1000, 2000).collect();
        assert!(all.iter().copied().eq(order.choices(1000, 2000)));
        assert!(all[..1000] != all[1000..]);
        all.sort_unstable();
        all.dedup();
        assert!(all.into_iter().eq(100..150));
    }

    #[test]
    fn permutation_has_every_number_once() {
        let mut all = Random::new(3).permutation(1000);
        assert!(all.windows(2).any(|pair| pair[0] > pair[1]));
        all.sort_unstable();
        assert!(all.into_iter().eq(0..1000));
    }
}
