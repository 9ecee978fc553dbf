//! Verbs that take long, on a disk that is slow: how far they are is shown, and they end with their
//! client, when they are cancelled, and with the server, or go on in the background.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::clients::tools::{MIB, noise, ok, qemu_io, tool, uri};
use crate::drives::raw::Raw;
use crate::harness::{Serve, finish, freestone, sentence};
use crate::stalls::disks::Disk;
use crate::stalls::{ANSWER_MAX, Control, text};

const STEP: Duration = Duration::from_millis(5);

/// A verb on a server, on a disk that can be made so slow that the verb does not end by itself.
struct Case<'a> {
    serve: &'a Serve,
    /// Makes the disk slow, or as it was.
    slow: &'a dyn Fn(bool),
    args: &'a [&'a str],
    /// As it is shown, and where.
    verb: &'a str,
    name: &'a str,
    /// How the sentence about its end ends.
    after: &'a str,
}

impl Case<'_> {
    fn control(&self) -> Control {
        Control::of(self.serve)
    }

    fn jobs(&self) -> Vec<Value> {
        let mut jobs = self.control().ok("jobs", &json!({ "name": self.name }));
        serde_json::from_value(jobs["jobs"].take()).unwrap()
    }

    /// The one that runs, once something is done.
    fn running(&self) -> Value {
        let start = Instant::now();
        loop {
            let jobs = self.jobs();
            let running = jobs.into_iter().find(|job| job["state"] == "running" && job["done_bytes"] != 0);
            if let Some(job) = running {
                assert_eq!((&job["verb"], &job["name"]), (&json!(self.verb), &json!(self.name)));
                assert!(job["done_bytes"].as_u64() <= job["total_bytes"].as_u64(), "{job}");
                return job;
            }
            assert!(start.elapsed() < ANSWER_MAX, "{:?} does nothing", self.args);
            sleep(STEP);
        }
    }

    fn ends(&self) {
        let start = Instant::now();
        while self.jobs().iter().any(|job| job["state"] == "running") {
            assert!(start.elapsed() < ANSWER_MAX, "{:?} goes on", self.args);
            sleep(STEP);
        }
    }

    /// A client with SIGINT as a terminal gives it to programs, whatever started this test.
    fn client(&self, more: &[&str]) -> Child {
        let mut client = Command::new("env");
        client.arg("--default-signal=INT").arg(env!("CARGO_BIN_EXE_freestone"));
        client.args(self.args).args(more).arg("--control").arg(self.serve.path("control"));
        client.current_dir(self.serve.dir.path()).stdin(Stdio::null());
        client.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// What the client says when it was told to end: its status and last sentence, and how far the
    /// verb was when that was told.
    fn interrupted(&self) -> (Option<i32>, String, Vec<Value>) {
        let mut client = self.client(&["--progress", "json"]);
        let mut lines = BufReader::new(client.stderr.take().unwrap()).lines().map(Result::unwrap);
        let mut told = Vec::new();
        while told.last().is_none_or(|line: &Value| line["done_bytes"] == 0) {
            let line = lines.next().expect("it ended by itself");
            told.push(serde_json::from_str::<Value>(&line).unwrap()["progress"].take());
        }
        signal(&client, Signal::INT);
        let last = lines.last().unwrap();
        assert_eq!(BufReader::new(client.stdout.take().unwrap()).lines().count(), 0);
        (client.wait().unwrap().code(), sentence(&last), told)
    }

    fn cancelled(&self, why: &str) -> String {
        format!("{}: {}: cancelled, because {why}; ", self.name, self.verb)
    }

    /// Every way to end it early; `sound` looks at what that has left.
    fn is_cancelled(&self, sound: &dyn Fn()) {
        (self.slow)(true);
        // By Ctrl-C.
        let (code, said, told) = self.interrupted();
        assert_eq!(code, Some(130), "{said}");
        assert!(said.starts_with(&self.cancelled("that was asked for")), "{said}");
        assert!(said.ends_with(self.after), "{said}");
        let last = told.last().unwrap();
        assert_eq!((&last["verb"], &last["name"]), (&json!(self.verb), &json!(self.name)));
        assert!(last["total_bytes"].as_u64() >= last["done_bytes"].as_u64(), "{last}");
        self.ends();
        sound();
        // By the end of its client.
        let mut client = self.client(&[]);
        let job = self.running();
        assert_eq!((&job["background"], job.get("result")), (&json!(false), None));
        client.kill().unwrap();
        client.wait().unwrap();
        self.ends();
        sound();
        // In the background it needs a word.
        let job = self.background();
        self.running();
        let out = self.serve.json(&["cancel", "--job", &job]);
        assert_eq!(out["jobs"][0]["job"].to_string(), job);
        let said = self.serve.refused(1, &["wait", "--job", &job]);
        assert!(said.starts_with(&self.cancelled("that was asked for")), "{said}");
        let last = self.jobs().pop().unwrap();
        assert_eq!(
            (&last["state"], &last["error"]["data"]["errno"]),
            (&json!("cancelled"), &json!("ECANCELED"))
        );
        let gone = self.serve.refused(1, &["cancel", "--job", &job]);
        assert_eq!(gone, format!("job {job}: no such job, or one that ended long ago"));
        sound();
        (self.slow)(false);
    }

    /// Begins it in the background; its number.
    fn background(&self) -> String {
        let mut args = self.args.to_vec();
        args.push("--background");
        let begun = self.serve.json(&args);
        assert_eq!((&begun["verb"], &begun["name"]), (&json!(self.verb), &json!(self.name)));
        begun["job"].to_string()
    }

    /// In the background it comes to its end, which is remembered; what it answered.
    fn goes_on(&self) -> Value {
        (self.slow)(true);
        let job = self.background();
        self.running();
        let (code, _, said) = finish(
            freestone(self.serve.dir.path())
                .args(["wait", "--job", &job, "--timeout", "1ms", "--control"])
                .arg(self.serve.path("control")),
        );
        assert_eq!((code, sentence(&said)), (1, format!("job {job}: has not ended; waited 1ms for it")));
        (self.slow)(false);
        let ended = self.serve.json(&["wait", "--job", &job]);
        assert_eq!((&ended["state"], &ended["background"]), (&json!("finished"), &json!(true)), "{ended}");
        assert_eq!(self.serve.text(&["wait", "--job", &job]), "");
        let line = self.serve.text(&["jobs", self.name]);
        assert!(line.contains(&format!("job {job}: {}: {}: finished", self.name, self.verb)), "{line}");
        ended["result"].clone()
    }
}

fn signal(client: &Child, signal: Signal) {
    kill_process(Pid::from_raw(client.id().cast_signed()).unwrap(), signal).unwrap();
}

/// Noise on an export, which stays there uncompressed.
pub(super) fn fill(serve: &Serve, name: &str, bytes: u64) {
    let image = serve.path("noise");
    fs::write(&image, noise(7, bytes)).unwrap();
    ok(tool("nbdcopy").arg(&image).arg(uri(serve, name)));
    fs::remove_file(image).unwrap();
}

fn names(serve: &Serve) -> Vec<String> {
    let rows = fs::read_dir(serve.dir.path()).unwrap();
    let mut names: Vec<_> = rows.map(|row| row.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn number(serve: &Serve, name: &str, section: &str, key: &str) -> u64 {
    serve.json(&["stat", name])[section][key].as_u64().unwrap()
}

pub(super) const SLOW_WRITES: &str = "write delay=200ms";
pub(super) const SLOW_READS: &str = "read delay=100ms";

fn slowed(disk: &Disk, rules: &str) -> impl Fn(bool) {
    move |slow| if slow { disk.hang(rules) } else { disk.heal() }
}

/// A RAM disk on a slow disk, with so many pages of noise.
pub(super) fn spilling(disk: &Disk, bytes: u64) -> Serve {
    let ram = format!("r=ram,disksize=64M,backing_dev={},compressed_writeback=yes", text(&disk.path()));
    let serve = Serve::start(&[ram]);
    fill(&serve, "r", bytes);
    // Many small writes: it is cancelled between them.
    serve.text(&["set", "r", "writeback_batch_size=32"]);
    serve
}

#[test]
fn a_writeback_keeps_what_was_written() {
    let disk = Disk::of("64M");
    let serve = spilling(&disk, 32 * MIB);
    let pages = || number(&serve, "r", "backing", "spilled_pages");
    let args = ["writeback", "r", "huge"];
    let case = Case {
        serve: &serve,
        slow: &slowed(&disk, "write delay=100ms"),
        args: &args,
        verb: "writeback",
        name: "r",
        after: " blocks",
    };
    let before = std::cell::Cell::new(0);
    case.is_cancelled(&|| {
        assert!(before.replace(pages()) < pages(), "nothing was written");
        assert!(pages() < 32 * 256, "all was written");
    });
    let result = case.goes_on();
    assert_eq!(pages(), 32 * 256);
    assert_eq!(result["pages"].as_u64().unwrap() + before.get(), 32 * 256);
    // A list shows what runs.
    serve.text(&["reset", "r"]);
    fill(&serve, "r", 32 * MIB);
    disk.hang(SLOW_WRITES);
    let job = case.background();
    case.running();
    assert_eq!(serve.json(&["list", "r"])["devices"][0]["progress"]["job"].to_string(), job);
    assert!(serve.text(&["list"]).contains("ram (writeback "), "{}", serve.text(&["list"]));
    assert_eq!(serve.json(&["stat", "r"])["progress"]["verb"], "writeback");
    // One that waits for it ends with its client.
    let mut second = case.client(&["--progress", "bar"]);
    let start = Instant::now();
    while case.jobs().iter().filter(|job| job["state"] == "running").count() < 2 {
        assert!(start.elapsed() < ANSWER_MAX, "it does not wait");
        sleep(STEP);
    }
    second.kill().unwrap();
    second.wait().unwrap();
    let start = Instant::now();
    while case.jobs().iter().filter(|job| job["state"] == "running").count() > 1 {
        assert!(start.elapsed() < ANSWER_MAX, "it waits still");
        sleep(STEP);
    }
    assert_eq!(case.running()["job"].to_string(), job);
    // The end of the server ends it as well.
    serve.signal(Signal::TERM);
    assert_eq!(serve.wait().0, Some(0));
}

#[test]
fn a_save_leaves_the_old_file() {
    let disk = Disk::of("64M");
    let serve = spilling(&disk, 32 * MIB);
    serve.text(&["writeback", "r", "huge"]);
    fs::write(serve.path("r.saved"), "").unwrap();
    let before = names(&serve);
    let after = format!("; {} is as it was", serve.path("r.saved").display());
    let args = ["save", "r", "r.saved"];
    let case = Case {
        serve: &serve,
        slow: &slowed(&disk, SLOW_READS),
        args: &args,
        verb: "save",
        name: "r",
        after: &after,
    };
    case.is_cancelled(&|| {
        assert_eq!(fs::metadata(serve.path("r.saved")).unwrap().len(), 0);
        assert_eq!(names(&serve), before);
    });
    assert_eq!(case.goes_on()["pages"], 32 * 256);
    assert!(fs::metadata(serve.path("r.saved")).unwrap().len() > 32 * MIB);
}

#[test]
fn a_restore_leaves_no_device() {
    let disk = Disk::of("64M");
    let serve = Serve::start(&["r=ram,disksize=64M"]);
    fill(&serve, "r", 32 * MIB);
    serve.text(&["save", "r", "r.saved"]);
    let file = serve.path("r.saved");
    let backing = format!("backing_dev={}", text(&disk.path()));
    let args = ["restore", "r.saved", "back", "mem_limit=4M", &backing];
    let case = Case {
        serve: &serve,
        slow: &slowed(&disk, SLOW_WRITES),
        args: &args,
        verb: "restore",
        name: text(&file),
        after: "; no device was made",
    };
    case.is_cancelled(&|| assert_eq!(serve.json(&["list"])["devices"].as_array().unwrap().len(), 1));
    assert_eq!(case.goes_on()["devices"][0]["name"], "back");
    qemu_io(&uri(&serve, "r"), &["read 0 4k"]);
    serve.text(&["publish", "back", "--nbd", &format!("unix:{}", text(&serve.path("nbd")))]);
    ok(tool("qemu-img").args(["compare", "-f", "raw", "-F", "raw", &uri(&serve, "r"), &uri(&serve, "back")]));
}

#[test]
fn a_delta_is_saved_whole_or_not_and_applied_as_far_as_it_came() {
    let disk = Disk::of("64M");
    let dir = tempfile::tempdir().unwrap();
    fs::File::create(dir.path().join("base.img")).unwrap().set_len(64 * MIB).unwrap();
    let base = format!(
        "base=file,path=base.img,readonly=yes,publish=no,mem_limit=4M,backing_dev={}",
        text(&disk.path())
    );
    let serve = Serve::start_in(dir, &[base.as_str(), "f=fork,base=base", "g=fork,base=base"], true);
    fill(&serve, "f", 16 * MIB);
    let before = names(&serve);
    let file = serve.path("f.qcow2");
    let after = format!("; {} is as it was", file.display());
    let args = ["delta", "save", "f", "f.qcow2"];
    let case = Case {
        serve: &serve,
        slow: &slowed(&disk, SLOW_READS),
        args: &args,
        verb: "delta save",
        name: "f",
        after: &after,
    };
    case.is_cancelled(&|| assert_eq!(names(&serve), before));
    assert_eq!(case.goes_on()["bytes"], 16 * MIB);
    let args = ["delta", "apply", "g", "f.qcow2", "--force"];
    let case = Case {
        serve: &serve,
        slow: &slowed(&disk, SLOW_WRITES),
        args: &args,
        verb: "delta apply",
        name: "g",
        after: "; what was applied stays; `freestone rewind g` takes it away",
    };
    case.is_cancelled(&|| {
        assert!(number(&serve, "g", "over_stat", "own_bytes") < 16 * MIB);
        serve.text(&["rewind", "g"]);
    });
    assert_eq!(case.goes_on()["data_bytes"], 16 * MIB);
    ok(tool("qemu-img").args(["compare", "-f", "raw", "-F", "raw", &uri(&serve, "f"), &uri(&serve, "g")]));
}

#[test]
fn a_merge_goes_on_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("disk.img"), vec![1; 2 << 20]).unwrap();
    fs::File::create(dir.path().join("disk.cow")).unwrap().set_len(8 * MIB).unwrap();
    let devices = [
        "disk=file,path=disk.img",
        "c=file,path=disk.cow,publish=no,faults=none",
        "d1=snapshot,origin=disk,cow=c,chunk_size=4K",
    ];
    let serve = Serve::start_in(dir, &devices, true);
    // Every chunk that is merged is read from there.
    let slow = |slow| {
        serve.text(&["set", "c", if slow { "faults=read delay=100ms" } else { "faults=none" }]);
    };
    // Each a run of its own.
    let writes: Vec<_> = (0..200).map(|run| format!("write -q -P 2 {} 4k", run * 8192)).collect();
    qemu_io(&uri(&serve, "d1"), &writes);
    let merged = || {
        let disk = fs::read(serve.path("disk.img")).unwrap();
        disk.chunks(4096).filter(|chunk| chunk[0] == 2).count()
    };
    let args = ["merge", "d1", "--into-origin"];
    let case = Case {
        serve: &serve,
        slow: &slow,
        args: &args,
        verb: "merge",
        name: "d1",
        after: "; what is merged stays; the same command goes on with it",
    };
    let before = std::cell::Cell::new(0);
    case.is_cancelled(&|| {
        assert!(before.replace(merged()) < merged(), "nothing was merged");
        assert!(merged() < 200, "all was merged");
        qemu_io(&uri(&serve, "disk"), &["read -P 2 0 4k", "read -P 1 4k 4k", "read -P 2 1592k 4k"]);
    });
    // Who waits beside one that runs takes nothing along.
    slow(true);
    let job = case.background();
    case.running();
    let mut beside = case.client(&[]);
    let start = Instant::now();
    while case.jobs().iter().filter(|job| job["state"] == "running").count() < 2 {
        assert!(start.elapsed() < ANSWER_MAX, "it does not wait");
        sleep(STEP);
    }
    beside.kill().unwrap();
    beside.wait().unwrap();
    while case.jobs().iter().filter(|job| job["state"] == "running").count() > 1 {
        assert!(start.elapsed() < ANSWER_MAX, "it waits still");
        sleep(STEP);
    }
    assert_eq!(serve.json(&["stat", "d1"])["merge"], "running");
    slow(false);
    assert_eq!(serve.json(&["wait", "--job", &job])["result"]["merge"], "finished");
    assert_eq!(merged(), 200);
}

#[test]
fn a_compaction_keeps_what_was_moved() {
    let disk = Disk::of("64M");
    let ram = format!("r=ram,disksize=64M,backing_dev={}", text(&disk.path()));
    let serve = Serve::start(&[ram]);
    // Pages that are half as large once they are packed, many in a block run.
    let mut data = noise(5, 32 * MIB);
    data.chunks_mut(4096).for_each(|page| page[1500..].fill(7));
    let image = serve.path("noise");
    fs::write(&image, data).unwrap();
    let fill = || {
        ok(tool("nbdcopy").arg(&image).arg(uri(&serve, "r")));
        serve.text(&["idle", "r", "all"]);
        serve.text(&["writeback", "r", "idle"]);
        // Holes everywhere on the disk.
        let holes: Vec<_> = (0..256).map(|at| format!("discard -q {}k 112k", at * 128)).collect();
        qemu_io(&uri(&serve, "r"), &holes);
    };
    fill();
    let used = || number(&serve, "r", "backing", "used_bytes");
    let case = Case {
        serve: &serve,
        slow: &slowed(&disk, "all delay=40ms"),
        args: &["compact", "r"],
        verb: "compact",
        name: "r",
        after: " pages were freed before",
    };
    let before = used();
    case.is_cancelled(&|| qemu_io(&uri(&serve, "r"), &["read -q 112k 16k"]));
    case.goes_on();
    assert!(used() < before, "{} of {before}", used());
}

#[test]
fn a_recompression_keeps_what_became_smaller() {
    let serve = Serve::start(&[
        "r=ram,disksize=128M,recomp_algorithm=algo=zstd priority=1,algorithm_params=priority=1 level=22",
    ]);
    // Text of few letters: zstd at its highest level takes its time with that.
    let data: Vec<u8> = noise(3, 16 * MIB).into_iter().map(|byte| b'a' + byte % 8).collect();
    let image = serve.path("letters");
    fs::write(&image, data).unwrap();
    ok(tool("nbdcopy").arg(&image).arg(uri(&serve, "r")));
    let size = || number(&serve, "r", "mm_stat", "compr_data_size");
    let before = std::cell::Cell::new(size());
    let args = ["recompress", "r"];
    let case =
        Case { serve: &serve, slow: &|_| (), args: &args, verb: "recompress", name: "r", after: " saved" };
    case.is_cancelled(&|| assert!(before.replace(size()) > size(), "nothing became smaller"));
    let result = case.goes_on();
    assert!(result["shrunk"].as_u64() > Some(0), "{result}");
}

#[test]
fn a_removal_goes_on_without_its_client() {
    let disk = Disk::of("8M");
    let file = format!("f=file,path={},power_cut=yes", text(&disk.path()));
    let serve = Serve::start(&[file.as_str(), "r=ram,disksize=64M"]);
    // What is held back is written when the device ends.
    assert_eq!(Raw::connect(&serve, "f").write(0, 0, &[7; 4096]), 0);
    disk.hang("write hang");
    let mut client = Command::new("env");
    client.arg("--default-signal=INT").arg(env!("CARGO_BIN_EXE_freestone")).args([
        "remove",
        "f",
        "--control",
    ]);
    let client =
        client.arg(serve.path("control")).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let control = Control::of(&serve);
    let runs = || control.ok("jobs", &json!({ "name": "f" }))["jobs"][0]["verb"] == "remove";
    let start = Instant::now();
    while !(runs() && serve.json(&["list"])["devices"].as_array().unwrap().len() == 1) {
        assert!(start.elapsed() < ANSWER_MAX, "it is not removed");
        sleep(STEP);
    }
    let whole = "f: remove cannot be taken back; it goes on";
    assert_eq!(serve.refused(1, &["cancel", "f"]), whole);
    signal(&client, Signal::INT);
    let output = client.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(sentence(&String::from_utf8(output.stderr).unwrap()), whole);
    assert!(runs(), "it ended with its client");
    disk.heal();
    while runs() {
        assert!(start.elapsed() < ANSWER_MAX, "it does not end");
        sleep(STEP);
    }
    // In the background the name is free when it answers.
    fill(&serve, "r", 32 * MIB);
    let begun = serve.json(&["remove", "r", "--background"]);
    assert_eq!(begun["connections_ended"], 0);
    serve.text(&["create", "r=ram,disksize=1M"]);
    let ended = serve.json(&["wait", "--job", &begun["job"].to_string()]);
    assert_eq!((&ended["state"], &ended["done_bytes"]), (&json!("finished"), &ended["total_bytes"]));
    assert!(ended["total_bytes"].as_u64() >= Some(32 * MIB), "{ended}");
    assert_eq!(serve.text(&["remove", "r", "--background"]).lines().count(), 1);
}
