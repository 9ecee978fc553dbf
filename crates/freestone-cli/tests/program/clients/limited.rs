//! Devices and exports that let through so much: rates, bursts and connections, changed while clients
//! are connected.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::clients::tools::stat;
use crate::drives::raw::{Ended, Raw};
use crate::harness::Serve;

/// What NBD calls a device that is gone.
const ESHUTDOWN: u32 = 108;
const PATIENCE: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);

/// Sends so many writes of a page at once.
fn send(client: &mut Raw, count: u64) {
    for n in 0..count {
        client.send_write(n * 4096, &[n as u8; 4096]);
    }
}

/// How long it takes until all are answered well.
fn answered(client: &mut Raw, count: u64) -> Duration {
    let begun = Instant::now();
    for _ in 0..count {
        assert_eq!(client.reply().unwrap().1, 0);
    }
    begun.elapsed()
}

fn written(client: &mut Raw, count: u64) -> Duration {
    let begun = Instant::now();
    send(client, count);
    answered(client, count);
    begun.elapsed()
}

/// What `stat` tells of the export whose address ends so.
fn export(serve: &Serve, name: &str, address: &str) -> Value {
    let told = serve.json(&["stat", name])["exports"].take();
    let all = told.as_array().unwrap();
    let is = |export: &&Value| export["address"].as_str().unwrap().ends_with(address);
    all.iter().find(is).unwrap_or_else(|| panic!("no {address} in {told}")).clone()
}

#[test]
fn a_device_lets_through_what_its_keys_say_and_what_is_set() {
    let serve = Serve::start(&["r=ram,disksize=16M,iops=100,iops_burst=1", "other=ram,disksize=16M"]);
    let mut client = Raw::connect(&serve, "r");
    let took = written(&mut client, 31);
    assert!((SHORT..PATIENCE).contains(&took), "{took:?}");
    let told = serve.json(&["stat", "r"]);
    let limits = json!({ "iops": 100, "bps": 0, "iops_burst": 1, "bps_burst": 0, "max_clients": 0 });
    assert_eq!(told["limits"], limits);
    assert!(stat(&serve, "r", "io", "limited") >= 29, "{told}");
    assert_eq!(serve.json(&["stat", "other"]).get("limits"), None);
    assert_eq!(stat(&serve, "other", "io", "limited"), 0);
    // Bytes: a MiB, of which nothing is there at once.
    serve.text(&["set", "r", "iops=0", "bps=4M", "bps_burst=4K"]);
    let took = written(&mut client, 256);
    assert!((Duration::from_millis(240)..PATIENCE).contains(&took), "{took:?}");
    assert_eq!(serve.text(&["get", "r", "bps"]), "4194304\n");
    // A burst is there after a pause, which this is long enough for.
    serve.text(&["set", "r", "bps=0", "iops=1", "iops_burst=100"]);
    assert!(written(&mut client, 100) < Duration::from_secs(30));
    // Who waits for minutes goes on at once.
    send(&mut client, 50);
    thread::sleep(Duration::from_millis(50));
    serve.text(&["set", "r", "iops=none"]);
    assert!(answered(&mut client, 50) < Duration::from_secs(30));
    for (words, said) in [
        ("iops=-1", "r: iops=-1: must be 1 to 10000000; 0 is no limit"),
        ("bps=100", "r: bps=100: give a unit; 100M? (K, M, G and T are known, 1024-based); 0 is no limit"),
        ("bps_burst=1K", "r: bps_burst=1K: must be 4K to 1T; 0 is a tenth of bps"),
        ("max_clients=1000000", "r: max_clients=1000000: must be 1 to 65536; 0 is no limit"),
    ] {
        assert_eq!(serve.refused(2, &["set", "r", "mem_limit=1G", words]), said);
    }
    assert_ne!(serve.json(&["get", "r", "mem_limit"])["mem_limit"], 1 << 30);
}

#[test]
fn exports_have_limits_of_their_own_which_publishing_again_changes() {
    let serve = Serve::start(&["r=ram,disksize=16M"]);
    serve.text(&["publish", "r", "--nbd", "unix:slow", "--iops", "10", "--iops-burst", "1"]);
    let (mut home, mut slow) = (Raw::connect(&serve, "r"), Raw::connect_at(&serve.path("slow"), "r"));
    send(&mut slow, 31);
    let begun = Instant::now();
    // Nobody there waits for the slow one, which takes three seconds.
    let long = Duration::from_millis(2500);
    assert!(written(&mut home, 31) < long);
    answered(&mut slow, 31);
    assert!(begun.elapsed() >= long);
    let told = export(&serve, "r", "/slow");
    assert_eq!((&told["limits"]["iops"], &told["limits"]["iops_burst"]), (&json!(10), &json!(1)), "{told}");
    assert!(told["io"]["limited"].as_u64().unwrap() >= 29, "{told}");
    let told = export(&serve, "r", "/nbd");
    assert_eq!((told.get("limits"), &told["io"]["limited"]), (None, &json!(0)), "{told}");

    // What waits heeds the change; what is not said stays.
    serve.text(&["publish", "r", "--nbd", "unix:slow", "--iops", "1"]);
    send(&mut slow, 50);
    thread::sleep(Duration::from_millis(50));
    serve.text(&["publish", "r", "--nbd", "unix:slow", "--iops", "0", "--bps", "1G", "--max-clients", "3"]);
    assert!(answered(&mut slow, 50) < Duration::from_secs(30));
    let limits = export(&serve, "r", "/slow")["limits"].take();
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
fn files_states_and_dumps_have_limits() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("f.toml"), FILE).unwrap();
    let serve = Serve::start_in(dir, &["--config", "f.toml", "--state", "state"], false);
    assert_eq!(serve.text(&["apply", "f.toml"]), "nothing changes\n");
    let limits = |serve: &Serve| {
        let told = serve.json(&["stat", "r"]);
        let of = |address| export(serve, "r", address)["limits"].clone();
        (told["limits"]["iops"].clone(), told["limits"]["max_clients"].clone(), of("/a"), of("/vm"))
    };
    let (iops, max_clients, a, vm) = limits(&serve);
    assert_eq!((iops, max_clients), (json!(5000), json!(8)));
    assert_eq!((&a["iops"], &a["bps"], &vm["bps"]), (&json!(1000), &json!(10 << 20), &json!(1 << 20)));

    // A client stays connected while the file changes what it may.
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
    assert!(written(&mut client, 31) >= SHORT);
    // What somebody changes by hand stays over a restart, and the file changes it back.
    serve.text(&["publish", "r", "--nbd", "unix:a", "--iops", "200"]);
    serve.text(&["set", "r", "max_clients=3", "bps=1G"]);
    let before = limits(&serve);
    let dumped = serve.text(&["dump"]);
    for text in ["max_clients = \"3\"", "bps = \"1G\"", "iops = 200", "iops_burst = 1"] {
        assert!(dumped.contains(text), "{text} in {dumped}");
    }
    drop(client);
    serve.signal(Signal::KILL);
    let (_, dir) = serve.wait();
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
    // The attributes come in any order.
    assert_eq!(lines.len(), expected.len(), "{applied}");
    assert_eq!(lines[0], expected[0], "{applied}");
    assert!(lines[1].contains("bps=0") && lines[1].contains("max_clients=8"), "{applied}");
}

#[test]
fn who_waits_is_told_when_the_device_goes_or_its_power_and_shutting_down_waits_for_nobody() {
    let serve = Serve::start(&[
        "r=ram,disksize=16M,iops=1,iops_burst=1",
        "p=null,size=16M,memory_backed=1,power_cut=yes,iops=1,iops_burst=1",
        "s=ram,disksize=16M,iops=1,iops_burst=1",
    ]);
    let wait = |name: &str| {
        let mut client = Raw::connect(&serve, name);
        send(&mut client, 50);
        let end = Instant::now() + PATIENCE;
        while stat(&serve, name, "io", "in_flight") < 45 {
            assert!(Instant::now() < end);
            thread::sleep(Duration::from_millis(2));
        }
        client
    };
    // Each is answered, or the connection is cut before it is.
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
    // Nothing arrives after the reboot that was asked for before it.
    thread::sleep(Duration::from_millis(1500));
    assert_eq!(stat(&serve, "p", "io", "in_flight"), 0);
    serve.text(&["set", "p", "iops=0"]);
    let mut client = Raw::connect(&serve, "p");
    assert_eq!(client.read(45 * 4096, 4096).unwrap(), [0; 4096]);

    // What was asked for is done, without the limit.
    let mut client = wait("s");
    let begun = Instant::now();
    serve.text(&["shutdown"]);
    assert_eq!(serve.wait().0, Some(0));
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert_eq!(outcomes(&mut client), 0);
}

#[test]
fn one_client_more_waits_for_a_place() {
    let serve = Serve::start(&["r=ram,disksize=16M,max_clients=2"]);
    serve.text(&["publish", "r", "--nbd", "unix:one", "--max-clients", "1"]);
    let first = Raw::connect_at(&serve.path("one"), "r");
    let at_home = Raw::connect(&serve, "r");
    let (tell, told) = mpsc::channel();
    for socket in ["one", "nbd"] {
        let (path, tell) = (serve.path(socket), tell.clone());
        thread::spawn(move || {
            let mut client = Raw::connect_at(&path, "r");
            client.read(0, 4096).unwrap();
            // It stays until the test has heard of it.
            tell.send(client).unwrap();
        });
    }
    assert!(told.recv_timeout(SHORT).is_err(), "somebody got in");
    // It is the device's last place, and nobody else's at this export.
    drop(at_home);
    let second = told.recv_timeout(PATIENCE).unwrap();
    assert!(told.recv_timeout(SHORT).is_err(), "both got in");
    drop(first);
    let third = told.recv_timeout(PATIENCE).unwrap();
    let list = serve.json(&["list"])["devices"][0]["exports"].take();
    let all: u64 =
        list.as_array().unwrap().iter().map(|export| export["connections"].as_u64().unwrap()).sum();
    assert_eq!(all, 2, "{list}");
    // More places let others in who wait already.
    let path = serve.path("nbd");
    thread::spawn(move || tell.send(Raw::connect_at(&path, "r")));
    assert!(told.recv_timeout(SHORT).is_err(), "somebody got in");
    serve.text(&["set", "r", "max_clients=0"]);
    drop((second, third, told.recv_timeout(PATIENCE).unwrap()));
}

#[test]
fn each_connection_to_a_template_has_the_limits() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("golden"), vec![0; 16 << 20]).unwrap();
    let golden = format!("golden=file,path={}/golden,readonly=yes", dir.path().display());
    let serve = Serve::start(&[&golden, "t=template,base=golden,iops=100,iops_burst=1"]);
    let (mut one, mut other) = (Raw::connect(&serve, "t"), Raw::connect(&serve, "t"));
    send(&mut one, 31);
    let took = written(&mut other, 31);
    assert!((SHORT..PATIENCE).contains(&took), "{took:?}");
    answered(&mut one, 31);
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
    assert!(written(&mut client, 16) >= SHORT);
    serve.text(&["publish", "fast", "--nbd", "unix:t", "--iops", "1"]);
    send(&mut client, 50);
    serve.text(&["publish", "fast", "--nbd", "unix:t", "--iops", "0"]);
    assert!(answered(&mut client, 50) < Duration::from_secs(30));
}
