//! `freestone mount` and `umount`, and `reset` and `rewind` of mounted devices, through nbdfuse and a loop device. The
//! kernel lab tests mounts that need kernel drivers (`lab/ublk-use.sh`, `lab/nbd-kernel.sh`).

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::thread::sleep;

use freestone_testkit::tools::skip_test;
use rustix::process::{Pid, kill_process, kill_process_group};

use crate::harness::prelude::*;

const STEP: Duration = Duration::from_millis(5);
const SOON: Duration = Duration::from_secs(20);
const IMAGE_BYTES: u64 = 16 << 20;

/// A server with the fork `job` of an image, whose file system contains the file `base`. Drop unmounts everything.
struct Machine {
    serve: Serve,
    mnt: PathBuf,
}

impl Machine {
    fn new() -> Self {
        if !rustix::process::geteuid().is_root() {
            skip_test("mounting needs root");
        }
        find("nbdfuse");
        let dir = tempfile::tempdir().unwrap();
        let (tree, image, mnt) = (dir.path().join("tree"), dir.path().join("image"), dir.path().join("mnt"));
        fs::create_dir(&tree).unwrap();
        fs::create_dir(&mnt).unwrap();
        fs::write(tree.join("base"), "base").unwrap();
        File::create(&image).unwrap().set_len(IMAGE_BYTES).unwrap();
        ok(tool("mke2fs").args(["-q", "-t", "ext4", "-F", "-d"]).arg(&tree).arg(&image));
        let serve =
            Serve::start_in(dir, &["golden=file,path=image,readonly=yes", "empty=ram,disksize=1M"], true);
        serve.text(&["fork", "golden", "job"]);
        Self { serve, mnt }
    }

    fn mount(&self, args: &[&str]) {
        self.serve.text(&[&["mount", "job", "mnt", "--via", "nbdfuse"], args].concat());
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = freestone(self.serve.dir.path());
        command.args(args).arg("--control").arg(self.serve.path("control"));
        command
    }

    fn states(&self) -> Vec<(String, String)> {
        let rows = self.serve.json(&["mount"])["mounts"].as_array().unwrap().clone();
        let text = |row: &serde_json::Value, key: &str| row[key].as_str().unwrap().to_owned();
        rows.iter().map(|row| (text(row, "name"), text(row, "state"))).collect()
    }

    fn check_state(&self, state: &str) {
        assert_eq!(self.states(), [("job".to_owned(), state.to_owned())]);
    }

    fn has(&self, file: &str) -> bool {
        self.mnt.join(file).exists()
    }

    /// Returns the process ID of the nbdfuse that serves a mount of this test, or None.
    fn nbdfuse(&self) -> Option<Pid> {
        let dir = self.serve.dir.path().to_str().unwrap().to_owned();
        let mut processes = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
        let found = processes.find(|process| {
            let line = fs::read_to_string(process.join("cmdline")).unwrap_or_default();
            line.contains("nbdfuse\0") && line.contains(&dir)
        })?;
        Pid::from_raw(found.file_name()?.to_str()?.parse().ok()?)
    }

    /// Checks that no process, loop device, mount or mount record of this test is left.
    fn check_nothing_left(&self) {
        let dir = self.serve.dir.path();
        let left = |text: &str| text.lines().any(|line| line.contains(dir.to_str().unwrap()));
        assert!(!left(&fs::read_to_string("/proc/self/mountinfo").unwrap()));
        assert!(!left(&ok(tool("losetup").arg("-a"))));
        assert_eq!(fs::read_dir(dir.join("mounts")).unwrap().count(), 0);
        wait_until("nbdfuse has ended", || self.nbdfuse().is_none());
        assert!(!self.has("base"));
    }

    /// Runs `freestone mount` with `program` replaced by a script that waits, and kills `freestone mount` meanwhile.
    /// Returns the process of the script.
    fn kill_mount_in(&self, program: &str) -> Orphan {
        let bin = self.serve.path("bin");
        fs::create_dir(&bin).unwrap();
        let (script, reached) = (bin.join(program), self.serve.path("reached"));
        let text = format!(
            "#!/bin/sh\necho $$ >{0}.new; mv {0}.new {0}\nwhile :; do sleep 0.01; done\n",
            reached.display()
        );
        fs::write(&script, text).unwrap();
        fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        let mut mount = self.command(&["mount", "job", "mnt", "--via", "nbdfuse"]);
        let mut mount = KillOnDrop(mount.env("PATH", path).spawn().unwrap());
        wait_until("the program is run", || reached.exists());
        mount.0.kill().unwrap();
        mount.0.wait().unwrap();
        fs::remove_file(script).unwrap();
        let pid = fs::read_to_string(reached).unwrap().trim().parse().unwrap();
        Orphan(Pid::from_raw(pid).unwrap())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Mounts remain only if the test failed, so an error is ignored.
        let _ = self.command(&["umount", "*", "--force"]).output();
    }
}

/// A process that is not a child of the tests and is killed when dropped.
struct Orphan(Pid);

impl Drop for Orphan {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}

#[test]
fn mounted_fork_reset_shows_base_again() {
    let machine = Machine::new();
    let mnt = &machine.mnt;
    machine.mount(&["-o", "noatime"]);
    machine.check_state("mounted");
    assert_eq!(fs::read_to_string(mnt.join("base")).unwrap(), "base");
    for verb in ["reset", "rewind"] {
        fs::write(mnt.join("own"), verb).unwrap();
        fs::remove_file(mnt.join("base")).unwrap();
        machine.serve.text(&[verb, "job"]);
        assert!(machine.has("base") && !machine.has("own"), "{verb}");
    }
    let options = fs::read_to_string("/proc/self/mounts").unwrap();
    let line = options.lines().find(|line| line.contains(mnt.to_str().unwrap())).unwrap();
    assert!(line.contains("noatime"), "{line}");

    // A pattern selects the mounted device for a rewind to a snapshot.
    fs::write(mnt.join("own"), "in the snapshot").unwrap();
    ok(tool("sync").arg("-f").arg(mnt));
    machine.serve.text(&["snapshot", "job", "job-1"]);
    fs::remove_file(mnt.join("own")).unwrap();
    machine.serve.text(&["rewind", "jo?", "--to", "job-1"]);
    assert_eq!(fs::read_to_string(mnt.join("own")).unwrap(), "in the snapshot");
    machine.serve.text(&["umount", "job"]);
    machine.check_nothing_left();
    let exports = machine.serve.json(&["list", "job"])["devices"][0]["exports"].clone();
    assert_eq!(exports, serde_json::json!([]));
}

#[test]
fn mounted_fork_open_file_reset_names_the_process() {
    let machine = Machine::new();
    machine.mount(&[]);
    let own = machine.mnt.join("own");
    let open = File::create(&own).unwrap();
    for verb in ["reset", "umount"] {
        let why = machine.serve.refused(1, &[verb, "job"]);
        let in_use = format!("job: {} is in use by ", machine.mnt.display());
        assert!(why.starts_with(&in_use), "{why}");
        let holder = format!("(pid {}, has {} open)", std::process::id(), own.display());
        assert!(why.contains(&holder), "{why}");
        assert!(machine.has("own"));
    }
    machine.check_state("mounted");
    drop(open);
    let mut holder = KillOnDrop(tool("sleep").arg("100").current_dir(&machine.mnt).spawn().unwrap());
    let why = machine.serve.refused(1, &["reset", "job"]);
    assert!(why.contains("its working directory is"), "{why}");
    holder.0.kill().unwrap();
    holder.0.wait().unwrap();
    // `tool` runs sleep under timeout(1), which makes itself and its child a process group. The child must end too.
    let group = Pid::from_child(&holder.0);
    let _ = kill_process_group(group, Signal::KILL);
    wait_until("it can be reset", || machine.serve.run_verb(&["reset", "job"]).0 == 0);
    assert!(!machine.has("own"));
}

#[test]
fn mounted_fork_second_client_reset_is_refused() {
    let machine = Machine::new();
    machine.serve.text(&["publish", "job", "--nbd", "unix:other"]);
    machine.mount(&[]);
    fs::write(machine.mnt.join("own"), "own").unwrap();
    let mut other = UnixStream::connect(machine.serve.path("other")).unwrap();
    connect_nbd(&mut other, "job");
    let why = machine.serve.refused(1, &["reset", "job"]);
    let client = format!("(pid {}) is open", std::process::id());
    assert!(why.starts_with("job: 1 connection of ") && why.contains(&client), "{why}");
    assert_eq!(fs::read_to_string(machine.mnt.join("own")).unwrap(), "own");
    machine.check_state("mounted");
    machine.serve.text(&["reset", "job", "--force"]);
    assert!(!machine.has("own") && machine.has("base"));
    let why = refused(machine.serve.dir.path(), 1, &["umount", "job", "--control", "elsewhere"]);
    assert!(why.contains("no such mount"), "{why}");
    machine.serve.text(&["umount", "mnt"]);
    // A connected client prevents a read-write mount, because both would write to the file system.
    let why = machine.serve.refused(1, &["mount", "job", "mnt"]);
    assert!(why.starts_with("job: mount: clients are connected (1): "), "{why}");
    // The mount used the existing export of the device, and left it published.
    let exports = machine.serve.json(&["list", "job"])["devices"][0]["exports"].clone();
    assert_eq!(exports.as_array().unwrap().len(), 1, "{exports}");
    machine.check_nothing_left();
}

#[test]
fn killed_server_umount_leaves_nothing() {
    let machine = Machine::new();
    machine.mount(&[]);
    fs::write(machine.mnt.join("own"), "own").unwrap();
    machine.serve.signal(Signal::KILL);
    wait_until("the server is dead", || UnixStream::connect(machine.serve.path("control")).is_err());
    machine.check_state("dead");
    let why = machine.serve.refused(1, &["reset", "job"]);
    assert!(why.starts_with("no server at "), "{why}");
    assert!(machine.has("base"));
    machine.serve.text(&["umount", "job"]);
    machine.check_nothing_left();
}

#[test]
fn killed_nbdfuse_umount_leaves_nothing() {
    let machine = Machine::new();
    machine.mount(&[]);
    fs::write(machine.mnt.join("own"), "own").unwrap();
    let nbdfuse = machine.nbdfuse().expect("nbdfuse runs");
    kill_process(nbdfuse, Signal::KILL).unwrap();
    wait_until("nbdfuse has ended", || machine.nbdfuse().is_none());
    machine.serve.text(&["umount", "job"]);
    machine.check_nothing_left();
    machine.mount(&[]);
    assert!(machine.has("base"));
}

#[test]
fn file_unmounted_by_hand_umount_writes_all() {
    let machine = Machine::new();
    machine.mount(&[]);
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let records = machine.serve.path("mounts");
    let mut dirs = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    let fuse = dirs.find(|dir| dir.starts_with(records.to_str().unwrap())).unwrap();
    // The loop device keeps the file of nbdfuse open, so the ext4 file system stays mounted.
    ok(tool("umount").arg("-l").arg(fuse));
    fs::write(machine.mnt.join("own"), "own").unwrap();
    machine.serve.text(&["umount", "job"]);
    machine.check_nothing_left();
    machine.mount(&[]);
    assert!(machine.has("own"));
}

#[test]
fn killed_mount_umount_leaves_nothing() {
    for (program, state) in [("mount", "nbdfuse runs"), ("nbdfuse", "nbdfuse begins")] {
        let machine = Machine::new();
        let waiting = machine.kill_mount_in(program);
        machine.check_state("stale");
        if program == "mount" {
            // `umount` waits for the lock of the mount, which the program started by the killed `mount` still holds.
            let locked = machine.command(&["umount", "job"]).spawn().unwrap();
            let mut locked = KillOnDrop(locked);
            sleep(STEP * 20);
            assert_eq!(locked.0.try_wait().unwrap(), None, "{state}");
            drop(waiting);
            assert!(locked.0.wait().unwrap().success(), "{state}");
        } else {
            machine.serve.text(&["umount", "job"]);
        }
        machine.check_nothing_left();
        machine.mount(&[]);
        assert!(machine.has("base"));
    }
}

#[test]
fn mount_undone_by_hand_is_stale_until_umount() {
    let machine = Machine::new();
    machine.mount(&[]);
    ok(tool("umount").arg(&machine.mnt));
    machine.check_state("stale");
    fs::remove_dir(&machine.mnt).unwrap();
    machine.serve.text(&["umount", machine.mnt.to_str().unwrap()]);
    machine.check_nothing_left();
    let why = machine.serve.refused(1, &["umount", "job"]);
    assert_eq!(why, "job: umount: no such mount; `freestone mount` lists those that there are");
}

#[test]
fn mount_second_of_device_or_directory_is_refused() {
    let machine = Machine::new();
    machine.mount(&["-o", "ro"]);
    machine.serve.text(&["fork", "golden", "second"]);
    fs::create_dir(machine.serve.path("second")).unwrap();
    for (name, dir) in [("job", "second"), ("second", "mnt")] {
        let why = machine.serve.refused(1, &["mount", name, dir, "-o", "ro"]);
        let has = format!("{name}: mount: job has a mount at {} already", machine.mnt.display());
        assert!(why.starts_with(&has), "{why}");
    }
    // Two devices of one server are mounted, each listed under its name.
    machine.serve.text(&["mount", "second", "second"]);
    assert_eq!(machine.states().len(), 2);
    machine.serve.text(&["umount", "*"]);
    machine.check_nothing_left();
}

#[test]
fn mount_failed_step_leaves_nothing() {
    let machine = Machine::new();
    let why = machine.serve.refused(1, &["mount", "empty", "mnt"]);
    assert!(why.starts_with("empty: mount ") && why.contains("wrong fs type"), "{why}");
    machine.check_nothing_left();
    for (name, dir, why) in [
        ("none", "mnt", "none: mount: there is no such device"),
        ("job", "absent", "job: mount: absent: create the directory first"),
        ("job", "image", "job: mount: image: is not a directory"),
    ] {
        let message = machine.serve.refused(1, &["mount", name, dir]);
        assert!(message.starts_with(why), "{message}");
    }
    let mut nobody = freestone(machine.serve.dir.path());
    fs::set_permissions(machine.serve.dir.path(), Permissions::from_mode(0o755)).unwrap();
    let copy = machine.serve.path("program");
    ok(tool("cp").arg(nobody.get_program()).arg(&copy));
    nobody = Command::new(copy);
    let (status, _, message) = finish(nobody.args(["mount", "job", "mnt"]).current_dir("/").uid(NOBODY));
    assert_eq!(status, 1);
    assert!(sentence(&message).starts_with("mount: only root can mount"), "{message}");
}

#[test]
#[ignore = "slow lane"]
fn hung_server_umount_ends_in_bounded_time() {
    let machine = Machine::new();
    machine.mount(&[]);
    fs::write(machine.mnt.join("own"), "own").unwrap();
    machine.serve.signal(Signal::STOP);
    machine.check_state("dead");
    let why = machine.serve.refused(1, &["umount", "job"]);
    assert!(why.contains("stays mounted") && why.contains("--force"), "{why}");
    assert!(Path::new(&machine.mnt.join("base")).exists());
    let begin = Instant::now();
    let (status, _, message) = machine.serve.run_verb(&["umount", "job", "--force"]);
    assert_eq!((status, message.as_str()), (0, ""));
    assert!(begin.elapsed() < SOON);
    machine.check_nothing_left();
    machine.serve.signal(Signal::CONT);
}
