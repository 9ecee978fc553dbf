//! `freestone explore`: recording, states as exports, files and mounts, failures and their repetition, results.

use std::env;

use freestone_testkit::tools::{may_use_fuse, skip_test};

use crate::harness::prelude::*;

/// Header and data with one flush for both: the header may become durable before its data.
const UNORDERED: &str = r#"qemu-io -t writeback -f raw -c "write -P 1 0 4k" -c flush \
    -c "write -P 2 64k 4k" -c "write -P 2 0 4k" -c flush "$uri""#;
/// The same with a flush between data and header.
const ORDERED: &str = r#"qemu-io -t writeback -f raw -c "write -P 1 0 4k" -c "write -P 2 64k 4k" -c flush \
    -c "write -P 2 0 4k" -c flush "$uri""#;
/// The header 2 needs its data. qemu-io prints a read that does not match its pattern.
const CHECK: &str = r#"qemu-io -r -f raw -c "read -P 2 0 4k" "$uri" | grep -q failed && exit
    qemu-io -r -f raw -c "read -P 2 64k 4k" "$uri" | grep failed && exit 1; true"#;
const SOON: Duration = Duration::from_secs(100);

/// Returns `freestone explore` with these arguments. The program is in the PATH of workload and check.
fn explore(dir: &Path, args: &[&str]) -> Command {
    let mut command = freestone(dir);
    let dirs = [Path::new(program()).parent().unwrap().to_owned()];
    let path = env::var_os("PATH").unwrap_or_default();
    let all = dirs.into_iter().chain(env::split_paths(&path)).chain(["/usr/sbin".into(), "/sbin".into()]);
    command.env("PATH", env::join_paths(all).unwrap()).arg("explore").args(args);
    command
}

/// Runs an exploration with `--json`. Returns the result, whose status must be `status`.
fn result(dir: &Path, status: i32, args: &[&str]) -> Value {
    let (code, out, err) = finish(explore(dir, args).arg("--json"));
    assert_eq!(code, status, "{out}\n{err}");
    serde_json::from_str(&out).unwrap()
}

/// Records the workload, and returns the number of entries of its log.
fn record(dir: &Path) -> u64 {
    let args = ["--size", "1M", "--log", "run.log", "--run", UNORDERED, "--check", "true"];
    result(dir, 0, &args)["entries"].as_u64().unwrap()
}

#[test]
fn lost_write_is_found_reported_and_repeated() {
    for tool in ["qemu-io", "python3"] {
        find(tool);
    }
    let dir = tempdir().unwrap();
    let args = ["--size", "1M", "--log", "run.log", "--run", UNORDERED, "--check", CHECK];
    let more = ["--keep", "kept", "--junit", "result.xml"];
    let found = result(dir.path(), 1, &[&args[..], &more].concat());
    assert_eq!((&found["end"], &found["flaky"]), (&json!("complete"), &json!([])));
    let failures = found["failures"].as_array().unwrap();
    let [failure] = &failures[..] else { panic!("{found:#}") };
    assert_eq!(
        (&failure["state"], &failure["minimal"], &failure["end"]),
        (&json!("4-3"), &json!(true), &json!("exit status 1"))
    );
    let lost = json!([{ "entry": 3, "offset": 65536, "bytes": 4096, "whole": true, "discard": false, "mark": null }]);
    assert_eq!(failure["lost"], lost);
    assert!(failure["output"].as_str().unwrap().contains("failed"), "{failure}");
    let kept = fs::read(failure["kept"].as_str().map(|path| dir.path().join(path)).unwrap()).unwrap();
    assert_eq!((kept.len() as u64, kept[0], kept[65536]), (MIB, 2, 0));
    let xml = fs::read_to_string(dir.path().join("result.xml")).unwrap();
    assert!(
        xml.contains("<failure message=\"exit status 1\">") && xml.contains("tests=\"2\" failures=\"1\""),
        "{xml}"
    );
    let parse = "import sys, xml.etree.ElementTree; xml.etree.ElementTree.parse(sys.argv[1])";
    ok(tool("python3").args(["-c", parse]).arg(dir.path().join("result.xml")));
    // The command of the report finds the failure again.
    let repeat = failure["repeat"].as_str().unwrap().strip_prefix("freestone explore ").unwrap();
    let words = shlex::split(repeat).unwrap();
    let (code, out, err) =
        finish(&mut explore(dir.path(), &words.iter().map(String::as_str).collect::<Vec<_>>()));
    assert_eq!(code, 1, "{out}\n{err}");
    assert!(out.ends_with("state 4-3: failed, exit status 1\n"), "{out}");
    let text = ["explore", "--log", "run.log", "--size", "1M", "--check", CHECK];
    let (code, out, _) = finish(freestone(dir.path()).args(text));
    assert!(code == 1 && out.contains("\n  lost    entry 3: 4096 bytes at 65536\n"), "{out}");
    let found = result(dir.path(), 0, &["--size", "1M", "--run", ORDERED, "--check", CHECK]);
    assert_eq!((&found["failures"], &found["end"]), (&json!([]), &json!("complete")));
}

/// A kept state is an overlay on the base, for qemu and for a server.
#[test]
fn kept_state_is_an_overlay_that_reopens() {
    for tool in ["qemu-io", "qemu-img"] {
        find(tool);
    }
    for format in ["raw", "qcow2"] {
        let dir = tempdir().unwrap();
        // A comma in a path is doubled in a specification.
        fs::create_dir(dir.path().join("a,b")).unwrap();
        let (base, kept) = (dir.path().join("a,b/base.img"), dir.path().join("a,b/kept"));
        let write = ["-f", format, "-c", "write -P 9 512k 64k", "-c", "write -P 9 64k 4k"];
        ok(tool("qemu-img").args(["create", "-q", "-f", format]).arg(&base).arg("1M"));
        ok(tool("qemu-io").args(write).arg(&base));
        let before = fs::read(&base).unwrap();
        let (base_arg, kept_arg) = (base.to_str().unwrap(), kept.to_str().unwrap());
        let args = ["--base", base_arg, "--log", "run.log", "--run", UNORDERED, "--check", CHECK];
        let found = result(dir.path(), 1, &[&args[..], &["--keep", kept_arg]].concat());
        let failure = &found["failures"][0];
        let overlay = Path::new(failure["kept"].as_str().unwrap());
        assert_eq!(overlay, kept.join("state-4-3.qcow2"));
        ok(tool("qemu-img").args(["check", "-q", "-f", "qcow2"]).arg(overlay));
        let map = ok(tool("qemu-img").args(["info", "--output", "json", "-f", "qcow2"]).arg(overlay));
        let info: Value = serde_json::from_str(&map).unwrap();
        assert_eq!(info["full-backing-filename"], json!(fs::canonicalize(&base).unwrap()));
        let reads = ["-c", "read -P 2 0 4k", "-c", "read -P 9 64k 4k", "-c", "read -P 9 512k 64k"];
        let from_qemu = ok(tool("qemu-io").args(["-r", "-f", "qcow2"]).args(reads).arg(overlay));
        assert!(!from_qemu.contains("failed"), "{from_qemu}");
        // The command of the report serves a fork, which can be written.
        let reopen = failure["reopen"].as_str().unwrap().strip_prefix("freestone ").unwrap();
        let mut serve = freestone(dir.path());
        serve.args(shlex::split(reopen).unwrap()).arg("--run").arg(format!(
            r#"qemu-io -f raw -c "{}" -c "{}" -c "{}" -c "write -P 3 0 4k" "$uri""#,
            reads[1], reads[3], reads[5]
        ));
        let (status, out, err) = finish(&mut serve);
        assert!(status == 0 && !out.contains("failed"), "{format}: {status}\n{out}\n{err}");
        assert!(fs::read(&base).unwrap() == before, "{format}: the base was changed");
        // The same state is kept again, also by its identifier, and its command is printed.
        let state =
            ["--base", base_arg, "--log", "run.log", "--check", CHECK, "--state", "4-3", "--keep", kept_arg];
        let (status, out, err) = finish(&mut explore(dir.path(), &state));
        assert!(status == 1 && out.contains("\n  reopen  freestone serve "), "{status}\n{out}\n{err}");
    }
}

/// A result is printed although a failing state cannot be kept.
#[test]
fn failed_keep_is_an_error_after_the_result() {
    find("qemu-io");
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("kept"), "a file").unwrap();
    let args =
        ["--size", "1M", "--run", UNORDERED, "--check", CHECK, "--keep", "kept", "--junit", "result.xml"];
    let (status, out, err) = finish(&mut explore(dir.path(), &args));
    assert!(
        status == 1 && out.contains("failure 1: state 4-3") && err.contains("--keep kept"),
        "{out}\n{err}"
    );
    assert!(!out.contains("reopen") && dir.path().join("result.xml").exists(), "{out}");
}

#[test]
fn early_acknowledgement_is_found_by_mark() {
    for tool in ["qemu-io", "nbdcopy"] {
        find(tool);
    }
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("data"), [7; 4096]).unwrap();
    let check = r#"test -z "$mark" || ! qemu-io -r -f raw -c "read -P 7 0 4k" "$uri" | grep failed"#;
    let explore = |status, flush: &str| {
        let run = format!("nbdcopy {flush} data \"$uri\" && freestone mark $device 'stored 7'");
        result(dir.path(), status, &["--size", "1M", "--run", &run, "--check", check, "--stop-at-first"])
    };
    assert_eq!(explore(0, "--flush")["failures"], json!([]));
    let found = explore(1, "");
    let failure = &found["failures"][0];
    assert_eq!((&failure["mark"], &found["end"]), (&json!("stored 7"), &json!("first_failure")), "{found:#}");
}

#[test]
fn bad_command_lines_and_workloads_are_refused() {
    let dir = tempdir().unwrap();
    let refuse = |status, args: &[&str], why: &str| {
        let (code, out, err) = finish(&mut explore(dir.path(), args));
        assert!(code == status && out.is_empty() && err.contains(why), "{args:?}: {code}, {out}\n{err}");
    };
    fs::write(dir.path().join("log"), "text").unwrap();
    let log = ["--log", "log", "--check", "true"];
    refuse(2, &["--check", "true"], "--run <CMD>");
    refuse(2, &log, "say the disk before the log");
    refuse(1, &[&log[..], &["--size", "1M"]].concat(), "log is not a dm-log-writes log");
    refuse(1, &["--run", "exit 3", "--check", "true", "--size", "1M"], "the workload failed (exit status 3)");
    let run = ["--run", "true", "--check", "true", "--size", "1M"];
    refuse(
        2,
        &[&run[..], &["--model", "torn", "--unit", "1000"]].concat(),
        "is not a power of two from 512 to 4096",
    );
    refuse(2, &[&run[..], &["--budget", "0"]].concat(), "must be at least 1 state");
    refuse(2, &[&run[..], &["--fs", "ext4"]].concat(), "--mount");
    let (code, ..) = finish(&mut explore(dir.path(), &[&run[..], &["--log", "new.log"]].concat()));
    assert_eq!(code, 0);
    refuse(1, &[&run[..], &["--log", "new.log"]].concat(), "new.log already exists");
    let state = ["--log", "new.log", "--size", "1M", "--check", "true", "--state", "9"];
    refuse(2, &state, "state 9: the log has");
}

#[test]
fn final_failure_timeout_and_flaky_check_are_reported() {
    find("qemu-io");
    let dir = tempdir().unwrap();
    let entries = record(dir.path());
    let args = ["--size", "1M", "--log", "run.log", "--check"];
    let found = result(dir.path(), 1, &[&args[..], &["sleep 60", "--timeout", "200ms"]].concat());
    assert_eq!(
        (&found["end"], &found["failures"][0]["end"]),
        (&json!("final_state"), &json!("timed out after 0.2 s"))
    );
    // Each state fails the first time.
    let flaky =
        format!(r"test $entry = {entries} || test -e seen-$state || {{ touch seen-$state; exit 1; }}");
    let found = result(dir.path(), 0, &[&args[..], &[&flaky]].concat());
    assert_eq!(found["failing_states"], json!(0));
    assert!(found["flaky"].as_array().unwrap().len() >= 3, "{found:#}");
}

#[test]
fn interrupt_prints_the_result_so_far() {
    find("qemu-io");
    let dir = tempdir().unwrap();
    let entries = record(dir.path());
    let check = format!("test $entry = {entries} && exit; touch began; sleep 60");
    let args = ["--size", "1M", "--log", "run.log", "--check", &check, "--timeout", "60s"];
    let mut child = explore(dir.path(), &args).stdout(Stdio::piped()).spawn().unwrap();
    wait_until("a check runs", || dir.path().join("began").exists());
    signal(&child, Signal::INT);
    assert_eq!(wait_for_end(&mut child, SOON).code(), Some(130));
    let mut out = String::new();
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    assert!(out.starts_with(&format!("{entries} entries: 1 state checked, until the interrupt")), "{out}");
}

/// The page cache of the file must not show an earlier state.
#[test]
fn file_shows_each_state() {
    if !may_use_fuse() {
        skip_test("needs access to FUSE");
    }
    for tool in ["qemu-io", "nbdfuse", "nbdcopy"] {
        find(tool);
    }
    let dir = tempdir().unwrap();
    let check = r#"nbdcopy "$uri" - | cmp - "$file" || exit 1; cat "$file" >/dev/null
        head -c 4096 /dev/zero | tr '\0' x | dd of="$file" bs=4k seek=16 conv=notrunc 2>/dev/null"#;
    let found = result(dir.path(), 0, &["--size", "1M", "--run", UNORDERED, "--file", "--check", check]);
    assert!(found["states"].as_u64().unwrap() >= 4, "{found:#}");
}

#[test]
fn mounted_file_system_finds_missing_fsync() {
    if !rustix::process::geteuid().is_root() {
        skip_test("mounting needs root");
    }
    for tool in ["nbdfuse", "mkfs.ext4"] {
        find(tool);
    }
    let dir = tempdir().unwrap();
    let check = r#"test -z "$mark" || grep -qx "$mark" "$dir/$mark""#;
    let explore = |status, sync: &str| {
        let run = format!(
            "for n in a b; do echo $n >$dir/new; {sync}; mv $dir/new $dir/$n; {sync}; freestone mark $device $n; done"
        );
        let args =
            ["--mount", "--fs", "ext4", "--size", "8M", "--budget", "24", "--run", &run, "--check", check];
        result(dir.path(), status, &args)
    };
    let found = explore(1, "true");
    assert!(found["failures"][0]["output"].as_str().unwrap().contains("No such file"), "{found:#}");
    assert_eq!(explore(0, "sync $dir/* $dir")["failures"], json!([]));
    let (_, out, _) = finish(freestone(dir.path()).arg("mount"));
    assert!(!out.contains("explore"), "a mount is left: {out}");
}

#[test]
fn mounts_of_a_killed_exploration_are_removed() {
    if !rustix::process::geteuid().is_root() {
        skip_test("mounting needs root");
    }
    for tool in ["nbdfuse", "mkfs.ext4"] {
        find(tool);
    }
    let dir = tempdir().unwrap();
    let mount = ["--mount", "--fs", "ext4", "--size", "8M", "--run", "true", "--jobs", "1", "--check"];
    let check = "touch began; exec sleep 60";
    let mut child = explore(dir.path(), &[&mount[..], &[check]].concat()).spawn().unwrap();
    wait_until("a check runs", || dir.path().join("began").exists());
    signal(&child, Signal::KILL);
    wait_for_end(&mut child, SOON);
    let mounts = || finish(freestone(dir.path()).arg("mount")).1;
    assert!(mounts().contains("explore-0"), "{}", mounts());
    // Each state has an nbdfuse. At most one that has ended may be waiting to be collected.
    let check = r#"grep -lx "PPid:.$PPID" /proc/[0-9]*/status 2>/dev/null | xargs -r grep -l "^State:.Z" | wc -l >count
        test "$(cat count)" -le 1"#;
    let found = result(dir.path(), 0, &[&mount[..], &[check]].concat());
    assert!(found["states"].as_u64().unwrap() >= 3, "{found:#}");
    assert!(!mounts().contains("explore"), "a mount is left: {}", mounts());
}
