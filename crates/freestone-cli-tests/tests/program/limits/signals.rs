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
