//! Maps of devices on the web page, compared with what was written.

use super::Watched;
use crate::harness::prelude::*;

const PAGE: u64 = 4096;
const TRIM: u16 = 4;

fn sum(counts: &Value) -> u64 {
    counts.as_array().map_or(0, |counts| counts.iter().map(|count| count.as_u64().unwrap()).sum())
}

/// Returns the number of pages or zones of each kind, summed over all cells of the map.
fn sums(map: &Value) -> Value {
    map["kinds"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(kind, counts)| (kind.clone(), json!(sum(counts))))
        .collect()
}

fn text_page(number: u64) -> Vec<u8> {
    format!("page {number} of a text that compresses; ").into_bytes().into_iter().cycle().take(4096).collect()
}

fn discard(client: &mut Raw, offset: u64, len: u32) {
    let cookie = client.send(0, TRIM, offset, len, &[]);
    assert_eq!(client.reply(), Ok((cookie, 0)));
}

#[test]
fn map_shows_written_pages_by_kind() {
    let dir = tempfile::tempdir().unwrap();
    let spill = format!("backing_dev={},backing_size=16M", dir.path().join("spill").display());
    let watched = Watched::page(&[&format!("r=ram,disksize=16M,{spill}")]);
    let mut client = Raw::connect(&watched.serve, "r");
    for page in 0..100 {
        assert_eq!(client.write(0, page * PAGE, &text_page(page)), 0);
    }
    assert_eq!(client.write(0, MIB, &noise(1, 20 * PAGE)), 0);
    assert_eq!(client.write(0, 2 * MIB, &vec![0xA5; 10 * PAGE as usize]), 0);
    assert_eq!(client.write(0, 3 * MIB, &vec![0; 5 * PAGE as usize]), 0);
    discard(&mut client, 90 * PAGE, 10 * PAGE as u32);
    let before = watched.json("/api/map/r?cells=16");
    assert_eq!(
        (&before["map"], &before["units"], &before["looked"]),
        (&json!("pages"), &json!(4096), &json!(4096))
    );
    let zeroes = sum(&before["kinds"]["zero"]);
    // The disk may store written zeroes as pages of the kind `zero`, or treat them as a hole.
    assert!(zeroes == 5 || zeroes == 0, "{before}");
    let hole = 4096 - 90 - 20 - 10 - zeroes;
    let expected = json!({ "compressed": 90, "huge": 20, "same": 10, "hole": hole });
    let mut counted = sums(&before);
    counted.as_object_mut().unwrap().remove("zero");
    assert_eq!(counted, expected);
    // The map shows each kind at the right position: a cell is 1 MiB.
    let of = |kind: &str, cell: usize| before["kinds"][kind][cell].as_u64().unwrap();
    assert_eq!((of("compressed", 0), of("huge", 1), of("same", 2), of("hole", 15)), (90, 20, 10, 256));

    watched.serve.text(&["idle", "r", "all"]);
    watched.serve.text(&["writeback", "r", "huge"]);
    let after = sums(&watched.json("/api/map/r"));
    assert_eq!((&after["spilled"], &after["compressed"]), (&json!(20), &json!(90)), "{after}");
    assert_eq!(after.get("huge"), None);

    // The maps of a fork and of a snapshot show their own pages and those of the base.
    watched.serve.text(&["snapshot", "r", "s"]);
    watched.serve.text(&["fork", "s", "f"]);
    watched.serve.text(&["publish", "f", "--nbd", &format!("unix:{}", watched.serve.path("f").display())]);
    let mut fork = Raw::connect_at(&watched.serve.path("f"), "f");
    assert_eq!(fork.write(0, 8 * MIB, &text_page(1)), 0);
    assert_eq!(client.write(0, 0, &noise(2, PAGE)), 0);
    assert_eq!(sums(&watched.json("/api/map/f")), json!({ "below": 4095, "compressed": 1 }));
    assert_eq!(sums(&watched.json("/api/map/s")), after, "what the snapshot is of");
    assert_eq!(sums(&watched.json("/api/map/r"))["compressed"], json!(89));
    let most = watched.json("/api/map/r?cells=4096");
    assert_eq!(most["cells"], json!(4096));
    assert!(most["kinds"]["hole"].as_array().unwrap().iter().all(|pages| pages.as_u64().unwrap() <= 1));
}

#[test]
fn map_shows_zone_conditions() {
    let watched = Watched::page(&["z=null,size=64M,zoned=1,zone_size=4M,memory_backed=1,zone_nr_conv=1"]);
    let mut client = Raw::connect(&watched.serve, "z");
    assert_eq!(client.write(0, 8 * MIB, &vec![1; MIB as usize]), 0);
    for (action, offset) in [("open", "12M"), ("finish", "16M"), ("open", "20M"), ("close", "8M")] {
        watched.serve.text(&["zones", "z", action, "--offset", offset, "--count", "1"]);
    }
    assert_eq!(client.write(0, 24 * MIB, &vec![1; PAGE as usize]), 0);
    watched.serve.text(&["set", "z", "zone_readonly=28M"]);
    watched.serve.text(&["set", "z", "zone_offline=32M"]);
    let map = watched.json("/api/map/z");
    assert_eq!((&map["map"], &map["units"], &map["unit"]), (&json!("zones"), &json!(16), &json!(4 * MIB)));
    let conditions = json!({
        "NOT_WP": 1, "EMPTY": 8, "CLOSED": 1, "EXP_OPEN": 2, "FULL": 1, "IMP_OPEN": 1, "READONLY": 1, "OFFLINE": 1,
    });
    assert_eq!(sums(&map), conditions);
    for (zone, condition) in [
        (0, "NOT_WP"),
        (2, "CLOSED"),
        (3, "EXP_OPEN"),
        (4, "FULL"),
        (6, "IMP_OPEN"),
        (7, "READONLY"),
        (8, "OFFLINE"),
    ] {
        assert_eq!(map["kinds"][condition][zone], json!(1), "zone {zone}: {map}");
    }
    assert_eq!((&map["written"][2], &map["written"][4]), (&json!(MIB), &json!(4 * MIB)));
    assert_eq!(
        (&map["written"][6], &map["written"][1], &map["capacity"][0]),
        (&json!(PAGE), &json!(0), &json!(0))
    );
    // With fewer cells, a cell has several zones.
    let coarse = watched.json("/api/map/z?cells=4");
    assert_eq!(sums(&coarse), conditions);
    assert_eq!((&coarse["cells"], &coarse["kinds"]["FULL"]), (&json!(4), &json!([0, 1, 0, 0])));
    assert_eq!(coarse["written"], json!([MIB, 4 * MIB + PAGE, 0, 0]));
}

#[test]
fn map_of_other_devices_shows_data_or_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = fs::File::create(dir.path().join("golden")).unwrap();
    file.write_all(&vec![1; 65536]).unwrap();
    file.set_len(MIB).unwrap();
    let golden = format!("golden=file,path={}/golden,readonly=yes", dir.path().display());
    let power = "p=ram,disksize=1M,power_cut=yes";
    let watched = Watched::page(&[&golden, "t=template,base=golden", "n=null,size=1M", power]);
    let map = watched.json("/api/map/golden?cells=16");
    assert_eq!((&map["map"], &map["cells"]), (&json!("extents"), &json!(16)));
    assert_eq!(sums(&map), json!({ "data": 65536, "hole": MIB - 65536 }));
    assert_eq!((&map["kinds"]["data"][0], &map["kinds"]["data"][1]), (&json!(65536), &json!(0)));
    let map = watched.json("/api/map/t");
    assert_eq!(map["why"], json!("t: a template has no content; each connection gets a fork of its own"));
    assert_eq!(sums(&watched.json("/api/map/n")), json!({ "hole": MIB }));
    assert_eq!(sums(&watched.json("/api/map/p")), json!({ "hole": 256 }));
    assert!(watched.json("/api/map/p")["note"].as_str().unwrap().contains("unflushed"), "{map}");
    for (path, status, sentence) in [
        ("/api/map/gone", 404, "gone: no such device"),
        ("/api/map/golden?cells=0", 400, "cells=0: must be a number from 1 to 4096"),
        ("/api/map/golden?cells=4097", 400, "cells=4097: must be a number from 1 to 4096"),
        ("/api/map/golden?cell=4", 400, "cell: unknown parameter"),
    ] {
        assert_eq!(watched.get(path), (status, json!({ "error": sentence })), "{path}");
    }
}

/// A device with a million zones, whose map takes longer to draw than the time limit.
const MILLION_ZONES: &str = "z=null,size=1T,zoned=1,zone_size=1M";

#[test]
fn map_ends_with_its_client_or_device() {
    let watched = Watched::page(&[MILLION_ZONES, "r=ram,disksize=1M"]);
    let end = Instant::now() + Duration::from_secs(60);
    let (stream, busy) = loop {
        let mut stream = watched.connect();
        write!(stream, "GET /api/map/z HTTP/1.0\r\n\r\n").unwrap();
        // The map of `z` is being drawn, or its request has not been read yet, so the test tries
        // again.
        thread::sleep(Duration::from_millis(200));
        let (status, reply) = watched.get("/api/map/r");
        if status != 200 || Instant::now() > end {
            break (stream, (status, reply));
        }
    };
    assert_eq!(busy, (503, json!({ "error": "r: a map of z is being drawn; try again" })));
    // Drawing a map stops when its client closes the connection.
    drop(stream);
    let left = Instant::now();
    while watched.get("/api/map/r").0 == 503 {
        // Drawing the whole map would take 10 s.
        assert!(left.elapsed() < Duration::from_secs(8), "{:?}", left.elapsed());
        thread::sleep(Duration::from_millis(20));
    }
    // Drawing a map stops when its device is removed.
    let gone = thread::scope(|scope| {
        let map = scope.spawn(|| watched.get("/api/map/z"));
        thread::sleep(Duration::from_millis(500));
        watched.serve.text(&["remove", "z"]);
        map.join().unwrap()
    });
    assert_eq!(gone, (404, json!({ "error": "z: was removed meanwhile" })));
}

#[test]
#[ignore = "slow lane"]
fn map_of_a_million_zones_is_cut_off_in_time() {
    let watched = Watched::page(&[MILLION_ZONES, "r=ram,disksize=1M"]);
    // While a map is drawn, the server serves other requests, and other devices can be removed.
    let (reply, overview, took) = thread::scope(|scope| {
        let map = scope.spawn(|| {
            let began = Instant::now();
            (watched.json("/api/map/z"), began.elapsed())
        });
        let overview = watched.json("/api/overview");
        watched.serve.text(&["remove", "r"]);
        let (reply, took) = map.join().unwrap();
        (reply, overview, took)
    });
    assert_eq!(overview["found"], json!(2));
    let looked = reply["looked"].as_u64().unwrap();
    assert!(looked > 100_000 && looked < 1 << 20, "{looked}");
    assert_eq!(sum(&reply["kinds"]["EMPTY"]), looked);
    assert!(took < Duration::from_secs(14), "{took:?}");
}
