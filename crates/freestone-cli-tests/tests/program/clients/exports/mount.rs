//! A mounted ext4 on an export, through nbdfuse and a loop device.

use crate::harness::prelude::*;
use crate::harness::tree::plant;

#[test]
fn mounted_ext4_keeps_files_and_frees_deleted_ones() {
    // Variables are dropped in reverse order: first the mounts, then nbdfuse, the server and the
    // files.
    let dir = tempfile::tempdir().unwrap();
    let serve = Serve::start(&["ram0=ram,disksize=256M"]);
    let (tree, archive) = (dir.path().join("tree"), dir.path().join("tree.tar"));
    plant(&tree, 32 * MIB);
    ok(tool("tar").arg("-C").arg(&tree).arg("--sparse").arg("-cf").arg(&archive).arg("."));

    let mut mounted = Mounted::new(&serve, "ram0", dir.path());
    let mnt = mounted.path().to_owned();
    mounted.make_ext4();
    mounted.mount();
    ok(root_tool("tar").arg("-C").arg(&mnt).arg("--sparse").arg("-xf").arg(&archive));
    ok(root_tool("sync").arg("-f").arg(&mnt));
    let used = stat(&serve, "ram0", "mm_stat", "orig_data_size");
    assert!(used > 16 * MIB, "{used}");

    // The file system is mounted again, so that the kernel reads all data from the server.
    mounted.unmount();
    mounted.check();
    mounted.mount();
    // mke2fs creates lost+found, which the original tree lacks.
    let diff = ["-r", "--no-dereference", "--exclude=lost+found"];
    ok(root_tool("diff").args(diff).arg(&tree).arg(&mnt));

    // Deleting files discards their blocks, and the RAM disk frees the memory.
    ok(root_tool("rm")
        .arg("-rf")
        .arg(mnt.join("0"))
        .arg(mnt.join("1"))
        .arg(mnt.join("2"))
        .arg(mnt.join("3")));
    ok(root_tool("sync").arg("-f").arg(&mnt));
    ok(root_tool("fstrim").arg(&mnt));
    let left = stat(&serve, "ram0", "mm_stat", "orig_data_size");
    assert!(left < used / 2, "{left} of {used}");
    mounted.unmount();
    mounted.check();
}
