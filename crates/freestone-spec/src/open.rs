//! A device from the words that `freestone serve` takes, for who drives it in this process.

use std::env;
use std::fmt;
use std::sync::Arc;

use freestone::device::Device;
use thiserror::Error;

use crate::entries::Entries;
use crate::kinds::registry::Registry;
use crate::kinds::{Spec, build};
use crate::refusal::{Errno, Refusal, one_line};

/// Why there is no device: one sentence for the user, as `freestone serve` prints it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{sentence}")]
pub struct OpenError {
    /// The Linux errno that fits best; `EINVAL` for words that cannot be meant.
    pub errno: i32,
    /// Names the device, the key and what is allowed.
    pub sentence: String,
}

/// Devices that this process alone has. Dropping them ends them in an orderly way: what a layer
/// holds back is answered, and the files that they keep (state of zones, recorded log) are complete
/// once the last clone of a device is gone too.
#[derive(Default)]
pub struct Devices {
    registry: Registry,
}

/// A device, and what it stands on; they end as [`Devices`] do.
pub struct Opened {
    device: Arc<dyn Device>,
    name: String,
    devices: Devices,
}

impl Devices {
    /// Sets up devices as `freestone serve DEVICE...` does, one after the other, without serving
    /// them. Each of `words` is `NAME=KIND[,key=value]...`; relative paths start at the working
    /// directory.
    ///
    /// # Errors
    /// Words that cannot be meant; a device that cannot be set up. Nothing is left of the others
    /// then.
    pub fn open(words: &[String]) -> Result<Self, OpenError> {
        let here =
            env::current_dir().map_err(|e| usage(format!("the working directory cannot be found: {e}")))?;
        let mut specs = Vec::new();
        for word in words {
            let entries = Entries::parse(word).map_err(|e| usage(e.to_string()))?;
            specs.push(Spec::from_entries(entries.with_base(&here)).map_err(|e| usage(e.to_string()))?);
        }
        let devices = Self::default();
        set_up(specs, &devices.registry).map_err(|refusal| refused(&refusal))?;
        Ok(devices)
    }

    /// They by their names.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }
}

/// Sets up devices as `freestone serve DEVICE...` does, without serving them. `words` is what one
/// would type there, quotes included: `NAME=KIND[,key=value]...`, several of them separated by
/// blanks where one stands on another. The last one is meant. Relative paths start at the working
/// directory.
///
/// # Errors
/// Words that cannot be meant; a device that cannot be set up. Nothing is left of the others then.
pub fn open_device(words: &str) -> Result<Opened, OpenError> {
    let Some(words) = shlex::split(words) else {
        return Err(usage(format!("{words}: a quote is not closed")));
    };
    let devices = Devices::open(&words)?;
    let last = devices.registry.all().pop().ok_or_else(|| {
        usage("no device; a device is NAME=KIND[,key=value]..., for example ram0=ram,disksize=4G".into())
    })?;
    let name = last.name().to_owned();
    match last.device() {
        Some(device) => Ok(Opened { device: Arc::clone(device), name, devices }),
        None => {
            Err(usage(format!("{name}: a template is a device for each connection; here it takes a fork")))
        }
    }
}

fn usage(sentence: String) -> OpenError {
    OpenError { errno: libc::EINVAL, sentence }
}

/// Sets them up one after the other.
fn set_up(specs: Vec<Spec>, registry: &Registry) -> Result<(), Refusal> {
    for spec in specs {
        registry.check_free(&spec.name).map_err(|why| why.of(&spec.name))?;
        let entry = Arc::new(build(spec, registry)?);
        registry.add(&entry).map_err(|why| why.of(entry.name()))?;
    }
    for entry in registry.all() {
        entry.kind.begin_merge(&entry, registry)?;
        entry.check_whole()?;
    }
    Ok(())
}

fn refused(refusal: &Refusal) -> OpenError {
    OpenError { errno: number(refusal.errno), sentence: one_line(refusal.sentence.clone()) }
}

const fn number(errno: Errno) -> i32 {
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

impl Opened {
    /// The device that was named last, with its layers.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sentences with the seeds that nobody chose: to make everything happen again.
    pub fn seeds(&self) -> Vec<String> {
        self.devices.registry.seeds()
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        for entry in self.registry.all() {
            // What is held back keeps devices alive, which flush when they end.
            if let Some(faults) = &entry.layers.faults {
                faults.close();
            }
        }
    }
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opened").field("name", &self.name).finish_non_exhaustive()
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
    fn the_last_one_is_meant() {
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
    fn what_is_wrong_is_said_as_on_the_command_line() {
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
                "t: a template is a device for each connection",
            ),
        ] {
            let (number, sentence) = sentence(words);
            assert!(sentence.starts_with(said), "{words}: {sentence}");
            assert_eq!(number, errno, "{words}: {sentence}");
        }
    }

    #[test]
    fn the_end_is_orderly() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk").display().to_string();
        let words = format!("d=file,path={path},size=8M,zoned=1,zone_size=1M");
        let opened = open_device(&words).unwrap();
        opened.device().write_at(1 << 20, &[3; 8192], Flags::empty()).unwrap();
        let elsewhere = opened.device().write_at(1 << 20, &[3; 4096], Flags::empty());
        assert_eq!(elsewhere, Err(Error::ZoneWritePointer));
        drop(opened);
        // The write pointer was remembered.
        let opened = open_device(&words).unwrap();
        opened.device().write_at((1 << 20) + 8192, &[4; 4096], Flags::empty()).unwrap();
    }

    #[test]
    fn what_hangs_is_answered_at_the_end() {
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
