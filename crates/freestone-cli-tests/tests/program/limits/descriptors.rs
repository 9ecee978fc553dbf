//! Clients that exhaust the file descriptors of the server (`RLIMIT_NOFILE`).

use rustix::process::Resource;

use super::{end, limit};
use crate::harness::prelude::*;

const DESCRIPTORS: u64 = 128;

#[test]
fn verbs_and_saves_have_reserved_descriptors() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("image"), [7; 4096]).unwrap();
    let start = |dir| {
        let args = ["r=ram,disksize=16M,keep=yes", "--state", "state"];
        Serve::start_in(dir, &args, true)
    };
    let serve = start(dir);
    limit(&serve, Resource::Nofile, DESCRIPTORS);
    let _silent: Vec<_> = (0..DESCRIPTORS).map(|_| UnixStream::connect(serve.path("nbd")).unwrap()).collect();
    // The server needs time to accept all connections.
    std::thread::sleep(std::time::Duration::from_millis(500));
    let control = serve.control();
    control.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
    let verb = |method: &str, params: serde_json::Value| {
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        let answer = ask(&control, request.to_string().as_bytes());
        assert!(answer["error"].is_null(), "{method}: {answer}");
    };
    verb("create", json!({ "device": format!("f=file,path={},publish=yes", serve.path("image").display()) }));
    verb("save", json!({ "names": ["r"], "file": serve.path("saved") }));
    drop(control);
    let serve = start(end(serve));
    assert_eq!(Raw::connect(&serve, "f").read(0, 4096), Ok(vec![7; 4096]));
}

#[test]
fn create_without_descriptors_names_the_reason() {
    let serve = Serve::start(&["a=null,size=1M"]);
    let control = serve.control();
    let create = |number: u64| {
        let device = format!("n{number}=null,size=1M,memory_backed=1");
        let params = json!({ "device": device });
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": "create", "params": params });
        ask(&control, request.to_string().as_bytes())["error"]["message"].as_str().map(str::to_owned)
    };
    assert_eq!(create(0), None);
    let open = std::fs::read_dir(format!("/proc/{}/fd", serve.pid().as_raw_nonzero())).unwrap().count();
    limit(&serve, Resource::Nofile, open as u64 + 8);
    // Each `memory_backed` device needs two memory files, so the descriptors are soon exhausted.
    let why = (1..open as u64 + 8).find_map(create).unwrap();
    assert!(why.contains("cannot create a memory file: Too many open files"), "{why}");
}
