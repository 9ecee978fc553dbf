//! Backing devices and recompression of RAM disks: keys, attributes, verbs and error messages.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use freestone_testkit::Rng;
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::tempdir;

use crate::harness::{Serve, ask, connect_nbd, finish, freestone};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;

/// NBD error number for "no space left on device".
const ENOSPC: u32 = 28;

struct Nbd(UnixStream);

impl Nbd {
    fn connect(serve: &Serve, name: &str) -> Self {
        let mut stream = UnixStream::connect(serve.path("nbd")).unwrap();
        connect_nbd(&mut stream, name);
        Self(stream)
    }

    /// Sends a request and returns the error number of the reply, 0 for success. The data of a read
    /// is left on the stream.
    fn ask(&mut self, command: u16, offset: u64, len: usize, payload: &[u8]) -> u32 {
        let mut request = vec![0x25, 0x60, 0x95, 0x13, 0, 0];
        request.extend(command.to_be_bytes());
        request.extend(7_u64.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(u32::try_from(len).unwrap().to_be_bytes());
        request.extend(payload);
        self.0.write_all(&request).unwrap();
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply).unwrap();
        assert_eq!((&reply[..4], &reply[8..]), (&[0x67, 0x44, 0x66, 0x98][..], &7_u64.to_be_bytes()[..]));
        u32::from_be_bytes(reply[4..8].try_into().unwrap())
    }

    fn request(&mut self, command: u16, offset: u64, len: usize, payload: &[u8]) {
        assert_eq!(self.ask(command, offset, len, payload), 0, "the request failed");
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        for (at, part) in (0..).step_by(MIB).zip(data.chunks(MIB)) {
            self.request(1, offset + at, part.len(), part);
        }
    }

    fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        for (at, part) in (0..).step_by(MIB).zip(data.chunks_mut(MIB)) {
            self.request(0, offset + at, part.len(), &[]);
            self.0.read_exact(part).unwrap();
        }
        data
    }
}

/// Returns `pages` pages, in each of which the first `noise` bytes do not compress.
fn data(pages: usize, noise: usize) -> Vec<u8> {
    let mut rng = Rng::new(1);
    let mut data = vec![b'.'; pages * PAGE];
    for page in data.chunks_mut(PAGE) {
        rng.fill(&mut page[..noise]);
    }
    data
}

/// Returns the paths of the regular files in a directory.
fn files_in(dir: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.is_file()).collect()
}

fn errno(serve: &Serve, method: &str, params: &Value) -> (Value, Value, Value) {
    let line = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params }).to_string();
    let mut error = ask(&serve.control(), line.as_bytes())["error"].take();
    (error["code"].take(), error["data"].take(), error["message"].take())
}

#[test]
fn full_backing_device_is_reported() {
    let serve = Serve::start(&["r=ram,disksize=64M,mem_limit=1M,backing_dev=spill.img,backing_size=1M"]);
    let backing = |serve: &Serve| serve.json(&["stat", "r"])["backing"]["state"].clone();
    assert_eq!(backing(&serve), "ok");
    let mut nbd = Nbd::connect(&serve, "r");
    let mut rng = Rng::new(1);
    let mut page = vec![0; PAGE];
    let mut answers = (0..4096).map(|number| {
        rng.fill(&mut page);
        nbd.ask(1, number * PAGE as u64, PAGE, &page)
    });
    assert_eq!(answers.find(|error| *error != 0), Some(ENOSPC));
    assert_eq!(backing(&serve), "full");
    let row = &serve.json(&["list"])["devices"][0]["backing"];
    assert!(row["used_bytes"].as_u64() > Some(900_000) && row["size"] == 1 << 20, "{row}");
    let list = serve.text(&["list"]);
    let column = |line: usize| list.lines().nth(line).unwrap().split_whitespace().nth(9).unwrap().to_owned();
    assert_eq!(column(0), "BACKING");
    assert!(column(1).ends_with('%') && column(1).len() >= 3, "{list}");
}

#[test]
fn writeback_pages_are_read_back() {
    let serve = Serve::start(&[
        "big=ram,disksize=64M,mem_limit=32M,backing_dev=spill.img,backing_size=64M",
        "plain=ram,disksize=64M",
    ]);
    let mut nbd = Nbd::connect(&serve, "big");
    let written = data(8 * MIB / PAGE, 1024);
    nbd.write(0, &written);
    assert_eq!(serve.text(&["idle", "big", "3600"]), "big: 0 pages marked\n");
    assert_eq!(serve.text(&["idle", "big", "all"]), "big: 2048 pages marked\n");
    // A read clears the idle mark of the page.
    assert_eq!(nbd.read(0, PAGE), &written[..PAGE]);
    let done = serve.json(&["writeback", "big", "idle"]);
    assert_eq!(done["pages"], 2047);
    let blocks = done["blocks"].as_u64().unwrap();
    // A compressed page is a bit larger than 1 KiB, and the packed layout stores several of them in
    // a block of 4 KiB.
    assert!((512..800).contains(&blocks), "{done}");

    let stat = serve.json(&["stat", "big"]);
    let keys =
        |section: &str| stat[section].as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ");
    assert_eq!(keys("bd_stat"), "bd_count bd_reads bd_writes");
    assert_eq!(stat["bd_stat"]["bd_writes"], blocks);
    assert_eq!(stat["backing"]["path"], serve.path("spill.img").display().to_string());
    assert_eq!(stat["backing"]["backing_size"], 64 << 20);
    assert_eq!(stat["backing"]["spilled_pages"], 2047);
    assert_eq!(stat["backing"]["state"], "ok");
    assert_eq!(stat["mm_stat"]["orig_data_size"], 8 << 20);
    assert!(stat["mm_stat"]["compr_data_size"].as_u64().unwrap() <= 4096);
    let row = serve.text(&["get", "big", "bd_stat"]);
    assert_eq!(row.split_whitespace().count(), 3, "{row}");
    let text = serve.text(&["stat", "big"]);
    assert!(text.contains("\n  bd_stat\n    bd_count ") && text.contains("\n    backing_size  "), "{text}");

    assert_eq!(nbd.read(0, written.len()), written);
    let stat = serve.json(&["stat", "big"]);
    assert!(stat["bd_stat"]["bd_reads"].as_u64().unwrap() > 0);
    assert_eq!(stat["backing"]["failed_reads"], 0);

    // `page_index` and `page_indexes` select pages. An index that is given twice counts once.
    nbd.write(16 << 20, &data(16, 3000));
    let done = serve.json(&["writeback", "big", "page_index=4096", "page_indexes=4096-4099 page_index=4111"]);
    assert_eq!(done["pages"], 5);
    assert_eq!(nbd.read(16 << 20, 16 * PAGE), data(16, 3000));

    assert_eq!(stat.get("auto_recompress"), None);

    // Without a backing device `bd_stat` is zeroes, and `stat` has no section `backing`.
    assert_eq!(serve.text(&["get", "plain", "bd_stat"]), "0 0 0\n");
    assert_eq!(serve.json(&["stat", "plain"]).get("backing"), None);
}

#[test]
fn writeback_limit_counts_as_in_the_kernel() {
    let serve = Serve::start(&["r=ram,disksize=64M,backing_dev=spill.img,backing_size=64M,\
                                compressed_writeback=no,writeback_limit=1002,writeback_limit_enable=1"]);
    let mut nbd = Nbd::connect(&serve, "r");
    let written = data(10 * MIB / PAGE, PAGE);
    nbd.write(0, &written);
    assert_eq!(serve.text(&["get", "r", "writeback_limit"]), "1002\n");
    serve.text(&["idle", "r", "all"]);
    let used_up = "r: writeback: writeback_limit is used up; 1002 pages were written before, in 1002 blocks";
    assert_eq!(serve.refused(1, &["writeback", "r", "type=idle"]), used_up);
    assert_eq!(serve.text(&["get", "r", "bd_stat"]), "1002 0 1002\n");
    assert_eq!(serve.text(&["get", "r", "writeback_limit"]), "0\n");
    serve.text(&["set", "r", "writeback_limit=100"]);
    let (code, done, _) = errno(&serve, "writeback", &json!({ "name": "r", "type": "huge_idle" }));
    assert_eq!((code, done), (json!(-32000), json!({ "errno": "EIO", "pages": 100, "blocks": 100 })));
    assert_eq!(serve.text(&["get", "r", "bd_stat"]), "1102 0 1102\n");
    let set = serve.text(&["set", "r", "writeback_limit_enable=0", "writeback_batch_size=32"]);
    assert_eq!(set, "writeback_limit_enable=0\nwriteback_batch_size=32\n");
    assert_eq!(serve.json(&["writeback", "r", "huge"])["pages"], 2560 - 1102);
    assert_eq!(serve.text(&["get", "r", "bd_stat"]), "2560 0 2560\n");
    assert_eq!(nbd.read(0, written.len()), written);
}

#[test]
fn pages_are_recompressed() {
    let serve = Serve::start(&["r=ram,disksize=64M,recomp_algorithm=zstd;algo=zstd priority=2,\
                                algorithm_params=priority=1 level=1;priority=2 level=19"]);
    let mut nbd = Nbd::connect(&serve, "r");
    // The text consists of eight letters: lz4 finds no repetitions, but an entropy coder such as
    // zstd's compresses it.
    let written: Vec<u8> = data(1024, PAGE).iter().map(|byte| b"etaoinsh"[usize::from(byte & 7)]).collect();
    nbd.write(0, &written);
    let before = serve.json(&["stat", "r"])["mm_stat"]["compr_data_size"].as_u64().unwrap();
    serve.text(&["idle", "r", "all"]);
    let some = serve.json(&["recompress", "r", "type=idle", "max_pages=100"]);
    assert_eq!((&some["tried"], &some["shrunk"]), (&json!(100), &json!(100)));
    let rest = serve.json(&["recompress", "r", "type=idle", "threshold=2000", "priority=1"]);
    assert_eq!(
        (&rest["tried"], &rest["shrunk"], &rest["incompressible"]),
        (&json!(924), &json!(924), &json!(0))
    );
    let after = serve.json(&["stat", "r"])["mm_stat"]["compr_data_size"].as_u64().unwrap();
    let saved = some["saved_bytes"].as_u64().unwrap() + rest["saved_bytes"].as_u64().unwrap();
    assert!(saved > 1 << 20, "{saved}");
    assert_eq!(before - after, saved);
    assert_eq!(nbd.read(0, written.len()), written);

    assert_eq!(
        serve.text(&["get", "r", "recomp_algorithm"]),
        "#1: lz4 lz4hc lzo [zstd] store\n#2: lz4 lz4hc lzo [zstd] store\n"
    );
    assert_eq!(
        serve.json(&["get", "r", "recomp_algorithm"]),
        json!({ "recomp_algorithm": { "1": "zstd", "2": "zstd" } })
    );
    assert_eq!(serve.text(&["get", "r", "algorithm_params"]), "priority=1 level=1; priority=2 level=19\n");
    let all = serve.text(&["get", "r"]);
    let second = format!("\nrecomp_algorithm        #1: lz4 lz4hc lzo [zstd] store\n{:24}#2: lz4 ", "");
    assert!(all.contains(&second), "{all}");
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
fn writeback_verbs_refuse_invalid_arguments() {
    let serve = Serve::start(&[
        "big=ram,disksize=64M,backing_dev=spill.img,backing_size=16M,recomp_algorithm=zstd",
        "plain=ram,disksize=64M",
        "n=null,size=1M",
    ]);
    let types = "allowed are idle, huge, huge_idle, incompressible, page_index=N and page_indexes=LO-HI";
    let keys =
        "allowed are type=idle|huge|huge_idle, threshold=BYTES, max_pages=N, algo=NAME and priority=1..3";
    let range = "the pages are 0 to 16383";
    for (status, args, sentence) in [
        (1, &["idle", "n", "all"][..], "n: only a ram device has pages to mark".to_owned()),
        (1, &["writeback", "n", "idle"], "n: only a ram device writes its pages back".into()),
        (1, &["recompress", "n"], "n: only a ram device is recompressed".into()),
        (1, &["idle", "bigg", "all"], "bigg: no such device; big?".into()),
        (2, &["idle", "big", "old"], "big: idle old: must be all, or an age in whole seconds".into()),
        (2, &["idle", "big", "1h"], "big: idle 1h: must be all, or an age in whole seconds".into()),
        (
            1,
            &["writeback", "plain", "idle"],
            "plain: has no backing_dev; set backing_dev when the device is created".into(),
        ),
        (2, &["writeback", "big", "hugeidle"], format!("big: writeback: hugeidle: unknown; {types}")),
        (2, &["writeback", "big", "type="], format!("big: writeback: type=: unknown; {types}")),
        (2, &["writeback", "big", "pages=1"], format!("big: writeback: pages=1: unknown; {types}")),
        (2, &["writeback", "big", ""], format!("big: writeback: no pages selected; {types}")),
        (
            2,
            &["writeback", "big", "idle", "type=huge"],
            "big: writeback: type=huge: one type at a time".into(),
        ),
        (
            2,
            &["writeback", "big", "idle", "page_index=1"],
            "big: writeback: a type, or page_index and page_indexes, but not both".into(),
        ),
        (
            2,
            &["writeback", "big", "page_index=-1"],
            "big: writeback: page_index=-1: must be the number of a page, from 0 on".into(),
        ),
        (
            2,
            &["writeback", "big", "page_indexes=5"],
            "big: writeback: page_indexes=5: must be two numbers of pages, LO-HI".into(),
        ),
        (
            1,
            &["writeback", "big", "page_index=16384"],
            format!("big: writeback: page_index=16384: there is no such page; {range}"),
        ),
        (
            1,
            &["writeback", "big", "page_index=1 page_indexes=2-1"],
            format!("big: writeback: page_indexes=2-1: the first page is behind the last; {range}"),
        ),
        (
            1,
            &["writeback", "big", "page_indexes=0-18446744073709551615"],
            format!("big: writeback: page_indexes=0-18446744073709551615: beyond the end; {range}"),
        ),
        (2, &["recompress", "big", "idle"], format!("big: recompress: idle: a value is missing; {keys}")),
        (2, &["recompress", "big", "level=3"], format!("big: recompress: level=3: unknown; {keys}")),
        (
            2,
            &["recompress", "big", "type=incompressible"],
            "big: recompress: type=incompressible: must be idle, huge or huge_idle".into(),
        ),
        (
            2,
            &["recompress", "big", "threshold=1K"],
            "big: recompress: threshold=1K: must be a number of bytes, without a unit".into(),
        ),
        (
            2,
            &["recompress", "big", "max_pages=x"],
            "big: recompress: max_pages=x: must be a number of pages".into(),
        ),
        (2, &["recompress", "big", "priority=256"], "big: recompress: priority=256: must be 1 to 3".into()),
        (
            2,
            &["recompress", "big", "type=idle type=huge"],
            "big: recompress: type=huge: type is given twice".into(),
        ),
        (
            2,
            &["recompress", "big", "algo=zst"],
            "big: recompress: algo=zst: unknown algorithm; zstd?; allowed are lz4, lz4hc, lzo, zstd, store"
                .into(),
        ),
    ] {
        assert_eq!(serve.refused(status, args), sentence, "{args:?}");
    }
    let data = |method: &str, params: &Value| {
        let (code, data, _) = errno(&serve, method, params);
        (code, data)
    };
    let nothing = |errno: &str| (json!(-32000), json!({ "errno": errno }));
    let writeback = |params: Value| data("writeback", &params);
    assert_eq!(writeback(json!({ "name": "plain", "type": "idle" })), nothing("ENODEV"));
    assert_eq!(writeback(json!({ "name": "big", "page_index": [16384] })), nothing("ERANGE"));
    assert_eq!(writeback(json!({ "name": "big", "page_indexes": ["9-3"] })), nothing("ERANGE"));
    let invalid = (json!(-32602), json!({ "errno": "EINVAL" }));
    assert_eq!(writeback(json!({ "name": "big", "page_indexes": ["9"] })), invalid);
    assert_eq!(writeback(json!({ "name": "big", "type": "all" })), invalid);
    assert_eq!(writeback(json!({ "name": "big" })), invalid);
    assert_eq!(data("idle", &json!({ "name": "big", "which": -1 })), invalid);
    assert_eq!(data("idle", &json!({ "name": "n", "which": 10 })), nothing("EOPNOTSUPP"));
    assert_eq!(data("recompress", &json!({ "name": "big", "type": "incompressible" })), invalid);
    // Values that are valid in general but not possible for this device. The error messages are
    // from the library crate.
    for words in
        ["priority=0", "priority=2", "priority=4", "algo=lz4hc", "algo=zstd priority=2", "threshold=4096"]
    {
        let sentence = serve.refused(2, &["recompress", "big", words]);
        assert!(sentence.starts_with("big: recompress: "), "{sentence}");
    }
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
    let mut nbd = Nbd::connect(&serve, "r");
    let written = data(512, 2000);
    nbd.write(0, &written);
    assert_eq!(serve.json(&["writeback", "r", "page_indexes=0-255"])["pages"], 256);
    fs::File::options().write(true).open(serve.path("old.img")).unwrap().set_len(0).unwrap();

    // A read of the lost page fails with EIO (5). Other pages are readable.
    assert_eq!(nbd.ask(0, 0, PAGE, &[]), 5);
    assert_eq!(nbd.read(MIB as u64, MIB), &written[MIB..]);
    // A page stays in memory if its writeback fails.
    let failed = serve.refused(1, &["writeback", "r", "page_indexes=256-511"]);
    assert!(failed.starts_with("r: writeback: backing_dev: "), "{failed}");
    assert!(failed.ends_with("; 0 pages were written before, in 0 blocks"), "{failed}");
    assert_eq!(nbd.read(MIB as u64, MIB), &written[MIB..]);
    let backing = serve.json(&["stat", "r"])["backing"].take();
    assert!(
        backing["failed_reads"].as_u64() > Some(0) && backing["failed_writes"].as_u64() > Some(0),
        "{backing}"
    );
    // After a lost page is written again, reads of the page succeed.
    nbd.write(0, &written[..PAGE]);
    assert_eq!(nbd.read(0, PAGE), &written[..PAGE]);
}

#[test]
fn killed_server_leaves_no_backing_file() {
    for signal in [Signal::KILL, Signal::TERM] {
        let serve = Serve::start(&["r=ram,disksize=64M,mem_limit=2M,backing_dev=spill.img,backing_size=32M"]);
        let mut nbd = Nbd::connect(&serve, "r");
        let written = data(2048, 2000);
        // The data is larger than mem_limit, so the device evicts pages automatically.
        nbd.write(0, &written);
        let stat = serve.json(&["stat", "r"]);
        assert!(stat["backing"]["spilled_pages"].as_u64().unwrap() > 0, "{stat}");
        assert_eq!(nbd.read(0, written.len()), written);
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
