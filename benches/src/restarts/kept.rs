//! A RAM disk with `keep=yes` that a server has saved at its end.

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
use crate::nbd_client::Client;
use crate::options::Set;
use crate::served::{Patience, Server};

/// The size of the disk where `--size` does not say.
const BYTES: u64 = 2 << 30;
/// What is written by one request.
const FILL_BYTES: usize = 1 << 20;
/// The last save, and loading, on a slow disk.
const DONE: Patience = Patience { most: Duration::from_secs(600), pause: Duration::from_millis(100) };
/// The same for what is looked for in /proc.
const LOADED: Patience = Patience { most: DONE.most, pause: Duration::from_millis(5) };
/// The name of the disk.
const NAME: &str = "disk";

/// The disk, saved; no server runs.
pub struct Kept {
    pub home: Home,
    pub data: Data,
    /// Pages of the disk: all are of the data.
    pub pages: u64,
    /// How long the end of the server took that has saved all of it.
    pub saving: Duration,
}

impl Kept {
    /// Fills a disk, and ends its server.
    pub fn fill(bench: &Bench<'_>, set: Set) -> Result<Self> {
        let data = Data::open(set, bench.options.bytes(BYTES), bench.options)?;
        let bytes = data.bytes() & !(FILL_BYTES as u64 - 1);
        let home = Home::new(bench)?;
        let disk = format!("{NAME}=ram,disksize={}M,keep=yes", bytes >> 20);
        let (server, _control) = home.start(&home.stateful(&[&disk]))?;
        let mut client = Client::connect(&home.nbd())?;
        let mut buffer = IoBuf::zeroed(FILL_BYTES)?;
        for at in (0..bytes).step_by(FILL_BYTES) {
            data.read(at / PAGE_BYTES as u64, &mut buffer)?;
            client.write(at, &buffer)?;
        }
        client.end()?;
        let begun = Instant::now();
        server.end(DONE.most)?;
        let saving = begun.elapsed();
        Ok(Self { home, data, pages: bytes / PAGE_BYTES as u64, saving })
    }

    /// Bytes of the disk.
    pub fn bytes(&self) -> u64 {
        self.pages * PAGE_BYTES as u64
    }

    /// A server that has all of the disk in memory.
    pub fn loaded(&self, words: &[&str]) -> Result<(Server, Control)> {
        let (mut server, mut control) = self.home.start(&self.home.stateful(words))?;
        wait_until_loaded(&mut server, &mut control)?;
        Ok((server, control))
    }

    /// Has a server save what it holds, and end.
    pub fn end(server: Server) -> Result<()> {
        server.end(DONE.most)
    }

    /// The directory of the disk's files.
    pub fn content(&self) -> Result<PathBuf> {
        let dirs = files(&self.home.state().join("content"))?;
        ensure!(dirs.len() == 1, "the disk has {} directories of content", dirs.len());
        Ok(dirs[0].clone())
    }

    /// The file with all of it, and the increments in their order.
    pub fn files(&self) -> Result<(PathBuf, Vec<PathBuf>)> {
        let (whole, increments): (Vec<_>, Vec<_>) = files(&self.content()?)?
            .into_iter()
            .filter(|path| path.extension().is_some())
            .partition(|path| path.extension().is_some_and(|end| end == "whole"));
        Ok((whole.last().context("the disk was not saved")?.clone(), increments))
    }
}

/// Waits until all of a disk is in memory. While the server has a thread that loads, nobody asks for
/// `stat`: that costs a server with much memory some 20 ms each time, which would be measured as well.
pub fn wait_until_loaded(server: &mut Server, control: &mut Control) -> Result<()> {
    let pid = server.pid();
    server.wait_for(LOADED, &mut || (!has_loader(pid)).then_some(()))?;
    server.wait_for(DONE, &mut || match stat(control) {
        Ok(stat) if stat["keep"]["loaded_percent"].is_null() => Some(check(&stat)),
        Ok(_) => None,
        Err(error) => Some(Err(error)),
    })?
}

/// Whether a server has a thread that loads.
fn has_loader(pid: u32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    let mut names = threads.filter_map(|entry| std::fs::read_to_string(entry.ok()?.path().join("comm")).ok());
    names.any(|name| name.trim_end() == "load")
}

/// `stat` of the disk.
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
