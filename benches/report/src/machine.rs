//! Description of the machine of a run.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Properties of a machine that affect measured numbers.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Machine {
    pub cpu: String,
    /// Number of CPUs that this process may use.
    pub cpus: usize,
    pub memory_mib: u64,
    pub kernel: String,
    /// Content of `transparent_hugepage/enabled`: the setting in effect is in brackets.
    pub transparent_hugepage: String,
    /// Load average of one minute at the start of the run, caused by other work.
    pub load: String,
}

impl Machine {
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
