//! Long verbs on a slow disk: progress, cancellation by client, verb or server shutdown, and
//! background jobs.

use std::io::{BufRead as _, BufReader};
use std::process::Child;
use std::thread::sleep;

use crate::harness::prelude::*;
use crate::stalls::Control;
use crate::stalls::disks::Disk;

const STEP: Duration = Duration::from_millis(5);

/// A verb and a disk. The disk can be made so slow that the verb does not finish by itself.
struct Case<'a> {
    serve: &'a Serve,
    /// Makes the disk slow (true) or fast again (false).
    slow: &'a dyn Fn(bool),
    args: &'a [&'a str],
    /// Name of the verb as the job list shows it. `name` is the device.
    verb: &'a str,
    name: &'a str,
    /// End of the error message after a cancellation.
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

    /// Waits until the job of this case has made progress. Returns the job from the job list.
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

    fn running_count(&self) -> usize {
        self.jobs().iter().filter(|job| job["state"] == "running").count()
    }

    fn wait_for_end(&self) {
        wait_until("the verb goes on", || self.running_count() == 0);
    }

    /// Starts a client for the verb, with SIGINT at its default action as on a terminal.
    fn client(&self, more: &[&str]) -> Child {
        let mut client = Command::new("env");
        client.arg("--default-signal=INT").arg(program());
        client.args(self.args).args(more).arg("--control").arg(self.serve.path("control"));
        client.current_dir(self.serve.dir.path()).stdin(Stdio::null());
        client.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Starts a client and interrupts it after the first progress. Returns its exit status, its
    /// last message and the progress reports.
    fn interrupt(&self) -> (Option<i32>, String, Vec<Value>) {
        let mut client = self.client(&["--progress", "json"]);
        let mut lines = BufReader::new(client.stderr.take().unwrap()).lines().map(Result::unwrap);
        let mut progress = Vec::new();
        while progress.last().is_none_or(|line: &Value| line["done_bytes"] == 0) {
            let line = lines.next().expect("it ended by itself");
            progress.push(serde_json::from_str::<Value>(&line).unwrap()["progress"].take());
        }
        signal(&client, Signal::INT);
        let last = lines.last().unwrap();
        assert_eq!(BufReader::new(client.stdout.take().unwrap()).lines().count(), 0);
        (client.wait().unwrap().code(), sentence(&last), progress)
    }

    fn cancelled_message(&self, why: &str) -> String {
        format!("{}: {}: cancelled: {why}; ", self.name, self.verb)
    }

    /// Cancels the verb in every possible way. After each, `check` verifies the state of the
    /// device.
    fn check_cancellation(&self, check: &dyn Fn()) {
        (self.slow)(true);
        // Ctrl-C (SIGINT) in the client cancels the verb.
        let (code, message, progress) = self.interrupt();
        assert_eq!(code, Some(130), "{message}");
        assert!(message.starts_with(&self.cancelled_message("requested by a client")), "{message}");
        assert!(message.ends_with(self.after), "{message}");
        let last = progress.last().unwrap();
        assert_eq!((&last["verb"], &last["name"]), (&json!(self.verb), &json!(self.name)));
        assert!(last["total_bytes"].as_u64() >= last["done_bytes"].as_u64(), "{last}");
        self.wait_for_end();
        check();
        // The end of the client cancels the verb.
        let mut client = self.client(&[]);
        let job = self.running();
        assert_eq!((&job["background"], job.get("result")), (&json!(false), None));
        client.kill().unwrap();
        client.wait().unwrap();
        self.wait_for_end();
        check();
        // The verb `cancel` cancels a background job.
        let job = self.background();
        self.running();
        let out = self.serve.json(&["cancel", "--job", &job]);
        assert_eq!(out["jobs"][0]["job"].to_string(), job);
        let message = self.serve.refused(1, &["wait", "--job", &job]);
        assert!(message.starts_with(&self.cancelled_message("requested by a client")), "{message}");
        let last = self.jobs().pop().unwrap();
        assert_eq!(
            (&last["state"], &last["error"]["data"]["errno"]),
            (&json!("cancelled"), &json!("ECANCELED"))
        );
        let gone = self.serve.refused(1, &["cancel", "--job", &job]);
        assert_eq!(gone, format!("job {job}: no such job, or one that ended long ago"));
        check();
        (self.slow)(false);
    }

    /// Starts the verb as a background job. Returns its job number.
    fn background(&self) -> String {
        let mut args = self.args.to_vec();
        args.push("--background");
        let begun = self.serve.json(&args);
        assert_eq!((&begun["verb"], &begun["name"]), (&json!(self.verb), &json!(self.name)));
        begun["job"].to_string()
    }

    /// Checks that a background job finishes and stays in the job list. Returns the result of the
    /// job.
    fn check_background(&self) -> Value {
        (self.slow)(true);
        let job = self.background();
        self.running();
        let (code, _, message) = finish(
            freestone(self.serve.dir.path())
                .args(["wait", "--job", &job, "--timeout", "1ms", "--control"])
                .arg(self.serve.path("control")),
        );
        assert_eq!((code, sentence(&message)), (1, format!("job {job}: has not ended; waited 1ms for it")));
        (self.slow)(false);
        let ended = self.serve.json(&["wait", "--job", &job]);
        assert_eq!((&ended["state"], &ended["background"]), (&json!("finished"), &json!(true)), "{ended}");
        assert_eq!(self.serve.text(&["wait", "--job", &job]), "");
        let line = self.serve.text(&["jobs", self.name]);
        assert!(line.contains(&format!("job {job}: {}: {}: finished", self.name, self.verb)), "{line}");
        ended["result"].clone()
    }
}

/// Fills `bytes` bytes of an export with incompressible noise.
pub(super) fn fill(serve: &Serve, name: &str, bytes: u64) {
    copy_in(serve, name, &noise(7, bytes));
}

fn number(serve: &Serve, name: &str, section: &str, key: &str) -> u64 {
    serve.json(&["stat", name])[section][key].as_u64().unwrap()
}

pub(super) const SLOW_WRITES: &str = "write delay=200ms";
pub(super) const SLOW_READS: &str = "read delay=100ms";

fn slow_switch(disk: &Disk, rules: &str) -> impl Fn(bool) {
    move |slow| if slow { disk.hang(rules) } else { disk.heal() }
}

/// Starts a server with the RAM disk `r` full of noise, and with a backing device on a disk that
/// can be made slow.
pub(super) fn serve_with_slow_backing(disk: &Disk, bytes: u64) -> Serve {
    let ram = format!("r=ram,disksize=64M,backing_dev={},compressed_writeback=yes", text(&disk.path()));
    let serve = Serve::start(&[ram]);
    fill(&serve, "r", bytes);
    // Small batches, so that the verb can be cancelled between many writes.
    serve.text(&["set", "r", "writeback_batch_size=32"]);
    serve
}

#[test]
fn cancelled_writeback_keeps_written_pages() {
    let disk = Disk::of("64M");
    let serve = serve_with_slow_backing(&disk, 32 * MIB);
    let pages = || number(&serve, "r", "backing", "spilled_pages");
    let args = ["writeback", "r", "huge"];
    let case = Case {
        serve: &serve,
        slow: &slow_switch(&disk, "write delay=100ms"),
        args: &args,
        verb: "writeback",
        name: "r",
        after: " blocks",
    };
    let before = std::cell::Cell::new(0);
    case.check_cancellation(&|| {
        assert!(before.replace(pages()) < pages(), "nothing was written");
        assert!(pages() < 32 * 256, "all was written");
    });
    let result = case.check_background();
    assert_eq!(pages(), 32 * 256);
    assert_eq!(result["pages"].as_u64().unwrap() + before.get(), 32 * 256);
    // `list` and `stat` show the verb that is running on the device.
    serve.text(&["reset", "r"]);
    fill(&serve, "r", 32 * MIB);
    disk.hang(SLOW_WRITES);
    let job = case.background();
    case.running();
    assert_eq!(serve.json(&["list", "r"])["devices"][0]["progress"]["job"].to_string(), job);
    assert!(serve.text(&["list"]).contains("ram (writeback "), "{}", serve.text(&["list"]));
    assert_eq!(serve.json(&["stat", "r"])["progress"]["verb"], "writeback");
    // A second client that waits for the same verb can end without cancelling it.
    let mut second = case.client(&["--progress", "bar"]);
    wait_until("it does not wait", || case.running_count() >= 2);
    second.kill().unwrap();
    second.wait().unwrap();
    wait_until("it waits still", || case.running_count() <= 1);
    assert_eq!(case.running()["job"].to_string(), job);
    // Server shutdown also cancels the background job.
    serve.end();
}

#[test]
fn cancelled_save_keeps_the_old_file() {
    let disk = Disk::of("64M");
    let serve = serve_with_slow_backing(&disk, 32 * MIB);
    serve.text(&["writeback", "r", "huge"]);
    fs::write(serve.path("r.saved"), "").unwrap();
    let before = names_in(serve.dir.path());
    let after = format!("; {} is unchanged", serve.path("r.saved").display());
    let args = ["save", "r", "r.saved"];
    let case = Case {
        serve: &serve,
        slow: &slow_switch(&disk, SLOW_READS),
        args: &args,
        verb: "save",
        name: "r",
        after: &after,
    };
    case.check_cancellation(&|| {
        assert_eq!(fs::metadata(serve.path("r.saved")).unwrap().len(), 0);
        assert_eq!(names_in(serve.dir.path()), before);
    });
    assert_eq!(case.check_background()["pages"], 32 * 256);
    assert!(fs::metadata(serve.path("r.saved")).unwrap().len() > 32 * MIB);
}

#[test]
fn cancelled_restore_leaves_no_device() {
    let disk = Disk::of("64M");
    let serve = Serve::start(&["r=ram,disksize=64M"]);
    fill(&serve, "r", 32 * MIB);
    serve.text(&["save", "r", "r.saved"]);
    let file = serve.path("r.saved");
    let backing = format!("backing_dev={}", text(&disk.path()));
    let args = ["restore", "r.saved", "back", "mem_limit=4M", &backing];
    let case = Case {
        serve: &serve,
        slow: &slow_switch(&disk, SLOW_WRITES),
        args: &args,
        verb: "restore",
        name: text(&file),
        after: "; no device was created",
    };
    case.check_cancellation(&|| assert_eq!(serve.json(&["list"])["devices"].as_array().unwrap().len(), 1));
    assert_eq!(case.check_background()["devices"][0]["name"], "back");
    qemu_io(&uri(&serve, "r"), &["read 0 4k"]);
    serve.text(&["publish", "back", "--nbd", &format!("unix:{}", text(&serve.path("nbd")))]);
    ok(tool("qemu-img").args(["compare", "-f", "raw", "-F", "raw", &uri(&serve, "r"), &uri(&serve, "back")]));
}

#[test]
fn cancelled_delta_save_is_undone_apply_is_partial() {
    let disk = Disk::of("64M");
    let dir = tempfile::tempdir().unwrap();
    fs::File::create(dir.path().join("base.img")).unwrap().set_len(64 * MIB).unwrap();
    let base = format!(
        "base=file,path=base.img,readonly=yes,publish=no,mem_limit=4M,backing_dev={}",
        text(&disk.path())
    );
    let serve = Serve::start_in(dir, &[base.as_str(), "f=fork,base=base", "g=fork,base=base"], true);
    fill(&serve, "f", 16 * MIB);
    let before = names_in(serve.dir.path());
    let file = serve.path("f.qcow2");
    let after = format!("; {} is unchanged", file.display());
    let args = ["delta", "save", "f", "f.qcow2"];
    let case = Case {
        serve: &serve,
        slow: &slow_switch(&disk, SLOW_READS),
        args: &args,
        verb: "delta save",
        name: "f",
        after: &after,
    };
    case.check_cancellation(&|| assert_eq!(names_in(serve.dir.path()), before));
    assert_eq!(case.check_background()["bytes"], 16 * MIB);
    let args = ["delta", "apply", "g", "f.qcow2", "--force"];
    let case = Case {
        serve: &serve,
        slow: &slow_switch(&disk, SLOW_WRITES),
        args: &args,
        verb: "delta apply",
        name: "g",
        after: "; the applied part stays; `freestone rewind g` removes it",
    };
    case.check_cancellation(&|| {
        assert!(number(&serve, "g", "over_stat", "own_bytes") < 16 * MIB);
        serve.text(&["rewind", "g"]);
    });
    assert_eq!(case.check_background()["data_bytes"], 16 * MIB);
    ok(tool("qemu-img").args(["compare", "-f", "raw", "-F", "raw", &uri(&serve, "f"), &uri(&serve, "g")]));
}

#[test]
fn cancelled_merge_resumes_where_it_stopped() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("disk.img"), vec![1; 2 << 20]).unwrap();
    fs::File::create(dir.path().join("disk.cow")).unwrap().set_len(8 * MIB).unwrap();
    let devices = [
        "disk=file,path=disk.img",
        "c=file,path=disk.cow,publish=no,faults=none",
        "d1=snapshot,origin=disk,cow=c,chunk_size=4K",
    ];
    let serve = Serve::start_in(dir, &devices, true);
    // The delay applies to each merged chunk, because the merge reads every chunk from this COW
    // device.
    let slow = |slow| {
        serve.text(&["set", "c", if slow { "faults=read delay=100ms" } else { "faults=none" }]);
    };
    // Unwritten chunks lie between the written ones, so the merge copies each chunk separately.
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
        after: "; what is merged stays; repeat the command to continue",
    };
    let before = std::cell::Cell::new(0);
    case.check_cancellation(&|| {
        assert!(before.replace(merged()) < merged(), "nothing was merged");
        assert!(merged() < 200, "all was merged");
        qemu_io(&uri(&serve, "disk"), &["read -P 2 0 4k", "read -P 1 4k 4k", "read -P 2 1592k 4k"]);
    });
    // A second client that waits for the merge can end without cancelling the merge.
    slow(true);
    let job = case.background();
    case.running();
    let mut beside = case.client(&[]);
    wait_until("it does not wait", || case.running_count() >= 2);
    beside.kill().unwrap();
    beside.wait().unwrap();
    wait_until("it waits still", || case.running_count() <= 1);
    assert_eq!(serve.json(&["stat", "d1"])["merge"], "running");
    slow(false);
    assert_eq!(serve.json(&["wait", "--job", &job])["result"]["merge"], "finished");
    assert_eq!(merged(), 200);
}

#[test]
fn cancelled_compaction_keeps_moved_pages() {
    let disk = Disk::of("64M");
    let ram = format!("r=ram,disksize=64M,backing_dev={}", text(&disk.path()));
    let serve = Serve::start(&[ram]);
    // Each page compresses to less than half its size, so a run of blocks on the backing device
    // holds many pages.
    let mut data = noise(5, 32 * MIB);
    data.chunks_mut(4096).for_each(|page| page[1500..].fill(7));
    let image = serve.path("noise");
    fs::write(&image, data).unwrap();
    let fill = || {
        ok(tool("nbdcopy").arg(&image).arg(uri(&serve, "r")));
        serve.text(&["idle", "r", "all"]);
        serve.text(&["writeback", "r", "idle"]);
        // Discards make holes all over the backing device, so that `compact` has to move pages.
        let holes: Vec<_> = (0..256).map(|at| format!("discard -q {}k 112k", at * 128)).collect();
        qemu_io(&uri(&serve, "r"), &holes);
    };
    fill();
    let used = || number(&serve, "r", "backing", "used_bytes");
    let case = Case {
        serve: &serve,
        slow: &slow_switch(&disk, "all delay=40ms"),
        args: &["compact", "r"],
        verb: "compact",
        name: "r",
        after: " pages were freed before",
    };
    let before = used();
    case.check_cancellation(&|| qemu_io(&uri(&serve, "r"), &["read -q 112k 16k"]));
    case.check_background();
    assert!(used() < before, "{} of {before}", used());
}

#[test]
fn cancelled_recompression_keeps_smaller_pages() {
    let serve = Serve::start(&[
        "r=ram,disksize=128M,recomp_algorithm=algo=zstd priority=1,algorithm_params=priority=1 level=22",
    ]);
    // zstd at its highest level compresses this text of eight letters slowly.
    let data: Vec<u8> = noise(3, 16 * MIB).into_iter().map(|byte| b'a' + byte % 8).collect();
    let image = serve.path("letters");
    fs::write(&image, data).unwrap();
    ok(tool("nbdcopy").arg(&image).arg(uri(&serve, "r")));
    let size = || number(&serve, "r", "mm_stat", "compr_data_size");
    let before = std::cell::Cell::new(size());
    let args = ["recompress", "r"];
    let case =
        Case { serve: &serve, slow: &|_| (), args: &args, verb: "recompress", name: "r", after: " saved" };
    case.check_cancellation(&|| assert!(before.replace(size()) > size(), "nothing became smaller"));
    let result = case.check_background();
    assert!(result["shrunk"].as_u64() > Some(0), "{result}");
}

#[test]
fn remove_continues_without_its_client() {
    let disk = Disk::of("8M");
    let file = format!("f=file,path={},power_cut=yes", text(&disk.path()));
    let serve = Serve::start(&[file.as_str(), "r=ram,disksize=64M"]);
    // The removal of the device writes its unflushed data, which hangs.
    assert_eq!(Raw::connect(&serve, "f").write(0, 0, &[7; 4096]), 0);
    disk.hang("write hang");
    let mut client = Command::new("env");
    client.arg("--default-signal=INT").arg(program()).args(["remove", "f", "--control"]);
    let client =
        client.arg(serve.path("control")).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let control = Control::of(&serve);
    let runs = || control.ok("jobs", &json!({ "name": "f" }))["jobs"][0]["verb"] == "remove";
    let is_removed = || serve.json(&["list"])["devices"].as_array().unwrap().len() == 1;
    wait_until("it is not removed", || runs() && is_removed());
    let whole = "f: remove cannot be cancelled; it continues";
    assert_eq!(serve.refused(1, &["cancel", "f"]), whole);
    signal(&client, Signal::INT);
    let output = client.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(sentence(&String::from_utf8(output.stderr).unwrap()), whole);
    assert!(runs(), "it ended with its client");
    disk.heal();
    wait_until("it does not end", || !runs());
    // After `remove --background` returns, the device name is free at once.
    fill(&serve, "r", 32 * MIB);
    let begun = serve.json(&["remove", "r", "--background"]);
    assert_eq!(begun["connections_ended"], 0);
    serve.text(&["create", "r=ram,disksize=1M"]);
    let ended = serve.json(&["wait", "--job", &begun["job"].to_string()]);
    assert_eq!((&ended["state"], &ended["done_bytes"]), (&json!("finished"), &ended["total_bytes"]));
    assert!(ended["total_bytes"].as_u64() >= Some(32 * MIB), "{ended}");
    assert_eq!(serve.text(&["remove", "r", "--background"]).lines().count(), 1);
}
