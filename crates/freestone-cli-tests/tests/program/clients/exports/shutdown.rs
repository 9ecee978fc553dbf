//! Server shutdown while clients have requests in flight.

use std::thread::sleep;

use crate::harness::prelude::*;

/// Deadline for the server to end: far above its grace period, for a busy machine.
const END_MAX: Duration = Duration::from_secs(15);
const STEP: Duration = Duration::from_millis(20);

#[test]
fn shutdown_ends_a_running_fio() {
    let serve = Serve::start(&["ram0=ram,disksize=64M"]);
    let mut fio = tool("fio");
    fio.args(["--name=busy", "--ioengine=nbd", "--rw=randrw", "--bs=16k", "--iodepth=16", "--numjobs=2"]);
    fio.args(["--size=64M", "--time_based", "--runtime=60", "--thread"]);
    fio.arg(format!("--uri={}", uri(&serve, "ram0"))).current_dir(serve.dir.path());
    let mut fio = KillOnDrop(fio.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    wait_until("fio writes nothing", || stat(&serve, "ram0", "mm_stat", "orig_data_size") >= 1 << 20);

    let begin = Instant::now();
    serve.signal(Signal::TERM);
    let (code, dir) = serve.wait();
    assert!(begin.elapsed() < END_MAX, "it took {:?}", begin.elapsed());
    assert_eq!(code, Some(0));
    assert!(!dir.path().join("nbd").exists() && !dir.path().join("control").exists());

    // fio notices the closed connection and ends before its run time of sixty seconds.
    while fio.0.try_wait().unwrap().is_none() {
        assert!(begin.elapsed() < 2 * END_MAX, "fio does not see the end");
        sleep(STEP);
    }
}
