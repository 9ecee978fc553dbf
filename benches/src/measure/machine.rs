//! CPU affinity of threads, and memory of this process.

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

pub fn allowed_cpus() -> Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

pub fn pin_to(cpu: usize) -> Result<()> {
    pin_to_any(&[cpu])
}

/// Restricts the calling thread to the given CPUs.
pub fn pin_to_any(cpus: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        set.set(cpu);
    }
    sched_setaffinity(None, &set).with_context(|| format!("pinning to CPUs {cpus:?}"))
}

/// Returns the proportional set size of this process in bytes.
pub fn pss_bytes() -> Result<u64> {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").context("/proc/self/smaps_rollup")?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:")).context("no Pss in smaps_rollup")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().context("Pss in smaps_rollup")?;
    Ok(kib << 10)
}
