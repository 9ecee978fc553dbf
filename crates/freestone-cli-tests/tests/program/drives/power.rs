//! Power cuts: their effect on clients, and the content of the device afterwards.

use crate::harness::prelude::*;

const BLOCKS: u64 = 64;

/// Fills pages 0 to 63 with ones and flushes them. Then fills all of them with twos and every third with threes,
/// without a flush.
fn dirty(client: &mut Raw) {
    for n in 0..BLOCKS {
        assert_eq!(client.write(0, n * 4096, &[1; 4096]), 0);
    }
    assert_eq!(client.flush(), 0);
    for n in 0..BLOCKS {
        assert_eq!(client.write(0, n * 4096, &[2; 4096]), 0);
    }
    for n in (0..BLOCKS).step_by(3) {
        assert_eq!(client.write(0, n * 4096, &[3; 4096]), 0);
    }
    // A write with FUA is durable without a flush.
    assert_eq!(client.write(FUA, BLOCKS * 4096, &[4; 4096]), 0);
}

/// Returns the byte that fills each block of 512 bytes, from page 0 to the first block of the FUA page.
fn blocks(serve: &Serve, name: &str) -> Vec<u8> {
    let mut client = Raw::connect(serve, name);
    let block = |n: u64| {
        let data = client.read(n * 512, 512).unwrap();
        assert!(data.iter().all(|byte| *byte == data[0]), "block {n} is torn");
        data[0]
    };
    (0..=BLOCKS * 8).map(block).collect()
}

#[test]
fn power_cut_ends_clients_and_loses_unflushed_data() {
    let dir = tempfile::tempdir().unwrap();
    let file = format!("f=file,path={}/disk,size=4M,power_cut=yes,power_cut_unit=512", dir.path().display());
    let devices = [
        "n=null,size=4M,blocksize=512,memory_backed=1,cache_size=1M",
        "r=ram,disksize=4M,power_cut=yes,power_cut_unit=512",
        "packed=null,size=4M,blocksize=512,memory_backed=1,comp_algorithm=zstd,power_cut=yes,power_cut_unit=512",
        &file,
    ];
    let serve = Serve::start(&devices);
    let mut results = Vec::new();
    for name in ["n", "r", "packed", "f"] {
        let mut client = Raw::connect(&serve, name);
        dirty(&mut client);
        assert!(stat(&serve, name, "power", "unflushed_bytes") >= BLOCKS * 4096, "{name}");
        let cut = serve.json(&["power-cut", name, "--seed", "11"]);
        assert_eq!((&cut["seed"], &cut["connections_ended"]), (&json!(11), &json!(1)), "{cut}");
        assert!(client.try_write(0, 0, &[9; 4096]).is_err(), "{name}: the connection is still there");
        let found = blocks(&serve, name);
        assert_eq!(found.last(), Some(&4));
        let lost = found.iter().map(|byte| u64::from(*byte == 1)).sum::<u64>();
        assert_eq!(
            (&cut["lost_blocks"], &cut["kept_blocks"]),
            (&json!(lost), &json!(BLOCKS * 8 - lost)),
            "{name}"
        );
        // With this seed, chosen arbitrarily, some blocks are lost and some are kept.
        assert!(lost > 0 && lost < BLOCKS * 8, "{name}: {lost}");
        results.push(found);
        // Flushed data is kept with any seed.
        let mut client = Raw::connect(&serve, name);
        assert_eq!((client.write(0, 0, &[5; 4096]), client.flush()), (0, 0));
        let cut = serve.json(&["power-cut", name]);
        assert_eq!((&cut["lost_blocks"], &cut["kept_blocks"]), (&json!(0), &json!(0)));
        assert_eq!(blocks(&serve, name)[0], 5);
        assert_eq!(stat(&serve, name, "power", "cuts"), 2);
    }
    // The same seed loses the same blocks on every kind of drive.
    assert!(results.iter().all(|found| *found == results[0]));
}

#[test]
fn power_cut_unit_is_not_torn() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("golden"), vec![0; 4 << 20]).unwrap();
    let serve = Serve::start(&[
        &format!("golden=file,path={}/golden,readonly=yes", dir.path().display()),
        "r=ram,disksize=4M,power_cut=yes",
        "f=fork,base=golden,power_cut=yes",
        "n=null,size=4M,blocksize=512,memory_backed=1,cache_size=1M,power_cut_unit=16K",
        "torn=ram,disksize=4M,power_cut=yes,power_cut_unit=512",
    ]);
    for (name, unit) in [("r", 4096), ("f", 4096), ("n", 16384), ("torn", 512)] {
        assert_eq!(stat(&serve, name, "power", "unit_bytes"), unit, "{name}");
        assert_eq!(serve.text(&["get", name, "power_cut_unit"]), format!("{unit}\n"));
        let mut client = Raw::connect(&serve, name);
        dirty(&mut client);
        let cut = serve.json(&["power-cut", name, "--seed", "11"]);
        let count = |key: &str| cut[key].as_u64().unwrap();
        assert_eq!(count("kept_blocks") + count("lost_blocks"), BLOCKS * 4096 / unit, "{name}: {cut}");
        assert_eq!(stat(&serve, name, "power", "last_lost_blocks"), count("lost_blocks"));
        assert_eq!(stat(&serve, name, "power", "last_seed"), 11);
        let found = blocks(&serve, name);
        let torn = found.chunks(8).filter(|page| page.iter().any(|byte| *byte != page[0])).count();
        assert_eq!(torn > 0, name == "torn", "{name}: {torn} pages are torn");
        // A unit shows its content between two of its writes: all ones, twos followed by ones, or no ones any more.
        for pages in found[..BLOCKS as usize * 8].chunks(unit as usize / 512) {
            let old = pages.iter().all(|byte| *byte == 1);
            let later = pages.iter().position(|byte| *byte == 1).is_none_or(|first| {
                pages[..first].iter().all(|byte| *byte == 2) && pages[first..].iter().all(|byte| *byte == 1)
            });
            assert!(old || later, "{name}: {pages:?}");
        }
    }
    for (status, device, why) in [
        (
            2,
            "x=ram,disksize=1M,power_cut_unit=4K",
            "power_cut_unit=4K: what a power cut does not tear; only with power_cut=yes",
        ),
        (
            1,
            "x=null,size=1M,memory_backed=1,power_cut=yes,power_cut_unit=1K",
            "power_cut_unit=1024: smaller than a block of the device, 4096 bytes",
        ),
    ] {
        let refused = serve.refused(status, &["create", device]);
        assert!(refused.contains(why), "{refused}");
    }
}

/// Writes pages, with a flush after every tenth, until the power is cut. Returns the number of completed writes.
fn write_until_power_cut(client: &mut Raw) -> u64 {
    for n in 0.. {
        let written = client.try_write(0, n % BLOCKS * 4096, &[n as u8; 4096]);
        if written.is_err() {
            return n;
        }
        if n % 10 == 9 && client.try_flush().is_err() {
            return n + 1;
        }
    }
    unreachable!()
}

#[test]
fn power_cut_after_n_writes_or_flushes() {
    let serve = Serve::start(&["r=ram,disksize=4M,power_cut=yes", "golden=null,size=1M"]);
    let run = |after: &str, seed: &str| {
        serve.text(&["reset", "r"]);
        let cuts = stat(&serve, "r", "power", "cuts");
        let output = serve.json(&["power-cut", "r", "--after", after, "--seed", seed]);
        assert_eq!(
            (&output["seed"].to_string()[..], &output["connections_ended"]),
            (seed, &json!(0)),
            "{output}"
        );
        let mut client = Raw::connect(&serve, "r");
        let answered = write_until_power_cut(&mut client);
        // A client that connects now reads the content of the disk after the power cut.
        let found = blocks(&serve, "r");
        assert_eq!(stat(&serve, "r", "power", "cuts"), cuts + 1);
        let of_cut = |key: &str| stat(&serve, "r", "power", key);
        assert_eq!(of_cut("last_seed").to_string(), seed);
        (answered, found, of_cut("last_kept_blocks") + of_cut("last_lost_blocks"))
    };
    // The reply to the last write may be lost, because the power cut ends the connection.
    let (answered, found, unflushed) = run("27writes", "5");
    assert!((26..=27).contains(&answered), "{answered}");
    assert_eq!(unflushed, 7, "20 writes were flushed");
    assert_eq!(run("27 writes", "5").1, found, "the same seed leaves the same");
    let others: Vec<_> = (6..12).map(|seed| run("27writes", &seed.to_string()).1).collect();
    assert!(others.iter().any(|other| *other != found), "every seed leaves the same");
    let (answered, _, unflushed) = run("2flushes", "1");
    assert!((19..=20).contains(&answered), "{answered}");
    assert_eq!(unflushed, 0);

    // `stat` reports the pending power cut, which can be cancelled.
    let output = serve.text(&["power-cut", "r", "--after", "3flushes", "--seed", "8"]);
    assert_eq!(output, "r: the power goes off after 3 flushes, seed 8\n");
    let mut client = Raw::connect(&serve, "r");
    assert_eq!(client.flush(), 0);
    let power = &serve.json(&["stat", "r"])["power"];
    assert_eq!((&power["cut_after"], &power["next_seed"]), (&json!("2 flushes"), &json!(8)), "{power}");
    let output = serve.text(&["power-cut", "r", "--after", "none"]);
    assert_eq!(output, "r: the power does not go off by itself\n");
    assert_eq!((client.flush(), client.flush(), client.flush()), (0, 0, 0));
    assert_eq!(serve.json(&["stat", "r"])["power"].get("cut_after"), None);
    // An immediate power cut cancels the pending one.
    serve.text(&["power-cut", "r", "--after", "1 write"]);
    serve.text(&["power-cut", "r"]);
    let mut client = Raw::connect(&serve, "r");
    assert_eq!((client.write(0, 0, &[1; 512]), client.write(0, 0, &[1; 512])), (0, 0));
    for bad in ["0writes", "writes", "12", "3 reads", "-1writes"] {
        let refused = serve.refused(2, &["power-cut", "r", &format!("--after={bad}")]);
        let why = "must be a number of writes or flushes, 1 at least, as in 1000writes or 3flushes; or none";
        assert!(refused.contains(&format!("r: power-cut: after={bad}: {why}")), "{refused}");
    }
    assert!(
        serve.refused(1, &["power-cut", "golden", "--after", "1write"]).contains("its power cannot be cut")
    );
    // A device with a pending power cut can be removed, and a server with one can end.
    serve.text(&["power-cut", "r", "--after", "1000writes"]);
    serve.text(&["remove", "r", "--force"]);
}

#[test]
fn power_cut_does_not_wait_and_reports_its_seed() {
    let serve = Serve::start(&[
        "r=ram,disksize=4M,power_cut=yes,faults=write hang; flush delay=3600s",
        "other=ram,disksize=1M",
    ]);
    let mut other = Raw::connect(&serve, "other");
    let mut client = Raw::connect(&serve, "r");
    client.send_write(0, &[1; 4096]);
    client.send(0, 3, 0, 0, &[]);
    while stat(&serve, "r", "faults", "hanging") == 0 {
        std::thread::yield_now();
    }
    let output = serve.text(&["power-cut", "r"]);
    assert!(output.starts_with("r: a connection ended\nr: power cut, seed "), "{output}");
    assert!(client.reply().is_err());
    assert_eq!(other.write(0, 0, &[1; 4096]), 0);
    serve.text(&["set", "r", "faults=none"]);
    let mut client = Raw::connect(&serve, "r");
    assert_eq!((client.write(0, 0, &[2; 4096]), client.flush()), (0, 0));
}

#[test]
fn power_cut_write_pointers_match_kept_data() {
    let serve = Serve::start(&["n=null,size=64M,zoned=1,zone_size=4M,memory_backed=1,power_cut=yes"]);
    let mut client = Raw::connect(&serve, "n");
    for zone in 0..16 {
        assert_eq!(client.write(0, zone * 4 * MIB, &vec![1; 65536]), 0);
    }
    assert_eq!(client.flush(), 0);
    for zone in 0..16 {
        assert_eq!(client.write(0, zone * 4 * MIB + 65536, &vec![2; 65536]), 0);
    }
    serve.text(&["power-cut", "n", "--seed", "3"]);
    let report = serve.json(&["zones", "n"]);
    let mut client = Raw::connect(&serve, "n");
    let mut pointers = Vec::new();
    for zone in report["zones"].as_array().unwrap() {
        let start = zone["start"].as_u64().unwrap();
        let pointer = zone["write_pointer"].as_u64().unwrap() - start;
        assert!((65536..=131_072).contains(&pointer), "{zone}");
        let data = client.read(start, 131_072).unwrap();
        let wanted = |at: usize| match at as u64 {
            at if at >= pointer => 0xff,
            0..65536 => 1,
            _ => 2,
        };
        assert!(data.iter().enumerate().all(|(at, byte)| *byte == wanted(at)), "{zone}");
        assert_eq!(client.write(0, start + pointer, &[3; 4096]), 0);
        pointers.push(pointer);
    }
    // The zones lost different amounts of data.
    assert!(pointers.iter().any(|pointer| *pointer != pointers[0]), "{pointers:?}");
}
