//! Server starts with `nbd` devices whose remote server does not respond.

use std::io;
use std::net::Shutdown;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

use crate::harness::prelude::*;

/// Deadline of the tests, shorter than the `timeout` of the `nbd` devices, so that a start that
/// waits for them fails.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns arguments for `count` `nbd` devices, all exports of one remote server.
fn device_args(count: usize) -> Vec<String> {
    let device = |n| format!("n{n}=nbd,uri=nbd+unix:///far?socket=far,timeout=60s");
    (0..count).map(device).collect()
}

/// Returns the listening socket of a remote server that accepts connections and sends nothing.
fn bind_silent_server(dir: &TempDir) -> UnixListener {
    let listener = UnixListener::bind(dir.path().join("far")).unwrap();
    listener.set_nonblocking(true).unwrap();
    listener
}

/// Accepts connections until `count` are open at the same time. Returns the open ones.
fn accept(listener: &UnixListener, count: usize) -> Vec<UnixStream> {
    let until = Instant::now() + PATIENCE;
    let mut all = Vec::new();
    while all.len() < count {
        if let Ok((stream, _)) = listener.accept() {
            all.push(stream);
        } else {
            assert!(Instant::now() < until, "{} of {count} devices are being opened", all.len());
            thread::sleep(Duration::from_millis(2));
        }
    }
    all
}

#[test]
fn remote_devices_are_opened_in_parallel() {
    let dir = tempdir().unwrap();
    let far = bind_silent_server(&dir);
    let mut server =
        freestone(dir.path()).arg("serve").args(device_args(5)).stderr(Stdio::null()).spawn().unwrap();
    drop(accept(&far, 5));
    assert_eq!(wait_for_end(&mut server, PATIENCE).code(), Some(1));
}

/// Copies bytes between two connections in both directions until one side closes.
fn relay(client: &UnixStream, server: &UnixStream) {
    thread::scope(|scope| {
        for (mut from, mut to) in [(client, server), (server, client)] {
            scope.spawn(move || {
                let _ = io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Both);
            });
        }
    });
}

/// Local devices of the state are served while the remote server is silent. The remote devices are
/// created when that server responds.
#[test]
fn remote_devices_of_state_wait_for_their_server() {
    let dir = tempdir().unwrap();
    let (real, far) = (dir.path().join("real"), dir.path().join("far"));
    let mut command = freestone(dir.path());
    command.args(["serve", "far=ram,disksize=1M", "--nbd", "unix:real", "--control", "backend"]);
    let _backend = Serve::ready(tempdir().unwrap(), command);
    symlink(&real, &far).unwrap();
    let state = ["--state".to_owned(), "state".to_owned()];
    let local = ["r=ram,disksize=1M,on_data_loss=empty".to_owned()];
    let over = ["f=snapshot,origin=n1,mem_limit=1M".to_owned()];
    let words = [&local[..], &device_args(4), &over, &state].concat();
    let server = Serve::start_in(dir, &words, true);
    let dir = server.end();

    fs::remove_file(&far).unwrap();
    let listener = bind_silent_server(&dir);
    let server = Serve::start_in(dir, &state, true);
    let open = accept(&listener, 4);
    let names = |list: &Value, key: &str| {
        // The key is absent from the reply if there are no such devices.
        let all = list[key].as_array().into_iter().flatten();
        all.map(|device| device["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let list = server.json(&["list"]);
    assert_eq!(names(&list, "devices"), ["r"], "{list}");
    assert_eq!(names(&list, "missing"), ["f", "n0", "n1", "n2", "n3"], "{list}");
    assert_eq!(Raw::connect(&server, "r").size, 1 << 20);

    listener.set_nonblocking(false).unwrap();
    thread::spawn(move || {
        for client in open.into_iter().chain(listener.incoming().map_while(Result::ok)) {
            client.set_nonblocking(false).unwrap();
            let Ok(server) = UnixStream::connect(&real) else { return };
            thread::spawn(move || relay(&client, &server));
        }
    });
    let until = Instant::now() + PATIENCE;
    loop {
        let list = server.json(&["list"]);
        if names(&list, "missing").is_empty() {
            let mut all = names(&list, "devices");
            all.sort_unstable();
            assert_eq!(all, ["f", "n0", "n1", "n2", "n3", "r"]);
            break;
        }
        assert!(Instant::now() < until, "{list}");
        thread::sleep(Duration::from_millis(5));
    }
    for name in ["n3", "r"] {
        assert_eq!(Raw::connect(&server, name).size, 1 << 20);
    }
    server.end();
}

#[test]
fn sigterm_ends_start_that_waits_for_server() {
    let dir = tempdir().unwrap();
    let far = bind_silent_server(&dir);
    let mut server =
        freestone(dir.path()).arg("serve").args(device_args(2)).stderr(Stdio::null()).spawn().unwrap();
    let _open = accept(&far, 2);
    signal(&server, Signal::TERM);
    assert_eq!(wait_for_end(&mut server, PATIENCE).code(), Some(1));
}
