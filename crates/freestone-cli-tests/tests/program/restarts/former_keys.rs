//! The device key `on_data_loss` under its former name `on_lost`.

use freestone_state::State;

use super::{image, is_served, serve};
use crate::harness::prelude::*;

const WARNING: &str = "on_lost: is deprecated, use on_data_loss";
const TWICE: &str = "on_data_loss: given twice";
const GOLDEN: &str = "golden=file,path=golden.img,readonly=yes";

/// Starts a server with a state directory and a log file.
fn logged(dir: TempDir, args: &[&str]) -> Serve {
    let paths = ["--state", "state", "--nbd", "unix:nbd", "--control", "control"];
    Serve::logged_in(dir, &[&paths, args].concat())
}

#[test]
fn former_key_of_words_and_files_warns() {
    let dir = tempdir().unwrap();
    let check = |word: &str, key: &str| {
        let file = format!("[[device]]\nname = 'f'\nkind = 'ram'\ndisksize = '1M'\n{key}\n");
        fs::write(dir.path().join("f.toml"), file).unwrap();
        let word = format!("w=ram,disksize=1M,{word}");
        finish(
            freestone(dir.path())
                .args(["serve", &word, "--config", "f.toml", "--state", "state", "--check"])
                .args(["--nbd", "unix:nbd"]),
        )
    };
    let (code, _, err) = check("on_lost=empty", "on_lost = 'empty'");
    assert_eq!((code, err.matches(WARNING).count()), (0, 2), "{err}");
    let (code, _, err) = check("on_data_loss=empty", "on_data_loss = 'empty'");
    assert_eq!((code, err.as_str()), (0, ""));
    let (code, _, err) = check("on_lost=empty,on_data_loss=empty", "");
    assert!(code == 2 && err.contains(&format!("w: {TWICE}")), "{err}");
    let (code, _, err) = check("publish=no", "on_lost = 'empty'\non_data_loss = 'empty'");
    assert!(code == 2 && err.contains(&format!("f: {TWICE}")), "{err}");
    // The line is that of the key.
    let (code, _, err) = check("publish=no", "on_lost = 'maybe'");
    assert!(code == 2 && err.contains("line 5: f: on_data_loss=maybe: must be withhold or empty"), "{err}");
}

#[test]
fn former_key_of_verbs_warns() {
    let server = logged(image(1 << 20), &[GOLDEN]);
    let run = |args: &[&str]| {
        let (code, out, err) = server.run_verb(args);
        assert_eq!((code, err.matches(WARNING).count()), (0, 1), "{args:?}: {err}");
        out
    };
    run(&["create", "r=ram,disksize=1M,on_lost=empty"]);
    run(&["fork", "golden", "f", "on_lost=empty"]);
    run(&["create", "s=snapshot,origin=r,on_lost=empty"]);
    server.text(&["save", "f", "saved"]);
    run(&["restore", "saved", "copy", "on_lost=empty"]);
    for name in ["r", "f", "s", "copy"] {
        assert_eq!(run(&["get", name, "on_lost"]), "empty\n");
        assert_eq!(server.json(&["get", name, "on_data_loss"]), with_both_names("empty"));
    }
    assert_eq!(run(&["set", "r", "on_lost=withhold"]), "on_data_loss=withhold\n");
    for args in [
        &["create", "x=ram,disksize=1M,on_lost=empty,on_data_loss=empty"][..],
        &["fork", "golden", "x", "on_lost=empty", "on_data_loss=empty"],
        &["restore", "saved", "x", "on_lost=empty", "on_data_loss=empty"],
        &["set", "r", "on_lost=empty", "on_data_loss=empty"],
    ] {
        let (code, _, err) = server.run_verb(args);
        assert!(code == 2 && err.contains(TWICE), "{args:?}: {err}");
    }
    let apply = |key: &str| {
        let file = format!("[[device]]\nname = 'a'\nkind = 'ram'\ndisksize = '1M'\n{key} = 'empty'\n");
        fs::write(server.path("f.toml"), file).unwrap();
        server.run_verb(&["apply", "f.toml"])
    };
    // The server reads the file, so it logs the warning.
    assert_eq!(apply("on_lost").0, 0);
    assert_eq!(server.log_with(WARNING).matches(WARNING).count(), 1);
    assert_eq!(server.text(&["get", "a", "on_data_loss"]), "empty\n");
    // The present name changes nothing.
    let (code, out, err) = apply("on_data_loss");
    assert!(code == 0 && !out.contains("set a"), "{out}{err}");
}

/// Returns an attribute of a reply, in which former names remain.
fn with_both_names(value: &str) -> Value {
    json!({ "on_data_loss": value, "on_lost": value })
}

/// The state directory is as an earlier version wrote it. Other programs call the control socket.
#[test]
fn former_key_of_state_and_requests_is_silent() {
    let words =
        ["kept=ram,disksize=1M,keep=yes,on_data_loss=empty", "lost=ram,disksize=1M,on_data_loss=empty"];
    let dir = serve(image(1 << 20), &[&[GOLDEN], &words[..]].concat()).end();
    let (state, _) = State::open(&dir.path().join("state")).unwrap();
    for name in ["kept", "lost"] {
        let mut device = state.find(name).unwrap();
        assert!(device.words.contains(",on_data_loss=empty"), "{}", device.words);
        device.words = device.words.replace("on_data_loss", "on_lost");
        state.put("serve", vec![device]).unwrap();
    }
    drop(state);
    let server = logged(dir, &[]);
    for name in ["kept", "lost"] {
        assert!(is_served(&server.path("nbd"), name), "{name}");
        assert_eq!(server.text(&["get", name, "on_data_loss"]), "empty\n");
    }
    server.text(&["save", "kept", "saved"]);

    let control = server.control();
    let call = |method: &str, params: Value| {
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        ask(&control, request.to_string().as_bytes())
    };
    let set = call("set", json!({ "name": "lost", "attrs": { "on_lost": "withhold" } }));
    assert_eq!(set["result"], with_both_names("withhold"), "{set}");
    let get = call("get", json!({ "name": "lost", "attr": "on_lost" }));
    assert_eq!(get["result"], with_both_names("withhold"), "{get}");
    let both = json!({ "on_lost": "empty", "on_data_loss": "empty" });
    let set = call("set", json!({ "name": "lost", "attrs": both }));
    assert_eq!(set["error"]["message"], format!("lost: {TWICE}"), "{set}");
    let saved = server.path("saved");
    for (method, params) in [
        ("create", json!({ "device": "r=ram,disksize=1M,on_lost=empty" })),
        ("fork", json!({ "base": "golden", "name": "f", "on_lost": "empty" })),
        ("snapshot", json!({ "snapshots": [{ "origin": "r", "name": "s", "on_lost": "empty" }] })),
        ("restore", json!({ "file": saved, "name": "copy", "family": { "on_lost": "empty" } })),
    ] {
        let reply = call(method, params);
        assert_eq!(reply.get("error"), None, "{method}: {reply}");
    }
    for name in ["r", "f", "s", "copy"] {
        assert_eq!(server.text(&["get", name, "on_data_loss"]), "empty\n");
    }
    let log = fs::read_to_string(server.path("log")).unwrap();
    assert!(!log.contains("deprecated"), "{log}");
}
