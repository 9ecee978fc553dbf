//! The subcommand `freestone top`.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use crate::harness::prelude::*;

/// Terminal escape sequence that leaves the alternate screen.
const LEAVE_SCREEN: &str = "\x1b[?1049l";

fn serve() -> Serve {
    Serve::start(&[
        "r=ram,disksize=64M",
        "n=null,size=64M",
        "s=ram,disksize=64M,faults=read delay=300ms,seed=1",
    ])
}

#[test]
fn top_once_and_json_show_rates() {
    let serve = serve();
    let ask = |args: &[&str]| {
        let mut command = freestone(serve.dir.path());
        command.args(["top", "--once", "--control", "control"]).args(args);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let done = AtomicBool::new(false);
    let work = || {
        let (mut r, mut n, mut s) =
            (Raw::connect(&serve, "r"), Raw::connect(&serve, "n"), Raw::connect(&serve, "s"));
        while !done.load(SeqCst) {
            for _ in 0..50 {
                r.read(0, 512).unwrap();
            }
            assert_eq!(n.write(0, 0, &vec![1; MIB as usize]), 0);
            s.read(0, 4096).unwrap();
        }
    };
    thread::scope(|scope| {
        let worker = scope.spawn(work);
        while stat(&serve, "s", "io", "reads") == 0 {
            assert!(!worker.is_finished());
        }
        let reply = ["requests", "bytes", "latency"].map(|by| {
            let output = ask(&["--json", "--by", by, "--count", "1"]).wait_with_output().unwrap();
            (by, output)
        });
        done.store(true, SeqCst);
        for ((by, output), first) in reply.into_iter().zip(["r", "n", "s"]) {
            assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
            let reply: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(reply["devices"].as_array().unwrap().len(), 1, "{reply}");
            assert_eq!(reply["devices"][0]["name"], json!(first), "{by}: {reply}");
            assert_eq!(
                (&reply["server"]["devices"], &reply["server"]["forks"]),
                (&json!(3), &json!(0)),
                "{reply}"
            );
            assert!(reply["seconds"].as_f64().unwrap() > 0.4, "{reply}");
        }
    });
    let text = serve.text(&["top", "--once"]);
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(text.starts_with("freestone ") && text.contains(": devices 3, forks 0, "), "{text}");
    assert_eq!((lines[1][0], lines[2][0], lines.len()), ("NAME", "(all)", 6), "{text}");
}

#[test]
fn top_without_terminal_prints_tables_until_eof() {
    let serve = serve();
    let line = format!("{} top --control control | head -n 12", program());
    let mut shell = std::process::Command::new("bash");
    shell.args(["-o", "pipefail", "-c", &line]).current_dir(serve.dir.path());
    let (status, out, err) = finish(&mut shell);
    assert_eq!((status, err.as_str()), (0, ""));
    assert_eq!((out.matches("NAME").count(), out.lines().count()), (2, 12), "{out}");
}

#[test]
fn invalid_top_options_are_refused() {
    let serve = serve();
    assert_eq!(serve.refused(2, &["top", "--every", "2h"]), "--every: must be 1s to 1h");
    let (status, _, none) = serve.run_verb(&["top", "--count", "0"]);
    assert!(status == 2 && none.contains("0 is not in 1..=1000"), "{none}");
    let reply = ask(&serve.control(), br#"{"jsonrpc":"2.0","id":1,"method":"top","params":{"count":1001}}"#);
    assert_eq!(reply["error"]["message"], json!("top: count=1001: must be 1 to 1000"));
}

#[test]
fn top_on_terminal_handles_keys_and_restores_it() {
    let serve = serve();
    let line = format!(
        "stty -a > before; {} top --control control; echo \"status=$?\"; stty -a > after; cmp before after && echo same",
        program()
    );
    for end in ["q", "\x1b", "\x03"] {
        let mut terminal = Terminal::shell(&serve, &line);
        // `top` draws unchanged text only once: the status line at once, the sum with the first
        // reply. Later only changed parts of the status line are drawn.
        terminal.until("by requests;");
        terminal.until("(all)");
        terminal.keys("l");
        terminal.until("latency;");
        terminal.keys(end);
        terminal.until(LEAVE_SCREEN);
        let shown = terminal.until("same");
        assert!(shown.contains("status=0"), "{end:?}: {shown:?}");
        assert_eq!(terminal.end().0, Some(0));
    }
}

#[test]
fn top_restores_terminal_on_signal_or_server_end() {
    let serve = serve();
    let line = format!(
        "sh -c 'until [ -e seen ]; do sleep 0.05; done; kill -TERM $0' $$ & exec {} top --control control",
        program()
    );
    let mut terminal = Terminal::shell(&serve, &line);
    terminal.until("(all)");
    std::fs::write(serve.path("seen"), "").unwrap();
    terminal.until(LEAVE_SCREEN);
    assert_eq!(terminal.end().0, Some(0));
    let mut terminal = Terminal::run(&serve, "top");
    terminal.until("(all)");
    serve.text(&["shutdown"]);
    // The last values stay on the screen, with the reason why they are not updated.
    terminal.until("server");
    terminal.keys("q");
    terminal.until(LEAVE_SCREEN);
    assert_eq!(terminal.end().0, Some(0));
}
