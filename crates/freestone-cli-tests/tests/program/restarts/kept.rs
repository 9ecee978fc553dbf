//! Content of RAM disks, forks and snapshots that is kept over restarts (`keep=yes`).

use freestone_testkit::effort;

use super::{GOLDEN, image, is_served, serve};
use crate::harness::prelude::*;

/// Returns the paths of the files with kept content in the state directory, sorted.
pub(super) fn content(dir: &Path) -> Vec<PathBuf> {
    let Ok(groups) = fs::read_dir(dir.join("state/content")) else { return Vec::new() };
    // The server may remove a directory meanwhile.
    let files = groups.filter_map(|group| fs::read_dir(group.unwrap().path()).ok()).flatten();
    let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    files.sort();
    files
}

pub(super) fn row(serve: &Serve, name: &str) -> Value {
    let list = serve.json(&["list"]);
    list["devices"].as_array().unwrap().iter().find(|device| device["name"] == name).unwrap().clone()
}

#[test]
fn kept_devices_have_their_content_after_restart() {
    let server = serve(image(8 << 20), &[GOLDEN, "disk=ram,disksize=16M,keep=yes", "other=ram,disksize=1M"]);
    let home = format!("unix:{}", server.path("nbd").display());
    qemu_io(&uri(&server, "disk"), &["write -P 1 0 4M", "write -P 2 8M 64k"]);
    for verb in [
        &["create", "monday=snapshot,origin=disk,keep=yes"][..],
        &["fork", "monday", "trial", "keep=yes", "--nbd", &home],
        &["fork", "golden", "job", "keep=yes", "size=12M", "--nbd", &home],
        &["publish", "monday", "--nbd", &home],
    ] {
        server.text(verb);
    }
    qemu_io(&uri(&server, "disk"), &["write -P 3 1M 64k", "discard 8M 64k"]);
    qemu_io(&uri(&server, "trial"), &["write -P 4 64k 64k"]);
    qemu_io(&uri(&server, "job"), &["write -P 5 1M 64k", "write -z 2M 64k", "write -P 6 9M 64k"]);
    server.text(&["set", "job", "disksize=16M"]);
    let check = |server: &Serve| {
        let reads = ["read -P 1 0 1M", "read -P 3 1M 64k", "read -P 1 1088k 64k", "read -P 0 8M 64k"];
        qemu_io(&uri(server, "disk"), &reads);
        qemu_io(&uri(server, "monday"), &["read -P 1 0 4M", "read -P 2 8M 64k", "read -P 0 9M 1M"]);
        qemu_io(&uri(server, "trial"), &["read -P 1 0 64k", "read -P 4 64k 64k", "read -P 2 8M 64k"]);
        let reads = [
            "read -P 7 0 1M",
            "read -P 5 1M 64k",
            "read -P 0 2M 64k",
            "read -P 6 9M 64k",
            "read -P 0 10M 6M",
        ];
        qemu_io(&uri(server, "job"), &reads);
    };
    let mut dir = server.end();
    for round in 0..3 {
        let server = serve(dir, &[]);
        check(&server);
        for name in ["disk", "monday", "trial", "job"] {
            let row = row(&server, name);
            assert!(row["saved"].as_str().unwrap().starts_with("20"), "{row}");
            assert_eq!((&row["withheld"], &row["content_of"]), (&Value::Null, &Value::Null), "{name}");
            assert_eq!(server.json(&["stat", name])["generation"], 1);
        }
        assert_eq!(row(&server, "other")["withheld"], true);
        // The server writes no new files when it ends, because no content changed.
        dir = server.end();
        let files: Vec<_> = content(dir.path());
        assert_eq!(files.len(), 2, "{round}: {files:?}");
    }
    // The server deletes the kept content of removed devices.
    let server = serve(dir, &[]);
    for name in ["trial", "monday", "disk", "job"] {
        server.text(&["remove", name]);
    }
    wait_until("the content of removed devices goes", || content(server.dir.path()).is_empty());
    let dir = server.end();
    assert_eq!(fs::read_dir(dir.path().join("state/content")).unwrap().count(), 0);
}

/// `keep` and `on_data_loss` can be set for running devices, and by `restore` for restored devices.
#[test]
fn keep_can_be_set_later_and_by_restore() {
    let server =
        serve(image(8 << 20), &[GOLDEN, "disk=ram,disksize=16M", "null=null,size=1M,memory_backed=1"]);
    let home = format!("unix:{}", server.path("nbd").display());
    server.text(&["fork", "golden", "job", "size=12M", "mem_limit=4M", "--nbd", &home]);
    server.text(&["snapshot", "job", "moment"]);
    server.text(&["fork", "moment", "deep", "--nbd", &home]);
    qemu_io(&uri(&server, "job"), &["write -P 5 1M 64k", "write -P 6 9M 64k"]);
    qemu_io(&uri(&server, "deep"), &["write -P 4 3M 64k"]);
    server.text(&["save", "job,deep", "saved"]);
    for name in ["deep", "moment", "job"] {
        server.text(&["remove", name, "--force"]);
    }
    let restored = server.text(&["restore", "saved", "keep=yes", "on_data_loss=empty"]);
    assert!(restored.contains("job: fork 12M, not published"), "{restored}");
    for (key, value) in [("keep", "yes\n"), ("on_data_loss", "empty\n")] {
        assert_eq!(server.text(&["get", "job", key]), value);
    }
    assert_eq!(server.json(&["stat", "job"])["over_stat"]["mem_limit"], 4 << 20);
    for name in ["job", "deep"] {
        server.text(&["publish", name, "--nbd", &home]);
    }
    server.text(&["set", "disk", "keep=yes"]);
    qemu_io(&uri(&server, "disk"), &["write -P 1 0 4M"]);
    assert_eq!(server.text(&["set", "null", "on_data_loss=empty"]), "on_data_loss=empty\n");
    let dir = server.end();

    let server = serve(dir, &[]);
    qemu_io(&uri(&server, "disk"), &["read -P 1 0 4M"]);
    qemu_io(&uri(&server, "job"), &["read -P 7 0 1M", "read -P 5 1M 64k", "read -P 6 9M 64k"]);
    qemu_io(&uri(&server, "deep"), &["read -P 7 1M 64k", "read -P 4 3M 64k"]);
    assert_eq!(server.json(&["stat", "job"])["over_stat"]["mem_limit"], 4 << 20);
    assert!(is_served(&server.path("nbd"), "null"));
    server.text(&["set", "disk", "keep=no"]);
    wait_until("the content of the disk is removed", || content(server.dir.path()).len() == 1);
    // A start cannot create a restored snapshot again, so a restored snapshot cannot have
    // `keep=yes`.
    server.text(&["snapshot", "disk", "then"]);
    server.text(&["save", "then", "then.saved"]);
    for (status, verb, message) in [
        (
            1,
            &["restore", "then.saved", "other", "keep=yes"][..],
            "restore: keep: then stands on a snapshot or is one",
        ),
        (2, &["set", "null", "keep=yes"], "null: unknown attribute"),
        (2, &["set", "disk", "keep=perhaps"], "disk: keep=perhaps: must be yes or no"),
    ] {
        let why = server.refused(status, verb);
        assert!(why.contains(message), "{why}");
    }
    let server = serve(server.end(), &[]);
    assert_eq!(row(&server, "disk")["withheld"], true);
    assert_eq!(row(&server, "job")["withheld"], Value::Null);
}

#[test]
fn keep_of_base_stays_while_a_kept_fork_needs_it() {
    let server = serve(image(1 << 20), &["disk=ram,disksize=1M,keep=yes"]);
    for verb in
        [&["create", "monday=snapshot,origin=disk,keep=yes"][..], &["fork", "monday", "trial", "keep=yes"]]
    {
        server.text(verb);
    }
    let why = server.refused(1, &["set", "monday", "keep=no"]);
    assert_eq!(why, "monday: keep=no: its fork trial is kept; set keep=no there first");
    server.text(&["set", "trial", "keep=no"]);
    server.text(&["set", "monday", "keep=no"]);
    let without = Serve::start(&["d=ram,disksize=1M"]);
    let why = without.refused(2, &["set", "d", "keep=yes"]);
    assert!(why.starts_with("d: keep: needs a server with a state directory"), "{why}");
}

#[test]
fn crash_restores_the_last_save_and_withholds_it() {
    let disks = ["disk=ram,disksize=16M,keep=yes", "served=ram,disksize=16M,keep=yes,on_data_loss=empty"];
    let server = serve(tempfile::tempdir().unwrap(), &[&disks[..], &["--save-every", "1s"]].concat());
    for name in ["disk", "served"] {
        qemu_io(&uri(&server, name), &["write -P 1 0 8M"]);
    }
    let saved = |server: &Serve| {
        wait_until("all is saved", || {
            ["disk", "served"].iter().all(|name| server.json(&["stat", name])["keep"]["unsaved_bytes"] == 0)
        });
    };
    saved(&server);
    let whole: u64 = content(server.dir.path()).iter().map(|file| fs::metadata(file).unwrap().len()).sum();
    // Only a small part of 8 MiB of noise changes afterwards, so the next save is an increment.
    fs::write(server.path("noise"), noise(1, 8 << 20)).unwrap();
    for name in ["disk", "served"] {
        qemu_io(&uri(&server, name), &[&format!("write -s {} 0 8M", server.path("noise").display())]);
    }
    saved(&server);
    qemu_io(&uri(&server, "disk"), &["write -P 2 1M 64k"]);
    saved(&server);
    let files = content(server.dir.path());
    let increments = files.iter().filter(|file| file.extension() != Some("whole".as_ref()));
    let bytes: Vec<_> = increments.map(|file| fs::metadata(file).unwrap().len()).collect();
    assert!(bytes.iter().any(|bytes| *bytes < 64 << 10), "{whole} {files:?} {bytes:?}");
    // SIGKILL follows, so this write is never saved.
    qemu_io(&uri(&server, "disk"), &["write -P 3 2M 64k"]);
    let server = serve(server.kill(), &[]);
    assert!(!is_served(&server.path("nbd"), "disk"));
    assert!(server.startup_output.contains("disk: has the content of 20"), "{}", server.startup_output);
    assert!(server.text(&["list"]).contains("\ndisk: has the content of 20"));
    assert_eq!(server.json(&["stat", "disk"])["generation"], 2);
    server.text(&["publish", "disk"]);
    qemu_io(&uri(&server, "disk"), &["read -P 2 1M 64k"]);
    let noise = fs::read(server.path("noise")).unwrap();
    for (name, at) in [("disk", 2 << 20), ("served", 0)] {
        let read = Raw::connect(&server, name).read(at, 64 << 10).unwrap();
        assert!(read == noise[at as usize..][..64 << 10], "{name}");
    }
}

#[test]
fn new_disk_is_saved_after_save_after_bytes() {
    let server =
        serve(tempfile::tempdir().unwrap(), &["disk=ram,disksize=16M,keep=yes", "--save-after", "2M"]);
    qemu_io(&uri(&server, "disk"), &["write -P 1 0 1M"]);
    thread::sleep(Duration::from_millis(2500));
    assert!(content(server.dir.path()).is_empty());
    qemu_io(&uri(&server, "disk"), &["write -P 1 1M 1M"]);
    wait_until("it is saved", || server.json(&["stat", "disk"])["keep"]["unsaved_bytes"] == 0);
    let server = serve(server.kill(), &[]);
    server.text(&["publish", "disk"]);
    qemu_io(&uri(&server, "disk"), &["read -P 1 0 2M"]);
}

#[test]
fn keep_of_unsuitable_devices_is_refused() {
    let server = serve(image(1 << 20), &[GOLDEN, "disk=ram,disksize=1M", "file=file,path=f.img,size=1M"]);
    server.text(&["snapshot", "disk", "loose"]);
    for (verb, message) in [
        (
            &["fork", "loose", "f", "keep=yes"][..],
            "f: keep=yes: its base loose is not kept; set keep=yes there first",
        ),
        (
            &["create", "s=snapshot,origin=file,keep=yes"],
            "s: keep=yes: copies of a file's snapshot in memory are not kept; cow=PATH keeps them",
        ),
    ] {
        assert_eq!(server.refused(1, verb), message);
    }
    for (device, message) in [
        ("z=ram,disksize=64M,zoned=1,zone_size=4M,keep=yes", "z: keep=yes: not with zoned=1: "),
        ("p=ram,disksize=1M,power_cut=yes,keep=yes", "p: keep=yes: not with power_cut=yes or record: "),
        ("s=snapshot,origin=file,cow=./c,keep=yes", "s: keep=yes: its content is on its COW device"),
        ("f=file,path=f.img,keep=yes", "f: unknown key \"keep\""),
    ] {
        let why = server.refused(2, &["create", device]);
        assert!(why.starts_with(message), "{why}");
    }
    let dir = tempfile::tempdir().unwrap();
    for (words, message) in [
        (&["d=ram,disksize=1M,keep=yes"][..], "d: keep: needs a server with a state directory"),
        (&["d=ram,disksize=1M", "--save-every", "1m"], "save_every: needs a state: --state DIR"),
    ] {
        let why = refused(dir.path(), 2, &[&["serve", "--check"], words].concat());
        assert!(why.starts_with(message), "{why}");
    }
}

/// A client writes its counter to pages of three forks of one base. After SIGKILL all forks must
/// show the content of one moment.
#[test]
fn save_is_of_one_moment_for_a_family() {
    const PAGES: u64 = 64;
    const PAGE: usize = 4096;
    let server = serve(image(1 << 20), &[GOLDEN]);
    let home = format!("unix:{}", server.path("nbd").display());
    server.text(&["fork", "golden", "f", "--count", "3", "keep=yes", "on_data_loss=empty", "--nbd", &home]);
    let mut dir: TempDir = server.end();
    let (mut counter, mut seen) = (0_u32, 0);
    // A save starts after 1 MiB, which is 256 writes. The pause limits the rate of writes.
    let pause = effort(Duration::from_micros(300), Duration::ZERO);
    let rounds = effort(3, 8);
    for _ in 0..rounds {
        let server = serve(dir, &["--save-every", "1s", "--save-after", "1M"]);
        let found: Vec<Vec<u32>> = (0..3)
            .map(|number| {
                let all = Raw::connect(&server, &format!("f-{number}"))
                    .read(0, PAGES as u32 * PAGE as u32)
                    .unwrap();
                let first = |page: &[u8]| u32::from_le_bytes(page[..4].try_into().unwrap());
                all.chunks(PAGE).map(first).collect()
            })
            .collect();
        // The forks must show all writes up to the newest saved one, and none after it.
        let newest =
            found.iter().flatten().filter(|number| **number != 0x0707_0707).max().copied().unwrap_or(0);
        let mut expected = vec![vec![0x0707_0707; PAGES as usize]; 3];
        let mut again = 1;
        for number in 1..=newest {
            let (disk, page) = place(&mut again, PAGES);
            expected[disk][page] = number;
        }
        assert_eq!(found, expected, "of {counter} writes, {newest} are there");
        seen += u32::from(newest > 0);
        // The counter continues after the newest saved write.
        counter = newest;
        let mut next = again;
        let mut clients = [0, 1, 2].map(|number| Raw::connect(&server, &format!("f-{number}")));
        let end = Instant::now() + Duration::from_millis(1500);
        while Instant::now() < end {
            counter += 1;
            let (disk, page) = place(&mut next, PAGES);
            let data: Vec<u8> = counter.to_le_bytes().into_iter().cycle().take(PAGE).collect();
            assert_eq!(clients[disk].write(0, page as u64 * PAGE as u64, &data), 0);
            thread::sleep(pause);
        }
        dir = server.kill();
    }
    assert!(seen > rounds / 2 - 1, "{seen} of {rounds}");
}

/// Returns the disk and the page of the next pseudorandom write.
fn place(seed: &mut u64, pages: u64) -> (usize, usize) {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (((*seed >> 33) % 3) as usize, ((*seed >> 40) % pages) as usize)
}

#[test]
fn kept_disk_is_usable_while_it_is_loaded() {
    let server = serve(tempfile::tempdir().unwrap(), &["disk=ram,disksize=256M,keep=yes"]);
    fs::write(server.path("noise"), noise(4, 32 << 20)).unwrap();
    let noise = format!("write -s {}", server.path("noise").display());
    for at in 0..4 {
        qemu_io(&uri(&server, "disk"), &[format!("{noise} {}M 32M", at * 32)]);
    }
    let server = serve(server.end(), &[]);
    // The server serves this read while part of the content is not loaded yet.
    let content = fs::read(server.path("noise")).unwrap();
    assert!(Raw::connect(&server, "disk").read(127 << 20, 1 << 20).unwrap() == content[31 << 20..]);
    qemu_io(&uri(&server, "disk"), &["write -P 9 64M 1M", "discard 96M 1M"]);
    wait_until("all is loaded", || server.json(&["stat", "disk"])["keep"]["loaded_percent"].is_null());
    qemu_io(&uri(&server, "disk"), &["read -P 9 64M 1M", "read -P 0 96M 1M"]);
    assert!(Raw::connect(&server, "disk").read(65 << 20, 1 << 20).unwrap() == content[1 << 20..][..1 << 20]);
}
