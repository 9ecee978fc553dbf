//! Signals whose default action would end the server.

use super::end;
use crate::harness::prelude::*;

const UNUSED: [Signal; 6] =
    [Signal::USR1, Signal::USR2, Signal::ALARM, Signal::VTALARM, Signal::PROF, Signal::IO];

#[test]
fn unused_signals_do_not_end_the_server() {
    let serve = Serve::start(&["n=null,size=1M"]);
    for signal in UNUSED {
        serve.signal(signal);
    }
    assert!(serve.text(&["list"]).contains("null"));
    end(serve);
}

#[test]
fn sigxcpu_or_sigpwr_shuts_down_cleanly() {
    for signal in [Signal::XCPU, Signal::POWER] {
        let serve = Serve::start(&["r=ram,disksize=1M"]);
        // At a CPU time limit the kernel sends SIGXCPU every second. The second signal must not end
        // the shutdown at once.
        serve.signal(signal);
        serve.signal(signal);
        let (code, dir) = serve.wait();
        assert_eq!(code, Some(0), "{signal:?}");
        assert!(!dir.path().join("control").exists());
    }
}

/// A supervisor that has run `freestone shutdown` may send SIGTERM as well, before or after the verb.
#[test]
fn shutdown_and_one_signal_save_content() {
    for is_signal_first in [false, true] {
        let args = ["r=ram,disksize=64M,keep=yes", "--state", "state"];
        let serve = Serve::start(&args);
        let mut client = Raw::connect_at(&serve.path("nbd"), "r");
        assert_eq!(client.write(0, 0, &[7; 4096]), 0);
        drop(client);
        if is_signal_first {
            serve.signal(Signal::TERM);
        }
        let _ = finish(freestone(serve.dir.path()).args(["shutdown", "--control", "control"]));
        if !is_signal_first {
            serve.signal(Signal::TERM);
        }
        let (code, dir) = serve.wait();
        assert_eq!(code, Some(0), "{is_signal_first}");
        let serve = Serve::start_in(dir, &args, true);
        assert_eq!(Raw::connect_at(&serve.path("nbd"), "r").read(0, 4096).unwrap(), [7; 4096]);
        end(serve);
    }
}

#[test]
fn command_of_run_has_default_signal_actions() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = freestone(dir.path());
    command.args(["serve", "n=null,size=1M", "--run", "exec grep SigIgn: /proc/self/status"]);
    let (code, out, err) = finish(&mut command);
    assert_eq!(code, 0, "{err}");
    let ignored = u64::from_str_radix(out.trim_start_matches("SigIgn:").trim(), 16).unwrap();
    for signal in UNUSED.into_iter().chain([Signal::XFSZ, Signal::XCPU, Signal::PIPE]) {
        assert_eq!(ignored & (1 << (signal.as_raw() - 1)), 0, "{signal:?}: {out}");
    }
}
