//! Forks as CI machines use them: many forks of one image, rewound and removed.

use crate::harness::prelude::*;

/// Starts a server with a base of 16 MiB: 4 MiB of noise, the rest a hole. Also returns the path of
/// the base's image file.
pub(super) fn with_base(more: &[&str]) -> (Serve, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("golden.img");
    fs::write(&image, noise(1, 4 * MIB)).unwrap();
    fs::File::options().write(true).open(&image).unwrap().set_len(16 * MIB).unwrap();
    let mut args = vec!["golden=file,path=golden.img,readonly=yes,mem_limit=256M"];
    args.extend(more);
    args.extend(["--nbd", "unix:nbd", "--control", "control"]);
    (Serve::start_in(dir, &args, false), image)
}

pub(super) fn socket(serve: &Serve, name: &str) -> String {
    format!("nbd+unix:///?socket={}", serve.path(name).display())
}

#[test]
fn forks_of_a_ci_machine() {
    const FORKS: usize = 100;
    let (serve, image) = with_base(&[]);
    let made = serve.json(&["fork", "golden", "job-%n", "--count", "100", "--nbd", "unix:job-%n.sock"]);
    let made = made["forks"].as_array().unwrap();
    assert_eq!(made.len(), FORKS);
    assert_eq!((&made[7]["name"], &made[7]["base"]), (&json!("job-7"), &json!("golden")));
    assert_eq!(made[7]["exports"][0]["default"], true);
    assert_eq!(serve.json(&["list"])["devices"].as_array().unwrap().len(), FORKS + 1);

    // Each client reads its own writes and not those of other clients.
    for number in [0, 7, 99] {
        let job = socket(&serve, &format!("job-{number}.sock"));
        assert_same(&job, &image);
        qemu_io(&job, &[&format!("write -P {} 1M 2M", number + 1), "discard 3M 1M", "write -P 9 12345k 512"]);
        qemu_io(&job, &[&format!("read -P {} 1M 2M", number + 1), "read -P 0 3M 1M", "read -P 9 12345k 512"]);
    }
    assert_same(&socket(&serve, "job-1.sock"), &image);
    fails(
        tool("qemu-img")
            .args(["compare", "-f", "raw", "-F", "raw", &socket(&serve, "job-7.sock")])
            .arg(&image),
    );

    // The NBD metadata context `freestone:changed` and the statistics report the same changed
    // pages.
    let map =
        json(tool("nbdinfo").args(["--json", "--map=freestone:changed", &socket(&serve, "job-7.sock")]));
    let own: u64 = map
        .as_array()
        .unwrap()
        .iter()
        .filter(|row| row["type"] == 1)
        .map(|row| row["length"].as_u64().unwrap())
        .sum();
    // The fork owns 2 MiB written, 1 MiB discarded, and the page at 12345k.
    assert_eq!(own, 3 * MIB + 4096);
    assert_eq!(map[0], json!({"offset": 0, "length": MIB, "type": 0}));
    let stat = serve.json(&["stat", "job-7"]);
    assert_eq!(stat["over_stat"]["own_bytes"].as_u64(), Some(own));
    assert_eq!((&stat["base"], &stat["family"]["mem_limit"]), (&json!("golden"), &json!(256 * MIB)));
    assert_eq!(serve.json(&["get", "golden", "family"])["family"]["layers"].as_u64(), Some(FORKS as u64));

    // A rewind discards all changes of the fork.
    let connected = UnixStream::connect(serve.path("job-7.sock")).map(|mut stream| {
        connect_nbd(&mut stream, "job-7");
        stream
    });
    let begin = Instant::now();
    let busy = serve.refused(1, &["rewind", "job-7"]);
    let refusal = begin.elapsed();
    assert!(busy.starts_with("job-7: 1 connection of "), "{busy}");
    // Before a refusal, the server waits for the client to disconnect. With `--force` it does not.
    let is_faster = || {
        let begin = Instant::now();
        assert_eq!(serve.text(&["rewind", "job-7", "--force"]), "");
        begin.elapsed() < refusal
    };
    assert!((0..20).any(|_| is_faster()), "rewind --force waits for the client");
    drop(connected);
    assert_same(&socket(&serve, "job-7.sock"), &image);
    assert_eq!(serve.json(&["stat", "job-7"])["over_stat"]["own_bytes"], 0);
    qemu_io(&socket(&serve, "job-99.sock"), &["read -P 100 1M 2M"]);

    // The base can be removed only after all its forks.
    assert_eq!(
        serve.refused(1, &["remove", "golden"]),
        "golden: cannot be removed: job-0, job-1, job-2 and 97 more stand on it"
    );
    for number in 0..FORKS {
        serve.text(&["remove", &format!("job-{number}"), "--force"]);
        assert!(!serve.path(&format!("job-{number}.sock")).exists());
    }
    assert_eq!(serve.json(&["get", "golden", "family"])["family"]["charged_bytes"], 0);
    serve.text(&["remove", "golden"]);
}

#[test]
fn fork_settings_apply() {
    let (serve, image) = with_base(&["vm=fork,base=golden,size=32M", "off=fork,base=golden,publish=no"]);
    // By default a fork of the command line is published at the `--nbd` addresses.
    let vm = uri(&serve, "vm");
    qemu_io(&vm, &["read -P 0 16M 16M", "write -P 5 31M 1M", "read -P 5 31M 1M"]);
    assert_eq!(serve.json(&["list", "off"])["devices"][0]["exports"], json!([]));

    serve.text(&["fork", "golden", "small", "mem_limit=1M", "mem_min=512K", "--nbd", "unix:small"]);
    let get = serve.json(&["get", "small"]);
    assert_eq!(
        (&get["mem_limit"], &get["mem_min"], &get["base"]),
        (&json!(MIB), &json!(MIB / 2), &json!("golden"))
    );
    // The memory limit of one fork does not limit other forks.
    fs::write(serve.path("noise"), noise(2, 4 * MIB)).unwrap();
    let copy = |to: &str| {
        let mut copy = tool("qemu-img");
        copy.args(["convert", "-n", "-f", "raw", "-O", "raw"]).arg(serve.path("noise")).arg(to);
        copy
    };
    fails(&mut copy(&socket(&serve, "small")));
    ok(&mut copy(&uri(&serve, "vm")));
    let set = serve.text(&["set", "small", "mem_limit=8M", "mem_min=2M"]);
    assert_eq!(set, "mem_limit=8388608\nmem_min=2097152\n");
    ok(&mut copy(&socket(&serve, "small")));
    assert_eq!(
        serve.refused(1, &["set", "small", "mem_min=9M"]),
        "small: mem_min=9M: mem_min=9M is above mem_limit=8M"
    );
    let left = "small: mem_limit=none mem_min=300M: the family's mem_limit has 256M left for guarantees";
    assert_eq!(serve.refused(1, &["set", "small", "mem_limit=none", "mem_min=300M"]), left);
    assert_eq!(serve.json(&["get", "small", "mem_limit"]), json!({"mem_limit": 8 * MIB}));
    // `set` at the base changes the memory limit of the whole family (a base and its forks, which
    // share memory).
    assert_eq!(serve.text(&["set", "golden", "mem_limit=128M"]), "mem_limit=134217728\n");
    assert_eq!(serve.json(&["stat", "vm"])["family"]["mem_limit"], 128 * MIB);

    // After a reset a fork has the content of its base.
    serve.text(&["reset", "small", "--force"]);
    assert_same(&socket(&serve, "small"), &image);
    assert_eq!(serve.json(&["get", "small", "io_stat"])["io_stat"]["failed_writes"], 0);

    // Creating a fork again fails, or with --if-absent reports the existing fork if the settings
    // are equal.
    let again = ["fork", "golden", "small", "mem_limit=1M", "mem_min=512K", "--nbd", "unix:small"];
    assert_eq!(serve.refused(1, &again), "small: a device of that name exists");
    let made = serve.json(&[&again[..], &["--if-absent"]].concat());
    assert_eq!(made["forks"][0]["created"], false);
    assert_eq!(made["forks"][0]["exports"].as_array().unwrap().len(), 1);
    assert_eq!(
        serve.refused(1, &["fork", "golden", "small", "--if-absent"]),
        "small: a fork device of that name exists, and was made with other settings"
    );
    assert_eq!(serve.json(&["create", "off=fork,base=golden,publish=no", "--if-absent"])["created"], false);
    assert_eq!(serve.json(&["create", "new=fork,base=golden", "--if-absent"])["created"], true);

    // If one of several forks cannot be created, none is created.
    serve.text(&["create", "many-3=null,size=1M"]);
    let many = ["fork", "golden", "many", "--count", "5", "--nbd", "unix:many-%n.sock"];
    assert_eq!(serve.refused(1, &many), "many-3: a device of that name exists");
    assert_eq!(serve.json(&["list", "many*"])["devices"].as_array().unwrap().len(), 1);
    assert!(!serve.path("many-0.sock").exists());
}

#[test]
fn unusable_base_of_fork_is_refused() {
    let (serve, _) = with_base(&["ram0=ram,disksize=16M", "n=null,size=1M"]);
    assert_eq!(
        serve.refused(1, &["fork", "ram0", "f"]),
        "f: base=ram0: is live; take a snapshot and fork that: freestone snapshot ram0 NAME"
    );
    assert_eq!(serve.refused(1, &["fork", "goldne", "f"]), "f: base=goldne: there is no such device (yet)");
    assert_eq!(serve.refused(1, &["fork", "n", "f"]), "f: base=n: a null device cannot be a base");
    let unit = "(K, M, G and T are known, 1024-based)";
    for (args, sentence) in [
        (&["fork", "golden", "f", "size=20"][..], format!("f: size=20: give a unit; 20M? {unit}")),
        (&["fork", "golden", "f", "siez=20G"], "f: unknown key \"siez\"; size?; the keys of a fork device are base, size, mem_limit, mem_min, full, faults, seed, \
             power_cut, power_cut_unit, record, publish, tls_clients, on_data_loss, keep; those of every device are iops, bps, iops_burst, bps_burst, max_clients".into()),
        (&["fork", "golden", "f", "size"], "f: fork: size: a value is missing; write size=VALUE".into()),
        (&["fork", "golden", "f", "size=1G", "size=2G"], "f: fork: size: given twice".into()),
        (&["fork", "golden", "f", "--count", "0"], "f: fork: count=0: must be a number from 1 to 65536".into()),
        (&["fork", "golden", "f-%n"], "f-%n: fork: %n is only for --count".into()),
        (&["fork", "golden", "a//b"], "\"a//b\": a device name is 1 to 255 bytes of printable characters without '=', ',' or blanks, and '/' only between others".into()),
        (&["publish", "golden", "--nbd", "unix:x", "--ttl", "1"], "golden: publish: ttl=1: only with --template".into()),
        (&["publish", "golden", "x", "--nbd", "unix:x"], "golden: publish: x: an export name is only for --template".into()),
        (&["snapshot", "ram0,golden", "a"], "a: snapshot: 2 origins and 1 names; one for each is needed".into()),
        (&["snapshot", "ram0", "a", "cwo=x"], "a: snapshot: unknown key \"cwo\"; cow?; the keys are cow, cow_size, store, chunk_size, readonly, discard_zeroes_cow, discard_passdown_origin, force, merge, tls_clients".into()),
        (&["merge", "ram0"], "ram0: merge: overwrites the origin with the content of the snapshot; confirm with --into-origin".into()),
    ] {
        assert_eq!(serve.refused(2, args), sentence, "{args:?}");
    }
    for (args, sentence) in [
        (
            &["fork", "golden", "f", "size=8M"][..],
            "f: size=8M: smaller than the base, which has 16M; a fork shows all of it",
        ),
        (
            &["fork", "golden", "f", "mem_min=1G"],
            "f: mem_min=1G: the family's mem_limit has 256M left for guarantees",
        ),
        (
            &["rewind", "ram0"],
            "ram0: a ram device has no base; `freestone reset ram0` wipes it, --to goes to a snapshot of it",
        ),
        (&["rewind", "golden"], "golden: a file device cannot be rewound; only forks can"),
        (&["snapshot", "golden", "s"], "s: origin=golden: is read-only, so it does not change; fork it"),
        (
            &["merge", "ram0", "--into-origin"],
            "ram0: merge: a ram device is not a snapshot with a COW device",
        ),
        (
            &["delta", "show", "ram0"],
            "ram0: delta show: a ram device has no changes over a base; forks and snapshots have",
        ),
        (
            &["publish", "ram0", "--template", "--nbd", "unix:x"],
            "ram0-fork: base=ram0: is live; take a snapshot and fork that: freestone snapshot ram0 NAME",
        ),
        (&["create", "golden=fork,base=golden"], "golden: a device of that name exists"),
    ] {
        assert_eq!(serve.refused(1, args), sentence, "{args:?}");
    }
    assert_eq!(serve.json(&["list"])["devices"].as_array().unwrap().len(), 3);
    assert!(!serve.path("x").exists());
}

/// A fork has exactly the size of its base, and so have its snapshots, their forks, its delta and
/// its save. A wrong size would misplace the backup header of a GPT, which is in the last sector.
#[test]
fn fork_has_the_exact_size_of_its_base() {
    const TINY: u64 = 1536;
    const SIZE: u64 = MIB + 1536;
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tiny.img"), noise(5, TINY)).unwrap();
    fs::write(dir.path().join("disk.img"), noise(6, SIZE)).unwrap();
    ok(tool("qemu-img")
        .args(["convert", "-f", "raw", "-O", "qcow2", "disk.img", "disk.qcow2"])
        .current_dir(dir.path()));
    let serve = Serve::start_in(
        dir,
        &[
            "tiny=file,path=tiny.img,readonly=yes,publish=no",
            "raw=file,path=disk.img,readonly=yes,publish=no",
            "image=qcow2,path=disk.qcow2,publish=no",
            "on-tiny=fork,base=tiny",
            "on-raw=fork,base=raw",
            "on-image=fork,base=image",
            "--nbd",
            "unix:nbd",
            "--control",
            "control",
        ],
        false,
    );
    let size_of = |format: &str, what: &str| {
        json(tool("qemu-img").args(["info", "-f", format, "--output=json", what]))["virtual-size"].clone()
    };
    // qemu-img compare ignores trailing zeroes of the longer image, so the sizes are compared
    // separately.
    let same = |one: &str, (format, other): (&str, &str)| {
        ok(tool("qemu-img").args(["compare", "-f", "raw", "-F", format, one, other]));
        assert_eq!(size_of("raw", one), size_of(format, other), "{one} {other}");
    };
    for (fork, image, base, size) in [
        ("on-tiny", "tiny.img", "tiny.img", TINY),
        ("on-raw", "disk.img", "disk.img", SIZE),
        ("on-image", "disk.img", "disk.qcow2", SIZE),
    ] {
        let path = |name: &str| serve.path(name).display().to_string();
        let nbd = format!("unix:{}", path("nbd"));
        let disk = uri(&serve, fork);
        assert_eq!(ok(tool("nbdinfo").args(["--size", &disk])).trim(), size.to_string());
        let info = json(tool("nbdinfo").args(["--json", &disk]));
        assert_eq!(info["exports"][0]["block_size_minimum"], 1, "{info}");
        same(&disk, ("raw", &path(image)));
        // A snapshot of the fork, and a fork of this snapshot, have the same size.
        let (kept, second) = (format!("{fork}-kept"), format!("{fork}-second"));
        serve.text(&["snapshot", fork, &kept]);
        serve.text(&["fork", &kept, &second, "--nbd", &nbd]);
        serve.text(&["publish", &kept, "--nbd", &nbd]);
        same(&uri(&serve, &kept), ("raw", &path(image)));
        // qemu-io writes the last sector, trims the last page, and writes the last sector again.
        let last = size - 512;
        let page = size / 4096 * 4096;
        for name in [fork, &second] {
            qemu_io(
                &uri(&serve, name),
                &[
                    &format!("discard {page} {}", size - page),
                    &format!("read -P 0 {page} {}", size - page),
                    &format!("write -P 5 {last} 512"),
                    &format!("read -P 5 {last} 512"),
                    &format!("write -z {page} 512"),
                ],
            );
        }
        same(&uri(&serve, &second), ("raw", &disk));
        same(&uri(&serve, &kept), ("raw", &path(image)));
        // The delta of the fork is a qcow2 overlay of the same size.
        let overlay = path(&format!("{fork}.qcow2"));
        serve.text(&["delta", "save", fork, &overlay]);
        let info = json(tool("qemu-img").args(["info", "--output=json", &overlay]));
        assert_eq!(
            (&info["virtual-size"], &info["backing-filename"]),
            (&json!(size), &json!(base)),
            "{info}"
        );
        ok(tool("qemu-img").args(["check", &overlay]));
        same(&disk, ("qcow2", &overlay));
        let applied = format!("{fork}-applied");
        serve.text(&["fork", fork.trim_start_matches("on-"), &applied, "--nbd", &nbd]);
        serve.text(&["delta", "apply", &applied, &overlay]);
        same(&uri(&serve, &applied), ("qcow2", &overlay));
        // A save of the fork, restored under another name, has the same size.
        serve.text(&["save", fork, &path("saved")]);
        serve.text(&["remove", &applied, "--force"]);
        let again = format!("{fork}-again");
        serve.text(&["restore", &path("saved"), &again]);
        serve.text(&["publish", &again, "--nbd", &nbd]);
        same(&uri(&serve, &again), ("raw", &disk));
        // A grown fork reads as zeroes beyond the end of its base.
        serve.text(&["set", &second, "disksize=2M"]);
        let second = uri(&serve, &second);
        assert_eq!(ok(tool("nbdinfo").args(["--size", &second])).trim(), (2 * MIB).to_string());
        qemu_io(&second, &[&format!("read -P 5 {last} 512"), &format!("read -P 0 {size} 4k")]);
    }
}

#[test]
fn disk_rewinds_to_its_snapshots() {
    let serve = Serve::start(&["r=ram,disksize=4M,mem_limit=64M,faults=none", "q=ram,disksize=4M"]);
    let disk = uri(&serve, "r");
    qemu_io(&disk, &["write -P 1 0 1M"]);
    serve.text(&["snapshot", "r", "r-1"]);
    qemu_io(&disk, &["write -P 2 0 64k", "write -P 3 3M 64k"]);
    serve.text(&["snapshot", "r", "r-2"]);
    qemu_io(&disk, &["write -P 4 0 64k"]);
    serve.text(&["set", "r", "faults=read error=EIO at=2M+4K", "seed=9"]);

    assert_eq!(serve.json(&["rewind", "r", "--to", "r-1"]), json!({"name": "r", "connections_ended": 0}));
    let first = ["read -P 1 0 1M", "read -P 0 3M 64k"];
    qemu_io(&disk, &first);
    let row = &serve.json(&["list", "r"])["devices"][0];
    assert_eq!(
        (&row["kind"], &row["base"], &row["disksize"]),
        (&json!("fork"), &json!("r-1"), &json!(4 * MIB))
    );
    assert_eq!((&row["exports"][0]["default"], &row["exports"][0]["uri"]), (&json!(true), &json!(disk)));
    // A rewind to a snapshot keeps other settings and the family (a base and its forks, which share
    // memory).
    assert_eq!(serve.json(&["get", "r"])["faults"], "read error=EIO at=2M+4K");
    assert_eq!(serve.json(&["stat", "r"])["family"]["mem_limit"], 64 * MIB);
    // After a rewind with --to the snapshot is the base of the disk, so a plain rewind returns to
    // the snapshot.
    qemu_io(&disk, &["write -P 5 0 64k"]);
    serve.text(&["rewind", "r"]);
    qemu_io(&disk, &first);

    // The disk goes back to the other snapshot, `r-2`. A rewind with connected clients fails; with
    // --force it ends their connections.
    let mut client = UnixStream::connect(serve.path("nbd")).unwrap();
    connect_nbd(&mut client, "r");
    let busy = serve.refused(1, &["rewind", "r", "--to", "r-2"]);
    assert_eq!(busy, "r: a client is connected; --force goes ahead");
    assert_eq!(serve.json(&["rewind", "r", "--to", "r-2", "--force"])["connections_ended"], 1);
    assert_eq!(std::io::Read::read(&mut client, &mut [0]).unwrap(), 0);
    qemu_io(&disk, &["read -P 2 0 64k", "read -P 1 64k 64k", "read -P 3 3M 64k"]);

    assert_eq!(serve.refused(1, &["remove", "r-2"]), "r-2: cannot be removed: r stands on it");
    assert_eq!(serve.refused(1, &["rewind", "q", "--to", "r-2"]), "q: to=r-2: is not a snapshot of it");
    assert_eq!(serve.refused(1, &["rewind", "r", "--to", "q"]), "r: to=q: is not a snapshot of it");
    let snapshot = serve.refused(1, &["rewind", "r-1", "--to", "r-2"]);
    assert_eq!(snapshot, "r-1: to=r-2: only a ram device or fork goes back to a snapshot of it");
    // `remove *` removes forks and snapshots before the devices that they depend on.
    serve.text(&["remove", "r-1"]);
    serve.text(&["remove", "*"]);
    assert_eq!(serve.json(&["list"])["devices"], json!([]));
}
