use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::thread;

use super::*;
use crate::lines;
use crate::topology::Export;

fn device(name: &str, words: &str) -> Device {
    Device {
        name: name.into(),
        uuid: "0".repeat(32),
        generation: 1,
        words: format!("{name}={words}"),
        withheld: false,
        saved: None,
        base: Vec::new(),
        declared: false,
        home: true,
        default_at: Vec::new(),
        exports: Vec::new(),
    }
}

fn open(dir: &Path) -> (State, Vec<InterruptedVerb>) {
    State::open(dir).unwrap()
}

fn names(state: &State) -> Vec<String> {
    state.topology().devices().map(|device| device.name.clone()).collect()
}

fn put(state: &State, name: &str, words: &str) {
    let mut change = state.begin("create", &[name]).unwrap();
    change.put(device(name, words));
    change.commit().unwrap();
}

#[test]
fn committed_changes_survive_restart() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("state");
    let (state, interrupted) = open(&at);
    assert!(interrupted.is_empty() && names(&state).is_empty());
    put(&state, "b", "ram,disksize=1M");
    put(&state, "a", "fork,base=b");
    put(&state, "b", "ram,disksize=2M");
    put(&state, "c", "null");
    let mut change = state.begin("remove", &["c"]).unwrap();
    change.remove("c");
    change.commit().unwrap();
    // The first change is rolled back; a crash leaves the second one open.
    drop(state.begin("fork", &["f"]).unwrap());
    std::mem::forget(state.begin("fork", &["d", "e"]).unwrap());
    assert!(matches!(State::open(&at), Err(StateError::InUse(_))));
    drop(state);
    let (state, interrupted) = open(&at);
    assert_eq!(interrupted, [InterruptedVerb { verb: "fork".into(), names: vec!["d".into(), "e".into()] }]);
    assert_eq!(names(&state), ["b", "a"], "in order of creation");
    assert_eq!(state.topology().find("b").unwrap().words, "b=ram,disksize=2M");
    drop(state);
    assert!(open(&at).1.is_empty(), "unfinished changes are reported once");
}

#[test]
fn torn_change_is_applied_whole_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(TOPOLOGY_FILE);
    let (state, _) = open(dir.path());
    put(&state, "a", "null");
    let before = fs::metadata(&file).unwrap().len() as usize;
    let mut change = state.begin("snapshot", &["b", "c", "a"]).unwrap();
    change.put(device("b", "ram"));
    change.put(device("c", "ram"));
    change.remove("a");
    change.commit().unwrap();
    drop(state);
    let whole = fs::read(&file).unwrap();
    for end in before..=whole.len() {
        fs::write(&file, &whole[..end]).unwrap();
        let (state, interrupted) = open(dir.path());
        let wanted: &[&str] = if end == whole.len() { &["b", "c"] } else { &["a"] };
        assert_eq!(names(&state), wanted, "{end}");
        assert!(interrupted.len() <= 1);
        // The reopened state accepts further changes.
        put(&state, "new", "null");
        assert_eq!(reopen(state, dir.path()).last().unwrap(), "new");
    }
    // The pages of the last lines may reach the disk in any order.
    let mut hole = whole.clone();
    hole[before + 20..before + 30].fill(0);
    fs::write(&file, &hole).unwrap();
    assert_eq!(names(&open(dir.path()).0), ["a"]);
}

fn reopen(state: State, dir: &Path) -> Vec<String> {
    drop(state);
    names(&open(dir).0)
}

#[test]
fn damaged_file_is_rejected_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(TOPOLOGY_FILE);
    let (state, _) = open(dir.path());
    put(&state, "a", "null");
    put(&state, "b", "null");
    drop(state);
    let whole = fs::read(&file).unwrap();
    let first = whole.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    let last = whole.windows(7).rposition(|word| word == b"\"begin\"").unwrap();
    let mut rejected = 0;
    for at in (first..last - 20).step_by(3) {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        fs::write(&file, &damaged).unwrap();
        // Removing or adding a newline also makes lines invalid.
        assert!(matches!(State::open(dir.path()), Err(StateError::Damaged(..))), "{at}");
        assert_eq!(fs::read(&file).unwrap(), damaged);
        rejected += 1;
    }
    assert!(rejected > 20);
    fs::write(&file, "[Unit]\nDescription=another\n").unwrap();
    assert!(matches!(State::open(dir.path()), Err(StateError::Foreign(_))));
    let mut newer = String::new();
    Line::Format { format: "freestone state".into(), version: lines::VERSION + 1 }.write(&mut newer);
    fs::write(&file, &newer).unwrap();
    assert!(
        matches!(State::open(dir.path()), Err(StateError::Newer(_, version)) if version == lines::VERSION + 1)
    );
    assert_eq!(fs::read_to_string(&file).unwrap(), newer);
}

#[test]
fn concurrent_changes_are_all_kept() {
    const THREADS: usize = 8;
    const EACH: usize = 40;
    let dir = tempfile::tempdir().unwrap();
    let (state, _) = open(dir.path());
    thread::scope(|scope| {
        for number in 0..THREADS {
            let state = &state;
            scope.spawn(move || {
                for turn in 0..EACH {
                    put(state, &format!("d{number}"), &format!("ram,disksize={turn}M"));
                    if turn % 2 == 0 {
                        put(state, &format!("d{number}-{turn}"), "null");
                    }
                }
            });
        }
    });
    let before = state.topology();
    drop(state);
    let (state, interrupted) = open(dir.path());
    assert!(interrupted.is_empty());
    let sorted = |topology: &Topology| {
        let mut all: Vec<_> = topology.devices().cloned().collect();
        all.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        all
    };
    assert_eq!(sorted(&state.topology()), sorted(&before));
    assert_eq!(names(&state).len(), THREADS * (1 + EACH / 2));
}

/// Opens a file that accepts writes but cannot be synced.
fn open_unsyncable_file() -> File {
    OpenOptions::new().append(true).open("/dev/null").unwrap()
}

/// Makes replacements of the topology file fail until the returned directory is removed.
fn block_replacement(dir: &Path) -> std::path::PathBuf {
    let new = dir.join("topology.new");
    fs::create_dir(&new).unwrap();
    new
}

#[test]
fn failed_sync_rewrites_log_before_reply() {
    let dir = tempfile::tempdir().unwrap();
    let (state, _) = open(dir.path());
    put(&state, "a", "null");
    let mut other = state.begin("create", &["c"]).unwrap();
    let crashed = state.begin("fork", &["f"]).unwrap();
    state.log.lock().exchange_file(open_unsyncable_file());
    put(&state, "b", "null");
    state.log.lock().exchange_file(open_unsyncable_file());
    // Changes that began before the failure continue in the new file.
    other.put(device("c", "null"));
    other.commit().unwrap();
    put(&state, "d", "null");
    assert_eq!(names(&state), ["a", "b", "c", "d"]);
    std::mem::forget(crashed);
    drop(state);
    let (state, interrupted) = open(dir.path());
    assert_eq!(interrupted, [InterruptedVerb { verb: "fork".into(), names: vec!["f".into()] }]);
    assert_eq!(names(&state), ["a", "b", "c", "d"]);
}

#[test]
fn failed_write_rewrites_log_before_reply() {
    let dir = tempfile::tempdir().unwrap();
    let (state, _) = open(dir.path());
    let mut change = state.begin("create", &["a"]).unwrap();
    // The file is read-only, so that neither writes nor truncation succeed.
    state.log.lock().exchange_file(File::open(dir.path().join(TOPOLOGY_FILE)).unwrap());
    change.put(device("a", "null"));
    change.commit().unwrap();
    put(&state, "b", "null");
    assert_eq!(reopen(state, dir.path()), ["a", "b"]);
}

#[test]
fn failed_replacement_refuses_changes_until_one_succeeds() {
    let dir = tempfile::tempdir().unwrap();
    let (state, _) = open(dir.path());
    put(&state, "a", "null");
    let mut change = state.begin("create", &["b"]).unwrap();
    state.log.lock().exchange_file(open_unsyncable_file());
    let new = block_replacement(dir.path());
    change.put(device("b", "null"));
    assert!(matches!(change.commit(), Err(StateError::Write(..))));
    assert!(matches!(state.begin("create", &["c"]), Err(StateError::Write(..))));
    assert!(matches!(state.put("serve", vec![device("c", "null")]), Err(StateError::Write(..))));
    assert_eq!(names(&state), ["a"]);
    fs::remove_dir(new).unwrap();
    put(&state, "d", "null");
    assert_eq!(names(&state), ["a", "d"]);
    assert_eq!(reopen(state, dir.path()), ["a", "d"]);
}

/// The directory is synced last, so a start after the rename reads the new file.
#[test]
fn failed_directory_sync_keeps_no_unlinked_log() {
    let dir = tempfile::tempdir().unwrap();
    let (state, _) = open(dir.path());
    put(&state, "a", "null");
    let good = state.log.lock().exchange_dir(open_unsyncable_file());
    state.log.lock().exchange_file(open_unsyncable_file());
    assert!(matches!(state.put("serve", vec![device("b", "null")]), Err(StateError::Write(..))));
    for name in ["c", "d"] {
        assert!(matches!(state.begin("create", &[name]), Err(StateError::Write(..))), "{name}");
    }
    state.log.lock().exchange_dir(good);
    put(&state, "e", "null");
    let mut change = state.begin("remove", &["a"]).unwrap();
    change.remove("a");
    change.commit().unwrap();
    assert_eq!(names(&state), ["e"]);
    // The state is as after a crash: the file at the path must contain all completed changes.
    assert_eq!(reopen(state, dir.path()), ["e"]);
}

#[test]
fn failed_directory_sync_while_shrinking_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (state, _) = open(dir.path());
    let words = format!("null,record={}", "x".repeat(1 << 20));
    let good = state.log.lock().exchange_dir(open_unsyncable_file());
    let (mut committed, mut refused) = (0, 0);
    while refused == 0 {
        match state
            .put("create", vec![device(&format!("d{}", committed % 2), &format!("{words}{committed}"))])
        {
            Ok(()) => committed += 1,
            Err(_) => refused += 1,
        }
        assert!(committed < 64, "the log was never replaced");
    }
    state.log.lock().exchange_dir(good);
    put(&state, "last", "null");
    let before = state.topology();
    drop(state);
    assert_eq!(open(dir.path()).0.topology(), before);
    assert!(before.find("last").is_some() && before.find(&format!("d{}", (committed - 1) % 2)).is_some());
}

#[test]
fn start_on_full_disk_uses_intact_log() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(TOPOLOGY_FILE);
    let (state, _) = open(dir.path());
    put(&state, "a", "null");
    let begun = state.begin("fork", &["f"]).unwrap();
    std::mem::forget(begun);
    drop(state);
    let mut content = fs::read(&file).unwrap();
    content.extend(b"0123");
    fs::write(&file, content).unwrap();
    let new = block_replacement(dir.path());
    let (state, interrupted) = open(dir.path());
    assert_eq!(interrupted.len(), 1);
    state.put("serve", vec![device("a", "ram")]).unwrap();
    put(&state, "b", "null");
    assert_eq!(reopen(state, dir.path()), ["a", "b"]);
    fs::remove_dir(new).unwrap();
    assert_eq!(open(dir.path()).0.find("a").unwrap().words, "a=ram");
}

#[test]
fn unwritable_new_state_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    block_replacement(dir.path());
    assert!(matches!(State::open(dir.path()), Err(StateError::Directory(..))));
}

#[test]
fn log_of_obsolete_changes_is_rewritten() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(TOPOLOGY_FILE);
    let (state, _) = open(dir.path());
    let words = format!("null,record={}", "x".repeat(100_000));
    let mut most = 0;
    for turn in 0..100 {
        put(&state, "a", &format!("{words}{turn}"));
        most = most.max(fs::metadata(&file).unwrap().len());
    }
    assert!(
        (crate::log::REWRITE_BYTES - (1 << 20)..crate::log::REWRITE_BYTES + (1 << 20)).contains(&most),
        "{most}"
    );
    assert!(fs::metadata(&file).unwrap().len() < most);
    assert!(state.topology().find("a").unwrap().words.ends_with("x99"));
    assert_eq!(reopen(state, dir.path()), ["a"]);
}

/// Version 1 of the program wrote the directory in tests/version-1.
#[test]
fn version_1_state_is_read_and_rewritten() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(TOPOLOGY_FILE);
    let old = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/version-1").join(TOPOLOGY_FILE);
    fs::copy(old, &file).unwrap();
    let (state, interrupted) = open(dir.path());
    assert_eq!(interrupted, [InterruptedVerb { verb: "fork".into(), names: vec!["next".into()] }]);
    let none = Export {
        nbd: None,
        vhost_user: None,
        ublk: None,
        read_only: false,
        allow: Vec::new(),
        declared: false,
        limits: BTreeMap::new(),
    };
    let device =
        |name: &str, words: &str, uuid: u8| Device { uuid: format!("{uuid:032x}"), ..device(name, words) };
    let expected = [
        Device { declared: true, ..device("base", "file,path=/srv/base.img,readonly=yes", 1) },
        Device {
            home: false,
            exports: vec![
                Export { nbd: Some("tcp:localhost:10809".into()), read_only: true, ..none.clone() },
                Export { vhost_user: Some("unix:/run/vm.sock".into()), ..none.clone() },
                Export { ublk: Some(2), declared: true, ..none.clone() },
            ],
            ..device("work", "fork,base=base,size=4G,mem_limit=1G", 2)
        },
        device("old", "ram,disksize=2G", 3),
    ];
    assert_eq!(state.topology().devices().cloned().collect::<Vec<_>>(), expected);
    drop(state);
    let written = fs::read_to_string(&file).unwrap();
    assert!(written.lines().next().unwrap().contains("\"version\":3"), "{written}");
    assert_eq!(open(dir.path()).0.topology().devices().cloned().collect::<Vec<_>>(), expected);
}
