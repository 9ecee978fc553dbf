//! A control group for processes whose CPU time is not to be that of others.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// Where control groups with the controller `cpu` are: those of version 1, then of version 2.
const ROOTS: [&str; 2] = ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup"];
const PROCS: &str = "cgroup.procs";

/// A new group. It goes when this is dropped; its processes have ended or left then.
pub struct Group(PathBuf);

impl Group {
    /// Beside the groups that are there, with the usual share of the CPUs.
    pub fn new(name: &str) -> Result<Self> {
        let root = ROOTS.iter().map(Path::new).find(|root| root.join(PROCS).exists());
        let root = root.context("no control groups are mounted")?;
        let dir = root.join(format!("freestone-{name}-{}", std::process::id()));
        fs::create_dir(&dir).with_context(|| format!("{}", dir.display()))?;
        let group = Self(dir);
        let has_cpu = ["cpu.shares", "cpu.weight"].iter().any(|file| group.0.join(file).exists());
        anyhow::ensure!(has_cpu, "{}: new groups have no controller for CPUs", root.display());
        Ok(group)
    }

    /// A process is in it from now on, with all its threads.
    pub fn take(&self, pid: u32) -> Result<()> {
        let procs = self.0.join(PROCS);
        fs::write(&procs, pid.to_string()).with_context(|| format!("{}", procs.display()))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Who is still in it goes to where it came from: a group that is not empty stays.
        let parent = self.0.with_file_name(PROCS);
        for pid in fs::read_to_string(self.0.join(PROCS)).unwrap_or_default().lines() {
            let _ = fs::write(&parent, pid);
        }
        let _ = fs::remove_dir(&self.0);
    }
}
