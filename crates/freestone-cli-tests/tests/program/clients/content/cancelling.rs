//! Cancelled saves: they end soon and leave existing files unchanged.

use std::process::{Child, Output};

use crate::harness::prelude::*;

/// Size in bytes of a sparse base that takes far longer to read than a test may run.
const ENDLESS_BYTES: u64 = 1 << 42;
/// Deadline for a server shutdown, including the grace period for clients.
const END_MAX: Duration = Duration::from_secs(15);

const SAVE: [&str; 4] = ["save", "f", "f.saved", "--whole-base"];
const DELTA: [&str; 4] = ["delta", "save", "g", "g.qcow2"];

/// Starts a server with two forks: `f` of a very large base, and `g` of the base `slow`, whose
/// reads take 2 s each. Both forks were saved.
fn start() -> Serve {
    let dir = tempfile::tempdir().unwrap();
    for (name, size) in [("endless.img", ENDLESS_BYTES), ("slow.img", 64 * MIB)] {
        fs::File::create(dir.path().join(name)).unwrap().set_len(size).unwrap();
    }
    let serve = Serve::start_in(
        dir,
        &[
            "endless=file,path=endless.img,readonly=yes",
            "slow=file,path=slow.img,readonly=yes,faults=none",
            "f=fork,base=endless",
            "g=fork,base=slow",
        ],
        true,
    );
    let mut io = tool("qemu-io");
    io.args(["-f", "raw"]);
    for at in 0..64 {
        io.args(["-c", &format!("write -q -P 1 {at}M 4k")]);
    }
    ok(io.arg(uri(&serve, "g")));
    serve.text(&["save", "f", "f.saved"]);
    serve.text(&["delta", "save", "g", "g.qcow2"]);
    serve.text(&["set", "slow", "faults=read delay=2s"]);
    serve
}

/// Starts a client for the verb in `args` and waits until the server runs the verb on `device`.
fn begin(serve: &Serve, args: &[&str], device: &str) -> Child {
    let mut client = freestone(serve.dir.path());
    client.args(args).arg("--control").arg(serve.path("control"));
    let client = client.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("it runs", || serve.json(&["stat", device]).get("progress").is_some());
    client
}

#[test]
fn save_is_cancelled_if_its_client_ends() {
    let serve = start();
    let before = names_in(serve.dir.path());
    for (args, device, file) in [(SAVE, "f", "f.saved"), (DELTA, "g", "g.qcow2")] {
        let old = fs::read(serve.path(file)).unwrap();
        let client = begin(&serve, &args, device);
        // Not SIGINT: a shell starts background jobs with SIGINT ignored, and child processes
        // inherit the ignored signal.
        signal(&client, Signal::TERM);
        assert_eq!(client.wait_with_output().unwrap().status.code(), None, "it ends by the signal");
        wait_until("the verb has ended", || serve.json(&["stat", device]).get("progress").is_none());
        assert_eq!(fs::read(serve.path(file)).unwrap(), old);
        assert_eq!(names_in(serve.dir.path()), before);
    }
    // The server cancels the verb only if the connection is closed. A client that only shuts down
    // its sending side receives the reply.
    let stream = serve.control();
    let file = serve.path("g.qcow2");
    let line = format!(
        "{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"delta.save\",\"params\":{{\"name\":\"g\",\"file\":{file:?}}}}}\n"
    );
    std::io::Write::write_all(&mut &stream, line.as_bytes()).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    wait_until("it runs", || serve.json(&["stat", "g"]).get("progress").is_some());
    serve.text(&["set", "slow", "faults=none"]);
    let answer = answer(&stream);
    assert_eq!(answer["result"]["name"], "g", "{answer}");
}

#[test]
fn save_is_cancelled_by_server_shutdown() {
    for (args, device, file) in [(SAVE, "f", "f.saved"), (DELTA, "g", "g.qcow2")] {
        let serve = start();
        let old = fs::read(serve.path(file)).unwrap();
        let mut before = names_in(serve.dir.path());
        before.retain(|name| name != "nbd" && name != "control");
        let client = begin(&serve, &args, device);
        let signalled = Instant::now();
        serve.signal(Signal::TERM);
        let Output { status, stderr, .. } = client.wait_with_output().unwrap();
        let message = sentence(&String::from_utf8(stderr).unwrap());
        let (code, dir) = serve.wait();
        assert!(signalled.elapsed() < END_MAX, "it took {:?}", signalled.elapsed());
        assert_eq!((code, status.code()), (Some(0), Some(1)), "{message}");
        let at = dir.path().join(file);
        let why = format!("cancelled: the server is shutting down; {} is unchanged", at.display());
        assert!(message.starts_with(device) && message.ends_with(&why), "{message}");
        assert_eq!(fs::read(at).unwrap(), old);
        let rows = fs::read_dir(dir.path()).unwrap();
        let mut after: Vec<_> = rows.map(|row| row.unwrap().file_name().into_string().unwrap()).collect();
        after.sort();
        assert_eq!(after, before);
    }
}

#[test]
fn save_reports_temporary_files_of_killed_server() {
    let serve = start();
    let mut before = names_in(serve.dir.path());
    let clients = [begin(&serve, &SAVE, "f"), begin(&serve, &DELTA, "g")];
    let dir = serve.kill();
    for client in clients {
        assert_eq!(client.wait_with_output().unwrap().status.code(), Some(1));
    }
    // On file systems without O_TMPFILE a killed server leaves a temporary file like this one.
    let left = dir.path().join(".freestone-save-abc.tmp");
    fs::write(&left, "half").unwrap();
    before.push(".freestone-save-abc.tmp".into());
    before.sort();
    let run = ["serve", "d=file,path=slow.img,readonly=yes", "--run", "true"];
    let (code, _, logged) = finish(freestone(dir.path()).args(run));
    assert!(
        code == 0 && logged.contains(".freestone-save-abc.tmp: was left by an interrupted save"),
        "{logged}"
    );
    let serve = Serve::start_in(dir, &["r=ram,disksize=1M"], true);
    assert_eq!(names_in(serve.dir.path()), before);
    let expected = format!("{}: was left by an interrupted save; it can be removed\n", left.display());
    assert!(serve.text(&["save", "r", "r.saved"]).starts_with(&expected));
    assert_eq!(serve.json(&["save", "r", "r.saved"])["left_behind"][0], left.display().to_string());
    fs::remove_file(&left).unwrap();
    assert!(!serve.text(&["save", "r", "r.saved"]).contains("left behind"));
}
