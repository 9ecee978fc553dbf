//! Devices and exports: verbs that list, create, change, publish and remove them.

use std::net::TcpStream;

use crate::harness::prelude::*;

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

    let connect = |name| Raw::connect(&serve, name).size;
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
        dir = serve.end();
    }
}
