//! Server starts that fail, and later starts with the state directory that they leave.

use std::net::TcpListener;

use freestone_state::{Export, State};

use super::kept::row;
use super::{Mounted, is_served, serve};
use crate::harness::prelude::*;

const WORK: &str = "work=ram,disksize=16M,keep=yes";

/// Returns a directory with a state in which the kept device `work` has a known pattern.
fn kept_work() -> TempDir {
    let server = serve(tempfile::tempdir().unwrap(), &[WORK]);
    qemu_io(&uri(&server, "work"), &["write -P 7 0 1M"]);
    server.end()
}

fn check_work(server: &Serve) {
    let row = row(server, "work");
    assert_eq!((&row["withheld"], &row["content_of"]), (&Value::Null, &Value::Null), "{row}");
    qemu_io(&uri(server, "work"), &["read -P 7 0 1M", "read -P 0 1M 1M"]);
}

#[test]
fn failed_start_leaves_kept_content_exact() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let metrics = taken.local_addr().unwrap().to_string();
    let dir = kept_work();
    let usual = ["serve", "--state", "state", "--control", "control"];
    for (args, message) in [
        (&["--nbd", "unix:nbd", "--metrics", &metrics][..], "--metrics"),
        (&["--nbd", "unix:away/nbd"], "away/nbd"),
        // The third start fails only after clients could already use the device.
        (&["--nbd", "unix:nbd", "--apply", WORK, "x=file,path=away/x.img,size=1M"], "away/x.img"),
    ] {
        let (code, _, why) = finish(freestone(dir.path()).args(usual).args(args));
        assert!(code == 1 && why.contains(message), "{code}: {why}");
    }
    check_work(&serve(dir, &[]));
}

#[test]
fn failed_first_start_leaves_state_empty() {
    let dir = tempfile::tempdir().unwrap();
    let file = "[[device]]\nname = 'a'\nkind = 'null'\nsize = '1M'\nexport = { nbd = 'unix:away/a' }\n";
    fs::write(dir.path().join("f.toml"), file).unwrap();
    let args = ["serve", "--state", "state", "--control", "control", "--nbd", "unix:nbd"];
    let (code, _, why) = finish(freestone(dir.path()).args(args).args(["--config", "f.toml"]));
    assert!(code == 1 && why.contains("away/a"), "{code}: {why}");
    let server = serve(dir, &["b=null,size=1M"]);
    assert_eq!(server.json(&["list"])["devices"].as_array().unwrap().len(), 1);
}

fn absent(server: &Serve, name: &str) -> Vec<String> {
    let row = row(server, name);
    let all = row["absent_exports"].as_array().cloned().unwrap_or_default();
    all.iter().map(|export| export["address"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn absent_export_is_listed_and_published_later() {
    let server = serve(tempfile::tempdir().unwrap(), &["a=null,size=1M", "b=null,size=1M"]);
    fs::create_dir(server.path("run")).unwrap();
    server.text(&["publish", "b", "--nbd", "unix:run/b"]);
    server.text(&["publish", "a", "--vhost-user", "unix:run/vm"]);
    let address = server.json(&["publish", "b", "--nbd", "tcp:127.0.0.1:0"])["address"].clone();
    let dumped = server.text(&["dump"]);
    let port = address.as_str().unwrap().strip_prefix("tcp:").unwrap().to_owned();
    let mut dir = server.end();
    // The exports stay in the state although their addresses are unavailable at two starts.
    for _ in 0..2 {
        let _ = fs::remove_dir_all(dir.path().join("run"));
        let taken = TcpListener::bind(&port).unwrap();
        let server = serve(dir, &[]);
        let at = |name: &str| server.path(name).display().to_string();
        assert_eq!(absent(&server, "b"), [format!("unix:{}", at("run/b")), format!("tcp:{port}")]);
        assert_eq!(absent(&server, "a"), [format!("vhost-user:{}", at("run/vm"))]);
        assert!(server.text(&["list"]).contains(&format!("b: not published at tcp:{port}: ")));
        assert!(is_served(&server.path("nbd"), "a") && is_served(&server.path("nbd"), "b"));
        assert_eq!(server.text(&["dump"]), dumped);
        dir = server.kill();
        drop(taken);
    }
    let server = serve(dir, &[]);
    fs::create_dir(server.path("run")).unwrap();
    wait_until("all is published again", || {
        absent(&server, "a").is_empty() && absent(&server, "b").is_empty()
    });
    assert!(is_served(&server.path("run/b"), "b"));
}

#[test]
fn absent_export_is_removed_by_unpublish() {
    let server = serve(tempfile::tempdir().unwrap(), &["a=null,size=1M", "b=null,size=1M"]);
    fs::create_dir(server.path("run")).unwrap();
    for name in ["a", "b"] {
        server.text(&["publish", name, "--nbd", &format!("unix:run/{name}")]);
    }
    let dir = server.end();
    fs::remove_dir_all(dir.path().join("run")).unwrap();
    let server = serve(dir, &[]);
    server.text(&["unpublish", "a"]);
    // A new export at the same address replaces the absent export of the state.
    fs::create_dir(server.path("run")).unwrap();
    let _ = server.run_verb(&["publish", "b", "--nbd", "unix:run/b"]);
    wait_until("it is published", || is_served(&server.path("run/b"), "b"));
    let server = serve(server.end(), &[]);
    assert!(absent(&server, "a").is_empty() && absent(&server, "b").is_empty());
    assert!(!is_served(&server.path("nbd"), "a") && is_served(&server.path("run/b"), "b"));
}

/// Adds an export to a device in the state. The export has a limit that no version of the program
/// knows.
fn add_unknown_export(dir: &TempDir, name: &str) {
    let (state, _) = State::open(&dir.path().join("state")).unwrap();
    let mut device = state.find(name).unwrap();
    let limits = [("max_moons".to_owned(), "3".to_owned())].into();
    device.exports.push(Export {
        nbd: Some("unix:/moon".into()),
        vhost_user: None,
        ublk: None,
        read_only: false,
        allow: Vec::new(),
        declared: false,
        limits,
    });
    let mut change = state.begin("test", &[name]).unwrap();
    change.put(device);
    change.commit().unwrap();
}

#[test]
fn unknown_export_stays_in_the_state() {
    let dir = serve(tempfile::tempdir().unwrap(), &["a=null,size=1M"]).end();
    add_unknown_export(&dir, "a");
    let server = serve(dir, &[]);
    assert_eq!(absent(&server, "a"), ["unix:/moon"]);
    assert!(server.text(&["list"]).contains("a: not published at unix:/moon: max_moons: "));
    // A change of the device writes its complete record to the state, including the unknown export.
    server.text(&["publish", "a", "--nbd", "unix:b"]);
    let server = serve(server.end(), &[]);
    assert_eq!(absent(&server, "a"), ["unix:/moon"]);
    assert!(is_served(&server.path("b"), "a"));
    server.text(&["unpublish", "a"]);
    assert!(absent(&server, "a").is_empty());
    let server = serve(server.end(), &[]);
    assert!(absent(&server, "a").is_empty());
}

/// Fills a file system, including the blocks that were preallocated for the state.
fn fill_up(dir: &Path) {
    let topology = fs::OpenOptions::new().write(true).open(dir.join("state/topology")).unwrap();
    // Truncating to the current size frees the preallocated blocks beyond the end of the file.
    topology.set_len(topology.metadata().unwrap().len()).unwrap();
    let mut file = fs::File::create(dir.join("full")).unwrap();
    while file.write_all(&[1; 4096]).is_ok() {}
}

#[test]
fn full_disk_under_state_does_not_prevent_start() {
    let dir = tempfile::tempdir().unwrap();
    let mounted = Mounted::with_size(dir.path().join("small"), "8M");
    let start = |dir| Serve::start_in(dir, &["--state", "small/state"], true);
    let server = start(dir);
    server.text(&["create", &format!("{WORK},publish=yes")]);
    server.text(&["create", "lost=ram,disksize=1M,on_data_loss=empty,publish=yes"]);
    qemu_io(&uri(&server, "work"), &["write -P 7 0 1M"]);
    let mut dir = server.end();
    fill_up(&mounted.0);
    // The content must be exact at both starts: on the full disk a server can still record at its
    // end that the content was saved.
    for _ in 0..2 {
        let server = start(dir);
        check_work(&server);
        assert!(is_served(&server.path("nbd"), "lost"));
        assert!(server.refused(1, &["create", "c=null,size=1M"]).contains("No space left"));
        dir = server.end();
    }
    let server = start(dir);
    let server = start(server.kill());
    assert_eq!(row(&server, "work")["withheld"], true);
    assert_eq!(server.json(&["stat", "lost"])["generation"], 5);
}

#[test]
fn device_withheld_by_one_start_is_published_by_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let mounted = Mounted::with_size(dir.path().join("small"), "8M");
    let start = |dir| Serve::start_in(dir, &["--state", "small/state"], true);
    let server = start(dir);
    server.text(&["create", &format!("{WORK},publish=yes")]);
    qemu_io(&uri(&server, "work"), &["write -P 7 0 1M"]);
    let dir = server.end();
    mounted.remount("ro");
    let server = start(dir);
    let why = "the state cannot record that it is in use";
    assert_eq!(row(&server, "work")["withheld_because"], why);
    mounted.remount("rw");
    // `set` writes the complete record of the device to the state, which is writable again.
    server.text(&["set", "work", "mem_limit=8M"]);
    assert_eq!(row(&server, "work")["withheld_because"], why);
    check_work(&start(server.end()));
}

#[test]
fn unrecorded_save_ends_with_status_1() {
    let dir = tempfile::tempdir().unwrap();
    let mounted = Mounted::with_size(dir.path().join("small"), "8M");
    let server = Serve::start_in(dir, &["--state", "small/state", "--save-every", "1s"], true);
    // The records of these devices need more than the free rest of the last page of the state.
    let names: Vec<String> = (0..12).map(|number| format!("{}{number}", "n".repeat(240))).collect();
    for name in &names {
        server.text(&["create", &format!("{name}=ram,disksize=1M,keep=yes,publish=yes")]);
    }
    let is_saved = |name: &String| row(&server, name)["saved"].is_string();
    wait_until("all are saved", || names.iter().all(is_saved));
    fill_up(&mounted.0);
    server.signal(rustix::process::Signal::TERM);
    let (code, dir) = server.wait();
    assert_eq!(code, Some(1));
    fs::remove_file(mounted.0.join("full")).unwrap();
    let server = Serve::start_in(dir, &["--state", "small/state"], true);
    assert_eq!(row(&server, &names[0])["withheld"], true);
}

#[test]
fn foreign_and_unused_content_survives_a_start() {
    let dir = kept_work();
    let content = dir.path().join("state/content");
    let kept = fs::read_dir(&content).unwrap().next().unwrap().unwrap().path();
    let foreign = [content.join("backup"), content.join("0123456789abcdef0123456789abcdef")];
    for foreign in &foreign {
        fs::create_dir(foreign).unwrap();
        fs::write(foreign.join("precious"), "data").unwrap();
    }
    let topology = dir.path().join("state/topology");
    let away = dir.path().join("topology.away");
    // A start with another state, which does not know the content, must not delete it.
    fs::rename(&topology, &away).unwrap();
    let dir = serve(dir, &["b=null,size=1M"]).end();
    for foreign in &foreign {
        assert_eq!(fs::read(foreign.join("precious")).unwrap(), b"data");
    }
    assert!(kept.join("unused").exists());
    fs::rename(&away, &topology).unwrap();
    let server = serve(dir, &[]);
    check_work(&server);
    assert!(!kept.join("unused").exists());
}

#[test]
fn newer_of_two_copies_of_content_is_used() {
    let dir = kept_work();
    let content = dir.path().join("state/content");
    let kept = fs::read_dir(&content).unwrap().next().unwrap().unwrap().path();
    let old: Vec<_> = fs::read_dir(&kept).unwrap().map(|file| file.unwrap()).collect();
    let old: Vec<_> = old.iter().map(|file| (file.file_name(), fs::read(file.path()).unwrap())).collect();
    let server = serve(dir, &[]);
    qemu_io(&uri(&server, "work"), &["write -P 8 0 1M"]);
    let mut dir = server.end();
    // The names of the old copies sort before and after that of the newer copy.
    for name in ["0".repeat(32), "f".repeat(32)] {
        let copy = content.join(name);
        fs::create_dir(&copy).unwrap();
        for (name, bytes) in &old {
            fs::write(copy.join(name), bytes).unwrap();
        }
    }
    for _ in 0..2 {
        let server = serve(dir, &[]);
        qemu_io(&uri(&server, "work"), &["read -P 8 0 1M"]);
        assert_eq!(row(&server, "work")["withheld"], Value::Null);
        dir = server.end();
    }
    assert_eq!(fs::read_dir(&content).unwrap().count(), 3);
}

#[test]
fn absent_export_of_file_does_not_fail_apply() {
    let dir = tempfile::tempdir().unwrap();
    let write = |dir: &TempDir, export: &str| {
        let device = "[[device]]\nname = 'a'\nkind = 'null'\nsize = '1M'\nreadonly = true\n";
        fs::write(dir.path().join("f.toml"), format!("{device}{export}")).unwrap();
    };
    write(&dir, "export = { nbd = 'unix:run/a' }\n");
    fs::create_dir(dir.path().join("run")).unwrap();
    let dir = serve(dir, &["--config", "f.toml"]).end();
    fs::remove_dir_all(dir.path().join("run")).unwrap();
    let server = serve(dir, &["--config", "f.toml", "--apply"]);
    assert_eq!(absent(&server, "a").len(), 1);
    assert_eq!(server.text(&["apply", "f.toml"]), "nothing changes\n");
    write(&server.dir, "");
    server.text(&["apply", "f.toml"]);
    assert!(absent(&server, "a").is_empty());
    let server = serve(server.end(), &["--config", "f.toml"]);
    assert!(absent(&server, "a").is_empty());
}
