//! Templates, which create a fork for each connection, and the sockets of a thousand forks.

use super::forks::{socket, with_base};
use crate::harness::prelude::*;

#[test]
fn template_makes_a_fork_for_each_connection() {
    let (serve, image) = with_base(&[]);
    let output = serve.text(&["fork", "golden", "ci", "--template", "--nbd", "unix:ci"]);
    let ci = socket(&serve, "ci");
    assert!(output.starts_with("ci: template of golden, 16M, nbd+unix:///ci?socket="), "{output}");
    // Each connection to a template has a fork of its own; the second connection does not see
    // writes of the first.
    qemu_io(&ci, &["write -P 7 0 1M", "read -P 7 0 1M"]);
    assert_same(&ci, &image);

    // `list` shows the forks of open connections like other devices.
    let connect = || {
        let mut stream = UnixStream::connect(serve.path("ci")).unwrap();
        assert_eq!(connect_nbd(&mut stream, ""), 16 * MIB);
        stream
    };
    let forks = || serve.json(&["list", "ci@*"])["devices"].as_array().unwrap().clone();
    let wait_for = |count: usize| wait_until("the forks stay", || forks().len() == count);
    wait_for(0);
    let (first, second) = (connect(), connect());
    wait_for(2);
    let there = forks();
    assert_eq!((&there[0]["template"], &there[0]["base"]), (&json!("ci"), &json!("golden")));
    let name = there[0]["name"].as_str().unwrap().to_owned();
    assert_eq!(serve.json(&["stat", &name])["over_stat"]["own_bytes"], 0);
    assert_eq!(
        serve.refused(1, &["remove", &name, "--force"]),
        format!("{name}: belongs to a connection to the template ci, and is removed with it")
    );
    assert_eq!(serve.text(&["rewind", &name]), "", "it holds nothing");
    let users =
        format!("golden: cannot be removed: ci, {name}, {} stand on it", there[1]["name"].as_str().unwrap());
    assert_eq!(serve.refused(1, &["remove", "golden", "--force"]), users);
    drop(first);
    wait_for(1);
    // Removing the template with --force ends its connections.
    assert_eq!(serve.refused(1, &["remove", "ci"]), "ci: a client is connected; --force goes ahead");
    assert_eq!(serve.json(&["remove", "ci", "--force"])["connections_ended"], 1);
    wait_for(0);
    drop(second);
    assert!(!serve.path("ci").exists());
    assert_eq!(serve.json(&["get", "golden", "family"])["family"]["charged_bytes"], 0);

    // A template by `publish --template`. The time to live (`--ttl`) ends each connection to the
    // template after 1 s.
    let uri = serve.json(&["publish", "golden", "--template", "--ttl", "1", "--nbd", "unix:short"]);
    assert_eq!(uri["name"], "golden-fork");
    let mut stream = UnixStream::connect(serve.path("short")).unwrap();
    connect_nbd(&mut stream, "golden-fork");
    assert_eq!(serve.json(&["list", "golden-fork@*"])["devices"].as_array().unwrap().len(), 1);
    wait_until("the fork stays", || serve.json(&["list", "golden-fork@*"])["devices"] == json!([]));
    assert_eq!(serve.json(&["get", "golden-fork"])["ttl"], 1);
}

#[test]
fn killed_server_leaves_no_files_of_forks() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("golden.img"), noise(1, MIB)).unwrap();
    let base = "golden=file,path=golden.img,readonly=yes,mem_limit=1M,backing_dev=spill,backing_size=64M";
    let args = [base, "ram0=ram,disksize=8M", "--nbd", "unix:nbd", "--control", "control"];
    let serve = Serve::start_in(dir, &args, false);
    serve.text(&["fork", "golden", "job", "size=32M", "--nbd", "unix:job"]);
    serve.text(&["snapshot", "ram0", "s"]);
    fs::write(serve.path("noise"), noise(2, 8 * MIB)).unwrap();
    let to = socket(&serve, "job");
    ok(tool("qemu-img").args(["convert", "-n", "-f", "raw", "-O", "raw"]).arg(serve.path("noise")).arg(to));
    assert!(serve.json(&["stat", "job"])["backing"]["spilled_pages"].as_u64().unwrap() > 0);
    serve.signal(Signal::KILL);
    let (code, dir) = serve.wait();
    assert_eq!(code, None);
    let mut left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    // SIGKILL leaves the sockets, but forks have no files with data that could be left.
    assert_eq!(left, ["control", "golden.img", "job", "nbd", "noise"]);
}

/// Creating and exporting the thousandth fork must not take much longer than the first. The allowed
/// factor is generous, because other tests run at the same time.
#[test]
fn thousand_forks_with_own_sockets_scale() {
    const FORKS: usize = 1000;
    const FACTOR_MAX: u32 = 4;
    let (serve, _) = with_base(&[]);
    let control = serve.control();
    let dir = serve.dir.path().display().to_string();
    let mut times = Vec::with_capacity(FORKS);
    for number in 0..FORKS {
        let start = Instant::now();
        let request = json!({"jsonrpc": "2.0", "id": number, "method": "fork", "params": {
            "base": "golden", "name": format!("f{number}"), "nbd": format!("unix:{dir}/{number}")}});
        let answer = ask(&control, request.to_string().as_bytes());
        times.push(start.elapsed());
        assert!(answer["result"].is_object(), "{answer}");
    }
    let median = |times: &[Duration]| {
        let mut times = times.to_vec();
        times.sort();
        times[times.len() / 2]
    };
    let (first, last) = (median(&times[..100]), median(&times[FORKS - 100..]));
    println!("create and export: first 100 {first:?}, last 100 {last:?}, longest {:?}", times.iter().max());
    assert!(last < first * FACTOR_MAX + Duration::from_millis(1), "{first:?} {last:?}");
    qemu_io(&socket(&serve, "999"), &["write -P 3 0 64k", "read -P 3 0 64k"]);
    let start = Instant::now();
    for number in 0..FORKS {
        let request =
            json!({"jsonrpc": "2.0", "id": 1, "method": "rewind", "params": {"name": format!("f{number}")}});
        let answer = ask(&control, request.to_string().as_bytes());
        assert!(answer["result"].is_object(), "{answer}");
    }
    println!("1000 rewinds: {:?}", start.elapsed());
    let start = Instant::now();
    for number in 0..FORKS {
        let request =
            json!({"jsonrpc": "2.0", "id": 1, "method": "remove", "params": {"name": format!("f{number}")}});
        let answer = ask(&control, request.to_string().as_bytes());
        assert!(answer["result"].is_object(), "{answer}");
    }
    println!("1000 removals: {:?}", start.elapsed());
    assert_eq!(serve.json(&["get", "golden", "family"])["family"]["charged_bytes"], 0);
}
