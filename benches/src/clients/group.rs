//! Control group (cgroup) whose processes have a share of the CPUs that other processes cannot use
//! up.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// Mount points of the control group hierarchy with the `cpu` controller: version 1, then version
/// 2.
const ROOTS: [&str; 2] = ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup"];
const PROCS: &str = "cgroup.procs";

/// A new control group. Drop moves the remaining processes to the parent group and removes the
/// group.
pub struct Group(PathBuf);

impl Group {
    /// Creates a group below the root of the hierarchy, with the default share of the CPUs.
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

    /// Moves a process with all its threads into the group.
    pub fn add(&self, pid: u32) -> Result<()> {
        let procs = self.0.join(PROCS);
        fs::write(&procs, pid.to_string()).with_context(|| format!("{}", procs.display()))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A group with processes cannot be removed: move the remaining ones to the parent.
        let parent = self.0.with_file_name(PROCS);
        for pid in fs::read_to_string(self.0.join(PROCS)).unwrap_or_default().lines() {
            let _ = fs::write(&parent, pid);
        }
        let _ = fs::remove_dir(&self.0);
    }
}
