//! Where images, overlays and sockets of a run lie, for as long as it lasts, however it ends.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tempfile::TempDir;

use crate::data::Data;

/// What a shell adds to the number of a signal.
const SIGNALLED: i32 = 128;
/// How long an interrupted run tries to remove its directory.
const REMOVAL: Duration = Duration::from_secs(5);
/// How directories of single servers begin.
const OWN_PREFIX: &str = "server-";

/// The directory of one run. It goes when this is dropped, and when the run is interrupted.
pub struct Place(TempDir);

/// The directory of one server. It goes when this is dropped.
pub struct Own {
    dir: TempDir,
    /// Sockets have short names, and this directory may have a long one.
    open: File,
}

impl Own {
    /// An image of the server.
    pub fn image(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A socket of the server, by a name that is short and that a process of this user can use
    /// while this lives.
    pub fn socket(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("{}{name}", opened(&self.open)))
    }
}

/// Where other processes find what this one has open.
pub fn opened(file: &File) -> String {
    format!("/proc/{}/fd/{}/", std::process::id(), file.as_raw_fd())
}

impl Place {
    /// A new one, whose name begins so.
    pub fn new(data_dir: &Path, prefix: &str) -> Result<Self> {
        let context = || format!("{}", data_dir.display());
        std::fs::create_dir_all(data_dir).with_context(context)?;
        // Servers are told whole paths.
        let data_dir = data_dir.canonicalize().with_context(context)?;
        let dir = tempfile::Builder::new().prefix(prefix).tempdir_in(&data_dir);
        let place = Self(dir.with_context(context)?);
        place.watch()?;
        Ok(place)
    }

    /// Removes the directory and ends this process where it is told to end. The kernel ends its
    /// servers then.
    fn watch(&self) -> Result<()> {
        let dir = self.0.path().to_owned();
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        std::thread::Builder::new().name("interrupted".into()).spawn(move || {
            if let Some(signal) = signals.forever().next() {
                remove(&dir);
                std::process::exit(SIGNALLED + signal);
            }
        })?;
        Ok(())
    }

    /// A file with the first `bytes` of the data.
    pub fn image(&self, data: &Data, bytes: u64) -> Result<PathBuf> {
        let path = self.0.path().join("data.img");
        let context = || format!("{}", path.display());
        let file = File::create(&path).with_context(context)?;
        data.save(&path)?;
        file.set_len(bytes).with_context(context)?;
        Ok(path)
    }

    /// A directory for one server.
    pub fn server(&self) -> Result<Own> {
        let dir = tempfile::Builder::new().prefix(OWN_PREFIX).tempdir_in(self.0.path())?;
        Ok(Own { open: File::open(dir.path())?, dir })
    }

    /// A text without the directories of the run and of one of its servers.
    pub fn shown(&self, text: &str, own: &Own) -> String {
        without(text, self.0.path()).replace(&opened(&own.open), "")
    }
}

/// Removes a directory in which the run and its servers may be making files at this moment: that
/// fails where one comes behind the look into its directory. Nothing can be made in a directory
/// that is gone.
fn remove(dir: &Path) {
    let begun = Instant::now();
    while let Err(error) = std::fs::remove_dir_all(dir) {
        if error.kind() == ErrorKind::NotFound && !dir.exists() {
            return;
        }
        if begun.elapsed() > REMOVAL {
            eprintln!("{} stays: {error}", dir.display());
            return;
        }
    }
}

/// A text without a directory and without those of single servers in it, which have names that say
/// nothing.
fn without(text: &str, dir: &Path) -> String {
    let mut shown = String::new();
    let dir = format!("{}/", dir.display());
    let mut parts = text.split(dir.as_str());
    shown.push_str(parts.next().unwrap_or_default());
    for part in parts {
        let name = if part.starts_with(OWN_PREFIX) { part.find(['/', ' ']).unwrap_or(part.len()) } else { 0 };
        let rest = &part[name..];
        let inside = rest.strip_prefix('/').filter(|_| name > 0);
        shown.push_str(if name > 0 && inside.is_none() { "." } else { "" });
        shown.push_str(inside.unwrap_or(rest));
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_goes_while_files_are_made_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("place");
        for _ in 0..10 {
            std::fs::create_dir(&place).unwrap();
            std::thread::scope(|scope| {
                // Like the run itself: a directory for a server, and a file in it, while anything
                // can be made.
                scope.spawn(|| {
                    for n in 0..1000 {
                        let own = place.join(n.to_string());
                        if std::fs::create_dir(&own).is_err() {
                            break;
                        }
                        let _ = std::fs::write(own.join("overlay"), "");
                    }
                });
                while !place.join("200").exists() {
                    std::thread::yield_now();
                }
                remove(&place);
            });
            assert!(!place.exists());
        }
    }

    #[test]
    fn a_command_is_shown_without_the_places_of_the_run() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::new(dir.path(), "place-").unwrap();
        let own = place.server().unwrap();
        let text = format!(
            "TMPDIR={} x --unix={} {} base={},readonly",
            own.path().display(),
            own.socket("nbd").display(),
            own.image("overlay.qcow2").display(),
            place.0.path().join("data.img").display()
        );
        assert_eq!(place.shown(&text, &own), "TMPDIR=. x --unix=nbd overlay.qcow2 base=data.img,readonly");
        std::fs::write(own.socket("here"), "").unwrap();
        assert!(own.image("here").exists());
        drop(own);
        drop(place);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
