//! What is in use is not replaced, by whatever name, and what is no saved file or overlay only
//! where that is said.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::Path;

use serde_json::json;

use crate::clients::tools::{MIB, noise, ok, tool, uri};
use crate::harness::Serve;

fn write(serve: &Serve, device: &str) {
    ok(tool("qemu-io").args(["-f", "raw", "-c", "write -P 7 0 64k"]).arg(uri(serve, device)));
}

fn inode(path: &Path) -> u64 {
    fs::metadata(path).unwrap().ino()
}

#[test]
fn what_is_open_here_is_never_replaced() {
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
                let said = serve.refused(1, &[verb, force].concat());
                let open = said.contains("it is open in this server; name another file");
                assert!(open || said.contains("would take the place of the base"), "{name}: {said}");
            }
        }
        assert_eq!(inode(&serve.path(name)), before, "{name}");
    }
    for name in ["/dev/null", "."] {
        let said = serve.refused(1, &["save", "r", name, "--force"]);
        assert!(said.contains("there is something else than a file"), "{name}: {said}");
    }
    // What was in use is free when its device is gone.
    serve.text(&["remove", "q"]);
    serve.text(&["save", "r", "top.qcow2", "--force"]);
    serve.text(&["delta", "save", "f", "middle.qcow2"]);
}

#[test]
fn what_is_of_another_kind_is_replaced_only_by_force() {
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
            "it is there, and is no saved device; --force replaces it",
            ["notes.txt", "f.qcow2"],
        ),
        (
            &["delta", "save", "f"],
            "it is there, and is no qcow2 overlay; --force replaces it",
            ["r.saved", "alone.qcow2"],
        ),
    ] {
        for name in others {
            let before = fs::read(serve.path(name)).unwrap();
            let said = serve.refused(1, &[verb, &[name]].concat());
            assert!(said.ends_with(wanted), "{name}: {said}");
            assert_eq!(fs::read(serve.path(name)).unwrap(), before);
        }
    }
    // One of its own kind, an empty one, and what is asked for.
    let before = inode(&serve.path("r.saved"));
    serve.text(&["save", "r", "r.saved"]);
    assert_ne!(inode(&serve.path("r.saved")), before);
    serve.text(&["delta", "save", "f", "f.qcow2"]);
    fs::write(serve.path("empty"), "").unwrap();
    serve.text(&["save", "r", "empty"]);
    serve.text(&["save", "r", "notes.txt", "--force"]);
    serve.text(&["delta", "save", "f", "alone.qcow2", "--force"]);
    // For programs.
    fs::write(serve.path("notes.txt"), "precious").unwrap();
    let file = serve.path("notes.txt");
    let line = json!({"jsonrpc": "2.0", "id": 1, "method": "save", "params": {"names": ["r"], "file": file}});
    let answer = crate::harness::ask(&serve.control(), line.to_string().as_bytes());
    assert_eq!(answer["error"]["data"]["errno"], "EEXIST", "{answer}");
}

#[test]
fn what_another_server_has_open_is_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("golden.img"), noise(4, 4 * MIB)).unwrap();
    let path = dir.path().join("golden.img");
    let _other = Serve::start_in(dir, &["golden=file,path=golden.img,readonly=yes"], true);
    let serve = Serve::start(&["r=ram,disksize=4M"]);
    let said = serve.refused(1, &["save", "r", &path.display().to_string(), "--force"]);
    assert!(said.ends_with("it is in use by another process; name another file"), "{said}");
}
