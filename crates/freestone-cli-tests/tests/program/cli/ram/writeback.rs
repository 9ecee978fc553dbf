//! Writeback and recompression of RAM disks: verbs, limits and error messages.

use freestone_testkit::Rng;

use crate::harness::prelude::*;

pub(super) const PAGE: usize = 4096;
pub(super) const MIB: usize = 1 << 20;

/// NBD error number for "no space left on device".
const ENOSPC: u32 = 28;

/// Writes data of any length.
pub(super) fn write(client: &mut Raw, offset: u64, data: &[u8]) {
    for (at, part) in (0..).step_by(MIB).zip(data.chunks(MIB)) {
        assert_eq!(client.write(0, offset + at, part), 0);
    }
}

/// Reads data of any length.
pub(super) fn read(client: &mut Raw, offset: u64, len: usize) -> Vec<u8> {
    let parts = (0..len).step_by(MIB).map(|at| (at as u64, MIB.min(len - at) as u32));
    parts.flat_map(|(at, len)| client.read(offset + at, len).unwrap()).collect()
}

/// Returns `pages` pages, in each of which the first `noise` bytes do not compress.
pub(super) fn data(pages: usize, noise: usize) -> Vec<u8> {
    let mut rng = Rng::new(1);
    let mut data = vec![b'.'; pages * PAGE];
    for page in data.chunks_mut(PAGE) {
        rng.fill(&mut page[..noise]);
    }
    data
}

pub(super) fn errno(serve: &Serve, method: &str, params: &Value) -> (Value, Value, Value) {
    let line = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params }).to_string();
    let mut error = ask(&serve.control(), line.as_bytes())["error"].take();
    (error["code"].take(), error["data"].take(), error["message"].take())
}

#[test]
fn full_backing_device_is_reported() {
    let serve = Serve::start(&["r=ram,disksize=64M,mem_limit=1M,backing_dev=spill.img,backing_size=1M"]);
    let backing = |serve: &Serve| serve.json(&["stat", "r"])["backing"]["state"].clone();
    assert_eq!(backing(&serve), "ok");
    let mut nbd = Raw::connect(&serve, "r");
    let mut rng = Rng::new(1);
    let mut page = vec![0; PAGE];
    let mut answers = (0..4096).map(|number| {
        rng.fill(&mut page);
        nbd.write(0, number * PAGE as u64, &page)
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
    let mut nbd = Raw::connect(&serve, "big");
    let written = data(8 * MIB / PAGE, 1024);
    write(&mut nbd, 0, &written);
    assert_eq!(serve.text(&["idle", "big", "3600"]), "big: 0 pages marked\n");
    assert_eq!(serve.text(&["idle", "big", "all"]), "big: 2048 pages marked\n");
    // A read clears the idle mark of the page.
    assert_eq!(read(&mut nbd, 0, PAGE), &written[..PAGE]);
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

    assert_eq!(read(&mut nbd, 0, written.len()), written);
    let stat = serve.json(&["stat", "big"]);
    assert!(stat["bd_stat"]["bd_reads"].as_u64().unwrap() > 0);
    assert_eq!(stat["backing"]["failed_reads"], 0);

    // `page_index` and `page_indexes` select pages. An index that is given twice counts once.
    write(&mut nbd, 16 << 20, &data(16, 3000));
    let done = serve.json(&["writeback", "big", "page_index=4096", "page_indexes=4096-4099 page_index=4111"]);
    assert_eq!(done["pages"], 5);
    assert_eq!(read(&mut nbd, 16 << 20, 16 * PAGE), data(16, 3000));

    assert_eq!(stat.get("auto_recompress"), None);

    // Without a backing device `bd_stat` is zeroes, and `stat` has no section `backing`.
    assert_eq!(serve.text(&["get", "plain", "bd_stat"]), "0 0 0\n");
    assert_eq!(serve.json(&["stat", "plain"]).get("backing"), None);
}

#[test]
fn writeback_limit_counts_as_in_the_kernel() {
    let serve = Serve::start(&["r=ram,disksize=64M,backing_dev=spill.img,backing_size=64M,\
                                compressed_writeback=no,writeback_limit=1002,writeback_limit_enable=1"]);
    let mut nbd = Raw::connect(&serve, "r");
    let written = data(10 * MIB / PAGE, PAGE);
    write(&mut nbd, 0, &written);
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
    assert_eq!(read(&mut nbd, 0, written.len()), written);
}

#[test]
fn pages_are_recompressed() {
    let serve = Serve::start(&["r=ram,disksize=64M,recomp_algorithm=zstd;algo=zstd priority=2,\
                                algorithm_params=priority=1 level=1;priority=2 level=19"]);
    let mut nbd = Raw::connect(&serve, "r");
    // The text consists of eight letters: lz4 finds no repetitions, but an entropy coder such as
    // zstd's compresses it.
    let written: Vec<u8> = data(1024, PAGE).iter().map(|byte| b"etaoinsh"[usize::from(byte & 7)]).collect();
    write(&mut nbd, 0, &written);
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
    assert_eq!(read(&mut nbd, 0, written.len()), written);

    assert_eq!(
        serve.text(&["get", "r", "recomp_algorithm"]),
        "#1: lz4 lz4hc lzo [zstd] store\n#2: lz4 lz4hc lzo [zstd] store\n"
    );
    assert_eq!(
        serve.json(&["get", "r", "recomp_algorithm"]),
        json!({ "recomp_algorithm": { "1": "zstd", "2": "zstd" } })
    );
    assert_eq!(serve.text(&["get", "r", "algorithm_params"]), "priority=1 level=1; priority=2 level=19\n");
    // All pages together, in groups of 8.
    assert_eq!(serve.json(&["stat", "r"]).get("groups"), None);
    write(&mut nbd, 0, &written);
    let grouped = serve.json(&["recompress", "r", "group=yes"]);
    assert_eq!(grouped["shrunk"], json!(1024));
    let groups = serve.json(&["stat", "r"])["groups"].take();
    assert_eq!((&groups["count"], &groups["pages"]), (&json!(128), &json!(1024)));
    assert_eq!(read(&mut nbd, 0, written.len()), written);
    // Two copies share objects. The first half is the same data again, compressed anew.
    assert_eq!(serve.json(&["stat", "r"]).get("dedup"), None);
    write(&mut nbd, 0, &written[..written.len() / 2]);
    write(&mut nbd, written.len() as u64 / 2, &written[..written.len() / 2]);
    let charged = serve.json(&["stat", "r"])["over_stat"]["charged_bytes"].take();
    let shared = serve.json(&["recompress", "r", "dedup=yes"]);
    assert_eq!((&shared["tried"], &shared["shrunk"]), (&json!(1024), &json!(512)));
    let stat = serve.json(&["stat", "r"]);
    let dedup = &stat["dedup"];
    assert_eq!(
        (&dedup["objects"], &dedup["pages"], &dedup["shared"]),
        (&json!(512), &json!(1024), &json!(512))
    );
    assert!(dedup["saved_bytes"].as_u64() >= shared["saved_bytes"].as_u64(), "{stat}");
    assert_eq!(stat["over_stat"]["charged_bytes"], charged);
    let half = &written[..written.len() / 2];
    assert_eq!(read(&mut nbd, 0, written.len()), [half, half].concat());
    let all = serve.text(&["get", "r"]);
    let second = format!("\nrecomp_algorithm        #1: lz4 lz4hc lzo [zstd] store\n{:24}#2: lz4 ", "");
    assert!(all.contains(&second), "{all}");
}

#[test]
fn writeback_verbs_refuse_invalid_arguments() {
    let serve = Serve::start(&[
        "big=ram,disksize=64M,backing_dev=spill.img,backing_size=16M,recomp_algorithm=zstd",
        "plain=ram,disksize=64M",
        "n=null,size=1M",
    ]);
    let types = "allowed are idle, huge, huge_idle, incompressible, page_index=N and page_indexes=LO-HI";
    let keys = "allowed are type=idle|huge|huge_idle, threshold=BYTES, max_pages=N, algo=NAME, priority=1..3, group=yes and dedup=yes";
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
        (2, &["recompress", "big", "group=8"], "big: recompress: group=8: must be yes or no".into()),
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
