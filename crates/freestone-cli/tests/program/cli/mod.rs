//! Tests of the command line: the built program, its sockets, messages and exit statuses.

mod access;
mod config_files;
mod memory;
mod messages;
mod read_only;
mod remote_servers;
mod scripts;
mod single;
mod statistics;
mod supervision;
mod units;
mod wait_verb;
mod writeback;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::tempdir;

use crate::drives::raw::Raw;
use crate::harness::{Serve, answer, ask, connect_nbd, finish, freestone, refused, sentence};

fn sockets_in(dir: &Path) -> usize {
    fs::read_dir(dir).unwrap().filter(|e| e.as_ref().unwrap().file_type().unwrap().is_socket()).count()
}

#[test]
fn devices_are_served_and_listed() {
    let serve = Serve::start(&[
        "ram0=ram,disksize=64M,mem_limit=1M",
        "n0=null,size=4G",
        "n1=null,size=1M,publish=no",
    ]);
    assert!(
        serve.startup_output.starts_with("ram0: nbdinfo 'nbd+unix:///ram0?socket="),
        "{}",
        serve.startup_output
    );
    assert_eq!(serve.startup_output.lines().count(), 3, "{}", serve.startup_output);

    let connect = |name| connect_nbd(&mut UnixStream::connect(serve.path("nbd")).unwrap(), name);
    assert_eq!(connect("ram0"), 64 << 20);
    assert_eq!(connect("n0"), 4 << 30);
    // An empty export name selects the default export, which is the first device.
    assert_eq!(connect(""), 64 << 20);

    let list = serve.text(&["list"]);
    let rows: Vec<Vec<&str>> = list.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        rows[0][..8],
        ["NAME", "KIND", "DISKSIZE", "DATA", "COMPR", "ALGORITHM", "MEM-USED", "MEM-MAX"]
    );
    assert_eq!(rows[1][..6], ["ram0", "ram", "64M", "0B", "0B", "lz4"]);
    assert_eq!(rows[2][..4], ["n0", "null", "4G", "-"]);
    assert_eq!((rows[3][0], *rows[3].last().unwrap()), ("n1", "-"));
    assert!(rows[1].last().unwrap().starts_with("unix:"));
    assert_eq!(serve.text(&["list", "n?"]).lines().count(), 3);

    let list = serve.json(&["list", "*0"]);
    assert_eq!(list["devices"].as_array().unwrap().len(), 2);
    assert_eq!(list["devices"][0]["mem_limit"], 1 << 20);
    assert_eq!(list["devices"][0]["exports"][0]["default"], true);
    assert_eq!(list["devices"][1].get("mem_limit"), None);
}

#[test]
fn open_files_limit_is_raised_for_the_server_only() {
    let dir = tempdir().unwrap();
    let run = |limit: &str| {
        let command = format!(
            "{limit}; exec {} serve n=null,size=1M --run 'ulimit -S -n; grep open.files /proc/$PPID/limits'",
            env!("CARGO_BIN_EXE_freestone")
        );
        let mut shell = std::process::Command::new("sh");
        let (code, out, err) =
            finish(shell.arg("-c").arg(command).current_dir(dir.path()).env("XDG_RUNTIME_DIR", dir.path()));
        assert_eq!((code, err.as_str()), (0, ""), "{out}");
        out.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let message = run("ulimit -S -n 300; ulimit -H -n 700");
    // The first word is the soft limit of the `--run` command. Words 4 and 5 are the soft and hard
    // limits of the server.
    assert_eq!([&message[0], &message[4], &message[5]], ["300", "700", "700"], "{message:?}");
}

#[test]
fn every_verb_help_has_examples() {
    let dir = tempdir().unwrap();
    for verb in [
        "serve",
        "wait",
        "stat",
        "get",
        "set",
        "create",
        "fork",
        "snapshot",
        "merge",
        "delta",
        "save",
        "restore",
        "rewind",
        "remove",
        "reset",
        "compact",
        "idle",
        "writeback",
        "recompress",
        "publish",
        "unpublish",
        "mount",
        "umount",
        "zones",
        "power-cut",
        "mark",
        "release",
    ] {
        let (code, out, _) = finish(freestone(dir.path()).args([verb, "--help"]));
        assert!(code == 0 && out.contains("Example") && out.contains(&format!("freestone {verb}")), "{out}");
    }
}

#[test]
fn statistics_have_kernel_columns() {
    let serve = Serve::start(&["ram0=ram,disksize=64M", "n0=null,size=1G"]);
    let stat = serve.json(&["stat", "ram0"]);
    let keys =
        |section: &str| stat[section].as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ");
    assert_eq!(
        keys("mm_stat"),
        "orig_data_size compr_data_size mem_used_total mem_limit mem_used_max same_pages pages_compacted \
         huge_pages huge_pages_since"
    );
    assert_eq!(keys("io_stat"), "failed_reads failed_writes invalid_io notify_free");
    assert!(stat["memory"]["process_pss_bytes"].as_u64().unwrap() > 0);
    assert!(stat["memory"]["process_rss_bytes"].as_u64() >= stat["memory"]["process_pss_bytes"].as_u64());
    // The default memory limit is half of the machine's memory.
    assert!(stat["mm_stat"]["mem_limit"].as_u64().unwrap() > 0);

    let all = serve.json(&["stat"]);
    assert_eq!(all["devices"].as_array().unwrap().len(), 2);
    assert!(all["server"]["pid"].as_u64().unwrap() > 1);

    let text = serve.text(&["stat", "ram0"]);
    assert!(text.starts_with("ram0: ram 64M lz4\n  mm_stat\n    orig_data_size    0\n"), "{text}");
    assert!(serve.text(&["stat"]).contains("\nn0: null 1G"));
    assert_eq!(serve.refused(1, &["stat", "ram9"]), "ram9: no such device; ram0?");
}

#[test]
fn attributes_are_read_and_set() {
    let serve = Serve::start(&["ram0=ram,disksize=64M,comp_algorithm=zstd,mem_limit=none"]);
    assert_eq!(serve.text(&["get", "ram0", "disksize"]), "67108864\n");
    assert_eq!(serve.text(&["get", "ram0", "comp_algorithm"]), "lz4 lz4hc lzo [zstd] store\n");
    assert_eq!(serve.text(&["get", "ram0", "io_stat"]), "0 0 0 0\n");
    assert!(serve.text(&["get", "ram0"]).contains("\nmem_limit               0\n"));
    assert_eq!(serve.json(&["get", "ram0", "disksize"]), json!({ "disksize": 64 << 20 }));

    // The reply of `set` shows the new values as `get` does. Sizes are rounded up to whole pages.
    let set = serve.text(&["set", "ram0", "disksize=128M", "mem_limit=9K", "mem_used_max=0"]);
    assert_eq!(set, "disksize=134217728\nmem_limit=12288\nmem_used_max=0\n");
    assert_eq!(serve.text(&["set", "ram0", "mem_limit=none"]), "mem_limit=0\n");
    assert_eq!(serve.text(&["get", "ram0", "disksize"]), "134217728\n");
    assert_eq!(serve.json(&["set", "ram0", "mem_limit=16M"]), json!({ "mem_limit": 16 << 20 }));

    // A `set` with an invalid value changes none of its attributes.
    let smaller = "ram0: disksize=64M: smaller than the present 128M; a device only grows";
    assert_eq!(serve.refused(1, &["set", "ram0", "mem_limit=1M", "disksize=64M"]), smaller);
    assert_eq!(serve.json(&["get", "ram0", "mem_limit"]), json!({ "mem_limit": 16 << 20 }));
    let bare = "give a unit; 12M? (K, M, G and T are known, 1024-based); 0 or none is no limit";
    assert_eq!(serve.refused(2, &["set", "ram0", "mem_limit=12"]), format!("ram0: mem_limit=12: {bare}"));
    let fixed = "fixed once the device is initialised; create a new device with another value";
    let algorithm = serve.refused(1, &["set", "ram0", "comp_algorithm=lz4"]);
    assert_eq!(algorithm, format!("ram0: comp_algorithm=lz4: {fixed}"));
    assert_eq!(
        serve.refused(2, &["set", "ram0", "mem_limit=1M", "mem_limit=2M"]),
        "ram0: mem_limit: given twice"
    );
    let missing = serve.refused(2, &["set", "ram0", "mem_limit"]);
    assert_eq!(missing, "ram0: mem_limit: a value is missing; write mem_limit=VALUE");
    assert!(
        serve
            .refused(2, &["get", "ram0", "memlimit"])
            .starts_with("ram0: unknown attribute \"memlimit\"; mem_limit?")
    );
    assert_eq!(
        serve.refused(2, &["set", "ram0", "disksize=300T"]),
        "ram0: disksize=300T: too large; a ram device has at most 256T"
    );
}

#[test]
fn devices_are_created_and_removed() {
    let serve = Serve::start(&["n0=null,size=1M"]);
    fs::write(serve.path("disk.img"), vec![0; 1 << 20]).unwrap();
    let output = serve.text(&["create", "r=ram,disksize=64M"]);
    assert_eq!(output, "r: ram 64M, not published; `freestone publish r --nbd ADDR` does that\n");
    // A relative path in an argument is relative to the working directory of the client, not of the
    // server.
    assert_eq!(serve.json(&["create", "f=file,path=disk.img,readonly=yes"])["disksize"], 1 << 20);
    assert_eq!(serve.json(&["create", "h=null,size=1M,publish=yes"])["exports"].as_array().unwrap().len(), 1);
    assert_eq!(serve.json(&["list"])["devices"].as_array().unwrap().len(), 4);

    assert_eq!(serve.refused(1, &["create", "r=ram,disksize=64M"]), "r: a device of that name exists");
    let hint = serve.refused(2, &["create", "x=rma,disksize=64M"]);
    assert_eq!(
        hint,
        "x: unknown kind \"rma\"; ram?; the kinds are ram, fork, snapshot, template, null, file, qcow2, image, nbd, rbd"
    );
    assert!(serve.refused(1, &["create", "x=file,path=missing.img"]).starts_with("x: "));
    let large = "x: disksize=300T: too large; a ram device has at most 256T";
    assert_eq!(serve.refused(2, &["create", "x=ram,disksize=300T"]), large);
    let dict = "x=ram,disksize=1M,comp_algorithm=zstd,algorithm_params=dict=none";
    let none = serve.path("none").display().to_string();
    assert_eq!(
        serve.refused(1, &["create", dict]),
        format!("x: algorithm_params: dict={none}: No such file or directory (os error 2)")
    );

    assert!(serve.text(&["compact", "r"]).starts_with("r: "));
    assert_eq!(serve.json(&["compact", "r"])["pages_freed"], 0);
    assert_eq!(serve.refused(1, &["compact", "f"]), "f: only a ram device can be compacted");
    assert_eq!(serve.text(&["reset", "r"]), "");
    assert_eq!(serve.json(&["reset", "n0"]), json!({ "name": "n0" }));
    let file = serve.refused(1, &["reset", "f"]);
    assert_eq!(file, "f: a file device cannot be reset; only ram and null devices and forks can");

    assert_eq!(serve.json(&["remove", "h"]), json!({ "name": "h", "connections_ended": 0 }));
    assert_eq!(serve.text(&["remove", "f"]), "");
    assert_eq!(serve.refused(1, &["remove", "f"]), "f: no such device");
    assert_eq!(serve.json(&["list"])["devices"].as_array().unwrap().len(), 2);
}

#[test]
fn exports_are_published_and_unpublished() {
    let serve = Serve::start(&["n0=null,size=1M"]);
    let own = format!("unix:{}", serve.path("own").display());
    serve.text(&["create", "r=ram,disksize=64M"]);
    assert_eq!(
        serve.text(&["publish", "r", "--nbd", "unix:own"]).trim_end(),
        format!("nbd+unix:///r?socket={}", &own[5..])
    );
    assert_eq!(connect_nbd(&mut UnixStream::connect(serve.path("own")).unwrap(), "r"), 64 << 20);
    assert_eq!(serve.refused(1, &["publish", "r", "--nbd", &own]), format!("r: already published at {own}"));

    // For port 0 the reply contains the port that the kernel chose. `--read-only` makes only this
    // export of the device read-only.
    let reply = serve.json(&["publish", "r", "--nbd", "tcp:127.0.0.1:0", "--read-only"]);
    let tcp = reply["address"].as_str().unwrap().strip_prefix("tcp:").unwrap().to_owned();
    assert_eq!(connect_nbd(&mut TcpStream::connect(&tcp).unwrap(), "r"), 64 << 20);
    assert_eq!(serve.json(&["list", "r"])["devices"][0]["exports"][1]["read_only"], true);
    assert_eq!(serve.text(&["publish", "n0", "--nbd", &own]).lines().count(), 1);

    // The server closes an address with the last export there. Addresses of the command line stay
    // open.
    serve.text(&["unpublish", "r", "--force"]);
    assert!(TcpStream::connect(&tcp).is_err());
    assert!(serve.path("own").exists());
    assert_eq!(serve.json(&["unpublish", "n0"])["name"], "n0");
    assert!(!serve.path("own").exists() && serve.path("nbd").exists());
    assert_eq!(serve.refused(1, &["unpublish", "n0"]), "n0: not published");
    assert!(serve.refused(2, &["publish", "n0", "--nbd", "nonsense"]).starts_with("n0: --nbd: "));
    assert!(
        serve.refused(1, &["publish", "n0", "--nbd", "unix:/nowhere/at/all"]).contains("/nowhere/at/all")
    );

    serve.text(&["publish", "r", "--nbd", &own]);
    serve.text(&["remove", "r"]);
    assert!(!serve.path("own").exists());
}

#[test]
fn connected_devices_are_busy() {
    let serve = Serve::start(&["r=ram,disksize=64M"]);
    let mut client = Raw::connect(&serve, "r");
    let busy = "r: a client is connected; --force goes ahead";
    for verb in ["remove", "unpublish"] {
        assert_eq!(serve.refused(1, &[verb, "r"]), busy);
    }
    assert_eq!(serve.text(&["reset", "r"]), "", "it holds nothing");
    assert_eq!(client.write(0, 0, &[1; 4096]), 0);
    let refused = serve.refused(1, &["reset", "r"]);
    let (who, way) = refused.split_once(" is open; ").expect(&refused);
    assert!(who.starts_with("r: 1 connection of "), "{refused}");
    assert!(who.ends_with(&format!("(pid {})", std::process::id())), "{refused}");
    let why = "1 change since it was made or last wiped, none in the last 200 ms; unmount a file system on it first, as \
its cached blocks would corrupt the new content; --force goes ahead";
    assert_eq!(way, why);
    assert_eq!(serve.json(&["list"])["devices"][0]["exports"][0]["connections"], 1);
    serve.text(&["reset", "r", "--force"]);
    assert_eq!(serve.json(&["remove", "r", "--force"])["connections_ended"], 1);
    assert!(client.reply().is_err());
    assert_eq!(serve.json(&["list"]), json!({ "devices": [] }));
}

#[test]
fn disconnected_client_does_not_block_reset() {
    let serve = Serve::start(&["r=ram,disksize=64M"]);
    let control = serve.control();
    for id in 0..200 {
        let mut client = Raw::connect(&serve, "r");
        assert_eq!(client.write(0, 0, &[1; 4096]), 0);
        drop(client);
        let reset = json!({ "jsonrpc": "2.0", "id": id, "method": "reset", "params": { "name": "r" } });
        let answer = ask(&control, reset.to_string().as_bytes());
        assert_eq!(answer["result"]["name"], "r", "{answer}");
    }
}

#[test]
fn signal_ends_server_and_removes_sockets() {
    for signal in [Signal::TERM, Signal::INT] {
        let serve = Serve::start(&["r=ram,disksize=64M", "--nbd", "tcp:127.0.0.1:0"]);
        serve.text(&["publish", "r", "--nbd", "unix:own"]);
        let mut client = UnixStream::connect(serve.path("nbd")).unwrap();
        connect_nbd(&mut client, "r");
        let _idle = serve.control();
        assert_eq!(sockets_in(serve.dir.path()), 3);
        let begun = Instant::now();
        serve.signal(signal);
        let (code, dir) = serve.wait();
        assert_eq!(code, Some(0));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(begun.elapsed() < Duration::from_secs(4), "idle clients are not waited for");
    }
}

#[test]
fn second_signal_ends_server_at_once() {
    let serve = Serve::start(&["r=ram,disksize=64M"]);
    let mut client = UnixStream::connect(serve.path("nbd")).unwrap();
    connect_nbd(&mut client, "r");
    // The client does not read the replies, so a shutdown would wait some seconds for the client.
    for cookie in 0..16_u8 {
        let mut read = vec![0x25, 0x60, 0x95, 0x13, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, cookie];
        read.extend([0; 8]);
        read.extend((1_u32 << 20).to_be_bytes());
        client.write_all(&read).unwrap();
    }
    client.read_exact(&mut [0; 16]).unwrap();
    serve.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(300));
    serve.signal(Signal::TERM);
    let (code, dir) = serve.wait();
    // The second signal ends the shutdown at once, with exit status 128 plus the signal number.
    assert_eq!((code, sockets_in(dir.path())), (Some(128 + 15), 0));
}

#[test]
fn sockets_of_a_killed_server_are_replaced() {
    let serve = Serve::start(&["n=null,size=1M"]);
    serve.signal(Signal::KILL);
    let (code, dir) = serve.wait();
    assert_eq!((code, sockets_in(dir.path())), (None, 2));
    let serve = Serve::start_in(dir, &["n=null,size=1M"], true);
    assert_eq!(serve.text(&["list"]).lines().count(), 2);
}

#[test]
fn default_paths_need_no_options() {
    let serve = Serve::start_in::<&str>(tempdir().unwrap(), &[], false);
    let private = serve.path("freestone");
    assert_eq!(fs::metadata(&private).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(fs::metadata(private.join("control.sock")).unwrap().permissions().mode() & 0o777, 0o600);
    let (code, out, _) = finish(freestone(serve.dir.path()).args(["get", "ram0", "disksize"]));
    assert_eq!((code, out.as_str()), (0, "1073741824\n"));
    assert_eq!(connect_nbd(&mut UnixStream::connect(private.join("nbd.sock")).unwrap(), ""), 1 << 30);
}

#[test]
fn control_socket_speaks_json_rpc() {
    let serve = Serve::start(&["r=ram,disksize=64M"]);
    let stream = serve.control();
    let request = |method: &str, params: Value| {
        let line = json!({ "jsonrpc": "2.0", "id": "x", "method": method, "params": params }).to_string();
        ask(&stream, line.as_bytes())
    };
    assert_eq!(
        request("get", json!({ "name": "r", "attr": "disksize" }))["result"],
        json!({ "disksize": 64 << 20 })
    );
    let reply = request("set", json!({ "name": "r", "attrs": { "mem_limit": "1M", "disksize": "128M" } }));
    assert_eq!(reply["result"], json!({ "mem_limit": 1 << 20, "disksize": 128 << 20 }));

    let errno = |reply: &Value| (reply["error"]["code"].clone(), reply["error"]["data"]["errno"].clone());
    let expected = |code: i32, errno: &str| (json!(code), json!(errno));
    assert_eq!(errno(&request("get", json!({ "name": "q" }))), expected(-32000, "ENODEV"));
    assert_eq!(errno(&request("create", json!({ "device": "r=null,size=1M" }))), expected(-32000, "EEXIST"));
    let busy = request("set", json!({ "name": "r", "attrs": { "comp_algorithm": "zstd" } }));
    assert_eq!(errno(&busy), expected(-32000, "EBUSY"));
    assert_eq!(errno(&request("get", json!({}))), expected(-32602, "EINVAL"));
    assert_eq!(errno(&request("get", json!({ "name": "r", "colour": 1 }))), expected(-32602, "EINVAL"));
    assert_eq!(errno(&request("get", json!(["r"]))), expected(-32602, "EINVAL"));
    assert_eq!(request("gte", json!({}))["error"]["code"], -32601);
    let batch =
        ask(&stream, br#"[{"jsonrpc":"2.0","id":1,"method":"list"},{"jsonrpc":"2.0","method":"list"},7]"#);
    assert_eq!((batch[0]["id"].clone(), batch[1]["error"]["code"].clone()), (json!(1), json!(-32600)));
    assert_eq!(batch.as_array().unwrap().len(), 2);
}

#[test]
fn control_socket_garbage_returns_errors() {
    let serve = Serve::start(&["n=null,size=1M"]);
    let stream = serve.control();
    let code = |reply: Value| reply["error"]["code"].as_i64().unwrap();
    assert_eq!(code(ask(&stream, b"\xff\x00garbage")), -32700);
    assert_eq!(code(ask(&stream, b"GET / HTTP/1.1")), -32700);
    assert_eq!(code(ask(&stream, &[b'['; 4096])), -32700);
    assert_eq!(code(ask(&stream, b"{}")), -32600);
    assert_eq!(code(ask(&stream, &vec![b' '; 3 << 20])), -32600);
    let long = format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"{}\"}}", "x".repeat(2 << 20));
    assert_eq!(code(ask(&stream, long.as_bytes())), -32600);
    // After invalid requests the connection still works. A connection that closes in the middle of
    // a request line causes no error.
    let list = br#"{"jsonrpc":"2.0","id":1,"method":"list"}"#;
    assert!(ask(&stream, list)["result"].is_object());
    let mut half = serve.control();
    half.write_all(&list[..20]).unwrap();
    drop(half);
    let mut whole = serve.control();
    whole.write_all(list).unwrap();
    whole.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(answer(&whole)["result"].is_object());
    assert_eq!(serve.text(&["list"]).lines().count(), 2);
}

#[test]
fn max_connections_refuses_the_next_client() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("one.toml"), "max_connections = 1\n").unwrap();
    fs::write(dir.path().join("many.toml"), "max_connections = 9\n").unwrap();
    let mut dir = dir;
    for args in [
        &["--max-connections", "1"][..],
        &["--config", "one.toml"],
        &["--config", "many.toml", "--max-connections", "1"],
    ] {
        let serve = Serve::start_in(dir, &[&["n=null,size=1M"], args].concat(), true);
        let mut first = UnixStream::connect(serve.path("nbd")).unwrap();
        assert_eq!(connect_nbd(&mut first, "n"), 1 << 20);
        let mut second = UnixStream::connect(serve.path("nbd")).unwrap();
        assert_eq!(second.read(&mut [0; 1]).unwrap_or(0), 0, "{args:?}");
        serve.signal(Signal::TERM);
        dir = serve.wait().1;
    }
}

#[test]
fn run_returns_the_status_of_its_command() {
    let dir = tempdir().unwrap();
    let run = |command: &str, args: &[&str]| {
        let mut serve = freestone(dir.path());
        serve.env("TMPDIR", dir.path()).env("freestone", env!("CARGO_BIN_EXE_freestone"));
        finish(serve.args(["serve", "r=ram,disksize=64M", "--run", command]).args(args))
    };
    assert_eq!(run("exit 7", &[]), (7, String::new(), String::new()));
    assert_eq!(run("kill -9 $$", &[]).0, 128 + 9);
    let (code, out, _) = run(
        r#"echo "$uri|$nbd|$unixsocket|$control"; "$freestone" get r disksize --control "$control""#,
        &[],
    );
    assert_eq!(code, 0);
    let lines: Vec<&str> = out.lines().collect();
    let words: Vec<&str> = lines[0].split('|').collect();
    assert_eq!(words[0], format!("nbd+unix:///r?socket={}", words[2]));
    assert_eq!((words[1], lines[1]), (words[0], "67108864"));
    // `--run` created the sockets in a temporary directory, and removed the directory at the end.
    assert!(!Path::new(words[2]).exists() && !Path::new(words[3]).exists());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);

    let (_, out, _) = run(r#"echo "$uri|$unixsocket|""#, &["--nbd", "tcp:127.0.0.1:0", "--control", "c"]);
    assert!(out.starts_with("nbd://127.0.0.1:") && out.ends_with("/r||\n"), "{out}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn run_forwards_signals_to_its_command() {
    let dir = tempdir().unwrap();
    for (command, signals, status) in [
        ("trap 'exit 5' TERM; echo ready; while :; do sleep 0.05; done", 1, 5),
        ("trap '' TERM; echo ready; while :; do sleep 0.05; done", 2, 128 + 9),
    ] {
        let mut serve = freestone(dir.path());
        serve.env("TMPDIR", dir.path()).args(["serve", "--run", command]).stdout(Stdio::piped());
        let mut child = serve.spawn().unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
        for _ in 0..signals {
            kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
            // The kernel would merge two pending signals of the same number, so the second one is
            // sent later.
            std::thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(child.wait().unwrap().code(), Some(status));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn config_file_equals_command_line() {
    let dir = tempdir().unwrap();
    let conf = dir.path().join("conf");
    fs::create_dir(&conf).unwrap();
    fs::write(conf.join("disk.img"), vec![0; 1 << 20]).unwrap();
    let write = |text: &str| fs::write(conf.join("freestone.toml"), text).unwrap();
    write(
        "nbd = ['unix:../nbd']\ncontrol = '../control'\n\
         [[device]]\nname = 'r'\nkind = 'ram'\ndisksize = '64M'\nmem_limit = 'none'\n\
         [[device]]\nname = 'f'\nkind = 'file'\npath = 'disk.img'\nreadonly = true\npublish = false\n",
    );
    let config = ["--config", "conf/freestone.toml"];
    let serve = Serve::start_in(dir, &[&config[..], &["n=null,size=1M"]].concat(), false);
    let list = serve.json(&["list"]);
    let names: Vec<_> =
        list["devices"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["r", "f", "n"]);
    assert_eq!(list["devices"][1]["exports"], json!([]));
    assert_eq!(connect_nbd(&mut UnixStream::connect(serve.path("nbd")).unwrap(), ""), 64 << 20);
    serve.signal(Signal::TERM);
    let (code, dir) = serve.wait();
    assert_eq!((code, sockets_in(dir.path())), (Some(0), 0));

    // `--nbd` replaces the NBD addresses of the configuration file. The other settings of the file
    // apply.
    let serve = Serve::start_in(dir, &[&config[..], &["--nbd", "unix:other"]].concat(), false);
    assert!(serve.path("other").exists() && serve.path("control").exists() && !serve.path("nbd").exists());
    serve.signal(Signal::TERM);
    let (_, dir) = serve.wait();

    let refused = |text: &str| {
        fs::write(dir.path().join("conf/freestone.toml"), text).unwrap();
        refused(dir.path(), 2, &["serve", "--config", "conf/freestone.toml", "n=null,size=1M"])
    };
    let unit = "give a unit; 64M? (K, M, G and T are known, 1024-based)";
    assert_eq!(
        refused("[[device]]\nname = 'r'\nkind = 'ram'\ndisksize = 64\n"),
        format!("conf/freestone.toml: line 4: r: disksize=64: {unit}")
    );
    assert_eq!(
        refused("[[device]]\nname = 'n'\nkind = 'null'\nsize = '1M'\n"),
        "n: two devices of that name",
    );
    assert!(refused("nbd = 'udp:1'\n").starts_with("conf/freestone.toml: nbd: "));
    assert!(refused("nbd = [\n").starts_with("conf/freestone.toml: line "));
    let (code, _, err) = finish(freestone(dir.path()).args(["serve", "--config", "missing.toml"]));
    assert_eq!(code, 1);
    assert!(sentence(&err).starts_with("missing.toml: cannot read the file: "), "{err}");
}
