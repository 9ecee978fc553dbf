//! Saved devices, restored by another server over the same base; damaged save files are refused.

use crate::harness::prelude::*;

const SOCKETS: [&str; 4] = ["--nbd", "unix:nbd", "--control", "control"];
const GOLDEN: &str = "golden=file,path=golden.img,readonly=yes";

fn serve(dir: TempDir, devices: &[&str]) -> Serve {
    Serve::start_in(dir, &[devices, &SOCKETS].concat(), false)
}

#[test]
fn ram_disk_is_saved_and_restored() {
    let first = Serve::start(&["ram0=ram,disksize=64M,comp_algorithm=zstd", "other=ram,disksize=8M"]);
    qemu_io(&uri(&first, "ram0"), &["write -P 1 1M 8M", "write -P 2 60M 1M"]);
    qemu_io(&uri(&first, "other"), &["write -P 3 0 1M"]);
    let saved = first.json(&["save", "ram0", "ram0.saved"]);
    assert_eq!((&saved["names"], &saved["pages"]), (&json!(["ram0"]), &json!(9 * MIB / 4096)));
    first.text(&["save", "ram0,other", "both.saved"]);
    qemu_io(&uri(&first, "ram0"), &["write -P 9 0 64M"]);

    let second = serve(first.end(), &["n=null,size=1M"]);
    assert_eq!(second.text(&["restore", "ram0.saved"]), "ram0: ram 64M, not published\n");
    let ram0 = publish(&second, "ram0");
    qemu_io(&ram0, &["read -P 0 0 1M", "read -P 1 1M 8M", "read -P 0 9M 51M", "read -P 2 60M 1M"]);
    qemu_io(&ram0, &["write -P 4 1M 1M", "read -P 4 1M 1M", "read -P 1 2M 7M"]);
    assert_eq!(second.json(&["get", "ram0", "comp_algorithm"])["comp_algorithm"], "zstd");
    second.text(&["restore", "ram0.saved", "again", "mem_limit=32M", "comp_algorithm=lz4"]);
    let get = second.json(&["get", "again"]);
    assert_eq!((&get["mem_limit"], &get["comp_algorithm"]), (&json!(32 * MIB), &json!("lz4")));
    qemu_io(&publish(&second, "again"), &["read -P 1 1M 8M"]);

    assert_eq!(second.refused(1, &["restore", "ram0.saved"]), "ram0: a device of that name exists");
    let both = second.refused(1, &["restore", "both.saved", "x"]);
    assert!(both.ends_with("both.saved has 2 devices, which keep their names"), "{both}");
    second.text(&["remove", "ram0", "--force"]);
    let restored = second.json(&["restore", "both.saved"]);
    assert_eq!(restored["devices"][1], json!({"name": "other", "kind": "ram", "disksize": 8 * MIB}));
    qemu_io(&publish(&second, "other"), &["read -P 3 0 1M"]);

    // A server refuses damaged, truncated, foreign and missing save files.
    let whole = fs::read(second.path("ram0.saved")).unwrap();
    fs::write(second.path("cut"), &whole[..whole.len() - 100]).unwrap();
    let mut damaged = whole.clone();
    damaged[whole.len() / 2] ^= 1;
    fs::write(second.path("damaged"), damaged).unwrap();
    fs::write(second.path("foreign"), noise(1, MIB)).unwrap();
    for (file, why) in [
        ("cut", "is incomplete"),
        ("damaged", "is damaged"),
        ("foreign", "was not saved by Freestone"),
        ("none", "cannot read"),
    ] {
        let message = second.refused(1, &["restore", file, "x"]);
        assert!(message.starts_with("restore: ") && message.contains(why), "{file}: {message}");
    }
    assert_eq!(second.json(&["list", "x"])["devices"], json!([]));
    let key = second.refused(2, &["restore", "ram0.saved", "x", "mem_limt=1G"]);
    assert!(key.starts_with("ram0.saved: restore: unknown key \"mem_limt\"; mem_limit?; "), "{key}");
    let limit = second.refused(2, &["restore", "ram0.saved", "x", "mem_limit=1"]);
    assert!(limit.contains("mem_limit=1: give a unit"), "{limit}");
    assert_eq!(
        second.refused(1, &["save", "n", "x.saved"]),
        "n: save: a null device is not saved; ram devices, forks and snapshots are"
    );
}

#[test]
fn forks_are_saved_and_restored_with_snapshots() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("golden.img"), noise(1, 8 * MIB)).unwrap();
    fs::write(dir.path().join("other.img"), noise(2, 8 * MIB)).unwrap();
    let first = serve(dir, &[GOLDEN, "a=fork,base=golden", "b=fork,base=golden", "apart=ram,disksize=1M"]);
    qemu_io(&uri(&first, "a"), &["write -P 1 0 1M"]);
    first.text(&["snapshot", "a", "a-1"]);
    qemu_io(&uri(&first, "a"), &["write -P 2 0 512k"]);
    qemu_io(&uri(&first, "b"), &["write -P 3 4M 1M", "discard 6M 1M"]);
    let saved = first.json(&["save", "golden", "jobs.saved", "--family"]);
    assert_eq!(saved["names"], json!(["a", "b", "a-1"]));

    let second = serve(first.end(), &["n=null,size=1M", "other=file,path=other.img,readonly=yes"]);
    let missing = second.refused(1, &["restore", "jobs.saved"]);
    assert!(missing.contains("create that base first"), "{missing}");
    second.text(&["create", "base=file,path=golden.img,readonly=yes,mem_limit=64M"]);
    let limit = second.refused(1, &["restore", "jobs.saved", "mem_limit=1G"]);
    assert!(limit.ends_with("the forks in the file join the family of base; set it there"), "{limit}");
    let restored = second.json(&["restore", "jobs.saved"]);
    assert_eq!(restored["devices"].as_array().unwrap().len(), 3);
    let same = |uri: &str, at: u64, len: u64| {
        // Pages that were never written read as the base. In qemu-img dd, `count` includes the
        // skipped part.
        let range = [format!("skip={at}"), format!("count={}", at + len)];
        let from = ok(tool("qemu-img")
            .args(["dd", "-f", "raw", "-O", "raw", "bs=1M"])
            .args(&range)
            .arg(format!("if={uri}"))
            .arg(format!("of={}", second.path("part").display())));
        assert_eq!(from, "");
        fs::read(second.path("part")).unwrap()
            == fs::read(second.path("golden.img")).unwrap()[(at << 20) as usize..((at + len) << 20) as usize]
    };
    let (a, b, a_1) = (publish(&second, "a"), publish(&second, "b"), publish(&second, "a-1"));
    qemu_io(&a, &["read -P 2 0 512k", "read -P 1 512k 512k"]);
    qemu_io(&a_1, &["read -P 1 0 1M"]);
    qemu_io(&b, &["read -P 3 4M 1M", "read -P 0 6M 1M"]);
    assert!(same(&a, 1, 7) && same(&b, 0, 4) && !same(&b, 4, 1));
    // Restored forks work like others: they share the memory limit of the base, can be rewound, and
    // prevent the removal of the base.
    assert_eq!(second.json(&["stat", "a"])["family"]["mem_limit"], 64 * MIB);
    let users = second.refused(1, &["remove", "base"]);
    assert!(users.starts_with("base: cannot be removed: "), "{users}");
    second.text(&["rewind", "b"]);
    assert!(same(&b, 0, 8));
    let delta = second.refused(1, &["delta", "save", "a", "a.qcow2"]);
    assert!(delta.starts_with("a: delta save: only a fork of a file"), "{delta}");
}
