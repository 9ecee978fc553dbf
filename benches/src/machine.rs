//! The machine: what it is, where a thread runs, what this process takes.

use std::fmt;

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Serialize;

/// What must be known of a machine to compare numbers.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    cpu: String,
    cpus: usize,
    memory_mib: u64,
    kernel: String,
    transparent_hugepage: String,
    /// Other work at the start: the load of one minute.
    load: String,
}

impl Machine {
    /// This machine at this moment.
    pub fn here() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = read("/proc/cpuinfo");
        let field = |text: &str, key: &str| {
            let line = text.lines().find(|line| line.starts_with(key));
            line.and_then(|line| line.split_once(':'))
                .map_or_else(|| "unknown".into(), |(_, v)| v.trim().to_owned())
        };
        let memory = field(&read("/proc/meminfo"), "MemTotal");
        Self {
            cpu: field(&cpuinfo, "model name"),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mib: memory.trim_end_matches(" kB").parse::<u64>().unwrap_or(0) >> 10,
            kernel: read("/proc/sys/kernel/osrelease").trim().into(),
            transparent_hugepage: read("/sys/kernel/mm/transparent_hugepage/enabled").trim().into(),
            load: read("/proc/loadavg").split(' ').next().unwrap_or_default().into(),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cpu, cpus, memory_mib, kernel, transparent_hugepage, load } = self;
        write!(f, "machine: {cpu}, {cpus} CPUs, {memory_mib} MiB, Linux {kernel}, ")?;
        write!(f, "transparent_hugepage {transparent_hugepage}, load {load}")
    }
}

/// CPUs that this process may use, as it was started.
pub fn allowed_cpus() -> Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

/// Keeps the calling thread on one CPU.
pub fn pin_to(cpu: usize) -> Result<()> {
    pin_to_any(&[cpu])
}

/// Keeps the calling thread on some CPUs.
pub fn pin_to_any(cpus: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        set.set(cpu);
    }
    sched_setaffinity(None, &set).with_context(|| format!("pinning to CPUs {cpus:?}"))
}

/// This process's proportional set size in bytes.
pub fn pss_bytes() -> Result<u64> {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").context("/proc/self/smaps_rollup")?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:")).context("no Pss in smaps_rollup")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().context("Pss in smaps_rollup")?;
    Ok(kib << 10)
}
