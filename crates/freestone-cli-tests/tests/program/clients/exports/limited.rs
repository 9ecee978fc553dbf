//! Rate limits, bursts and connection limits of devices and exports, changed while clients are connected.

use std::sync::mpsc;

use crate::harness::prelude::*;

/// NBD error number of requests to a removed device.
const ESHUTDOWN: u32 = 108;
const PATIENCE: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);

/// Sends `count` writes of one page each without waiting for replies.
fn send(client: &mut Raw, count: u64) {
    for n in 0..count {
        client.send_write(n * 4096, &[n as u8; 4096]);
    }
}

/// Waits for `count` successful replies. Returns how long the replies took.
fn wait_for_replies(client: &mut Raw, count: u64) -> Duration {
    let begun = Instant::now();
    for _ in 0..count {
        assert_eq!(client.reply().unwrap().1, 0);
    }
    begun.elapsed()
}

fn write_and_wait(client: &mut Raw, count: u64) -> Duration {
    let begun = Instant::now();
    send(client, count);
    wait_for_replies(client, count);
    begun.elapsed()
}

/// Returns the `stat` object of the export whose address ends with `address`.
fn export_stat(serve: &Serve, name: &str, address: &str) -> Value {
    let reply = serve.json(&["stat", name])["exports"].take();
    let all = reply.as_array().unwrap();
    let is = |export: &&Value| export["address"].as_str().unwrap().ends_with(address);
    all.iter().find(is).unwrap_or_else(|| panic!("no {address} in {reply}")).clone()
}

#[test]
fn device_limits_apply_by_key_and_set() {
    let serve = Serve::start(&["r=ram,disksize=16M,iops=100,iops_burst=1", "other=ram,disksize=16M"]);
    let mut client = Raw::connect(&serve, "r");
    let took = write_and_wait(&mut client, 31);
    assert!((SHORT..PATIENCE).contains(&took), "{took:?}");
    let reply = serve.json(&["stat", "r"]);
    let limits = json!({ "iops": 100, "bps": 0, "iops_burst": 1, "bps_burst": 0, "max_clients": 0 });
    assert_eq!(reply["limits"], limits);
    assert!(stat(&serve, "r", "io", "limited") >= 29, "{reply}");
    assert_eq!(serve.json(&["stat", "other"]).get("limits"), None);
    assert_eq!(stat(&serve, "other", "io", "limited"), 0);
    // 1 MiB at 4 MiB/s with a small burst takes about 250 ms.
    serve.text(&["set", "r", "iops=0", "bps=4M", "bps_burst=4K"]);
    let took = write_and_wait(&mut client, 256);
    assert!((Duration::from_millis(240)..PATIENCE).contains(&took), "{took:?}");
    assert_eq!(serve.text(&["get", "r", "bps"]), "4194304\n");
    // The burst refills while the device is idle, and the idle time since the previous writes is long enough.
    serve.text(&["set", "r", "bps=0", "iops=1", "iops_burst=100"]);
    assert!(write_and_wait(&mut client, 100) < Duration::from_secs(30));
    // Waiting requests continue at once when the limit is removed.
    send(&mut client, 50);
    thread::sleep(Duration::from_millis(50));
    serve.text(&["set", "r", "iops=none"]);
    assert!(wait_for_replies(&mut client, 50) < Duration::from_secs(30));
    for (words, message) in [
        ("iops=-1", "r: iops=-1: must be 1 to 10000000; 0 is no limit"),
        ("bps=100", "r: bps=100: give a unit; 100M? (K, M, G and T are known, 1024-based); 0 is no limit"),
        ("bps_burst=1K", "r: bps_burst=1K: must be 4K to 1T; 0 is a tenth of bps"),
        ("max_clients=1000000", "r: max_clients=1000000: must be 1 to 65536; 0 is no limit"),
    ] {
        assert_eq!(serve.refused(2, &["set", "r", "mem_limit=1G", words]), message);
    }
    assert_ne!(serve.json(&["get", "r", "mem_limit"])["mem_limit"], 1 << 30);
}

#[test]
fn export_limits_apply_and_change_by_publish() {
    let serve = Serve::start(&["r=ram,disksize=16M"]);
    serve.text(&["publish", "r", "--nbd", "unix:slow", "--iops", "10", "--iops-burst", "1"]);
    let (mut home, mut slow) = (Raw::connect(&serve, "r"), Raw::connect_at(&serve.path("slow"), "r"));
    send(&mut slow, 31);
    let begun = Instant::now();
    // The rate limit of the export `slow`, whose writes need three seconds, does not delay the other export.
    let long = Duration::from_millis(2500);
    assert!(write_and_wait(&mut home, 31) < long);
    wait_for_replies(&mut slow, 31);
    assert!(begun.elapsed() >= long);
    let stats = export_stat(&serve, "r", "/slow");
    assert_eq!(
        (&stats["limits"]["iops"], &stats["limits"]["iops_burst"]),
        (&json!(10), &json!(1)),
        "{stats}"
    );
    assert!(stats["io"]["limited"].as_u64().unwrap() >= 29, "{stats}");
    let stats = export_stat(&serve, "r", "/nbd");
    assert_eq!((stats.get("limits"), &stats["io"]["limited"]), (None, &json!(0)), "{stats}");

    // A new limit also applies to requests that already wait. A limit that is omitted stays unchanged.
    serve.text(&["publish", "r", "--nbd", "unix:slow", "--iops", "1"]);
    send(&mut slow, 50);
    thread::sleep(Duration::from_millis(50));
    serve.text(&["publish", "r", "--nbd", "unix:slow", "--iops", "0", "--bps", "1G", "--max-clients", "3"]);
    assert!(wait_for_replies(&mut slow, 50) < Duration::from_secs(30));
    let limits = export_stat(&serve, "r", "/slow")["limits"].take();
    assert_eq!(limits["iops"], 0);
    assert_eq!((&limits["bps"], &limits["bps_burst"]), (&json!(1 << 30), &json!((1 << 30) / 10)));
    assert_eq!((&limits["max_clients"], &limits["iops_burst"]), (&json!(3), &json!(1)));
    let again = serve.refused(1, &["publish", "r", "--nbd", "unix:slow"]);
    assert!(again.starts_with("r: already published at unix:"), "{again}");
    let vm = ["publish", "r", "--vhost-user", "unix:vm", "--max-clients", "2"];
    assert_eq!(
        serve.refused(2, &vm),
        "r: publish: max_clients=2: the socket of a virtual machine has one client at a time; it is for NBD, \
         and for the device"
    );
    assert!(!serve.path("vm").exists());
    let bad = serve.refused(2, &["publish", "r", "--nbd", "unix:slow", "--bps", "7"]);
    assert_eq!(
        bad,
        "r: publish: bps=7: give a unit; 7M? (K, M, G and T are known, 1024-based); 0 is no limit"
    );
}

const FILE: &str = "
nbd = 'unix:nbd'
control = 'control'
[[device]]
name = 'r'
kind = 'ram'
disksize = '16M'
iops = 5000
max_clients = 8
export = [{ nbd = 'unix:a', iops = 1000, bps = '10M' }, { vhost_user = 'unix:vm', bps = '1M' }]
";

#[test]
fn limits_are_kept_in_file_state_and_dump() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("f.toml"), FILE).unwrap();
    let serve = Serve::start_in(dir, &["--config", "f.toml", "--state", "state"], false);
    assert_eq!(serve.text(&["apply", "f.toml"]), "nothing changes\n");
    let limits = |serve: &Serve| {
        let reply = serve.json(&["stat", "r"]);
        let of = |address| export_stat(serve, "r", address)["limits"].clone();
        (reply["limits"]["iops"].clone(), reply["limits"]["max_clients"].clone(), of("/a"), of("/vm"))
    };
    let (iops, max_clients, a, vm) = limits(&serve);
    assert_eq!((iops, max_clients), (json!(5000), json!(8)));
    assert_eq!((&a["iops"], &a["bps"], &vm["bps"]), (&json!(1000), &json!(10 << 20), &json!(1 << 20)));

    // The client stays connected while `apply` changes the limits.
    let mut client = Raw::connect_at(&serve.path("a"), "r");
    let less = FILE
        .replacen("iops = 5000\n", "", 1)
        .replacen("iops = 1000, bps = '10M'", "iops = 100, iops_burst = 1", 1)
        .replacen(", bps = '1M'", "", 1);
    std::fs::write(serve.path("f.toml"), &less).unwrap();
    let at = serve.dir.path().display().to_string();
    let changes = format!(
        "set r iops=0\nlimit r at unix:{at}/a, iops=100, iops_burst=1\nlimit r at vhost-user:{at}/vm: no limit\n"
    );
    assert_eq!(serve.text(&["apply", "f.toml", "--check"]), changes);
    assert_eq!(serve.text(&["apply", "f.toml"]), changes);
    assert_eq!(serve.text(&["apply", "f.toml"]), "nothing changes\n");
    assert!(write_and_wait(&mut client, 31) >= SHORT);
    // Limits set by verbs are kept over a restart. The next `apply` resets them to those of the configuration file.
    serve.text(&["publish", "r", "--nbd", "unix:a", "--iops", "200"]);
    serve.text(&["set", "r", "max_clients=3", "bps=1G"]);
    let before = limits(&serve);
    let dumped = serve.text(&["dump"]);
    for text in ["max_clients = \"3\"", "bps = \"1G\"", "iops = 200", "iops_burst = 1"] {
        assert!(dumped.contains(text), "{text} in {dumped}");
    }
    drop(client);
    let dir = serve.kill();
    let serve = Serve::start_in(dir, &["--state", "state"], true);
    assert_eq!(serve.json(&["stat", "r"])["limits"]["max_clients"], 3);
    serve.text(&["publish", "r"]);
    assert_eq!(limits(&serve), before);
    let changes = format!("set r bps=0 max_clients=8\nlimit r at unix:{at}/a, iops=100, iops_burst=1\n");
    let applied = serve.text(&["apply", "f.toml"]);
    let mut lines: Vec<_> = applied.lines().collect();
    lines.sort_unstable();
    let mut expected: Vec<_> = changes.lines().collect();
    expected.sort_unstable();
    // The order of the attributes in a line varies, so the second line is compared in parts.
    assert_eq!(lines.len(), expected.len(), "{applied}");
    assert_eq!(lines[0], expected[0], "{applied}");
    assert!(lines[1].contains("bps=0") && lines[1].contains("max_clients=8"), "{applied}");
}

#[test]
fn limited_requests_end_on_remove_power_cut_and_shutdown() {
    let serve = Serve::start(&[
        "r=ram,disksize=16M,iops=1,iops_burst=1",
        "p=null,size=16M,memory_backed=1,power_cut=yes,iops=1,iops_burst=1",
        "s=ram,disksize=16M,iops=1,iops_burst=1",
    ]);
    let wait = |name: &str| {
        let mut client = Raw::connect(&serve, name);
        send(&mut client, 50);
        wait_until("the requests do not wait", || stat(&serve, name, "io", "in_flight") >= 45);
        client
    };
    // Reads replies until the connection closes. Returns the number of replies with ESHUTDOWN.
    let outcomes = |client: &mut Raw| {
        let mut gone = 0;
        loop {
            match client.reply() {
                Ok((_, 0)) => {}
                Ok((_, error)) => {
                    assert_eq!(error, ESHUTDOWN);
                    gone += 1;
                }
                Err(Ended) => return gone,
            }
        }
    };
    let mut client = wait("r");
    let begun = Instant::now();
    serve.text(&["remove", "r", "--force"]);
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    assert!(outcomes(&mut client) >= 40);

    let mut client = wait("p");
    let begun = Instant::now();
    serve.text(&["power-cut", "p", "--seed", "1"]);
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    outcomes(&mut client);
    // No write that was sent before the power cut reaches the device after it.
    thread::sleep(Duration::from_millis(1500));
    assert_eq!(stat(&serve, "p", "io", "in_flight"), 0);
    serve.text(&["set", "p", "iops=0"]);
    let mut client = Raw::connect(&serve, "p");
    assert_eq!(client.read(45 * 4096, 4096).unwrap(), [0; 4096]);

    // A shutdown completes the waiting requests and ignores their rate limit.
    let mut client = wait("s");
    let begun = Instant::now();
    serve.text(&["shutdown"]);
    assert_eq!(serve.wait().0, Some(0));
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert_eq!(outcomes(&mut client), 0);
}

#[test]
fn client_above_max_clients_waits() {
    let serve = Serve::start(&["r=ram,disksize=16M,max_clients=2"]);
    serve.text(&["publish", "r", "--nbd", "unix:one", "--max-clients", "1"]);
    let first = Raw::connect_at(&serve.path("one"), "r");
    let at_home = Raw::connect(&serve, "r");
    let (tx, rx) = mpsc::channel();
    for socket in ["one", "nbd"] {
        let (path, tx) = (serve.path(socket), tx.clone());
        thread::spawn(move || {
            let mut client = Raw::connect_at(&path, "r");
            client.read(0, 4096).unwrap();
            // The client stays connected until the test receives the connection.
            tx.send(client).unwrap();
        });
    }
    assert!(rx.recv_timeout(SHORT).is_err(), "somebody got in");
    // The closed connection frees a slot of the device, and only one of the waiting clients uses the slot.
    drop(at_home);
    let second = rx.recv_timeout(PATIENCE).unwrap();
    assert!(rx.recv_timeout(SHORT).is_err(), "both got in");
    drop(first);
    let third = rx.recv_timeout(PATIENCE).unwrap();
    let list = serve.json(&["list"])["devices"][0]["exports"].take();
    let all: u64 =
        list.as_array().unwrap().iter().map(|export| export["connections"].as_u64().unwrap()).sum();
    assert_eq!(all, 2, "{list}");
    // A higher limit also admits a client that already waits.
    let path = serve.path("nbd");
    thread::spawn(move || tx.send(Raw::connect_at(&path, "r")));
    assert!(rx.recv_timeout(SHORT).is_err(), "somebody got in");
    serve.text(&["set", "r", "max_clients=0"]);
    drop((second, third, rx.recv_timeout(PATIENCE).unwrap()));
}

#[test]
fn template_limits_apply_to_each_connection() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("golden"), vec![0; 16 << 20]).unwrap();
    let golden = format!("golden=file,path={}/golden,readonly=yes", dir.path().display());
    let serve = Serve::start(&[&golden, "t=template,base=golden,iops=100,iops_burst=1"]);
    let (mut one, mut other) = (Raw::connect(&serve, "t"), Raw::connect(&serve, "t"));
    send(&mut one, 31);
    let took = write_and_wait(&mut other, 31);
    assert!((SHORT..PATIENCE).contains(&took), "{took:?}");
    wait_for_replies(&mut one, 31);
    serve.text(&[
        "publish",
        "golden",
        "fast",
        "--template",
        "--nbd",
        "unix:t",
        "--iops",
        "50",
        "--iops-burst",
        "1",
    ]);
    let mut client = Raw::connect_at(&serve.path("t"), "fast");
    assert!(write_and_wait(&mut client, 16) >= SHORT);
    serve.text(&["publish", "fast", "--nbd", "unix:t", "--iops", "1"]);
    send(&mut client, 50);
    serve.text(&["publish", "fast", "--nbd", "unix:t", "--iops", "0"]);
    assert!(wait_for_replies(&mut client, 50) < Duration::from_secs(30));
}
