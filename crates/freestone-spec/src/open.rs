//! Opens devices in this process from the same specifications as `freestone serve`.

use std::env;
use std::fmt;
use std::sync::Arc;

use freestone::device::Device;
use thiserror::Error;

use crate::entries::Entries;
use crate::kinds::registry::Registry;
use crate::kinds::{Spec, build};
use crate::refusal::{Errno, Refusal, one_line};

/// Error from opening a device: one sentence for the user, the same as `freestone serve` prints.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{sentence}")]
pub struct OpenError {
    /// Linux errno. `EINVAL` if the specification is invalid.
    pub errno: i32,
    /// Message that names the device, the key and the allowed values.
    pub sentence: String,
}

/// Devices opened in this process. Dropping this completes requests that a fault layer holds. Files
/// of the devices (zone state, recorded log) are complete when the last clone of each device is
/// dropped, too.
#[derive(Default)]
pub struct Devices {
    registry: Registry,
}

/// Device, together with the devices on which it depends. Dropping it has the same effects as
/// dropping [`Devices`].
pub struct OpenedDevice {
    device: Arc<dyn Device>,
    name: String,
    devices: Devices,
}

impl Devices {
    /// Opens devices in order, like `freestone serve DEVICE...`, but without serving them. Each of
    /// `words` is a specification `NAME=KIND[,key=value]...`. Relative paths start at the working
    /// directory.
    ///
    /// # Errors
    /// Fails if a specification is invalid or a device cannot be opened. The other devices are
    /// closed then.
    pub fn open(words: &[String]) -> Result<Self, OpenError> {
        let here = env::current_dir()
            .map_err(|e| usage_error(format!("the working directory cannot be found: {e}")))?;
        let mut specs = Vec::new();
        for word in words {
            let entries = Entries::parse_with_warnings(word).map_err(|e| usage_error(e.to_string()))?;
            specs.push(Spec::from_entries(entries.with_base(&here)).map_err(|e| usage_error(e.to_string()))?);
        }
        let devices = Self::default();
        build_all(specs, &devices.registry).map_err(|refusal| open_error(&refusal))?;
        Ok(devices)
    }

    /// Returns the registry, which contains the devices by name.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }
}

/// Opens devices like `freestone serve DEVICE...`, but without serving them, and returns the last
/// one. `words` is one or more specifications `NAME=KIND[,key=value]...`, separated by blanks and
/// quoted as in a shell. The last device may depend on the others. Relative paths start at the
/// working directory.
///
/// # Errors
/// Fails if a specification is invalid or a device cannot be opened. The other devices are closed
/// then.
pub fn open_device(words: &str) -> Result<OpenedDevice, OpenError> {
    let Some(words) = shlex::split(words) else {
        return Err(usage_error(format!("{words}: a quote is not closed")));
    };
    let devices = Devices::open(&words)?;
    let last = devices.registry.all().pop().ok_or_else(|| {
        usage_error(
            "no device; a device is NAME=KIND[,key=value]..., for example ram0=ram,disksize=4G".into(),
        )
    })?;
    let name = last.name().to_owned();
    match last.device() {
        Some(device) => Ok(OpenedDevice { device: Arc::clone(device), name, devices }),
        None => {
            Err(usage_error(format!("{name}: a template is a fork for each connection; open a fork instead")))
        }
    }
}

fn usage_error(sentence: String) -> OpenError {
    OpenError { errno: libc::EINVAL, sentence }
}

/// Builds devices in order, and starts the merges that their specifications request.
fn build_all(specs: Vec<Spec>, registry: &Registry) -> Result<(), Refusal> {
    for spec in specs {
        registry.check_free(&spec.name).map_err(|why| why.of(&spec.name))?;
        let entry = Arc::new(build(spec, registry)?);
        registry.add(&entry).map_err(|why| why.of(entry.name()))?;
    }
    for entry in registry.all() {
        entry.kind.begin_merge(&entry, registry)?;
        entry.check_no_unfinished_merge()?;
    }
    Ok(())
}

fn open_error(refusal: &Refusal) -> OpenError {
    OpenError { errno: errno_number(refusal.errno), sentence: one_line(refusal.sentence.clone()) }
}

const fn errno_number(errno: Errno) -> i32 {
    match errno {
        Errno::EINVAL => libc::EINVAL,
        Errno::ENODEV => libc::ENODEV,
        Errno::EEXIST => libc::EEXIST,
        Errno::EBUSY => libc::EBUSY,
        Errno::EOPNOTSUPP => libc::EOPNOTSUPP,
        Errno::EROFS => libc::EROFS,
        Errno::EIO => libc::EIO,
        Errno::ETIMEDOUT => libc::ETIMEDOUT,
        Errno::EADDRNOTAVAIL => libc::EADDRNOTAVAIL,
        Errno::ENOSPC => libc::ENOSPC,
        Errno::ERANGE => libc::ERANGE,
        Errno::ENOMEM => libc::ENOMEM,
        Errno::ETOOMANYREFS => libc::ETOOMANYREFS,
        Errno::EOVERFLOW => libc::EOVERFLOW,
        Errno::ECANCELED => libc::ECANCELED,
        Errno::ECONNREFUSED => libc::ECONNREFUSED,
        Errno::EPERM => libc::EPERM,
    }
}

impl OpenedDevice {
    /// Returns the opened device, with its layers.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Returns the name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns a message for each device whose seed of fault rules was chosen at random. With the
    /// seed a run can be repeated.
    pub fn seeds(&self) -> Vec<String> {
        self.devices.registry.seeds()
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        for entry in self.registry.all() {
            // Requests held by a fault layer keep devices alive, and devices flush only when they
            // are dropped.
            if let Some(faults) = &entry.layers.faults {
                faults.close();
            }
        }
    }
}

impl fmt::Debug for OpenedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenedDevice").field("name", &self.name).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use freestone::device::{Blocking as _, Completion, Error, Flags, IoBuf, Request};

    use super::open_device;

    fn sentence(words: &str) -> (i32, String) {
        let error = open_device(words).unwrap_err();
        (error.errno, error.sentence)
    }

    #[test]
    fn open_device_returns_the_last_device() {
        let opened =
            open_device("r=ram,disksize=1M,mem_limit=8M  s=snapshot,origin=r 'f=fork,base=s,size=2M'")
                .unwrap();
        assert_eq!((opened.name(), opened.device().geometry().size), ("f", 2 << 20));
        opened.device().write_at(4096, &[7; 4096], Flags::empty()).unwrap();
        let mut back = [0; 8192];
        opened.device().read_at(0, &mut back).unwrap();
        assert!(back[..4096].iter().all(|&b| b == 0) && back[4096..].iter().all(|&b| b == 7));
        assert!(opened.seeds().is_empty());
    }

    #[test]
    fn open_error_has_errno_and_message() {
        for (words, errno, said) in [
            ("", libc::EINVAL, "no device; a device is NAME=KIND"),
            ("'r=ram", libc::EINVAL, "'r=ram: a quote is not closed"),
            ("r=rom,disksize=1M", libc::EINVAL, "r: unknown kind \"rom\"; ram?"),
            ("r=ram,disksize=1", libc::EINVAL, "r: disksize=1"),
            ("n=null,size=1M n=null,size=1M", libc::EEXIST, "n: a device of that name exists"),
            ("f=fork,base=b", libc::ENODEV, "f: base=b: there is no such device (yet)"),
            ("f=file,path=/nowhere/at/all", libc::EIO, "f: /nowhere/at/all"),
            (
                "r=ram,disksize=1M s=snapshot,origin=r t=template,base=s",
                libc::EINVAL,
                "t: a template is a fork for each connection",
            ),
        ] {
            let (number, sentence) = sentence(words);
            assert!(sentence.starts_with(said), "{words}: {sentence}");
            assert_eq!(number, errno, "{words}: {sentence}");
        }
    }

    #[test]
    fn drop_saves_zone_state() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk").display().to_string();
        let words = format!("d=file,path={path},size=8M,zoned=1,zone_size=1M");
        let opened = open_device(&words).unwrap();
        opened.device().write_at(1 << 20, &[3; 8192], Flags::empty()).unwrap();
        let misplaced = opened.device().write_at(1 << 20, &[3; 4096], Flags::empty());
        assert_eq!(misplaced, Err(Error::ZoneWritePointer));
        drop(opened);
        // The write pointer was saved, so the next write starts at the end of the first one.
        let opened = open_device(&words).unwrap();
        opened.device().write_at((1 << 20) + 8192, &[4; 4096], Flags::empty()).unwrap();
    }

    #[test]
    fn drop_completes_hanging_requests() {
        let opened = open_device("'n=null,size=1M,faults=read hang,seed=1'").unwrap();
        let (sender, receiver) = mpsc::channel();
        let buffer = IoBuf::zeroed(4096).unwrap();
        let done = Completion::new(move |outcome, _| sender.send(outcome).unwrap());
        opened.device().submit(Request::read(0, 4096), buffer, done);
        assert!(receiver.try_recv().is_err());
        drop(opened);
        assert!(receiver.recv().unwrap().is_err());
    }
}
