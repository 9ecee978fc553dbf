//! Setting devices up: from what was asked for to what is there.

mod family;
mod fork;
mod layers;
mod null;
mod snapshot;

use std::io;
use std::sync::Arc;

use freestone::cow;
use freestone::device::Device;
use freestone::file::{self, File};
use freestone::qcow2::{self, Image};

pub use self::family::{family_of, new as new_family};
pub use self::fork::fork_of;
pub use self::layers::{condition, place};
pub use self::snapshot::snapshots;
use crate::entry::{Entry, Kind};
use crate::notes::{self, FileNotes};
use crate::refusal::{Errno, Refusal};
use crate::registry::Registry;
use crate::size::exact;
use crate::spec::{KindSpec, Spec};

/// Sets a device up. What it stands on is looked for in the registry, to which it is not added.
pub fn build(spec: Spec, registry: &Registry) -> Result<Entry, Refusal> {
    if matches!(spec.kind, KindSpec::Snapshot(_)) {
        let made = snapshots(vec![spec], registry)?;
        return Ok(made.into_iter().next().expect("one was asked for"));
    }
    let name = spec.name.clone();
    alone(spec, registry).map_err(|error| error.of(&name))
}

fn alone(spec: Spec, registry: &Registry) -> Result<Entry, Refusal> {
    let mut needs = Vec::new();
    let (kind, device): (Kind, Option<Arc<dyn Device>>) = match &spec.kind {
        KindSpec::Ram { disksize, family } => {
            let family = family::new(&spec.name, family, *disksize, registry)?;
            let ram = family.ram(*disksize).map_err(family::refused)?;
            let ram = Arc::new(ram);
            (Kind::Ram(Arc::clone(&ram)), Some(ram))
        }
        KindSpec::Fork(fork) => {
            let base = find(registry, "base", &fork.base)?;
            let ram = Arc::new(fork_of(&base, fork, registry)?);
            needs.push(base);
            (Kind::Fork(Arc::clone(&ram)), Some(ram))
        }
        KindSpec::Template(template) => {
            let base = find(registry, "base", &template.fork.base)?;
            // Every way in which the first connection could fail shows now.
            drop(fork_of(&base, &template.fork, registry)?);
            needs.push(base);
            (Kind::Template(0.into()), None)
        }
        KindSpec::Null(asked) => {
            let (data, device) = null::data(&spec.name, asked, spec.layers.zones.is_some(), registry)?;
            (Kind::Null(data), Some(device))
        }
        KindSpec::File { path, readonly, direct, size, family: _ } => {
            let mut config = file::Config::new(path);
            (config.read_only, config.direct, config.size) = (*readonly, *direct, *size);
            let file = Arc::new(open(&config, "size")?);
            if file.geometry().read_only {
                if let Some(why) = notes::half_merged(&file, &spec.name) {
                    return Err(Refusal::failed(Errno::EBUSY, format!("{why}, and without readonly=yes")));
                }
                (Kind::File(Arc::clone(&file), None), Some(file))
            } else {
                let notes = Box::new(FileNotes(Arc::clone(&file)));
                let origin = cow::Origin::noted(Arc::clone(&file) as Arc<dyn Device>, Some(notes));
                (Kind::File(file, Some(origin.clone())), Some(Arc::new(origin)))
            }
        }
        KindSpec::Qcow2 { path, standalone, family: _ } => {
            let config = qcow2::Config { path: path.clone(), standalone: *standalone };
            let image = Arc::new(Image::open(&config).map_err(|e| of_image(&e))?);
            (Kind::Qcow2(Arc::clone(&image)), Some(image))
        }
        KindSpec::Snapshot(_) => unreachable!("these are made together"),
        KindSpec::Restored { .. } => unreachable!("these come from a file"),
    };
    let Some(device) = device else { return Ok(Entry::new(spec, kind, None, needs)) };
    let (top, layers) = layers::over(&spec, device)?;
    let mut entry = Entry::new(spec, kind, Some(top), needs);
    entry.layers = layers;
    Ok(entry)
}

/// What a device is to stand on.
fn find(registry: &Registry, key: &str, name: &str) -> Result<Arc<Entry>, Refusal> {
    registry
        .find(name)
        .ok_or_else(|| Refusal::failed(Errno::ENODEV, format!("{key}={name}: there is no such device (yet)")))
}

/// Opens a file whose size was asked for under `key`.
fn open(config: &file::Config, key: &str) -> Result<File, Refusal> {
    File::open(config).map_err(|e| Refusal::failed(errno_of(&e), in_typed_sizes(key, &e)))
}

fn of_image(error: &qcow2::SetupError) -> Refusal {
    let errno = match error {
        qcow2::SetupError::File(e) => errno_of(e),
        _ => Errno::EIO,
    };
    let hint = match error {
        qcow2::SetupError::Image { fault: qcow2::Fault::NotQcow2, .. } => "; a raw image is of kind file",
        _ => "",
    };
    Refusal::failed(errno, format!("{error}{hint}"))
}

fn errno_of(error: &file::SetupError) -> Errno {
    match error {
        file::SetupError::InUse { .. } => Errno::EBUSY,
        file::SetupError::Call { source, .. } => match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                Errno::ENOSPC
            }
            _ => Errno::EIO,
        },
        _ => Errno::EIO,
    }
}

/// The library says sizes in bytes; here they are typed with units, under `key`.
fn in_typed_sizes(key: &str, error: &file::SetupError) -> String {
    match error {
        file::SetupError::SizeDiffers { path, found, asked } => {
            let (path, found, asked) = (path.display(), exact(*found), exact(*asked));
            format!("{key}={asked}: {path} has {found}; leave {key} out to take the file as it is")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::build;
    use crate::registry::Registry;

    fn sentence(registry: &Registry, text: &str) -> String {
        build(text.parse().unwrap(), registry).err().unwrap_or_else(|| panic!("{text}")).sentence
    }

    fn add(registry: &Registry, text: &str) {
        registry.add(&Arc::new(build(text.parse().unwrap(), registry).unwrap())).unwrap();
    }

    #[test]
    fn what_cannot_be_set_up_is_named() {
        let registry = Registry::default();
        let error = sentence(&registry, "f=file,path=/nowhere/at/all");
        assert!(error.starts_with("f: ") && error.contains("/nowhere/at/all"), "{error}");
        let dict = "r=ram,disksize=1M,comp_algorithm=zstd,algorithm_params=level=3 dict=/nowhere/d";
        let missing = "r: algorithm_params: dict=/nowhere/d: No such file or directory (os error 2)";
        assert_eq!(sentence(&registry, dict), missing);

        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        let path = file.path().display();
        let differs = format!("f: size=1G: {path} has 8K; leave size out to take the file as it is");
        assert_eq!(sentence(&registry, &format!("f=file,path={path},size=1G")), differs);
        let raw = format!("q: {path}: is not a qcow2 image; a raw image is of kind file");
        assert_eq!(sentence(&registry, &format!("q=qcow2,path={path}")), raw);
    }

    #[test]
    fn bases_that_cannot_be_are_told_apart() {
        let registry = Registry::default();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk").display().to_string();
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        add(&registry, &format!("disk=file,path={path}"));
        add(&registry, "r=ram,disksize=1M");
        add(&registry, "n=null,size=1M");
        add(&registry, "s=snapshot,origin=r");
        add(&registry, "f=fork,base=s");
        add(&registry, "t=template,base=s");
        add(&registry, "w=snapshot,origin=disk,readonly=no");
        for (text, expected) in [
            ("x=fork,base=none", "x: base=none: there is no such device (yet)"),
            ("x=fork,base=r", "x: base=r: is live; take a snapshot and fork that: freestone snapshot r NAME"),
            ("x=fork,base=f", "x: base=f: is live; take a snapshot and fork that: freestone snapshot f NAME"),
            (
                "x=fork,base=disk",
                "x: base=disk: is live; take a snapshot and fork that: freestone snapshot disk NAME",
            ),
            ("x=fork,base=n", "x: base=n: a null device is no base"),
            ("x=fork,base=t", "x: base=t: is a template; fork what it is made of, s"),
            (
                "x=fork,base=w",
                "x: base=w: is a snapshot that its users write (readonly=no); take one with readonly=yes",
            ),
            (
                "x=fork,base=s,size=512K",
                "x: size=512K: smaller than the base, which has 1M; a fork shows all of it",
            ),
            ("x=fork,base=s,mem_min=999T", "x: mem_min=999T: the family's mem_limit has "),
            ("x=template,base=s,size=512K", "x: size=512K: smaller than the base"),
            ("x=snapshot,origin=n", "x: origin=n: a null device has no snapshots"),
            ("x=snapshot,origin=s", "x: origin=s: is a snapshot, which does not change; fork it"),
            ("x=snapshot,origin=t", "x: origin=t: a template has no content; take a snapshot of a fork"),
            ("x=snapshot,origin=none", "x: origin=none: there is no such device (yet)"),
            (
                "x=snapshot,origin=r,cow=./x",
                "x: cow=./x: only for a file; copies of a ram device stay in its family's memory",
            ),
            (
                "x=snapshot,origin=r,mem_limit=1G",
                "x: its forks are in the family of r; set mem_limit and the like there",
            ),
            ("x=snapshot,origin=disk,cow=disk", "x: cow=disk: is the origin itself"),
            (
                "x=snapshot,origin=disk,cow=none",
                "x: cow=none: there is no such device (yet); a file is written with a slash, ./none",
            ),
            (
                "x=snapshot,origin=disk,cow=n",
                "x: cow=n: copies need a ram, fork or file device that can be written",
            ),
            (
                "x=snapshot,origin=disk,cow=r",
                "x: cow=r: the COW device ends with the process, so a persistent store is pointless; use a transient one (N), or force it",
            ),
        ] {
            let said = sentence(&registry, text);
            assert!(said.starts_with(expected), "{text}: {said}");
        }
    }
}
