//! A RAM disk with a backing file, under a file system with real files.

use crate::harness::prelude::*;
use crate::harness::tree::plant;

/// The procedure that the kernel's writeback patches were tested with: copy a tarball to the disk,
/// write back all pages, copy the tarball back and compare.
#[test]
fn tarball_survives_writeback() {
    for layout in ["yes", "no"] {
        let dir = tempfile::tempdir().unwrap();
        let device = format!(
            "ram0=ram,disksize=256M,mem_limit=128M,backing_dev=spill.img,backing_size=256M,compressed_writeback={layout}"
        );
        let serve = Serve::start(&[device]);
        let (tree, tarball) = (dir.path().join("tree"), dir.path().join("tree.tar"));
        plant(&tree, 16 * MIB);
        fs::write(tree.join("more noise"), noise(3, 8 * MIB)).unwrap();
        ok(tool("tar").arg("-C").arg(&tree).arg("--sparse").arg("-cf").arg(&tarball).arg("."));
        let bytes = fs::metadata(&tarball).unwrap().len();
        assert!(bytes > 20 * MIB, "{bytes}");

        let mut mounted = Mounted::new(&serve, "ram0", dir.path());
        mounted.make_ext4();
        mounted.mount();
        let there = mounted.path().join("tree.tar");
        ok(root_tool("cp").arg(&tarball).arg(&there));
        mounted.unmount();

        serve.text(&["idle", "ram0", "all"]);
        let before = stat(&serve, "ram0", "mm_stat", "compr_data_size");
        assert!(before > 8 * MIB, "{before}");
        serve.text(&["writeback", "ram0", "idle"]);
        let (count, writes) =
            (stat(&serve, "ram0", "bd_stat", "bd_count"), stat(&serve, "ram0", "bd_stat", "bd_writes"));
        assert_eq!(
            (stat(&serve, "ram0", "mm_stat", "compr_data_size"), stat(&serve, "ram0", "bd_stat", "bd_reads")),
            (0, 0)
        );
        assert_eq!(count, writes);
        // Packed compressed pages use fewer blocks than the number of stored pages.
        let data = stat(&serve, "ram0", "mm_stat", "orig_data_size") / 4096;
        let same = stat(&serve, "ram0", "mm_stat", "same_pages");
        if layout == "yes" {
            assert!(count < data - same, "{count} of {data}");
        } else {
            assert_eq!(count, data - same);
        }

        // The client's page cache is empty after the remount, so reads reach the server, which
        // reads the backing file.
        mounted.mount();
        let back = dir.path().join("back.tar");
        ok(root_tool("cp").arg(&there).arg(&back));
        ok(root_tool("chmod").arg("a+r").arg(&back));
        assert_eq!(sha256(&back), sha256(&tarball), "compressed_writeback={layout}");
        assert!(stat(&serve, "ram0", "bd_stat", "bd_reads") > 1000);
        mounted.unmount();
        mounted.check();
        assert_eq!(stat(&serve, "ram0", "backing", "failed_reads"), 0);
    }
}

/// SIGKILL at different times during a writeback leaves no backing file behind.
#[test]
fn server_killed_in_writeback_leaves_no_backing_file() {
    const ROUNDS: u32 = 6;
    let mut cut_off = 0;
    for round in 0..ROUNDS {
        let serve =
            Serve::start(&["ram0=ram,disksize=256M,mem_limit=128M,backing_dev=spill.img,backing_size=256M"]);
        let image = serve.path("noise");
        fs::write(&image, noise(u64::from(round), 32 * MIB)).unwrap();
        ok(tool("nbdcopy").arg(&image).arg(uri(&serve, "ram0")));
        fs::remove_file(&image).unwrap();
        // The server creates the backing file without a name, so the file never appears in the
        // directory.
        let before = names_in(serve.dir.path());
        assert!(!before.iter().any(|name| name.contains("spill")), "{before:?}");
        let mut writeback = Command::new(program());
        writeback.args(["writeback", "ram0", "huge", "--control"]).arg(serve.path("control"));
        let mut writeback = writeback.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let start = Instant::now();
        thread::sleep(Duration::from_millis(u64::from(round) * 15));
        serve.signal(Signal::KILL);
        cut_off += u32::from(!writeback.wait().unwrap().success());
        let (_, dir) = serve.wait();
        // SIGKILL leaves the sockets, so these are ignored.
        let mut after = names_in(dir.path());
        after.retain(|name| !name.starts_with("control") && !name.starts_with("nbd"));
        assert!(after.is_empty(), "{after:?} after {:?}", start.elapsed());
    }
    assert!(cut_off > 0, "each was done before its server was killed");
}

/// Copies more data to the disk and back than memory can hold, so pages are evicted automatically.
#[test]
fn data_larger_than_memory_is_copied_in_and_out() {
    let dir = tempfile::tempdir().unwrap();
    let serve =
        Serve::start(&["ram0=ram,disksize=256M,mem_limit=16M,backing_dev=spill.img,backing_size=256M"]);
    let (image, back) = (dir.path().join("image"), dir.path().join("back"));
    let mut data = noise(5, 96 * MIB);
    // One page in three is partly compressible, the others are not.
    data.chunks_mut(4096).step_by(3).for_each(|page| page[..2000].fill(7));
    fs::write(&image, data).unwrap();
    ok(tool("nbdcopy").arg(&image).arg(uri(&serve, "ram0")));
    assert!(stat(&serve, "ram0", "mm_stat", "mem_used_total") <= 16 * MIB);
    assert!(stat(&serve, "ram0", "backing", "spilled_pages") > 10_000);
    let size =
        json(tool("nbdinfo").arg("--json").arg(uri(&serve, "ram0")))["exports"][0]["export-size"].as_u64();
    assert_eq!(size, Some(256 * MIB));
    ok(tool("nbdcopy").arg(uri(&serve, "ram0")).arg(&back));
    ok(tool("truncate").args(["-s", "96M"]).arg(&back));
    assert_eq!(sha256(&back), sha256(&image));
    assert_eq!(stat(&serve, "ram0", "io_stat", "failed_writes"), 0);
}
