//! Write logs (`record=`): points that a power cut visits, marks, and logs of forks and restored devices.

use crate::harness::prelude::*;

#[test]
fn power_cut_at_visits_points_of_the_log() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("golden"), vec![0xee; 1 << 20]).unwrap();
    let serve = Serve::start_in(
        dir,
        &[
            "golden=file,path=golden,readonly=yes",
            "f=fork,base=golden,power_cut=yes,record=f.log",
            "n=null,size=1M,memory_backed=1,cache_size=64K,record=n.log",
            "r=ram,disksize=1M,power_cut=yes,record=r.log",
        ],
        true,
    );
    for (name, before) in [("f", 0xee), ("n", 0), ("r", 0)] {
        let mut client = Raw::connect(&serve, name);
        let first = |serve: &Serve| Raw::connect(serve, name).read(0, 4096).unwrap()[0];
        for commit in 1..=3_u8 {
            assert_eq!((client.write(0, 0, &[commit; 4096]), client.flush()), (0, 0));
            let output = serve.text(&["mark", name, &format!("commit {commit}")]);
            let entry = u64::from(commit) * 3;
            assert_eq!(output, format!("{name}: \"commit {commit}\" is entry {entry}\n"));
            assert_eq!(stat(&serve, name, "power", "log_entries"), entry);
        }
        for commit in [2, 1, 3] {
            // The mark and the number of its log entry name the same point.
            let entry = u64::from(commit) * 3;
            for at in [format!("commit {commit}"), entry.to_string()] {
                assert_eq!(serve.json(&["power-cut", name, "--at", &at])["entries"], entry, "{name}: {at}");
                assert_eq!(first(&serve), commit, "{name}: {at}");
            }
        }
        serve.json(&["power-cut", name, "--at", "0"]);
        assert_eq!(first(&serve), before);
        // Entry 1 of the log is the write of the first commit; the flush follows as another entry.
        let cut = serve.json(&["power-cut", name, "--at", "1", "--seed", "5"]);
        let blocks = cut["kept_blocks"].as_u64().unwrap() + cut["lost_blocks"].as_u64().unwrap();
        assert_eq!((blocks > 0, &cut["entries"]), (true, &json!(1)), "{cut}");
        let none = serve.refused(1, &["power-cut", name, "--at", "commit 4"]);
        assert_eq!(none, format!("{name}: power-cut: at=commit 4: the log has no mark \"commit 4\""));
        let many = serve.refused(1, &["power-cut", name, "--at", "100"]);
        assert!(many.starts_with(&format!("{name}: power-cut: at=100: the log has ")), "{many}");
    }
    let again = serve.refused(1, &["create", "x=ram,disksize=1M,record=r.log"]);
    assert!(again.starts_with("x: record: ") && again.contains("exists"), "{again}");
}

#[test]
fn cut_of_nothing_unflushed_prints_hint() {
    let serve = Serve::start(&["r=ram,disksize=1M,power_cut=yes,record=r.log"]);
    let hint = "r: no write was unflushed; if the device is mounted, the page cache may still hold the writes: run \
                `sync -f` on the mount before the cut, while the program still writes\n";
    let cut = "r: power cut, seed 1: of the unflushed blocks 0 were kept and 0 lost\n";
    assert_eq!(serve.text(&["power-cut", "r", "--seed", "1"]), format!("{cut}{hint}"));
    let mut client = Raw::connect(&serve, "r");
    assert_eq!(client.write(0, 0, &[1; 4096]), 0);
    assert!(!serve.text(&["power-cut", "r", "--seed", "1"]).contains("page cache"));
    // The content at a point of the log does not depend on a page cache, so the output has no hint.
    let output = serve.text(&["power-cut", "r", "--at", "0", "--seed", "1"]);
    assert_eq!(output, format!("r: is as at 0, after 0 entries of the log\n{cut}"));
}

/// A log is useful without `power_cut`, because `replay-log` reads it. So a missing `power_cut` is only a warning.
#[test]
fn record_without_power_cut_is_warned_of() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("golden"), vec![0; 1 << 20]).unwrap();
    let devices = ["golden=file,path=golden,readonly=yes", "s=ram,disksize=1M,record=s.log"];
    let serve = Serve::logged_in(dir, &[&devices[..], &["--control", "control"]].concat());
    let warning = |name: &str, log: &str| {
        format!(
            "{name}: record={log}: without power_cut=yes `freestone power-cut {name} --at` cannot visit points of the log"
        )
    };
    let at = |name: &str| serve.path(&format!("{name}.log")).display().to_string();
    serve.log_with(&warning("s", &at("s")));
    for name in ["r", "n"] {
        let kind = if name == "r" { "ram,disksize=1M" } else { "null,size=1M,memory_backed=1" };
        let made = serve.json(&["create", &format!("{name}={kind},record={name}.log")]);
        assert_eq!(made["warnings"], json!([warning(name, &at(name))]));
        serve.log_with(&warning(name, &at(name)));
    }
    let output = serve.text(&["fork", "golden", "f", "record=f.log"]);
    assert!(output.starts_with(&format!("warning: {}\n", warning("f", &at("f")))), "{output}");
    let made = serve.json(&["fork", "golden", "t", "--template", "record=t-%n.log"]);
    assert_eq!(made["forks"][0]["warnings"], json!([warning("t", &at("t-%n"))]));
    // There is no warning if `power-cut --at` works for the device, or if no option could make it work.
    for words in [
        "a=ram,disksize=1M,power_cut=yes,record=a.log",
        "b=null,size=1M,memory_backed=1,cache_size=64K,record=b.log",
        "c=file,path=c,size=1M,record=c.log",
        "d=null,size=1G,memory_backed=1,zoned=yes,record=d.log",
        "e=ram,disksize=1M",
    ] {
        let made = serve.json(&["create", words]);
        assert_eq!(made.get("warnings"), None, "{words}");
    }
}

#[test]
fn recording_continues_after_rewind_or_reset() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("golden"), vec![0xee; 1 << 20]).unwrap();
    let devices = [
        "golden=file,path=golden,readonly=yes",
        "f=fork,base=golden,power_cut=yes,record=f.log",
        "r=ram,disksize=1M,power_cut=yes,record=r.log",
    ];
    let serve = Serve::start_in(dir, &devices, true);
    for (name, verb, before) in [("f", "rewind", 0xee), ("f", "reset", 0xee), ("r", "reset", 0)] {
        let page = |at: u64| Raw::connect(&serve, name).read(at * 4096, 4096).unwrap()[0];
        let trial = if verb == "rewind" { "first" } else { "second" };
        if verb == "rewind" || name == "r" {
            let mut client = Raw::connect(&serve, name);
            assert_eq!((client.write(0, 0, &[1; 4096]), client.flush()), (0, 0));
            assert_eq!(client.write(0, 4096, &[2; 4096]), 0);
        }
        while serve.json(&["list", name])["devices"][0]["exports"][0]["connections"] != 0 {
            std::thread::yield_now();
        }
        serve.text(&["mark", name, &format!("before {trial}")]);
        serve.text(&[verb, name]);
        assert_eq!((page(0), page(1)), (before, before), "{name} {verb}");
        let mut client = Raw::connect(&serve, name);
        assert_eq!((client.write(0, 8192, &[3; 4096]), client.flush()), (0, 0));
        drop(client);
        serve.text(&["mark", name, &format!("after {trial}")]);
        assert_eq!(serve.json(&["stat", name])["power"]["log"], "records");
        while serve.json(&["list", name])["devices"][0]["exports"][0]["connections"] != 0 {
            std::thread::yield_now();
        }
    }
    for (name, trial, before) in [("f", "first", 0xee), ("r", "second", 0)] {
        let page = |at: u64| Raw::connect(&serve, name).read(at * 4096, 4096).unwrap()[0];
        let pages = |point: &str| {
            serve.text(&["power-cut", name, "--at", &format!("{point} {trial}")]);
            [page(0), page(1), page(2)]
        };
        // Writes before the rewind or reset are not in the content after it.
        assert_eq!(pages("after"), [before, before, 3], "{name}");
        assert_eq!(pages("before"), [1, 2, before], "{name}");
        serve.text(&["power-cut", name, "--at", &format!("after {trial}"), "--seed", "1"]);
        assert_eq!([page(0), page(1), page(2)], [before, before, 3], "{name}");
    }
    let taken = serve.refused(1, &["mark", "f", "freestone: back to the beginning"]);
    assert!(taken.contains("a mark is text of"), "{taken}");
}

#[test]
fn fork_verbs_and_templates_take_layer_keys() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("golden"), vec![0xee; 1 << 20]).unwrap();
    let serve = Serve::start_in(dir, &["golden=file,path=golden,readonly=yes"], true);
    let layers = ["faults=read error=EIO at=4K+4K", "seed=7", "power_cut=yes"];
    let nbd = format!("unix:{}", serve.path("nbd").display());
    serve.text(
        &[&["fork", "golden", "f-%n", "record=f-%n.log", "--count", "2", "--nbd", &nbd][..], &layers]
            .concat(),
    );
    serve.text(&["create", &format!("c=fork,base=golden,record=c.log,publish=yes,{}", layers.join(","))]);
    for name in ["f-0", "f-1", "c"] {
        let mut client = Raw::connect(&serve, name);
        assert_eq!(client.write(0, 0, &[1; 4096]), 0);
        assert_eq!(client.read(4096, 4096), Err(EIO), "{name}");
        serve.text(&["mark", name, "written"]);
        assert_eq!(serve.json(&["power-cut", name])["connections_ended"], 1, "{name}");
        assert_eq!(serve.json(&["get", name])["seed"], 7);
        assert!(serve.path(&format!("{name}.log")).exists());
    }

    serve.text(
        &[&["fork", "golden", "t", "--template", "record=t-%n.log", "--nbd", &nbd][..], &layers].concat(),
    );
    serve.text(
        &[&["publish", "golden", "p", "--template", "record=p-%n.log", "--nbd", &nbd][..], &layers].concat(),
    );
    serve.text(&[
        "create",
        &format!("m=template,base=golden,record=m-%n.log,publish=yes,{}", layers.join(",")),
    ]);
    for name in ["t", "p", "m"] {
        let get = serve.json(&["get", name]);
        assert_eq!(
            (&get["seed"], &get["power_cut"], &get["faults"]),
            (&7.into(), &1.into(), &"read error=EIO at=4K+4K".into())
        );
        for number in 1..3 {
            let own = format!("{name}@{number}");
            let mut client = Raw::connect(&serve, name);
            assert_eq!(client.write(0, 0, &[number; 4096]), 0);
            assert_eq!(client.read(4096, 4096), Err(EIO), "{own}");
            serve.text(&["mark", &own, "written"]);
            // Power cuts do not end a connection to a template, because its fork would be removed with the connection.
            let cut = serve.json(&["power-cut", &own, "--seed", "1"]);
            assert_eq!((&cut["connections_ended"], &cut["seed"]), (&0.into(), &1.into()));
            assert!([number, 0xee].contains(&client.read(0, 4096).unwrap()[0]));
            assert!(serve.path(&format!("{name}-{number}.log")).exists());
        }
    }
    serve.text(&["fork", "golden", "plain"]);
    serve.text(&["save", "plain", "plain.saved"]);
    serve.text(&[&["restore", "plain.saved", "back", "record=back.log"][..], &layers].concat());
    serve.text(&["publish", "back", "--nbd", &nbd]);
    let mut client = Raw::connect(&serve, "back");
    assert_eq!((client.write(0, 0, &[1; 4096]), client.read(4096, 4096)), (0, Err(EIO)));
    assert_eq!(serve.json(&["power-cut", "back"])["connections_ended"], 1);
    assert!(serve.path("back.log").exists());

    check_restore_records_a_log_for_each_device(&serve);
    let one = serve.refused(2, &["fork", "golden", "x", "--template", "record=x.log"]);
    assert!(one.contains("each connection has a log of its own; %n is its number"), "{one}");
    let unknown = serve.refused(2, &["fork", "golden", "x", "fualts=none"]);
    assert!(unknown.starts_with("x: unknown key \"fualts\"; faults?"), "{unknown}");
    let plain = serve.refused(2, &["publish", "golden", "seed=1", "--nbd", &nbd]);
    assert_eq!(plain, "golden: publish: seed: only with --template");
}

/// Checks that `restore` of two forks and their snapshots creates a log for each fork, and none for the snapshots.
fn check_restore_records_a_log_for_each_device(serve: &Serve) {
    serve.text(&["fork", "golden", "other"]);
    serve.text(&["snapshot", "plain,other", "plain-1,other-1"]);
    serve.text(&["save", "plain,plain-1,other,other-1", "several.saved"]);
    serve.text(&["remove", "plain", "plain-1", "other", "other-1"]);
    let restore = |log: &str| ["restore".to_owned(), "several.saved".to_owned(), format!("record={log}")];
    let args = restore("one.log");
    let why = serve.refused(1, &args.each_ref().map(String::as_str));
    let message = "restore: record: 2 disks and forks, and one log; %n in its name is the number of each";
    assert!(why.ends_with(message), "{why}");
    // If the second log cannot be created, `restore` removes the first one.
    std::fs::write(serve.path("log-1"), "precious").unwrap();
    let args = restore("log-%n");
    let args = args.each_ref().map(String::as_str);
    let why = serve.refused(1, &args);
    assert!(why.contains("record: ") && why.contains("exists"), "{why}");
    assert!(!serve.path("log-0").exists());
    assert_eq!(std::fs::read(serve.path("log-1")).unwrap(), b"precious");
    std::fs::remove_file(serve.path("log-1")).unwrap();
    let made = serve.json(&[&args[..], &["power_cut=yes"]].concat());
    let made = made["devices"].as_array().unwrap();
    let live: Vec<_> = made.iter().filter(|made| made["kind"] == "fork").map(|made| &made["name"]).collect();
    assert_eq!(live, ["plain", "other"]);
    for (number, name) in live.into_iter().enumerate() {
        let name = name.as_str().unwrap();
        let log = serve.path(&format!("log-{number}"));
        assert_eq!(serve.json(&["get", name, "record"])["record"], log.to_str().unwrap());
        let before = std::fs::metadata(&log).unwrap().len();
        serve.text(&["mark", name, "here"]);
        assert!(std::fs::metadata(&log).unwrap().len() > before, "{name}");
    }
    assert!(!serve.path("log-2").exists());
}

#[test]
fn damaged_log_leaves_the_device_as_it_is() {
    let serve = Serve::start(&["r=ram,disksize=1M,power_cut=yes,record=r.log"]);
    let mut client = Raw::connect(&serve, "r");
    for content in [1, 2] {
        assert_eq!((client.write(0, 0, &[content; 4096]), client.flush()), (0, 0));
    }
    drop(client);
    serve.text(&["mark", "r", "end"]);
    let log = std::fs::File::options().write(true).open(serve.path("r.log")).unwrap();
    log.set_len(10_000).unwrap();
    let message = serve.refused(1, &["power-cut", "r", "--at", "4"]);
    assert!(message.starts_with("r: power-cut: at=4: ") && message.contains("r.log: entry "), "{message}");
    assert_eq!(Raw::connect(&serve, "r").read(0, 4096).unwrap(), [2; 4096]);
    let power = &serve.json(&["stat", "r"])["power"];
    assert_eq!((&power["half_set_back"], &power["log"]), (&json!(false), &json!("records")), "{power}");
}
