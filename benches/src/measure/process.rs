//! Resource usage of this process: CPU time, bytes written to disks, the busiest thread.
#![expect(unsafe_code)]
// UNSAFETY: rustix has no getrusage, so the C function is called.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::ops::Sub;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::param::clock_ticks_per_second;

/// CPU time of all threads of this process, including ended ones and kernel threads that work for
/// an `io_uring` of the process.
#[derive(Debug, Clone, Copy)]
pub struct Cpu {
    pub user: Duration,
    pub system: Duration,
}

impl Cpu {
    /// Returns the CPU time of this process so far.
    pub fn now() -> Result<Self> {
        Self::of(libc::RUSAGE_SELF)
    }

    /// Returns the CPU time of all children that have ended.
    pub fn of_ended_children() -> Result<Self> {
        Self::of(libc::RUSAGE_CHILDREN)
    }

    fn of(whom: libc::c_int) -> Result<Self> {
        let mut usage = MaybeUninit::<libc::rusage>::uninit();
        // SAFETY: the pointer is to a whole `rusage`, which the call fills.
        let status = unsafe { libc::getrusage(whom, usage.as_mut_ptr()) };
        ensure!(status == 0, "getrusage: {}", std::io::Error::last_os_error());
        // SAFETY: the call succeeded, so it was filled.
        let usage = unsafe { usage.assume_init() };
        let span = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
        Ok(Self { user: span(usage.ru_utime), system: span(usage.ru_stime) })
    }

    pub fn total(self) -> Duration {
        self.user + self.system
    }
}

impl Sub for Cpu {
    type Output = Self;
    fn sub(self, earlier: Self) -> Self {
        Self {
            user: self.user.saturating_sub(earlier.user),
            system: self.system.saturating_sub(earlier.system),
        }
    }
}

/// Resource usage of this process at one moment, to compare with a later one.
pub struct UsageMeter {
    started: Instant,
    cpu: Cpu,
    threads: HashMap<u32, Thread>,
    disk_bytes: u64,
}

struct Thread {
    name: String,
    cpu: Duration,
}

/// Resource usage of this process between two moments.
#[derive(Debug, Clone)]
pub struct ResourceUsage {
    pub wall: Duration,
    pub cpu: Cpu,
    /// CPU time of the busiest thread, relative to `wall`. The resolution is one tick of the
    /// kernel, usually 10 ms.
    pub busiest: f64,
    pub busiest_name: String,
    /// Bytes that the process wrote to disks (`write_bytes` of /proc/self/io).
    pub disk_bytes: u64,
}

impl UsageMeter {
    pub fn start() -> Result<Self> {
        Ok(Self { disk_bytes: disk_bytes()?, threads: threads()?, cpu: Cpu::now()?, started: Instant::now() })
    }

    /// Ends the measurement and returns the usage since its start.
    pub fn stop(self) -> Result<ResourceUsage> {
        let wall = self.started.elapsed();
        let cpu = Cpu::now()? - self.cpu;
        let mut busiest = (Duration::ZERO, String::new());
        for (id, thread) in threads()? {
            let before = self.threads.get(&id).map_or(Duration::ZERO, |thread| thread.cpu);
            let spent = thread.cpu.saturating_sub(before);
            if spent >= busiest.0 {
                busiest = (spent, thread.name);
            }
        }
        Ok(ResourceUsage {
            wall,
            cpu,
            busiest: busiest.0.as_secs_f64() / wall.as_secs_f64(),
            busiest_name: busiest.1,
            disk_bytes: disk_bytes()?.saturating_sub(self.disk_bytes),
        })
    }
}

/// Returns all threads of this process by thread id.
fn threads() -> Result<HashMap<u32, Thread>> {
    let mut all = HashMap::new();
    for entry in std::fs::read_dir("/proc/self/task").context("/proc/self/task")? {
        let entry = entry?;
        // The thread may have ended since the listing.
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        let id = entry.file_name().to_string_lossy().parse().context("/proc/self/task")?;
        all.insert(id, thread(&stat).context("/proc/self/task/*/stat")?);
    }
    Ok(all)
}

/// Parses `id (name) state ...`. The name may contain any character; user and system ticks are the
/// 12th and 13th word after the name.
fn thread(stat: &str) -> Option<Thread> {
    let (front, back) = stat.rsplit_once(')')?;
    let mut words = back.split_ascii_whitespace().skip(11);
    let mut ticks = || words.next()?.parse::<u64>().ok();
    let cpu = Duration::from_secs_f64((ticks()? + ticks()?) as f64 / clock_ticks_per_second() as f64);
    Some(Thread { name: front.split_once('(')?.1.to_owned(), cpu })
}

/// Returns the CPU time of all threads of another process so far. The resolution is one tick of the
/// kernel, usually 10 ms.
pub fn cpu_of(pid: u32) -> Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    Ok(thread(&stat).context(path)?.cpu)
}

fn disk_bytes() -> Result<u64> {
    let io = std::fs::read_to_string("/proc/self/io").context("/proc/self/io")?;
    let line = io.lines().find_map(|line| line.strip_prefix("write_bytes:"));
    line.and_then(|number| number.trim().parse().ok()).context("no write_bytes in /proc/self/io")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::thread_clock;

    #[test]
    fn thread_stat_with_parenthesis_in_name_is_parsed() {
        let line =
            "77 (a b) c) S 1 77 77 0 -1 4194304 9 0 0 0 250 50 0 0 20 0 1 0 100 1 1 18446744073709551615";
        let thread = thread(line).unwrap();
        assert_eq!(thread.name, "a b) c");
        assert_eq!(thread.cpu, Duration::from_secs_f64(300.0 / clock_ticks_per_second() as f64));
        assert!(crate::measure::process::thread("77 (x) S 1 2").is_none());
    }

    #[test]
    fn busy_thread_is_found() {
        let watch = UsageMeter::start().unwrap();
        // Use the thread's clock: on a busy machine, the thread uses less CPU time than wall time.
        let started = thread_clock();
        while thread_clock().saturating_sub(started) < Duration::from_millis(100) {
            std::hint::black_box(0);
        }
        let spent = watch.stop().unwrap();
        assert!(spent.cpu.total() >= Duration::from_millis(80), "{spent:?}");
        assert!(spent.busiest > 0.0 && !spent.busiest_name.is_empty(), "{spent:?}");
    }
}
