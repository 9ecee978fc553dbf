//! Options that all benchmarks share.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::{Args, ValueEnum};
use freestone::quantity::{self, ParseError};

use crate::measure::Slices;

/// Options that all benchmarks share.
#[derive(Args)]
pub struct Options {
    /// Data sets, separated by commas [default: fio,real, memory: real]
    #[arg(long, global = true, value_enum, value_delimiter = ',')]
    pub set: Vec<Set>,
    /// File used as the `real` data set, instead of the one made from this machine's files
    #[arg(long, global = true)]
    pub data: Option<PathBuf>,
    /// Directory in which the `real` data set is kept between runs
    #[arg(long, global = true, default_value = "target/bench-data")]
    pub data_dir: PathBuf,
    /// Bytes of data, such as 512M [default: 512M, memory: 2560M; with --quick 32M]
    #[arg(long, global = true)]
    pub size: Option<Size>,
    /// Smoke run of a few seconds, whose numbers mean nothing
    #[arg(long, global = true)]
    pub quick: bool,
    /// Pairs of slices for each row [default: 31; with --quick 3]
    #[arg(long, global = true)]
    pub pairs: Option<u32>,
    /// Length of a slice in milliseconds [default: 120; with --quick 10]
    #[arg(long, global = true)]
    pub slice_ms: Option<u32>,
    /// Output file for the JSON [default: benches/out/NAME.json]
    #[arg(long, global = true)]
    pub json: Option<PathBuf>,
    /// Omit the kernel's side if there is no usable zram device, instead of failing
    #[arg(long, global = true)]
    pub if_present: bool,
    /// zram device to compare with; must be unused, and is reset afterwards
    #[arg(long, global = true, default_value = "zram0")]
    pub zram: String,
}

/// A data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Set {
    /// fio's 60 % compressible pages.
    Fio,
    /// Real files of this machine.
    Real,
    /// Disk of a Debian guest. The first use needs root, mmdebstrap and some minutes.
    Debian,
    /// Disk of a database server. The first use needs Debian's package postgresql.
    Postgresql,
    /// Memory of a Debian guest. The first use needs what `debian` needs, and the kernel lab.
    Guest,
}

/// Units of `--size`, with their bytes. T is omitted, as every size in T is above the limit.
const UNITS: [(&str, u64); 3] = {
    let [_, g, m, k] = quantity::SIZES;
    [g, m, k]
};
/// Largest `--size`, in GiB.
const SIZE_GIB_MAX: u64 = 1024;
const PAIRS_MAX: u32 = 10_000;
const SLICE_MS_MAX: u32 = 10_000;

/// A number of bytes, written with a unit.
#[derive(Debug, Clone, Copy)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match quantity::parse(text, &UNITS) {
            Ok(bytes) if (1 << 20..=SIZE_GIB_MAX << 30).contains(&bytes) => Ok(Self(bytes)),
            Ok(_) | Err(ParseError::TooLong | ParseError::Overflow) => {
                bail!("a size is between 1M and {SIZE_GIB_MAX}G")
            }
            Err(_) => bail!("a size must be a whole number followed by K, M or G, such as 512M"),
        }
    }
}

impl Options {
    /// Returns an error if a numeric option is out of range, which clap does not check.
    pub fn check(&self) -> Result<()> {
        ensure!(self.pairs.is_none_or(|n| (1..=PAIRS_MAX).contains(&n)), "--pairs takes 1 to {PAIRS_MAX}");
        ensure!(
            self.slice_ms.is_none_or(|n| (1..=SLICE_MS_MAX).contains(&n)),
            "--slice-ms takes 1 to {SLICE_MS_MAX}"
        );
        let plain = !self.zram.is_empty() && self.zram.bytes().all(|b| b.is_ascii_alphanumeric());
        ensure!(plain && self.zram.starts_with("zram"), "--zram takes a name such as zram0");
        Ok(())
    }

    /// Returns the selected data sets, or `usual` if none is selected.
    pub fn sets(&self, usual: &[Set]) -> Vec<Set> {
        if self.set.is_empty() { usual.to_vec() } else { self.set.clone() }
    }

    /// Returns the size of the data in bytes, `usual` by default, rounded down to whole pages.
    pub fn bytes(&self, usual: u64) -> u64 {
        self.size.map_or(if self.quick { 32 << 20 } else { usual }, |size| size.0) & !0xFFF
    }

    pub fn slices(&self) -> Slices {
        let (pairs, millis) = if self.quick { (3, 10) } else { (31, 120) };
        Slices {
            pairs: self.pairs.unwrap_or(pairs),
            slice: Duration::from_millis(u64::from(self.slice_ms.unwrap_or(millis))),
        }
    }

    /// Returns the number of repetitions of a long measurement: `--pairs`, or the default for a
    /// full or a quick run.
    pub fn rounds(&self, usual: u32, quick: u32) -> u32 {
        self.pairs.unwrap_or(if self.quick { quick } else { usual })
    }

    /// Returns the output file for the JSON of benchmark `name`.
    pub fn json_file(&self, name: &str) -> PathBuf {
        self.json.clone().unwrap_or_else(|| PathBuf::from(format!("benches/out/{name}.json")))
    }
}
