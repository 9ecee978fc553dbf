//! The kernel's zram, for as long as a benchmark needs it.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use freestone::PAGE_BYTES;

/// Bytes of a write of the fill: whole pages, as the block layer likes them.
pub const FILL_BYTES: usize = 128 << 10;

/// A device that was set up here. Dropping it resets it; so does the end of this process, however
/// it comes.
pub struct ZramDevice {
    sys: PathBuf,
    file: Option<File>,
    guardian: Guardian,
}

/// A process that resets the device when it is told to, or when this one has ended.
struct Guardian(Child);

/// Reads until the pipe from us ends. The kernel may close the device later than the pipe, so it
/// tries for a while. What a terminal sends to all of its processes is not meant for it.
const GUARD: &str = r#"trap "" INT TERM HUP;
read -r end
for try in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  echo 1 > "$1/reset" && break
  sleep 0.1
done 2> /dev/null
[ -z "$2" ] || echo "$2" > "$1/comp_algorithm""#;

/// Columns of `mm_stat`.
#[derive(Debug, Clone, Copy)]
pub struct KernelStat {
    pub orig_data_size: u64,
    pub compr_data_size: u64,
    pub mem_used_total: u64,
    pub same_pages: u64,
}

impl ZramDevice {
    /// Sets up the unused device `name` with `algorithm` and `disksize` bytes. Fails, and changes
    /// nothing, where it is absent or in use.
    pub fn claim(name: &str, algorithm: &str, disksize: u64) -> Result<Self> {
        let sys = Path::new("/sys/block").join(name);
        ensure!(sys.exists(), "there is no /dev/{name}: load the kernel's module zram first");
        let initstate =
            fs::read_to_string(sys.join("initstate")).with_context(|| format!("{name}: initstate"))?;
        ensure!(initstate.trim() == "0", "/dev/{name} is in use: reset it, or name another one with --zram");
        let algorithms = fs::read_to_string(sys.join("comp_algorithm"))
            .with_context(|| format!("{name}: comp_algorithm"))?;
        let before = algorithms.split(['[', ']']).nth(1).map(ToOwned::to_owned);
        let set = |attribute: &str, value: &str| {
            fs::write(sys.join(attribute), value).with_context(|| {
                format!("{name}: setting {attribute} to {value} (it needs root and an unused device)")
            })
        };
        set("comp_algorithm", algorithm)?;
        // Fails where somebody else was faster, so what is reset on drop is ours.
        set("disksize", &disksize.to_string())?;
        let guardian = match Guardian::start(&sys, before.as_deref()) {
            Ok(guardian) => guardian,
            Err(error) => {
                let _ = fs::write(sys.join("reset"), "1");
                return Err(error);
            }
        };
        let mut device = Self { sys, file: None, guardian };
        // O_EXCL on a block device: nobody may mount it or swap to it meanwhile.
        let flags = (rustix::fs::OFlags::DIRECT | rustix::fs::OFlags::EXCL).bits() as i32;
        let path = Path::new("/dev").join(name);
        let open = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path);
        device.file = Some(open.with_context(|| format!("{}", path.display()))?);
        Ok(device)
    }

    /// The open device, `O_DIRECT`.
    pub fn file(&self) -> Result<&File> {
        self.file.as_ref().context("the device is closed")
    }

    /// Writes pages from the device's beginning on; `read` fills a buffer with those from a number
    /// on.
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

    /// The device's memory statistics.
    pub fn stat(&self) -> Result<KernelStat> {
        let text = fs::read_to_string(self.sys.join("mm_stat")).context("mm_stat")?;
        let columns: Vec<u64> =
            text.split_whitespace().map(str::parse).collect::<Result<_, _>>().context("mm_stat")?;
        let [orig_data_size, compr_data_size, mem_used_total, _, _, same_pages, ..] = columns[..] else {
            bail!("mm_stat has {} columns", columns.len())
        };
        Ok(KernelStat { orig_data_size, compr_data_size, mem_used_total, same_pages })
    }

    /// Packs its pool.
    pub fn compact(&self) -> Result<()> {
        fs::write(self.sys.join("compact"), "1").context("compact")
    }
}

impl KernelStat {
    /// Pool, slots (16 bytes each) and handles (8 bytes an object) over compressed bytes, for
    /// `pages` slots.
    pub fn overhead(&self, pages: u64) -> f64 {
        self.memory(pages) as f64 / self.compr_data_size as f64
    }

    /// Bytes of memory for `pages` slots: pool, slots and handles.
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
        Ok(Self(command.spawn().context("sh, which resets the device if this is interrupted")?))
    }

    /// Has it reset the device, which nobody has open any more.
    fn act(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

impl Drop for ZramDevice {
    fn drop(&mut self) {
        self.file = None;
        self.guardian.act();
        if !fs::read_to_string(self.sys.join("initstate")).is_ok_and(|state| state.trim() == "0") {
            eprintln!("{} could not be reset", self.sys.display());
        }
    }
}
