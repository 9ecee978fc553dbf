//! Progress bars of client commands on a terminal.

use super::Control;
use super::disks::Disk;
use super::long_verbs::{SLOW_READS, SLOW_WRITES, serve_with_slow_backing};
use crate::harness::prelude::*;

#[test]
fn progress_bar_shows_rate_and_time_left() {
    let disk = Disk::of("64M");
    let serve = serve_with_slow_backing(&disk, 32 * MIB);
    serve.text(&["writeback", "r", "huge"]);
    disk.hang(SLOW_READS);
    let mut terminal = Terminal::run(&serve, "save r r.saved");
    terminal.until("r: save [");
    let shown = terminal.until(" left");
    let last = shown.rsplit("r: save [").next().unwrap();
    let (bar, rest) = last.split_once("] ").unwrap();
    assert!(bar.starts_with('#') && bar.ends_with('-'), "{last}");
    assert!(rest.contains(" of 32M, ") && rest.contains(" %, ") && rest.contains("/s, "), "{last}");
    terminal.keys("\x03");
    terminal.until("r: save, is being cancelled; press Ctrl-C again to exit at once");
    // The error message replaces the progress bar on its line.
    let (code, rest) = terminal.end();
    assert_eq!(code, Some(130), "{rest}");
    let line = rest.rsplit("\x1b[2K").next().unwrap();
    assert!(line.trim_start().starts_with("freestone: r: save: cancelled: "), "{rest:?}");
    // The progress shows no total while the verb waits for another verb to end.
    disk.heal();
    serve.text(&["reset", "r"]);
    super::long_verbs::fill(&serve, "r", 32 * MIB);
    disk.hang(SLOW_WRITES);
    serve.text(&["writeback", "r", "huge", "--background"]);
    Control::of(&serve).until("it runs", "r", |stat| stat["progress"]["done_bytes"].as_u64() > Some(0));
    let mut terminal = Terminal::run(&serve, "writeback r huge");
    terminal.until("r: writeback, 1s");
    terminal.keys("\x03");
    assert_eq!(terminal.end().0, Some(130));
    let mut quiet = Terminal::run(&serve, "writeback r huge --progress none");
    Control::of(&serve).until("it waits", "r", |_| serve.text(&["jobs"]).matches("running").count() == 2);
    quiet.keys("\x03");
    let (_, rest) = quiet.end();
    assert!(!rest.contains("\x1b["), "{rest:?}");
}

#[test]
fn progress_bar_needs_a_terminal() {
    let disk = Disk::of("64M");
    let serve = serve_with_slow_backing(&disk, 2 * MIB);
    serve.text(&["writeback", "r", "huge"]);
    // The save is slow enough for several progress updates.
    disk.hang("read delay=300ms");
    let mut save = freestone(serve.dir.path());
    save.args(["save", "r", "r.saved", "--progress", "bar", "--control", "control"]);
    let start = Instant::now();
    let (code, _, message) = finish(&mut save);
    assert_eq!((code, message.as_str()), (0, ""));
    assert!(start.elapsed().as_millis() > 600, "nobody looked: {:?}", start.elapsed());
}
