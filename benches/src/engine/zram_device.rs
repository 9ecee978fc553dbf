//! The kernel's zram device: set up for a benchmark and reset afterwards, even if this process is
//! killed.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use freestone::PAGE_BYTES;

/// Bytes per write of the fill: whole pages, in a size that suits the block layer.
pub const FILL_BYTES: usize = 128 << 10;

/// A device set up by this process. The device is reset on drop, and when this process ends in any
/// way.
pub struct ZramDevice {
    sys: PathBuf,
    file: Option<File>,
    guardian: Guardian,
}

/// A child process that resets the device when its standard input ends, that is on request or when
/// this process has ended.
struct Guardian(Child);

/// Script of the guardian: waits for the end of its input. The kernel may close the device later
/// than the pipe, so the reset is retried. Signals of a terminal to the process group are ignored.
const GUARD: &str = r#"trap "" INT TERM HUP;
read -r end
for try in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  echo 1 > "$1/reset" && break
  sleep 0.1
done 2> /dev/null
[ -z "$2" ] || echo "$2" > "$1/comp_algorithm""#;

/// Columns of zram's file `mm_stat`.
#[derive(Debug, Clone, Copy)]
pub struct KernelStat {
    pub orig_data_size: u64,
    pub compr_data_size: u64,
    pub mem_used_total: u64,
    pub same_pages: u64,
}

impl ZramDevice {
    /// Sets up the unused device `name` with `algorithm` and `disksize` bytes. Fails without any
    /// change if the device is absent or in use.
    pub fn claim(name: &str, algorithm: &str, disksize: u64) -> Result<Self> {
        let sys = Path::new("/sys/block").join(name);
        ensure!(sys.exists(), "/dev/{name} does not exist: load the kernel module zram first");
        let initstate =
            fs::read_to_string(sys.join("initstate")).with_context(|| format!("{name}: initstate"))?;
        ensure!(
            initstate.trim() == "0",
            "/dev/{name} is in use: reset it, or choose another device with --zram"
        );
        let algorithms = fs::read_to_string(sys.join("comp_algorithm"))
            .with_context(|| format!("{name}: comp_algorithm"))?;
        let before = algorithms.split(['[', ']']).nth(1).map(ToOwned::to_owned);
        let set = |attribute: &str, value: &str| {
            fs::write(sys.join(attribute), value).with_context(|| {
                format!("{name}: setting {attribute} to {value} (needs root and an unused device)")
            })
        };
        set("comp_algorithm", algorithm)?;
        // Fails if another process has set up the device in between, so drop resets only a device
        // of this process.
        set("disksize", &disksize.to_string())?;
        let guardian = match Guardian::start(&sys, before.as_deref()) {
            Ok(guardian) => guardian,
            Err(error) => {
                let _ = fs::write(sys.join("reset"), "1");
                return Err(error);
            }
        };
        let mut device = Self { sys, file: None, guardian };
        // O_EXCL on a block device prevents mounting it and swapping to it.
        let flags = (rustix::fs::OFlags::DIRECT | rustix::fs::OFlags::EXCL).bits() as i32;
        let path = Path::new("/dev").join(name);
        let open = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path);
        device.file = Some(open.with_context(|| format!("{}", path.display()))?);
        Ok(device)
    }

    /// Returns the open device (`O_DIRECT`).
    pub fn file(&self) -> Result<&File> {
        self.file.as_ref().context("the device is closed")
    }

    /// Writes `pages` pages from the start of the device. `read` fills a buffer with the pages from
    /// a number on.
    pub fn fill(&self, pages: u64, mut read: impl FnMut(u64, &mut [u8]) -> Result<()>) -> Result<()> {
        let mut buffer = freestone::device::IoBuf::zeroed(FILL_BYTES)?;
        let step = FILL_BYTES / PAGE_BYTES;
        for page in (0..pages).step_by(step) {
            let n = (pages - page).min(step as u64) as usize * PAGE_BYTES;
            read(page, &mut buffer[..n])?;
            self.file()?.write_all_at(&buffer[..n], page * PAGE_BYTES as u64)?;
        }
        Ok(())
    }

    pub fn stat(&self) -> Result<KernelStat> {
        let text = fs::read_to_string(self.sys.join("mm_stat")).context("mm_stat")?;
        let columns: Vec<u64> =
            text.split_whitespace().map(str::parse).collect::<Result<_, _>>().context("mm_stat")?;
        let [orig_data_size, compr_data_size, mem_used_total, _, _, same_pages, ..] = columns[..] else {
            bail!("mm_stat has {} columns", columns.len())
        };
        Ok(KernelStat { orig_data_size, compr_data_size, mem_used_total, same_pages })
    }

    pub fn compact(&self) -> Result<()> {
        fs::write(self.sys.join("compact"), "1").context("compact")
    }
}

impl KernelStat {
    /// Returns the memory of pool, slots (16 bytes each) and handles (8 bytes per object) for
    /// `pages` slots, relative to the compressed bytes.
    pub fn overhead(&self, pages: u64) -> f64 {
        self.memory(pages) as f64 / self.compr_data_size as f64
    }

    /// Returns the bytes of memory for `pages` slots: pool, slots and handles.
    pub fn memory(&self, pages: u64) -> u64 {
        let objects = (self.orig_data_size / PAGE_BYTES as u64).saturating_sub(self.same_pages);
        self.mem_used_total + 16 * pages + 8 * objects
    }
}

impl Guardian {
    fn start(sys: &Path, algorithm_before: Option<&str>) -> Result<Self> {
        let mut command = Command::new("sh");
        command.args(["-c", GUARD, "sh"]).arg(sys).arg(algorithm_before.unwrap_or_default());
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self(command.spawn().context("cannot start sh, which resets the device after an interrupt")?))
    }

    /// Makes the guardian reset the device, which no process may have open.
    fn reset_device(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

impl Drop for ZramDevice {
    fn drop(&mut self) {
        self.file = None;
        self.guardian.reset_device();
        if !fs::read_to_string(self.sys.join("initstate")).is_ok_and(|state| state.trim() == "0") {
            eprintln!("cannot reset {}", self.sys.display());
        }
    }
}
