//! A delta that does not fit on its disk: the old one stays, and nothing lies about.
//!
//! The test runs itself again under a limit for the size of files, which fails a write as a full disk does; it is alone in its
//! program, because such a limit is the whole process's.

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

use freestone::device::{
    Buffer, Change, Changes, Completion, Device, Extent, Geometry, IoBuf, Request, Result, Tried,
};
use freestone::qcow2::Format;
use freestone::qcow2::delta::{DeltaError, save};
use freestone_testkit::Model;

const SIZE: usize = 8 << 20;
/// In the child: the directory to work in.
const DIR: &str = "FREESTONE_TEST_DIR";

/// Every byte is its own.
struct All(Model);

impl Device for All {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        self.0.try_io(request, buffer)
    }
    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.0.submit(request, buffer, done);
    }
    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.0.extents(offset, len, row)
    }
    fn changes(&self) -> Option<&dyn Changes> {
        Some(self)
    }
}

impl Changes for All {
    fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> Result<u64> {
        row(Change { offset, len, own: true });
        Ok(len)
    }
}

fn child(dir: &Path) {
    let device = All(Model::read_only(vec![5; SIZE], 4096));
    let saved = save(&device, &dir.join("base"), Format::Raw, &dir.join("delta"), &mut |_, _| {});
    assert!(matches!(saved, Err(DeltaError::Write { .. })), "{saved:?}");
}

#[test]
fn a_full_disk_keeps_the_old_delta() {
    if let Some(dir) = env::var_os(DIR) {
        return child(Path::new(&dir));
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("base"), vec![1; SIZE]).unwrap();
    let device = All(Model::read_only(vec![9; SIZE], 4096));
    save(&device, &dir.path().join("base"), Format::Raw, &dir.path().join("delta"), &mut |_, _| {}).unwrap();
    let old = fs::read(dir.path().join("delta")).unwrap();
    // In steps of 512 or 1024 bytes, as the shell has it; the whole takes 8.5 MiB. The limit hits data, tables, and almost the end.
    let whole = old.len() / 1024;
    for limit in [40, 1000, 4000, whole / 2 - 1] {
        let script = format!("trap '' XFSZ; ulimit -f {limit} && exec \"$0\" --exact \"$1\" --nocapture");
        let out = Command::new("sh")
            .args(["-c", &script])
            .arg(env::current_exe().unwrap())
            .arg("a_full_disk_keeps_the_old_delta")
            .env(DIR, dir.path())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stdout);
        assert!(
            out.status.success() && text.contains("1 passed"),
            "{text}{}",
            String::from_utf8_lossy(&out.stderr)
        );
        assert!(fs::read(dir.path().join("delta")).unwrap() == old, "{limit}");
        let mut names: Vec<_> =
            fs::read_dir(dir.path()).unwrap().map(|row| row.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["base", "delta"], "{limit}");
    }
}
