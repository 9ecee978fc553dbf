//! `umount NAME|DIR|PATTERN...`: undoes mounts, whatever their state.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use freestone_server::verbs::text::pattern::Pattern;
use freestone_spec::refusal::Errno;
use serde::Serialize;

use super::record::{LockedRecord, Record, Records};
use super::server::{ServerState, has_errno};
use super::show::print_json;
use super::unmounting::{Liveness, finish, unmount};
use super::{check_root, control, via};
use crate::client::Common;
use crate::error;

/// The help below the options.
pub const EXAMPLES: &str = "\
Examples:
  freestone umount job-7
  freestone umount /mnt/job
  freestone umount 'job-*'
  freestone umount job-7 --force      also if the server is dead or hangs; what was not written is lost

Works after a kill of the server or of `freestone mount`, and after the file system was unmounted by hand. Without
--control, a name or pattern means the mounts of all servers.";

/// The command line.
#[derive(Debug, Args)]
pub struct Line {
    /// Devices by name or pattern (* matches any characters, ? one), or directories
    #[arg(required = true, value_name = "NAME|DIR|PATTERN")]
    words: Vec<String>,
    /// If the server is dead or hangs: unmount lazily, and lose unwritten data
    #[arg(long)]
    force: bool,
}

#[derive(Serialize)]
struct Unmounted {
    mounts: Vec<Record>,
}

/// Runs the verb `umount`. If one mount cannot be undone, continues with the others.
pub fn ask(line: &Line, common: &Common) -> Result<ExitCode> {
    check_root("umount")?;
    let records = Records::locate();
    let control = common.control.as_ref().map(|_| control(common)).transpose()?;
    let all: Vec<_> = records.all()?.into_iter().filter(|record| is_of(record, control.as_deref())).collect();
    let (mut failed, mut done) = (false, Unmounted { mounts: Vec::new() });
    let mut targets: Vec<&Record> = Vec::new();
    for word in &line.words {
        match find(word, &all) {
            Ok(found) => targets.extend(found),
            Err(error) => {
                failed = true;
                error::print_error(&error);
            }
        }
    }
    let mut dirs: Vec<&Path> = Vec::new();
    for target in targets {
        if dirs.contains(&target.dir.as_path()) {
            continue;
        }
        dirs.push(&target.dir);
        let locked = records.lock(|record| record.dir == target.dir && record.name == target.name);
        // `None`: another command has just undone the mount.
        let released = locked.and_then(|locked| locked.map_or(Ok(()), |locked| release(locked, line.force)));
        match released {
            Ok(()) => done.mounts.push(target.clone()),
            Err(error) => {
                failed = true;
                error::print_error(&error);
            }
        }
    }
    if common.json {
        print_json(&done)?;
    }
    Ok(if failed { ExitCode::from(error::STATUS_FAILURE) } else { ExitCode::SUCCESS })
}

fn is_of(record: &Record, control: Option<&Path>) -> bool {
    control.is_none_or(|control| record.control == control)
}

/// Returns the mounts that a word selects: the name of a device, a pattern of names, or a directory.
fn find<'a>(word: &str, all: &'a [Record]) -> Result<Vec<&'a Record>> {
    let pattern = Pattern::new(word);
    let by_name: Vec<_> = all.iter().filter(|record| record.name == word).collect();
    let found = match by_name.len() {
        0 if Pattern::is_pattern(word) => all.iter().filter(|record| pattern.matches(&record.name)).collect(),
        0 => {
            // The path is compared unresolved first: the directory may be gone, or access to it may hang.
            let dir = std::path::absolute(word).unwrap_or_else(|_| PathBuf::from(word));
            let is_dir = |record: &&Record| record.dir == dir;
            let exact: Vec<_> = all.iter().filter(is_dir).collect();
            if exact.is_empty() {
                let dir = fs::canonicalize(&dir).unwrap_or(dir);
                all.iter().filter(|record| record.dir == dir).collect()
            } else {
                exact
            }
        }
        1 => by_name,
        _ => {
            let places: Vec<_> = by_name.iter().map(|record| record.dir.display().to_string()).collect();
            let places = places.join(", ");
            bail!(rpc_error!(
                EINVAL,
                "{word}: umount: mounts of several servers: say --control, or one of {places}"
            ));
        }
    };
    if found.is_empty() {
        bail!(rpc_error!(
            ENODEV,
            "{word}: umount: no such mount; `freestone mount` lists those that there are"
        ));
    }
    Ok(found)
}

/// Undoes a mount and removes its record. Skips steps that are undone already.
pub fn release(locked: LockedRecord, force: bool) -> Result<()> {
    let name = locked.record.name.clone();
    let state = ServerState::of(&locked.record.control, &name);
    let liveness = Liveness::of(&locked.record, &state);
    let lazy = unmount(&locked, liveness, force)?;
    via::detach(&locked, force && liveness != Liveness::Responds)?;
    finish(&locked, lazy)?;
    if let ServerState::Responds(mut server) = state
        && let Some(at) = via::published(&locked, &server)
    {
        match server.unpublish(&name, &at) {
            // Another client unpublished or removed the device.
            Err(error) if has_errno(&error, Errno::ENODEV) || has_errno(&error, Errno::EINVAL) => {}
            answer => answer?,
        }
    }
    locked.remove()
}
