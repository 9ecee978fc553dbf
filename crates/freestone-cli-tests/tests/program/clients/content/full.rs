//! RAM disks and forks without free memory, and log lines and counters of failed requests.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt as _;
use std::thread::sleep;

use crate::harness::prelude::*;

const PAGE: u64 = 4 * KIB;
const TRIM: u16 = 4;
const ENOSPC: u32 = 28;
/// A RAM disk with memory for about 1 MiB of noise. When the disk is full, writes wait longer than
/// the test runs.
const WAITING: &str = "small=ram,disksize=64M,mem_limit=1M,full=wait,full_timeout=3600";
/// Time limit for operations that must not wait, shorter than the server's grace period of 5 s for
/// open connections.
const AT_ONCE: Duration = Duration::from_secs(4);

fn serve(devices: &[&str]) -> Serve {
    let ends = ["--nbd", "unix:nbd", "--control", "control"];
    Serve::logged_in(tempfile::tempdir().unwrap(), &[devices, &ends].concat())
}

/// Returns the lines of the log so far that contain `what`.
fn logged_so_far(serve: &Serve, what: &str) -> Vec<String> {
    lines(&fs::read_to_string(serve.path("log")).unwrap(), what)
}

/// Waits until a line of the log contains `what`, then returns all such lines.
#[track_caller]
fn wait_for_log(serve: &Serve, what: &str) -> Vec<String> {
    lines(&serve.log_with(what), what)
}

fn lines(log: &str, what: &str) -> Vec<String> {
    log.lines().filter(|line| line.contains(what)).map(Into::into).collect()
}

/// Writes pages of noise until a write fails, which must be with `error`. Returns the number of
/// writes that succeeded.
fn fill(client: &mut Raw, error: u32) -> u64 {
    let wrong = |page: &u64| match client.write(0, page * PAGE, &noise(*page + 1, PAGE)) {
        0 => false,
        found => {
            assert_eq!(found, error);
            true
        }
    };
    (0..1000).find(wrong).unwrap()
}

/// Fills the disk until a write waits for memory. Returns the client, the cookie of the waiting
/// write, and the number of its page.
fn fill_until_write_waits(serve: &Serve) -> (Raw, u64, u64) {
    let mut client = Raw::connect(serve, "small");
    let waits = || serve.json(&["stat", "small"])["full"]["waiting"] == 1;
    for page in 0.. {
        let cookie = client.send_write(page * PAGE, &noise(page + 1, PAGE));
        // 256 pages of noise are 1 MiB, so the disk is full at page 256 at the latest.
        if page == 256 {
            wait_until("a write waits", waits);
        }
        let full = page > 200 && {
            sleep(Duration::from_millis(20));
            waits()
        };
        if full {
            return (client, cookie, page);
        }
        assert_eq!(client.reply(), Ok((cookie, 0)));
    }
    unreachable!()
}

#[test]
fn full_disk_is_logged_before_and_when_full() {
    let serve = serve(&["small=ram,disksize=64M,mem_limit=1M", "other=ram,disksize=1M"]);
    let mut client = Raw::connect(&serve, "small");
    let fits = fill(&mut client, ENOSPC);
    assert!((200..=256).contains(&fits), "{fits}");
    wait_until("a warning", || !logged_so_far(&serve, "% of mem_limit is used").is_empty());
    for page in fits..fits + 500 {
        assert_eq!(client.write(0, page * PAGE, &noise(page, PAGE)), ENOSPC);
    }
    let line = "small: a write failed: no space left on the device";
    let lines = wait_for_log(&serve, line);
    assert_eq!(lines.len(), 1, "once a minute");
    // The log line describes the first failed write.
    let at = format!("{line}; offset {}, length {PAGE} ", fits * PAGE);
    assert!(lines[0].contains(&at), "{lines:?}: not {at}");
    assert_eq!(wait_for_log(&serve, "of mem_limit is used").len(), 1);
    assert!(
        logged_so_far(&serve, "WARN").iter().all(|line| line.contains("small: ")),
        "and of no other device"
    );
    let stat = serve.json(&["stat", "small"]);
    assert_eq!(stat["failed"], json!({ "no_space": 501 }));
    let full = json!({ "full": "error", "full_timeout": 60, "full_warn": 90, "mem_warn_threshold": 90, "waiting": 0 });
    assert_eq!(stat["full"], full);
    assert!(serve.text(&["stat", "small"]).contains("\n  failed\n    no_space  501\n"));
    assert_eq!(serve.json(&["stat", "other"]).get("failed"), None);
    // Invalid requests, here beyond the end of the device, are counted but not logged.
    assert_ne!(client.write(0, 64 * MIB, &[0; 512]), 0);
    assert_eq!(serve.json(&["stat", "small"])["failed"]["out_of_range"], 1);
    assert_eq!(logged_so_far(&serve, "out of range").len(), 0);
    // The counter belongs to the device, so it survives the removal of the export.
    drop(client);
    wait_until("it has left", || serve.json(&["list"])["devices"][0]["exports"][0]["connections"] == 0);
    serve.json(&["unpublish", "small"]);
    assert_eq!(serve.json(&["stat", "small"])["failed"]["no_space"], 501);
}

#[test]
fn failed_write_log_names_zone_or_fault() {
    let serve = serve(&[
        "z=null,size=1G,zoned=1,zone_size=64M,zone_max_open=1,zone_nr_conv=0",
        "f=ram,disksize=1M,faults=read error=EIO",
    ]);
    let mut client = Raw::connect(&serve, "z");
    assert_eq!(client.write(0, MIB, &[1; 4096]), EIO);
    let line = "z: a write failed: not at the zone's write pointer; offset 1048576, length 4096 ";
    assert_eq!(wait_for_log(&serve, line).len(), 1);
    assert_eq!(serve.json(&["stat", "z"])["failed"], json!({ "zone_write_pointer": 1 }));
    let mut client = Raw::connect(&serve, "f");
    for _ in 0..1000 {
        assert_eq!(client.read(8192, 4096), Err(EIO));
    }
    assert_eq!(wait_for_log(&serve, "f: a read failed: I/O error; offset 8192, length 4096 ").len(), 1);
    assert_eq!(serve.json(&["stat", "f"])["failed"], json!({ "io_error": 1000 }));
}

#[test]
fn full_wait_write_resumes_after_trim_or_higher_limit() {
    let serve = serve(&[WAITING]);
    let (mut client, cookie, page) = fill_until_write_waits(&serve);
    let full = &serve.json(&["stat", "small"])["full"];
    assert_eq!(
        full,
        &json!({ "full": "wait", "full_timeout": 3600, "full_warn": 90, "mem_warn_threshold": 90, "waiting": 1 })
    );
    assert_eq!(wait_for_log(&serve, "small: is full: writes wait for space, for at most 3600 s").len(), 1);
    // Reads and discards continue while a write waits, also on the same connection.
    let mut other = Raw::connect(&serve, "small");
    assert_eq!(other.read(0, 4096), Ok(noise(1, PAGE)));
    let trim = client.send(0, TRIM, 0, 4096, &[]);
    let mut answers = [client.reply().unwrap(), client.reply().unwrap()];
    answers.sort_unstable();
    assert_eq!(answers, [(cookie, 0), (trim, 0)]);

    let cookie = client.send_write(0, &noise(1, PAGE));
    wait_until("it waits again", || serve.json(&["stat", "small"])["full"]["waiting"] == 1);
    serve.json(&["set", "small", "mem_limit=2M"]);
    assert_eq!(client.reply(), Ok((cookie, 0)));
    assert_eq!(client.read(page * PAGE, 4096), Ok(noise(page + 1, PAGE)));
    assert_eq!(client.read(0, 4096), Ok(noise(1, PAGE)));
    wait_until("nobody waits", || serve.json(&["stat", "small"])["full"]["waiting"] == 0);
    assert_eq!(serve.json(&["stat", "small"]).get("failed"), None);
}

#[test]
fn full_wait_write_fails_at_timeout_or_full_error() {
    let serve = serve(&[WAITING]);
    let (mut client, cookie, page) = fill_until_write_waits(&serve);
    let set = serve.json(&["set", "small", "full_timeout=4", "mem_warn_threshold=off"]);
    assert_eq!(set, json!({ "full_timeout": 4, "full_warn": 0, "mem_warn_threshold": 0 }));
    assert_eq!(client.reply(), Ok((cookie, ENOSPC)));
    assert_eq!(wait_for_log(&serve, "small: is full, and no space was freed in time: writes fail").len(), 1);
    let began = Instant::now();
    assert_eq!(client.write(0, page * PAGE, &noise(9, PAGE)), ENOSPC, "it has given up");
    assert!(began.elapsed() < Duration::from_secs(4));
    // After memory was free for some time, writes to a full disk wait again.
    serve.json(&["set", "small", "full_timeout=3600", "mem_limit=1028K"]);
    let cookie = (0..).map(|n| client.send_write((page + n) * PAGE, &noise(9 + n, PAGE))).nth(20).unwrap();
    wait_until("one waits again", || serve.json(&["stat", "small"])["full"]["waiting"] != 0);
    serve.json(&["set", "small", "full=error"]);
    while let Ok((answered, error)) = client.reply() {
        assert!(error == 0 || error == ENOSPC);
        if answered == cookie {
            break;
        }
    }
    assert_eq!(serve.text(&["get", "small", "full"]), "error\n");
    let message = serve.refused(2, &["set", "small", "full=maybe"]);
    assert_eq!(message, "small: full=maybe: must be error or wait");
}

#[test]
fn full_wait_fork_is_removed_while_it_waits() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("img"), vec![0; 4 << 20]).unwrap();
    let ends = ["--nbd", "unix:nbd", "--control", "control"];
    let devices = [
        "golden=file,path=img,readonly=yes,mem_limit=1M,full=wait,full_timeout=3600,publish=no",
        "small=fork,base=golden",
        "other=fork,base=golden,mem_limit=64K",
    ];
    let serve = Serve::logged_in(dir, &[&devices[..], &ends].concat());
    // The fork `other` reaches its own memory limit, while `small` can use the rest of the
    // family's.
    let mut other = Raw::connect(&serve, "other");
    let asked: Vec<_> = (0..32).map(|n| other.send_write(n * PAGE, &noise(n + 1, PAGE))).collect();
    wait_until("writes wait", || serve.json(&["stat", "other"])["full"]["waiting"].as_u64() > Some(10));
    wait_until("a warning", || {
        logged_so_far(&serve, "other: ").iter().any(|line| line.contains("of its own mem_limit is used"))
    });
    serve.json(&["set", "other", "mem_limit=none"]);
    for _ in asked {
        assert_eq!(other.reply().unwrap().1, 0);
    }
    let (mut client, cookie, _) = fill_until_write_waits(&serve);
    wait_until("a warning", || !logged_so_far(&serve, "golden: ").is_empty());
    assert_eq!(serve.json(&["get", "golden", "full_timeout"]), json!({ "full_timeout": 3600 }));
    let began = Instant::now();
    serve.json(&["remove", "small", "--force"]);
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
    assert_eq!(client.reply(), Ok((cookie, ENOSPC)));
}

#[test]
fn full_setting_of_fork_overrides_family() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("img"), vec![0; 4 << 20]).unwrap();
    let ends = ["--nbd", "unix:nbd", "--control", "control"];
    let devices = [
        "golden=file,path=img,readonly=yes,mem_limit=1M,full_timeout=3600,publish=no",
        "fails=fork,base=golden",
        "small=fork,base=golden,full=wait",
    ];
    let serve = Serve::logged_in(dir, &[&devices[..], &ends].concat());
    let full = |name: &str| serve.json(&["stat", name])["full"]["full"].clone();
    assert_eq!((full("fails"), full("small")), (json!("error"), json!("wait")));
    assert_eq!(serve.json(&["get", "fails", "full"]), json!({ "full": "family" }));
    let (mut client, cookie, page) = fill_until_write_waits(&serve);
    let mut other = Raw::connect(&serve, "fails");
    assert_eq!(other.write(0, 0, &noise(1, PAGE)), ENOSPC);
    // The setting `full` of a fork applies to its waiting writes, and not to other forks.
    assert_eq!(serve.text(&["set", "small", "full=error"]), "full=error\n");
    assert_eq!(client.reply(), Ok((cookie, ENOSPC)));
    serve.text(&["set", "golden", "full=wait"]);
    assert_eq!(client.write(0, page * PAGE, &noise(1, PAGE)), ENOSPC);
    let cookie = other.send_write(0, &noise(1, PAGE));
    wait_until("it waits as its family does", || serve.json(&["stat", "fails"])["full"]["waiting"] == 1);
    serve.text(&["set", "golden", "mem_limit=2M"]);
    assert_eq!(other.reply(), Ok((cookie, 0)));
    assert_eq!(
        serve.refused(2, &["set", "small", "full=maybe"]),
        "small: full=maybe: must be error, wait or family"
    );
    // The setting `full` survives a rewind to a snapshot.
    drop(client);
    serve.text(&["snapshot", "small", "then"]);
    serve.text(&["rewind", "small", "--to", "then", "--force"]);
    assert_eq!(full("small"), "error");
    serve.text(&["fork", "golden", "each", "--template", "full=error"]);
    assert_eq!(serve.json(&["get", "each", "full"]), json!({ "full": "error" }));
}

#[test]
fn shutdown_ends_waiting_writes() {
    let serve = serve(&[WAITING]);
    let (mut client, cookie, _) = fill_until_write_waits(&serve);
    let began = Instant::now();
    serve.signal(Signal::TERM);
    assert_eq!(client.reply(), Ok((cookie, ENOSPC)));
    let (code, dir) = serve.wait();
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
    assert_eq!(code, Some(0));
    let log = fs::read_to_string(dir.path().join("log")).unwrap();
    assert!(!log.contains("did not end in time"), "{log}");
}

#[test]
fn power_cut_ends_waiting_writes() {
    let serve = serve(&["small=ram,disksize=64M,mem_limit=1M,full=wait,full_timeout=3600,power_cut=yes"]);
    let mut client = Raw::connect(&serve, "small");
    for page in 0..400 {
        assert_eq!(client.write(0, page * PAGE, &noise(page + 1, PAGE)), 0, "it is kept apart");
    }
    client.send(0, 3, 0, 0, &[]);
    wait_until("the flush waits for room", || serve.json(&["stat", "small"])["full"]["waiting"] != 0);
    let began = Instant::now();
    let message = serve.refused(1, &["power-cut", "small", "--seed", "1"]);
    assert!(message.contains("no space left on the device"), "{message}");
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
    serve.json(&["set", "small", "mem_limit=8M"]);
    serve.json(&["power-cut", "small", "--seed", "1"]);
}

#[test]
fn large_write_waits_as_a_whole() {
    let serve = serve(&[WAITING]);
    fs::write(serve.path("large"), noise(1, 3 * MIB)).unwrap();
    let large = serve.path("large").display().to_string();
    std::thread::scope(|scope| {
        let copies = scope.spawn(|| ok(tool("nbdcopy").args([&large, &uri(&serve, "small")])));
        wait_until("it waits", || serve.json(&["stat", "small"])["full"]["waiting"] != 0);
        assert!(!copies.is_finished());
        serve.json(&["set", "small", "mem_limit=8M"]);
        copies.join().unwrap();
    });
    let out = serve.path("out");
    ok(tool("nbdcopy").arg(uri(&serve, "small")).arg(&out));
    assert!(fs::read(out).unwrap()[..3 << 20] == noise(1, 3 * MIB)[..]);
}

#[test]
fn damaged_backing_device_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("spill"), vec![0; 32 << 20]).unwrap();
    let serve = Serve::logged_in(
        dir,
        &[
            "small=ram,disksize=64M,mem_limit=1M,backing_dev=spill",
            "--nbd",
            "unix:nbd",
            "--control",
            "control",
        ],
    );
    let state = || serve.json(&["stat", "small"])["backing"]["state"].clone();
    let mut client = Raw::connect(&serve, "small");
    let pages = 4 * MIB / PAGE;
    let fill = |client: &mut Raw, first: u64| {
        for page in first..first + pages {
            assert_eq!(client.write(0, page * PAGE, &noise(page + 1, PAGE)), 0);
        }
    };
    fill(&mut client, 0);
    assert_eq!(client.read(0, 4096), Ok(noise(1, PAGE)));
    assert_eq!(state(), "ok");
    let spill = OpenOptions::new().write(true).open(serve.path("spill")).unwrap();
    spill.write_all_at(&vec![0x5a; 32 << 20], 0).unwrap();
    spill.sync_all().unwrap();
    let bad = (1..pages / 2).filter(|page| client.read(page * PAGE, 4096) == Err(EIO)).count();
    assert!(bad > 100, "{bad}");
    assert_eq!(state(), "reads fail");
    let lines = wait_for_log(&serve, "came back damaged from backing_dev");
    assert!(matches!(&lines[..], [line] if line.contains("small: page ")), "{lines:?}");
    assert_eq!(wait_for_log(&serve, "small: a read failed: I/O error").len(), 1);
    // New pages are readable: only the pages that were overwritten in the backing file are lost.
    fill(&mut client, pages);
    assert_eq!(client.read(pages * PAGE, 4096), Ok(noise(pages + 1, PAGE)));
    assert_eq!(state(), "ok");
}
