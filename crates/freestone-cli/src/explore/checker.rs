//! The check of the command line: runs `sh -c CMD` for each state.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use freestone::device::Device;
use freestone_explore::{Check, ExploreError, State, Verdict};

use super::command::{self, CommandEnd};
use super::disks::Disks;
use super::mounted::FileSystem;
use super::progress::Observer;

/// The check with its disks.
pub struct Checker<'a> {
    pub text: &'a str,
    pub timeout: Duration,
    /// Type of the file system that is mounted.
    pub fs: Option<&'a str>,
    pub disks: &'a Disks,
    pub observer: &'a Observer,
}

impl Checker<'_> {
    fn run(&self, worker: usize, state: &State, disk: Arc<dyn Device>) -> Result<Option<Verdict>> {
        let started = Instant::now();
        self.disks.switch(worker, disk)?;
        let mounted = match &self.disks.mounts {
            None => None,
            // A file system that cannot be mounted is a failure of the state.
            Some(mounts) => match mounts.mount(worker, FileSystem(self.fs)) {
                Ok(mounted) => Some(mounted),
                Err(error) => {
                    let (end, output) =
                        ("the file system cannot be mounted".to_owned(), format!("{error:#}\n"));
                    return Ok(Some(Verdict { passed: false, end, output, time: started.elapsed() }));
                }
            },
        };
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(self.text);
        let uri = self.disks.uri(worker);
        shell.env("uri", uri).env("nbd", uri).env("unixsocket", self.disks.socket());
        shell.env("state", state.id().to_string()).env("entry", state.point().to_string());
        shell.env("mark", state.mark().unwrap_or_default());
        for (variable, path) in
            [("file", self.disks.file(worker)), ("dir", mounted.as_ref().map(|m| m.dir.clone()))]
        {
            match path {
                Some(path) => shell.env(variable, path),
                None => shell.env_remove(variable),
            };
        }
        let (end, output) =
            command::run(&mut shell, self.timeout, &|| self.observer.is_interrupted()).context("--check")?;
        if let Some(mounted) = mounted {
            mounted.unmount().context("--check: the disk stays in use after the check")?;
        }
        let time = started.elapsed();
        Ok(match end {
            CommandEnd::Stopped => None,
            CommandEnd::Exited(status) => {
                Some(Verdict { passed: status.success(), end: command::describe(status), output, time })
            }
            CommandEnd::TimedOut => {
                let end = format!("timed out after {} s", self.timeout.as_secs_f64());
                Some(Verdict { passed: false, end, output, time })
            }
        })
    }
}

impl Check for Checker<'_> {
    fn check(
        &self,
        worker: usize,
        state: &State,
        disk: Arc<dyn Device>,
    ) -> freestone_explore::Result<Option<Verdict>> {
        self.run(worker, state, disk).map_err(|error| ExploreError::Check(format!("{error:#}")))
    }
}
