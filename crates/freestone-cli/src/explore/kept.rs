//! Keeps failing states (`--keep DIR`): as a qcow2 overlay on the base, or as a raw image if the disk was empty before
//! the log.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use freestone::device::{Blocking as _, Device};
use freestone::qcow2::{Format, delta};
use freestone_core::zeroes::are_zeroes;
use freestone_explore::{StateId, Timeline, changes_at};

use super::workload::{Disk, base_format, read_only_spec};
use crate::serve::announce::quote;

/// Length of the pieces in which a state is written to a raw image, in bytes.
const CHUNK_BYTES: u64 = 1 << 20;
/// Longest name of a state in a file name, in bytes.
const NAME_MAX: usize = 100;

/// A state that was kept.
pub struct Kept {
    pub path: PathBuf,
    /// Command that serves a fork of the state.
    pub reopen: String,
}

/// Writes a state to a file in `dir`. An overlay of an earlier run is replaced once the new one is complete.
///
/// # Errors
/// Fails if the state cannot be made, or the file cannot be written.
pub fn keep(dir: &Path, timeline: &Arc<Timeline>, id: &StateId, disk: &Disk) -> Result<Kept> {
    let at = || format!("--keep {}", dir.display());
    fs::create_dir_all(dir).with_context(at)?;
    let state = changes_at(timeline, id)?;
    let (path, format) = match disk {
        Disk::Image(base) => {
            let path = dir.join(format!("{}.qcow2", file_stem(id)));
            delta::save(&state, base, base_format(base)?, &path, &mut |_, _| {}).with_context(at)?;
            (path, Format::Qcow2)
        }
        Disk::Empty(_) => {
            let path = dir.join(format!("{}.img", file_stem(id)));
            write_raw(&state, &path).with_context(|| format!("--keep {}", path.display()))?;
            (path, Format::Raw)
        }
    };
    let spec = read_only_spec("kept", &std::path::absolute(&path).with_context(at)?, format);
    Ok(Kept { path, reopen: format!("freestone serve {} failed=fork,base=kept", quote(&spec)) })
}

/// Returns the name of a state in a file name. Colons are replaced, which qemu takes for the end of a protocol, and
/// commas, which would have to be doubled in options.
fn file_stem(id: &StateId) -> String {
    let name = format!("state-{id}").replace(',', "_").replace(':', ".");
    if name.len() <= NAME_MAX {
        return name;
    }
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    format!("state-{}-{:016x}", id.point, hasher.finish())
}

/// Writes the content of a device to a sparse file.
fn write_raw(device: &dyn Device, path: &Path) -> Result<()> {
    let file = File::create(path)?;
    let size = device.geometry().size;
    file.set_len(size)?;
    let mut chunk = vec![0; CHUNK_BYTES as usize];
    let mut offset = 0;
    while offset < size {
        let part = &mut chunk[..CHUNK_BYTES.min(size - offset) as usize];
        device.read_at(offset, part)?;
        // Zeroes stay holes.
        if !are_zeroes(part) {
            file.write_all_at(part, offset)?;
        }
        offset += part.len() as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::file_stem;

    #[test]
    fn file_stem_has_no_special_characters() {
        let stem = |id: &str| file_stem(&id.parse().unwrap());
        assert_eq!(stem("120-45..47,50:2..5@512"), "state-120-45..47_50.2..5@512");
        let long: Vec<_> = (1..100).map(|entry| (entry * 2).to_string()).collect();
        let (one, other) =
            (stem(&format!("300-{}", long.join(","))), stem(&format!("300-1,{}", long.join(","))));
        assert!(one.len() < 40 && one.starts_with("state-300-") && one != other, "{one}, {other}");
    }
}
