//! Backing devices: keys, attributes, refused files, and files that a server loses.

use super::writeback::{MIB, PAGE, data, errno, read, write};
use crate::harness::prelude::*;

/// Returns the paths of the regular files in a directory.
fn files_in(dir: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.is_file()).collect()
}

#[test]
fn attributes_of_the_backing_device() {
    let serve = Serve::start(&[
        "big=ram,disksize=64M,backing_dev=spill.img,backing_size=16M,auto_recompress=600",
        "plain=ram,disksize=64M",
    ]);
    let path = format!("{}\n", serve.path("spill.img").display());
    for (attr, big, plain) in [
        ("backing_dev", path.as_str(), "none\n"),
        ("backing_size", "16777216\n", "0\n"),
        ("compressed_writeback", "1\n", "0\n"),
        ("writeback_limit", "0\n", "0\n"),
        ("writeback_limit_enable", "0\n", "0\n"),
        ("writeback_batch_size", "1024\n", "1024\n"),
        ("recomp_algorithm", "\n", "\n"),
        ("auto_recompress", "600\n", "0\n"),
    ] {
        assert_eq!(serve.text(&["get", "big", attr]), big, "{attr}");
        assert_eq!(serve.text(&["get", "plain", attr]), plain, "{attr}");
    }
    let auto = serve.json(&["stat", "big"])["auto_recompress"].take();
    assert_eq!(auto, json!({ "pages": 0, "saved_bytes": 0, "dictionary_bytes": 0 }));
    let fixed = "fixed once the device is initialised; create a new device with another value";
    for attr in ["backing_dev", "backing_size", "compressed_writeback", "recomp_algorithm", "auto_recompress"]
    {
        assert_eq!(
            serve.refused(1, &["set", "big", &format!("{attr}=1")]),
            format!("big: {attr}=1: {fixed}")
        );
    }
    for (set, sentence) in [
        ("writeback_limit=4G", "a count of 4 KiB units, without a letter; 1048576?"),
        ("writeback_limit=many", "must be a whole number: a count of 4 KiB units"),
        ("writeback_limit_enable=2", "must be yes or no"),
        ("writeback_batch_size=0", "must be a whole number of 4 KiB blocks, 1 to 4294967295"),
        (
            "bd_stat=0",
            "read-only; disksize (grow), mem_limit, mem_used_max (0), writeback_limit, writeback_limit_enable, \
             writeback_batch_size, full, full_timeout and mem_warn_threshold can be set",
        ),
    ] {
        assert_eq!(serve.refused(2, &["set", "big", "mem_limit=1M", set]), format!("big: {set}: {sentence}"));
    }
    let none = "the device has no backing_dev; create it with one";
    assert_eq!(
        serve.refused(1, &["set", "plain", "writeback_limit=1"]),
        format!("plain: writeback_limit=1: {none}")
    );
    for (attr, verb) in [
        ("idle", "idle big all"),
        ("writeback", "writeback big idle"),
        ("recompress", "recompress big type=idle"),
    ] {
        let sentence = format!("big: {attr} is a verb here: freestone {verb}");
        assert_eq!(serve.refused(2, &["set", "big", &format!("{attr}=all")]), sentence);
        assert_eq!(serve.refused(2, &["get", "big", attr]), sentence);
    }
    // JSON numbers are accepted as attribute values as well.
    let set = json!({ "name": "big", "attrs": { "writeback_limit": 7, "writeback_limit_enable": 1 } });
    let line = json!({ "jsonrpc": "2.0", "id": 1, "method": "set", "params": set }).to_string();
    let reply = ask(&serve.control(), line.as_bytes());
    assert_eq!(reply["result"], json!({ "writeback_limit": 7, "writeback_limit_enable": 1 }));
}

#[test]
fn unusable_backing_device_is_refused() {
    let serve = Serve::start(&["big=ram,disksize=64M,backing_dev=new.img,backing_size=16M"]);
    let at = |name: &str| serve.path(name).display().to_string();
    fs::create_dir(serve.path("dir")).unwrap();
    fs::write(serve.path("old.img"), vec![0; 1 << 20]).unwrap();
    let create = |keys: &str| format!("x=ram,disksize=64M,{keys}");
    for (keys, sentence) in [
        (
            "backing_dev=missing.img",
            format!("{}: cannot open: No such file or directory (os error 2)", at("missing.img")),
        ),
        (
            "backing_dev=no/such/dir,backing_size=1M",
            format!("{}: cannot create: No such file or directory (os error 2)", at("no/such/dir")),
        ),
        (
            "backing_dev=dir",
            format!("{}: is a directory; a regular file or a block device is needed", at("dir")),
        ),
        (
            "backing_dev=old.img,backing_size=2M",
            format!(
                "backing_size=2M: {} has 1M; leave backing_size out to take the file as it is",
                at("old.img")
            ),
        ),
    ] {
        assert_eq!(serve.refused(1, &["create", &create(keys)]), format!("x: backing_dev: {sentence}"));
    }
    // An existing backing file is accepted, for one device at a time. A device that was refused
    // does not keep the file open.
    serve.text(&["create", &create("backing_dev=old.img")]);
    assert_eq!(serve.text(&["get", "x", "backing_size"]), "1048576\n");
    let used = format!("y: backing_dev: {}: is in use by another device or process", at("old.img"));
    assert_eq!(serve.refused(1, &["create", "y=ram,disksize=1M,backing_dev=old.img"]), used);
    let device = format!("y=ram,disksize=1M,backing_dev={}", at("old.img"));
    assert_eq!(errno(&serve, "create", &json!({ "device": device })).1, json!({ "errno": "EBUSY" }));
    serve.text(&["remove", "x"]);
    serve.text(&["create", "y=ram,disksize=1M,backing_dev=old.img,backing_size=1M"]);
    // The backing file that `big` creates has no name in the directory, so only the existing file
    // is listed.
    assert_eq!(files_in(serve.dir.path()), [serve.path("old.img")]);
}

#[test]
fn truncated_backing_file_loses_only_its_pages() {
    let dir = tempdir().unwrap();
    let image = dir.path().join("old.img");
    fs::write(&image, vec![0; 8 * MIB]).unwrap();
    let serve = Serve::start_in(dir, &["r=ram,disksize=64M,mem_limit=16M,backing_dev=old.img"], true);
    let mut nbd = Raw::connect(&serve, "r");
    let written = data(512, 2000);
    write(&mut nbd, 0, &written);
    assert_eq!(serve.json(&["writeback", "r", "page_indexes=0-255"])["pages"], 256);
    fs::File::options().write(true).open(serve.path("old.img")).unwrap().set_len(0).unwrap();

    // A read of the lost page fails with EIO. Other pages are readable.
    assert_eq!(nbd.read(0, PAGE as u32), Err(EIO));
    assert_eq!(read(&mut nbd, MIB as u64, MIB), &written[MIB..]);
    // A page stays in memory if its writeback fails.
    let failed = serve.refused(1, &["writeback", "r", "page_indexes=256-511"]);
    assert!(failed.starts_with("r: writeback: backing_dev: "), "{failed}");
    assert!(failed.ends_with("; 0 pages were written before, in 0 blocks"), "{failed}");
    assert_eq!(read(&mut nbd, MIB as u64, MIB), &written[MIB..]);
    let backing = serve.json(&["stat", "r"])["backing"].take();
    assert!(
        backing["failed_reads"].as_u64() > Some(0) && backing["failed_writes"].as_u64() > Some(0),
        "{backing}"
    );
    // After a lost page is written again, reads of the page succeed.
    write(&mut nbd, 0, &written[..PAGE]);
    assert_eq!(read(&mut nbd, 0, PAGE), &written[..PAGE]);
}

#[test]
fn killed_server_leaves_no_backing_file() {
    for signal in [Signal::KILL, Signal::TERM] {
        let serve = Serve::start(&["r=ram,disksize=64M,mem_limit=2M,backing_dev=spill.img,backing_size=32M"]);
        let mut nbd = Raw::connect(&serve, "r");
        let written = data(2048, 2000);
        // The data is larger than mem_limit, so the device evicts pages automatically.
        write(&mut nbd, 0, &written);
        let stat = serve.json(&["stat", "r"]);
        assert!(stat["backing"]["spilled_pages"].as_u64().unwrap() > 0, "{stat}");
        assert_eq!(read(&mut nbd, 0, written.len()), written);
        serve.signal(signal);
        let (_, dir) = serve.wait();
        assert_eq!(files_in(dir.path()), Vec::<PathBuf>::new());
    }
}

#[test]
fn config_file_takes_backing_device_keys() {
    let dir = tempdir().unwrap();
    let conf = dir.path().join("conf");
    fs::create_dir(&conf).unwrap();
    fs::write(conf.join("old.img"), vec![0; 1 << 20]).unwrap();
    fs::write(
        conf.join("freestone.toml"),
        "[[device]]\nname = 'r'\nkind = 'ram'\ndisksize = '64M'\nbacking_dev = 'old.img'\nbacking_size = '1M'\n\
         compressed_writeback = false\nwriteback_limit = 5\nwriteback_limit_enable = true\nwriteback_batch_size = 64\n\
         recomp_algorithm = 'zstd'\nauto_recompress = 60\n",
    )
    .unwrap();
    let serve = Serve::start_in(dir, &["--config", "conf/freestone.toml"], true);
    let all = serve.json(&["get", "r"]);
    assert_eq!(all["backing_dev"], serve.path("conf/old.img").display().to_string());
    for (attr, value) in [
        ("backing_size", json!(1 << 20)),
        ("compressed_writeback", json!(0)),
        ("writeback_limit", json!(5)),
        ("writeback_limit_enable", json!(1)),
        ("writeback_batch_size", json!(64)),
        ("recomp_algorithm", json!({ "1": "zstd" })),
        ("auto_recompress", json!(60)),
    ] {
        assert_eq!(all[attr], value, "{attr}");
    }
}

#[test]
fn useless_backing_device_is_warned_of() {
    let dir = tempdir().unwrap();
    let warnings = |keys: &str| {
        let mut serve = freestone(dir.path());
        serve.args(["serve", "--control", "c", "--run", "true"]).arg(format!("r=ram,disksize=64M,{keys}"));
        let (code, _, err) = finish(&mut serve);
        assert_eq!(code, 0, "{err}");
        err
    };
    assert_eq!(warnings("mem_limit=16M,backing_dev=spill,backing_size=64M"), "");
    let unlimited = warnings("mem_limit=none,backing_dev=spill,backing_size=64M");
    assert!(
        unlimited.lines().count() == 1 && unlimited.contains("without mem_limit, pages are written there"),
        "{unlimited}"
    );
    let memory = warnings("mem_limit=16M,backing_dev=/dev/shm/spill,backing_size=64M");
    assert!(memory.contains(": is itself in memory, so it saves no memory"), "{memory}");
}
