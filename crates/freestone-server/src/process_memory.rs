//! Memory use of this process.

use std::fs;

use anyhow::{Context as _, Result};
use freestone_spec::machine::kib_line;
use serde::{Deserialize, Serialize};

/// Memory of this process as counted by the kernel, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMemory {
    /// Resident set size (RSS).
    pub rss_bytes: u64,
    /// Proportional set size (PSS): each shared page is divided by the number of processes that map it.
    pub pss_bytes: u64,
}

/// Reads the memory use from `/proc/self/smaps_rollup`.
pub fn process_memory() -> Result<ProcessMemory> {
    let text =
        fs::read_to_string("/proc/self/smaps_rollup").context("cannot read /proc/self/smaps_rollup")?;
    let line = |key| kib_line(&text, key).with_context(|| format!("/proc/self/smaps_rollup has no {key}"));
    Ok(ProcessMemory { rss_bytes: line("Rss:")?, pss_bytes: line("Pss:")? })
}

#[cfg(test)]
mod tests {
    use super::process_memory;

    #[test]
    fn process_memory_is_plausible() {
        let process = process_memory().unwrap();
        assert!(process.pss_bytes > 0 && process.rss_bytes >= process.pss_bytes);
    }
}
