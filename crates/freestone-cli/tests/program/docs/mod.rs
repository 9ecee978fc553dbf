//! Runs the commands that README and docs show, and compares their output.
//!
//! A section (the text below one heading) is one bash session in a directory of its own, which starts with the files
//! that [`sections`] makes for it. The output lines that the page shows must appear in this order, with any lines
//! between them. Numbers and sizes are not compared.

mod page;
mod sections;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use freestone_testkit::tools;
use page::{Section, Shown};
use sections::{NOT_RUN, preparation};

/// Deadline of a session.
const SESSION_MAX: Duration = Duration::from_secs(120);
const STEP: Duration = Duration::from_millis(20);
/// Directories in the docs that stand for the directory of a session.
const DIRS_SHOWN: [&str; 4] = ["/tmp/freestone-0", "/tmp/try", "/run/ci", "/run"];
/// Number of digits of an image name.
const NAME_DIGITS: usize = 64;

#[test]
fn readme() {
    run_page("README.md");
}

#[test]
fn devices() {
    run_page("docs/devices.md");
}

#[test]
fn nbd() {
    run_page("docs/nbd.md");
}

#[test]
fn nbd_client() {
    run_page("docs/nbd-client.md");
}

#[test]
fn forks() {
    run_page("docs/forks.md");
}

#[test]
fn ci() {
    run_page("docs/ci.md");
}

#[test]
fn databases() {
    run_page("docs/databases.md");
}

#[test]
fn restarts() {
    run_page("docs/restarts.md");
}

#[test]
fn snapshots() {
    run_page("docs/snapshots.md");
}

#[test]
fn object_storage() {
    run_page("docs/object-storage.md");
}

#[test]
fn control() {
    run_page("docs/control.md");
}

#[test]
fn metrics() {
    run_page("docs/metrics.md");
}

#[test]
fn web_page() {
    run_page("docs/page.md");
}

#[test]
fn faults_and_power() {
    run_page("docs/faults.md");
    run_page("docs/power.md");
}

#[test]
fn zones() {
    run_page("docs/zones.md");
}

#[test]
fn vhost_user() {
    run_page("docs/vhost-user.md");
}

#[test]
fn zram() {
    run_page("docs/zram.md");
}

#[test]
fn every_page_with_commands_is_run() {
    let run = [
        "README.md",
        "docs/ci.md",
        "docs/control.md",
        "docs/databases.md",
        "docs/devices.md",
        "docs/faults.md",
        "docs/forks.md",
        "docs/metrics.md",
        "docs/nbd-client.md",
        "docs/nbd.md",
        "docs/object-storage.md",
        "docs/page.md",
        "docs/power.md",
        "docs/restarts.md",
        "docs/snapshots.md",
        "docs/vhost-user.md",
        "docs/zones.md",
        "docs/zram.md",
    ];
    let docs = fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let docs = docs.filter(|path| path.extension().is_some_and(|ext| ext == "md"));
    let docs = docs.map(|path| format!("docs/{}", path.file_name().unwrap().to_str().unwrap()));
    let pages = docs.chain(["README.md".to_owned()]);
    let with_commands: BTreeSet<_> = pages
        .filter(|page| {
            sections_of(page).iter().any(|section| !NOT_RUN.contains(&(page, section.title.as_str())))
        })
        .collect();
    assert_eq!(with_commands, run.map(str::to_owned).into());
    for (page, title) in NOT_RUN {
        assert!(sections_of(page).iter().any(|section| section.title == title), "{page}: no section {title}");
    }
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Returns the sections of a page that show commands.
fn sections_of(page: &str) -> Vec<Section> {
    page::sections(&fs::read_to_string(root().join(page)).unwrap())
}

fn run_page(page: &str) {
    let (mut wrong, mut left_out) = (String::new(), Vec::new());
    for section in sections_of(page) {
        if NOT_RUN.contains(&(page, section.title.as_str())) {
            continue;
        }
        match needs(&section) {
            None => wrong += &run_section(page, &section),
            Some(what) => left_out.push(format!("{page}, {}: needs {what}", section.title)),
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    if !left_out.is_empty() {
        tools::leave_out(&left_out.join("; "));
    }
}

/// Returns what the commands of a section need that this user does not have.
fn needs(section: &Section) -> Option<&'static str> {
    let has =
        |word: &str| section.shown.iter().any(|shown| shown.command.split_whitespace().any(|w| w == word));
    let is_root = rustix::process::geteuid().is_root();
    match () {
        () if ["mount", "losetup"].into_iter().any(has) && !is_root => Some("root"),
        () if has("nbdfuse") && !tools::may_use_fuse() => Some("access to FUSE"),
        () => None,
    }
}

/// Runs a section. Returns the differences from the page.
fn run_section(page: &str, section: &Section) -> String {
    let Section { title, shown, blocks } = section;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for (n, block) in blocks.iter().enumerate() {
        fs::write(dir.join(format!(".block.{n}")), block).unwrap();
    }
    let session = session(dir, &preparation(page, title), shown);
    let log = run_bash(dir, &session);
    let mut wrong = String::new();
    for (n, Shown { command, output }) in shown.iter().enumerate() {
        let read = |name: &str| fs::read_to_string(dir.join(format!(".{name}.{n}"))).unwrap_or_default();
        let printed = read("out");
        let status = read("status");
        let failed = output.is_empty() && status.trim() != "0";
        let missing = missing(dir, output, &printed);
        if failed || missing.is_some() {
            let _ = writeln!(
                wrong,
                "\n{page}, {title}: $ {command}\nstatus {status}is shown and not printed: {missing:?}\n\
                 printed:\n{printed}{log}"
            );
        }
    }
    wrong
}

/// Returns the first line that is shown but not printed.
fn missing(dir: &Path, shown: &[String], printed: &str) -> Option<String> {
    let mut lines = printed.lines().map(|line| normal(dir, line));
    let shown = shown.iter().map(|line| normal(dir, line)).filter(|line| line != "...");
    shown.into_iter().find(|line| !lines.any(|printed| printed == *line))
}

/// Returns a line without the parts that vary: directories, numbers, sizes, names of images, widths of columns.
fn normal(dir: &Path, line: &str) -> String {
    let mut line = line.split_whitespace().collect::<Vec<_>>().join(" ");
    let dir = dir.to_str().unwrap();
    for name in [&format!("{dir}/freestone"), dir] {
        line = line.replace(name, "DIR");
    }
    for name in DIRS_SHOWN {
        line = line.replace(name, "DIR");
    }
    let line = without_names(&line);
    let mut out = String::new();
    let mut rest = line.chars().peekable();
    while let Some(c) = rest.next() {
        if c == '0' && rest.next_if_eq(&'x').is_some() {
            while rest.next_if(char::is_ascii_hexdigit).is_some() {}
            out.push('#');
            continue;
        }
        if !c.is_ascii_digit() {
            out.push(c);
            continue;
        }
        let mut fraction = false;
        while let Some(next) = rest.next_if(|next| next.is_ascii_digit() || (*next == '.' && !fraction)) {
            fraction |= next == '.';
        }
        rest.next_if(|next| "BKMGT".contains(*next));
        out.push('#');
    }
    out
}

/// Replaces names of images, which are hashes.
fn without_names(line: &str) -> String {
    let (mut out, mut rest) = (String::new(), line);
    while let Some(start) = rest.find(|c: char| c.is_ascii_hexdigit()) {
        let (before, digits) = rest.split_at(start);
        let end = digits.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(digits.len());
        let (digits, after) = digits.split_at(end);
        out += before;
        out += if end == NAME_DIGITS { "#" } else { digits };
        rest = after;
    }
    out + rest
}

/// Returns the commands of a section as a script. The output of each command goes to its own file. The script waits
/// until a server is ready before the next command, as a reader of the page would.
fn session(dir: &Path, prepare: &str, shown: &[Shown]) -> String {
    let mut script = format!("{prepare}\n");
    for (n, Shown { command, .. }) in shown.iter().enumerate() {
        let out = format!(".out.{n}");
        // The command may be a comment, or end with one.
        let _ = writeln!(script, "{{ :\n{command}\n}} >{out} 2>&1\necho $? >.status.{n}");
        if command.starts_with("freestone serve") && command.trim_end().ends_with('&') {
            let _ = writeln!(script, "ready {out}");
        }
    }
    for name in DIRS_SHOWN {
        let own = if name == DIRS_SHOWN[0] { dir.join("freestone") } else { dir.to_owned() };
        script = script.replace(&format!("{name}/"), &format!("{}/", own.display()));
    }
    script
}

/// Returns the processes of a group that have not ended, with their names. Ended processes stay in
/// their group until init collects them, which can take seconds.
fn running(group: Pid) -> Vec<(Pid, String)> {
    let group = group.as_raw_nonzero().to_string();
    let stats = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path().join("stat"));
    let of_group = |stat: String| {
        // The name is in parentheses and may have spaces. State, parent and group follow it.
        let (pid, rest) = stat.split_once(" (")?;
        let (name, rest) = rest.rsplit_once(") ")?;
        let fields: Vec<_> = rest.split(' ').take(3).collect();
        let is_running = !matches!(fields[0], "Z" | "X") && fields[2] == group;
        is_running.then(|| (Pid::from_raw(pid.parse().unwrap()).unwrap(), name.to_owned()))
    };
    stats.flat_map(fs::read_to_string).filter_map(of_group).collect()
}

/// Runs a script and ends the processes that it left. Returns what bash itself printed.
fn run_bash(dir: &Path, script: &str) -> String {
    let file = dir.join(".session");
    fs::write(&file, script).unwrap();
    let log = fs::File::create(dir.join(".log")).unwrap();
    let bin = Path::new(env!("CARGO_BIN_EXE_freestone")).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let mut bash = Command::new("bash");
    bash.arg(&file).current_dir(dir).env("PATH", path).env("XDG_RUNTIME_DIR", dir).env("TMPDIR", dir);
    bash.env("FREESTONE_CACHE", dir.join("cache")).env("FREESTONE_MOUNTS", dir.join("mounts"));
    bash.env_remove("RUST_LOG")
        .env_remove("FREESTONE_CONTROL")
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log);
    let mut child = bash.process_group(0).spawn().unwrap();
    let group = Pid::from_child(&child);
    let start = Instant::now();
    let late = loop {
        if child.try_wait().unwrap().is_some() {
            break false;
        }
        if start.elapsed() > SESSION_MAX {
            break true;
        }
        std::thread::sleep(STEP);
    };
    // SIGTERM first: nbdfuse unmounts, and a server removes its sockets. Programs that hold the disks of a server end
    // after the server, which flushes to them.
    let ends = |keep: &[&str]| {
        let is_left = |(_, name): &(Pid, String)| !keep.contains(&name.as_str());
        for (pid, _) in running(group).into_iter().filter(is_left) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let end = Instant::now() + Duration::from_secs(5);
        while running(group).iter().any(is_left) && Instant::now() < end {
            std::thread::sleep(STEP);
        }
    };
    if late {
        let _ = kill_process_group(group, Signal::TERM);
    }
    let _ = child.wait();
    ends(&["qemu-nbd", "nbdkit"]);
    ends(&[]);
    let _ = kill_process_group(group, Signal::KILL);
    let message = fs::read_to_string(dir.join(".log")).unwrap();
    if late { format!("{message}\nthe session took longer than {SESSION_MAX:?}") } else { message }
}
