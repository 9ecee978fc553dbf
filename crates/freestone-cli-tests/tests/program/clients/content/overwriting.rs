//! Files that `save` and `delta save` do not overwrite: files in use by the server under any name,
//! and other kinds of files without --force.

use std::os::unix::fs::{MetadataExt as _, symlink};

use crate::harness::prelude::*;

fn write(serve: &Serve, device: &str) {
    ok(tool("qemu-io").args(["-f", "raw", "-c", "write -P 7 0 64k"]).arg(uri(serve, device)));
}

fn inode(path: &Path) -> u64 {
    fs::metadata(path).unwrap().ino()
}

#[test]
fn save_never_replaces_files_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for name in ["disk.img", "golden.img", "disk2.img", "zoned.img", "lower.img", "spill.img"] {
        fs::write(at(name), noise(3, 4 * MIB)).unwrap();
    }
    let image = |args: &[&str]| ok(tool("qemu-img").args(args).current_dir(dir.path()));
    image(&["create", "-q", "-f", "qcow2", "-b", "lower.img", "-F", "raw", "middle.qcow2"]);
    image(&["create", "-q", "-f", "qcow2", "-b", "middle.qcow2", "-F", "qcow2", "top.qcow2"]);
    symlink("golden.img", at("link")).unwrap();
    fs::hard_link(at("golden.img"), at("hard")).unwrap();
    let serve = Serve::start_in(
        dir,
        &[
            "r=ram,disksize=4M,backing_dev=spill.img",
            "disk=file,path=disk.img",
            "golden=file,path=golden.img,readonly=yes",
            "f=fork,base=golden",
            "q=qcow2,path=top.qcow2",
            "z=file,path=zoned.img,zoned=yes,zone_size=1M,zone_state=z.state",
            "l=file,path=disk2.img,power_cut=yes,record=l.log",
            "s=snapshot,origin=disk,cow=./s.cow,cow_size=8M",
        ],
        true,
    );
    write(&serve, "r");
    write(&serve, "f");
    let used = [
        "disk.img",
        "golden.img",
        "link",
        "hard",
        "top.qcow2",
        "middle.qcow2",
        "lower.img",
        "zoned.img",
        "z.state",
        "disk2.img",
        "l.log",
        "s.cow",
        "spill.img",
    ];
    for name in used {
        let before = inode(&serve.path(name));
        for verb in [&["save", "r", name][..], &["delta", "save", "f", name]] {
            for force in [&[][..], &["--force"]] {
                let message = serve.refused(1, &[verb, force].concat());
                let open = message.contains("the file is open in this server; name another file");
                assert!(open || message.contains("would take the place of the base"), "{name}: {message}");
            }
        }
        assert_eq!(inode(&serve.path(name)), before, "{name}");
    }
    for name in ["/dev/null", "."] {
        let message = serve.refused(1, &["save", "r", name, "--force"]);
        assert!(message.contains("the path is not a regular file"), "{name}: {message}");
    }
    // After a device is removed, its image files may be overwritten.
    serve.text(&["remove", "q"]);
    serve.text(&["save", "r", "top.qcow2", "--force"]);
    serve.text(&["delta", "save", "f", "middle.qcow2"]);
}

#[test]
fn save_replaces_other_kinds_only_with_force() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("golden.img"), noise(4, 4 * MIB)).unwrap();
    let serve = Serve::start_in(
        dir,
        &["r=ram,disksize=4M", "golden=file,path=golden.img,readonly=yes", "f=fork,base=golden"],
        true,
    );
    write(&serve, "r");
    write(&serve, "f");
    ok(tool("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(serve.path("alone.qcow2")).arg("1M"));
    fs::write(serve.path("notes.txt"), "precious").unwrap();
    serve.text(&["save", "r", "r.saved"]);
    serve.text(&["delta", "save", "f", "f.qcow2"]);
    for (verb, wanted, others) in [
        (
            &["save", "r"][..],
            "the file exists and is not a saved device; --force replaces it",
            ["notes.txt", "f.qcow2"],
        ),
        (
            &["delta", "save", "f"],
            "the file exists and is not a qcow2 overlay; --force replaces it",
            ["r.saved", "alone.qcow2"],
        ),
    ] {
        for name in others {
            let before = fs::read(serve.path(name)).unwrap();
            let message = serve.refused(1, &[verb, &[name]].concat());
            assert!(message.ends_with(wanted), "{name}: {message}");
            assert_eq!(fs::read(serve.path(name)).unwrap(), before);
        }
    }
    // `save` and `delta save` replace a file of the same kind, an empty file, and any file with
    // --force.
    let before = inode(&serve.path("r.saved"));
    serve.text(&["save", "r", "r.saved"]);
    assert_ne!(inode(&serve.path("r.saved")), before);
    serve.text(&["delta", "save", "f", "f.qcow2"]);
    fs::write(serve.path("empty"), "").unwrap();
    serve.text(&["save", "r", "empty"]);
    serve.text(&["save", "r", "notes.txt", "--force"]);
    serve.text(&["delta", "save", "f", "alone.qcow2", "--force"]);
    // The control socket reports an existing file with the errno EEXIST.
    fs::write(serve.path("notes.txt"), "precious").unwrap();
    let file = serve.path("notes.txt");
    let line = json!({"jsonrpc": "2.0", "id": 1, "method": "save", "params": {"names": ["r"], "file": file}});
    let answer = ask(&serve.control(), line.to_string().as_bytes());
    assert_eq!(answer["error"]["data"]["errno"], "EEXIST", "{answer}");
}

#[test]
fn save_never_replaces_files_of_another_server() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("golden.img"), noise(4, 4 * MIB)).unwrap();
    let path = dir.path().join("golden.img");
    let _other = Serve::start_in(dir, &["golden=file,path=golden.img,readonly=yes"], true);
    let serve = Serve::start(&["r=ram,disksize=4M"]);
    let message = serve.refused(1, &["save", "r", &path.display().to_string(), "--force"]);
    assert!(message.ends_with("the file is in use by another process; name another file"), "{message}");
}
