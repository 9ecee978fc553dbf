//! Memory of the server that its devices use: limits, statistics, and release.

use crate::harness::prelude::*;

/// Returns the resident anonymous memory of the server process, in bytes.
fn anonymous(serve: &Serve) -> u64 {
    status_field(serve, "RssAnon:")
}

/// Returns the peak resident memory of the server process, in bytes.
fn peak(serve: &Serve) -> u64 {
    status_field(serve, "VmHWM:")
}

fn status_field(serve: &Serve, what: &str) -> u64 {
    let pid = serve.json(&["stat"])["server"]["pid"].as_u64().unwrap();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(what)).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * KIB
}

#[test]
fn empty_disk_takes_32_kib_until_removed() {
    const DISKS: u64 = 400;
    let serve = Serve::start(&["first=ram,disksize=1G"]);
    let control = serve.control();
    let begin = anonymous(&serve);
    for n in 0..DISKS {
        let device = format!("r{n}=ram,disksize=1G,mem_limit=1M");
        let line = json!({ "jsonrpc": "2.0", "id": n, "method": "create", "params": { "device": device } });
        let answer = ask(&control, line.to_string().as_bytes());
        assert_eq!(answer["result"]["created"], true, "{answer}");
    }
    let taken = anonymous(&serve).saturating_sub(begin);
    assert!(taken <= DISKS * 32 * KIB, "{} bytes a disk", taken / DISKS);
    serve.text(&["remove", "r*"]);
    // The server returns freed memory to the kernel about a second later.
    let mut left = u64::MAX;
    for _ in 0..100 {
        left = anonymous(&serve).saturating_sub(begin);
        if left <= taken / 4 {
            return;
        }
        thread::sleep(Duration::from_millis(100));
    }
    panic!("{left} bytes of {taken} are left");
}

#[test]
fn snapshot_copies_in_memory_are_limited_and_listed() {
    let dir = tempdir().unwrap();
    let file = |name: &str| {
        let path = dir.path().join(name);
        fs::write(&path, noise(1, 8 * MIB)).unwrap();
        format!("{name}=file,path={}", path.display())
    };
    let serve = Serve::start(&[
        &file("disk"),
        &file("other"),
        "s=snapshot,origin=disk,mem_limit=1M,publish=yes",
        "w=snapshot,origin=other,mem_limit=1M,full=wait,full_timeout=3600,publish=yes",
    ]);
    let row = |name: &str| serve.json(&["list", name])["devices"][0].clone();
    assert_eq!((&row("s")["mem_limit"], &row("s")["mem_used_total"]), (&json!(MIB), &json!(0)));
    assert_eq!(serve.text(&["get", "s", "mem_limit"]), "1048576\n");
    let mut client = Raw::connect(&serve, "disk");
    assert_eq!(client.write(0, 0, &noise(2, 512 * KIB)), 0);
    let used = row("s")["mem_used_total"].as_u64().unwrap();
    assert!((512 * KIB..=MIB).contains(&used), "{used}");
    assert_eq!(serve.json(&["stat", "s"])["mm_stat"]["mem_used_total"], used);
    assert_eq!(serve.json(&["stat", "s"])["family"]["mem_limit"], MIB);
    // Forks of the snapshot share its memory limit.
    serve.text(&["fork", "s", "f"]);
    assert_eq!(serve.json(&["stat", "f"])["family"]["mem_limit"], MIB);
    serve.text(&["remove", "f"]);
    // At the memory limit the snapshot overflows and becomes invalid, and the origin's write
    // succeeds.
    for n in 0..4 {
        assert_eq!(client.write(0, n * MIB, &noise(3, MIB)), 0);
    }
    assert!(row("s")["mem_used_total"].as_u64().unwrap() <= MIB);
    let table = serve.text(&["list"]);
    let line = |name: &str| table.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(line("s ").contains("snapshot invalid "), "{table}");
    assert!(line("w ").contains("snapshot ") && !line("w ").contains("invalid"), "{table}");
    assert_eq!(Raw::connect(&serve, "s").read(0, 4096), Err(EIO));

    // With full=wait, the origin's writes wait for memory instead.
    let mut client = Raw::connect(&serve, "other");
    let waiting = client.send_write(0, &noise(4, 2 * MIB));
    while serve.json(&["stat", "w"])["full"]["waiting"] == 0 {
        thread::sleep(Duration::from_millis(10));
    }
    serve.text(&["set", "w", "mem_limit=16M"]);
    assert_eq!(client.reply(), Ok((waiting, 0)));
    assert_eq!(serve.json(&["list", "w"])["devices"][0]["mem_limit"], 16 * MIB);
    assert_eq!(
        Raw::connect(&serve, "w").read(MIB, 4096).unwrap(),
        &noise(1, 8 * MIB)[MIB as usize..][..4096]
    );
}

#[test]
fn full_cow_device_shows_in_list() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("disk"), noise(1, 4 * MIB)).unwrap();
    let at = dir.path().display();
    let serve = Serve::start(&[
        &format!("disk=file,path={at}/disk"),
        &format!("s=snapshot,origin=disk,cow={at}/cow,cow_size=128K,store=PO,publish=yes"),
    ]);
    let mut client = Raw::connect(&serve, "s");
    while client.write(0, 0, &noise(2, MIB)) == 0 {}
    assert!(serve.text(&["list", "s"]).contains(" snapshot overflow "), "{}", serve.text(&["list", "s"]));
    assert_eq!(serve.json(&["list", "s"])["devices"][0]["status"], "Overflow");
}

#[test]
fn many_clients_stay_within_memory_limits() {
    const CLIENTS: u64 = 64;
    const EACH: u64 = 4;
    let dir = tempdir().unwrap();
    let args = [
        "--max-memory-in-flight",
        "64M",
        "d=ram,disksize=512M,mem_limit=48M,backing_dev=spill.img,backing_size=640M",
    ];
    let serve = Serve::start_in(dir, &args, true);
    // The clients together request 256 MiB of buffers for requests in flight.
    let data = noise(7, MIB);
    thread::scope(|scope| {
        for number in 0..CLIENTS {
            let (serve, data) = (&serve, &data);
            scope.spawn(move || {
                let mut client = Raw::connect(serve, "d");
                for n in 0..EACH {
                    client.send_write((number * EACH + n) * MIB, data);
                }
                for _ in 0..EACH {
                    assert_eq!(client.reply().unwrap().1, 0);
                }
            });
        }
    });
    let (peak, most) = (peak(&serve), (48 + 64 + 64) * MIB);
    assert!(peak <= most, "{} of {} MiB", peak / MIB, most / MIB);
}

/// Flags of a thread that is an I/O flusher (`PF_MEMALLOC_NOIO`, `PF_LOCAL_THROTTLE`).
const FLUSHER: u64 = 0x18_0000;

/// Returns true if [`FLUSHER`] is set in the flags of a thread, given a line of `/proc/PID/stat`.
fn is_flusher(stat: &str) -> bool {
    // The third field of the line follows the thread name, which is in parentheses and may contain
    // spaces.
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    let flags: u64 = fields.split(' ').nth(6).unwrap().parse().unwrap();
    flags & FLUSHER == FLUSHER
}

#[test]
fn server_threads_are_io_flushers() {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap().trim();
    let may = u64::from_str_radix(capabilities, 16).unwrap() & (1 << 24) != 0;

    let dir = tempdir().unwrap();
    fs::write(dir.path().join("image"), [7; 4096]).unwrap();
    let serve = Serve::start_in(dir, &["f=file,path=image", "r=ram,disksize=1M"], true);
    let mut client = UnixStream::connect(serve.path("nbd")).unwrap();
    connect_nbd(&mut client, "f");
    let pid = serve.json(&["stat"])["server"]["pid"].as_u64().unwrap();
    let threads: Vec<_> = fs::read_dir(format!("/proc/{pid}/task"))
        .unwrap()
        .filter_map(|thread| fs::read_to_string(thread.unwrap().path().join("stat")).ok())
        .collect();
    assert!(threads.len() > 3, "{threads:?}");
    for thread in threads {
        assert_eq!(is_flusher(&thread), may, "{thread}");
    }

    // The command of `--run` is not an I/O flusher, because the command uses disks but does not
    // serve them.
    let (status, message, error) = finish(freestone(serve.dir.path()).args([
        "serve",
        "r=ram,disksize=1M",
        "--run",
        "cat /proc/self/stat",
    ]));
    assert_eq!((status, error.as_str()), (0, ""));
    assert!(!is_flusher(&message), "{message}");
}
