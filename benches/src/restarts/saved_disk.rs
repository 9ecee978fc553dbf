//! A RAM disk with `keep=yes` whose content a server has saved on shutdown.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use freestone::PAGE_BYTES;
use freestone::device::IoBuf;
use serde_json::{Value, json};

use super::Bench;
use super::control::Control;
use super::home::Home;
use crate::data::Data;
use crate::options::Set;
use crate::programs::server_process::{Server, WaitLimits};
use crate::transport::nbd_client::Client;

/// Default size of the disk, in bytes.
const BYTES: u64 = 2 << 30;
/// Bytes per write request of the fill.
const FILL_BYTES: usize = 1 << 20;
/// Time limits for the last save and for loading, on a slow disk.
const DONE: WaitLimits = WaitLimits { timeout: Duration::from_secs(600), pause: Duration::from_millis(100) };
/// Time limit for loading, with a shorter interval for checks in /proc.
const LOADED: WaitLimits = WaitLimits { timeout: DONE.timeout, pause: Duration::from_millis(5) };
const NAME: &str = "disk";

/// The saved disk. No server is running.
pub struct SavedDisk {
    pub home: Home,
    pub data: Data,
    /// Pages of the disk. All are filled from the data set.
    pub pages: u64,
    /// Duration of the shutdown that saved the whole content.
    pub save_time: Duration,
}

impl SavedDisk {
    /// Fills a disk and ends its server, which saves the content.
    pub fn fill(bench: &Bench<'_>, set: Set) -> Result<Self> {
        let data = Data::open(set, bench.options.bytes(BYTES), bench.options)?;
        let bytes = data.bytes() & !(FILL_BYTES as u64 - 1);
        let home = Home::new(bench)?;
        let disk = format!("{NAME}=ram,disksize={}M,keep=yes", bytes >> 20);
        let (server, _control) = home.start(&home.command_with_state(&[&disk]))?;
        let mut client = Client::connect(&home.nbd_socket())?;
        let mut buffer = IoBuf::zeroed(FILL_BYTES)?;
        for at in (0..bytes).step_by(FILL_BYTES) {
            data.read(at / PAGE_BYTES as u64, &mut buffer)?;
            client.write(at, &buffer)?;
        }
        client.end()?;
        let started = Instant::now();
        server.end(DONE.timeout)?;
        let save_time = started.elapsed();
        Ok(Self { home, data, pages: bytes / PAGE_BYTES as u64, save_time })
    }

    pub fn bytes(&self) -> u64 {
        self.pages * PAGE_BYTES as u64
    }

    /// Starts a server and waits until it has loaded the whole disk.
    pub fn start_loaded(&self, words: &[&str]) -> Result<(Server, Control)> {
        let (mut server, mut control) = self.home.start(&self.home.command_with_state(words))?;
        wait_until_loaded(&mut server, &mut control)?;
        Ok((server, control))
    }

    /// Ends a server, which saves the content.
    pub fn end(server: Server) -> Result<()> {
        server.end(DONE.timeout)
    }

    /// Returns the directory of the disk's content files.
    pub fn content(&self) -> Result<PathBuf> {
        let dirs = files(&self.home.state().join("content"))?;
        ensure!(dirs.len() == 1, "the disk has {} directories of content", dirs.len());
        Ok(dirs[0].clone())
    }

    /// Returns the paths of the full save and of the increments, in order.
    pub fn files(&self) -> Result<(PathBuf, Vec<PathBuf>)> {
        let (whole, increments): (Vec<_>, Vec<_>) = files(&self.content()?)?
            .into_iter()
            .filter(|path| path.extension().is_some())
            .partition(|path| path.extension().is_some_and(|end| end == "whole"));
        Ok((whole.last().context("the disk was not saved")?.clone(), increments))
    }
}

/// Waits until the whole disk is in memory. While the server has a loader thread, this checks /proc
/// only: `stat` costs a server with much memory about 20 ms per call, which would be measured too.
pub fn wait_until_loaded(server: &mut Server, control: &mut Control) -> Result<()> {
    let pid = server.pid();
    server.wait_for(LOADED, &mut || (!has_loader(pid)).then_some(()))?;
    server.wait_for(DONE, &mut || match stat(control) {
        Ok(stat) if stat["keep"]["loaded_percent"].is_null() => Some(check(&stat)),
        Ok(_) => None,
        Err(error) => Some(Err(error)),
    })?
}

fn has_loader(pid: u32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    let mut names = threads.filter_map(|entry| std::fs::read_to_string(entry.ok()?.path().join("comm")).ok());
    names.any(|name| name.trim_end() == "load")
}

/// Returns the reply of the verb `stat` for the disk.
pub fn stat(control: &mut Control) -> Result<Value> {
    control.call("stat", &json!({ "name": NAME }))
}

fn check(stat: &Value) -> Result<()> {
    let keep = &stat["keep"];
    ensure!(keep.is_object() && keep["failed"].is_null(), "the disk is not kept: {keep}");
    Ok(())
}

fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir).with_context(|| format!("{}", dir.display()))?;
    let mut files: Vec<_> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.sort();
    Ok(files)
}
