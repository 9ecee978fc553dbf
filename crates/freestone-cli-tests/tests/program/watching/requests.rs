//! Single requests: the request log, and trace probes for a debugger.

use crate::harness::prelude::*;

const DEVICES: [&str; 2] = ["r=ram,disksize=16M", "s=ram,disksize=16M,faults=read delay=20ms,seed=1"];

/// Device, operation, offset and length of the requests of [`ask`], as the log prints them.
const EXPECTED: [(&str, &str, u64, u64); 4] =
    [("r", "write", 4096, 8192), ("r", "read", 4096, 512), ("r", "flush", 0, 0), ("s", "read", MIB, 4096)];

fn ask(serve: &Serve) {
    let (mut r, mut s) = (Raw::connect(serve, "r"), Raw::connect(serve, "s"));
    assert_eq!(r.write(0, 4096, &[7; 8192]), 0);
    r.read(4096, 512).unwrap();
    assert_eq!(r.flush(), 0);
    s.read(MIB, 4096).unwrap();
}

#[test]
fn request_log_has_a_line_for_each_request() {
    let logged = |filter: Option<&str>| {
        let dir = tempfile::tempdir().unwrap();
        let mut command = freestone(dir.path());
        command.arg("serve").args(DEVICES).args(["--nbd", "unix:nbd", "--control", "control"]);
        command.arg("q=null,size=4M,faults=write error=EIO at=1M+4K,seed=1");
        command.stderr(fs::File::create(dir.path().join("log")).unwrap());
        match filter {
            Some(filter) => command.env("RUST_LOG", filter),
            None => command.env_remove("RUST_LOG"),
        };
        let serve = Serve::ready(dir, command);
        ask(&serve);
        assert_eq!(Raw::connect(&serve, "q").write(0, MIB, &[1; 4096]), EIO);
        serve.text(&["shutdown"]);
        let (status, dir) = serve.wait();
        assert_eq!(status, Some(0));
        let log = fs::read_to_string(dir.path().join("log")).unwrap();
        (log, format!("unix:{}", dir.path().join("nbd").display()))
    };
    let (log, place) = logged(Some("freestone::request=trace"));
    for (device, op, offset, bytes) in EXPECTED {
        let waits = device == "s";
        let span = format!(
            "request{{device=\"{device}\" place=\"{place}\" op=\"{op}\" offset={offset} bytes={bytes} \
             waits={waits} end=\"done\"}}"
        );
        let lines: Vec<_> = log.lines().filter(|line| line.contains(&span)).collect();
        assert_eq!(lines.len(), 1, "{span}\n{log}");
        assert!(lines[0].contains("close time.busy=") && lines[0].contains("TRACE"), "{lines:?}");
    }
    // The server first tries a request inline. A request that must wait is then run again with
    // `waits=true`.
    assert!(log.contains("bytes=4096 waits=false end=\"has to wait\""), "{log}");
    assert!(log.contains("op=\"write\" offset=1048576 bytes=4096 waits=true end=\"io_error\""), "{log}");
    for filter in [None, Some("debug"), Some("trace,freestone::request=debug")] {
        assert!(!logged(filter).0.contains("request{"), "{filter:?}");
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn probes_fire_for_each_request() {
    let dir = tempfile::tempdir().unwrap();
    let print = |numbers: &str| {
        format!(
            "commands\nsilent\nprintf \"{numbers}\\n\", $_probe_arg2, $_probe_arg3, $_probe_arg4, $_probe_arg5\n\
             output *(char*)$_probe_arg0@(int)$_probe_arg1\nprintf \"\\n\"\n"
        )
    };
    let script = [
        "set pagination off\nset confirm off\nset language c\nset logging file seen\nset logging redirect on\n",
        "handle all nostop noprint pass\nset logging enabled on\n",
        "break -probe-stap freestone:request_begin\n",
        &print("begin op=%ld offset=%ld bytes=%ld waits=%ld device="),
        "continue\nend\nbreak -probe-stap freestone:request_end\n",
        &print("end op=%ld offset=%ld bytes=%ld took=%ld device="),
        "printf \"code=%ld\\n\", $_probe_arg6\ncontinue\nend\nrun\n",
    ];
    fs::write(dir.path().join("script"), script.concat()).unwrap();
    let mut command = Command::new(find("gdb"));
    // gdb needs no debug information for the probes, and reading it would be slow.
    command.args(["-nx", "-batch", "--readnever", "-x", "script", "--args"]).current_dir(&dir);
    command.env_remove("RUST_LOG").env("DEBUGINFOD_URLS", "").stdin(Stdio::null());
    command.arg(program()).arg("serve").args(DEVICES);
    command.args(["--nbd", "unix:nbd", "--control", "control"]);
    let serve = Serve::ready(dir, command);
    ask(&serve);
    serve.text(&["shutdown"]);
    let (status, dir) = serve.wait();
    let seen = fs::read_to_string(dir.path().join("seen")).unwrap();
    assert_eq!(status, Some(0), "{seen}");
    // gdb prints lines about threads, which are dropped.
    let lines = seen.split_inclusive('\n').filter(|line| !line.starts_with('['));
    let seen = lines.collect::<String>();
    // The requests are printed in this order. Flushes at the end of the server follow.
    let mut rest = seen.as_str();
    for (device, op, offset, bytes) in EXPECTED {
        let op = ["read", "write", "discard", "write_zeroes", "flush"].iter().position(|word| *word == op);
        let op = op.unwrap();
        // A request that must wait is printed twice: the inline attempt, then the request itself.
        let turns: &[_] = if device == "s" { &[(0, -2, 1), (1, 0, 20_000_000)] } else { &[(0, 0, 1)] };
        for (waits, code, least) in turns {
            let begin =
                format!("begin op={op} offset={offset} bytes={bytes} waits={waits} device=\n\"{device}\"\n");
            let after = rest.split_once(&begin).unwrap_or_else(|| panic!("no {begin} in {rest}\n{seen}")).1;
            let end = after.strip_prefix(&format!("end op={op} offset={offset} bytes={bytes} took="));
            let (took, after) = end.and_then(|end| end.split_once(' ')).expect(&seen);
            assert!(took.parse::<u64>().unwrap() >= *least, "{took}: {seen}");
            let end = format!("device=\n\"{device}\"\ncode={code}\n");
            rest = after.strip_prefix(&end).unwrap_or_else(|| panic!("no {end} in {after}\n{seen}"));
        }
    }
}
