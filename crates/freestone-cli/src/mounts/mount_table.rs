//! The mounts of this mount namespace, as /proc/self/mountinfo lists them.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

const TABLE: &str = "/proc/self/mountinfo";

/// An entry of the mount table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    id: u32,
    parent: u32,
    /// Mount point.
    pub dir: PathBuf,
    /// The mounted device, as it was passed to mount(2).
    pub source: PathBuf,
}

/// All mounts of a mount namespace.
pub struct MountTable(Vec<Mount>);

impl MountTable {
    /// Reads the mounts of this process's mount namespace.
    pub fn read() -> Result<Self> {
        let text = fs::read(TABLE).with_context(|| format!("cannot read {TABLE}"))?;
        Ok(Self(text.split(|byte| *byte == b'\n').filter_map(parse).collect()))
    }

    /// Returns the topmost mount at `dir`, to which paths resolve, or `None` if `dir` is not a
    /// mount point.
    pub fn top_at(&self, dir: &Path) -> Option<&Mount> {
        let here = || self.0.iter().filter(|mount| mount.dir == dir);
        here().find(|mount| !here().any(|other| other.parent == mount.id))
    }

    /// Returns the mounts whose source is one of these devices.
    pub fn of<'a>(&'a self, sources: &'a [PathBuf]) -> impl Iterator<Item = &'a Mount> {
        self.0.iter().filter(|mount| sources.contains(&mount.source))
    }

    /// Returns the mounts below `dir`.
    pub fn below<'a>(&'a self, dir: &'a Path) -> impl Iterator<Item = &'a Mount> {
        self.0.iter().filter(move |mount| mount.dir != dir && mount.dir.starts_with(dir))
    }
}

/// Parses `ID PARENT MAJOR:MINOR ROOT DIR OPTIONS [TAG...] - TYPE SOURCE OPTIONS`.
fn parse(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let mut number = || std::str::from_utf8(fields.next()?).ok()?.parse().ok();
    let (id, parent) = (number()?, number()?);
    let dir = unescape(fields.nth(2)?);
    let source = unescape(fields.skip_while(|field| *field != b"-").nth(2)?);
    Some(Mount { id, parent, dir, source })
}

/// Replaces each escape `\NNN` (three octal digits) by the byte.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let code = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(escaped) if byte == b'\\' => {
                bytes.push(escaped);
                rest = &after[3..];
            }
            _ => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::{MountTable, parse};

    fn table(lines: &[&str]) -> MountTable {
        MountTable(lines.iter().map(|line| parse(line.as_bytes()).unwrap()).collect())
    }

    #[test]
    fn mount_table_stacked_mounts_returns_the_top() {
        let table = table(&[
            r"20 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
            r"32 31 7:1 / /mnt/a\040b rw - ext4 /dev/loop1 rw",
            r"31 20 7:0 / /mnt/a\040b rw,relatime shared:2 master:1 - xfs /dev/loop0 rw",
        ]);
        let dir = Path::new("/mnt/a b");
        assert_eq!(table.top_at(dir).unwrap().source, PathBuf::from("/dev/loop1"));
        assert_eq!(table.of(&["/dev/loop0".into()]).map(|mount| mount.id).collect::<Vec<_>>(), [31]);
        assert_eq!(table.below(Path::new("/mnt")).count(), 2);
        assert_eq!(table.top_at(Path::new("/mnt")), None);
    }

    #[test]
    fn mount_table_short_line_is_omitted() {
        assert_eq!(parse(b""), None);
        assert_eq!(parse(b"31 20 7:0 / /mnt rw - ext4"), None);
    }
}
