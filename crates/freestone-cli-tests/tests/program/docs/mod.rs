//! Runs the commands that README and docs show, and compares their output.
//!
//! A section (the text below one heading) is one bash session in a directory of its own. The directory contains the
//! files that [`sections`] prepares. A tutorial is one session as a whole. The output lines that the page shows must be
//! printed in the same order, possibly with other lines between them. Numbers and sizes are not compared.

mod page;
mod sections;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::os::unix::process::CommandExt as _;

use freestone_testkit::tools;
use rustix::process::{Pid, kill_process, kill_process_group};

use self::page::{Section, Shown};
use self::sections::{NOT_RUN, preparation};
use crate::harness::prelude::*;

/// Time limit of a session, after which its processes are ended and the test fails.
const SESSION_MAX: Duration = Duration::from_secs(120);
const STEP: Duration = Duration::from_millis(20);
/// Directories in the docs that are replaced by the directory of the session.
const DIRS_SHOWN: [&str; 4] = ["/tmp/freestone-0", "/tmp/try", "/run/ci", "/run"];
/// Directories of the four parts of the documentation.
const PARTS: [&str; 4] = ["tutorials", "how-to", "reference", "explanation"];
/// Number of hexadecimal digits of an image name.
const NAME_DIGITS: usize = 64;

/// Defines a test for each page with commands, and the list `PAGES` of these pages.
macro_rules! pages {
    ($($name:ident: $page:literal,)*) => {
        /// Paths of the pages whose commands the tests run.
        const PAGES: &[&str] = &[$($page),*];
        $(
            #[test]
            fn $name() {
                run_page($page);
            }
        )*
    };
}

pages! {
    readme: "README.md",
    tutorial_fork_image: "docs/tutorials/fork-image.md",
    tutorial_power_loss: "docs/tutorials/power-loss.md",
    tutorial_ram_disk: "docs/tutorials/ram-disk.md",
    tutorial_snapshot_file: "docs/tutorials/snapshot-file.md",
    explanation_snapshots: "docs/explanation/snapshots.md",
    how_to_access: "docs/how-to/access.md",
    how_to_ci: "docs/how-to/ci.md",
    how_to_coming_from: "docs/how-to/coming-from.md",
    how_to_configuration_file: "docs/how-to/configuration-file.md",
    how_to_databases: "docs/how-to/databases.md",
    how_to_denser_memory: "docs/how-to/denser-memory.md",
    how_to_disk_per_connection: "docs/how-to/disk-per-connection.md",
    how_to_explore: "docs/how-to/explore.md",
    how_to_monitoring: "docs/how-to/monitoring.md",
    how_to_object_storage: "docs/how-to/object-storage.md",
    how_to_power_cuts: "docs/how-to/power-cuts.md",
    how_to_ram_disks: "docs/how-to/ram-disks.md",
    how_to_remote_images: "docs/how-to/remote-images.md",
    how_to_restarts: "docs/how-to/restarts.md",
    how_to_scripts: "docs/how-to/scripts.md",
    how_to_virtual_machines: "docs/how-to/virtual-machines.md",
    reference_control: "docs/reference/control.md",
    reference_devices: "docs/reference/devices.md",
    reference_faults: "docs/reference/faults.md",
    reference_ram_statistics: "docs/reference/ram-statistics.md",
    reference_snapshots: "docs/reference/snapshots.md",
    reference_web_page: "docs/reference/web-page.md",
    reference_zones: "docs/reference/zones.md",
}

#[test]
fn every_page_with_commands_is_run() {
    let parts = PARTS.into_iter().flat_map(|part| {
        let pages = fs::read_dir(root().join("docs").join(part)).unwrap();
        pages.map(move |page| format!("docs/{part}/{}", page.unwrap().file_name().to_str().unwrap()))
    });
    let with_commands: BTreeSet<_> = parts
        .chain(["README.md", "docs/README.md"].map(str::to_owned))
        .filter(|page| {
            sections_of(page).iter().any(|section| !NOT_RUN.contains(&(page, section.title.as_str())))
        })
        .collect();
    let run: BTreeSet<_> = PAGES.iter().map(|&page| page.to_owned()).collect();
    assert_eq!(with_commands, run);
    for (page, title) in NOT_RUN {
        assert!(sections_of(page).iter().any(|section| section.title == title), "{page}: no section {title}");
    }
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Returns the sections of a page that show commands. A tutorial is one section, with the title of the page.
fn sections_of(page: &str) -> Vec<Section> {
    let text = fs::read_to_string(root().join(page)).unwrap();
    let sections = page::sections(&text);
    if page.starts_with("docs/tutorials/") { page::join(&text, sections) } else { sections }
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
        tools::skip_test(&left_out.join("; "));
    }
}

/// Returns what the commands of a section need and the user of the tests lacks, or `None` if nothing is missing.
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

/// Runs the commands of a section. Returns a description of the differences from the page; empty if there are none.
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

/// Returns the first line of `shown` that is not in `printed` after the lines before it, or `None` if all are.
fn missing(dir: &Path, shown: &[String], printed: &str) -> Option<String> {
    let mut lines = printed.lines().map(|line| normal(dir, line));
    let shown = shown.iter().map(|line| normal(dir, line)).filter(|line| line != "...");
    shown.into_iter().find(|line| !lines.any(|printed| printed == *line))
}

/// Returns a line with placeholders for the parts that vary: directories, numbers, sizes and image names. Runs of
/// spaces become one space.
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

/// Replaces image names, which are hashes of the content, by `#`.
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

/// Returns the commands of a section as a bash script. The output of each command is written to a file of its own.
/// After a command that starts a server, the script waits until the server is ready, as a reader of the page would.
fn session(dir: &Path, prepare: &str, shown: &[Shown]) -> String {
    let mut script = format!("{prepare}\n");
    for (n, Shown { command, .. }) in shown.iter().enumerate() {
        let out = format!(".out.{n}");
        // `:` makes the braces valid even if the command is only a comment. The line break ends a comment at the end.
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

/// Returns process ID and name of the processes of a group that have not ended. Ended processes stay in their group
/// until init collects them, which can take seconds.
fn running(group: Pid) -> Vec<(Pid, String)> {
    let group = group.as_raw_nonzero().to_string();
    let stats = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path().join("stat"));
    let of_group = |stat: String| {
        // In /proc/PID/stat the process name is in parentheses and may contain spaces. The state, parent and group
        // follow.
        let (pid, rest) = stat.split_once(" (")?;
        let (name, rest) = rest.rsplit_once(") ")?;
        let fields: Vec<_> = rest.split(' ').take(3).collect();
        let is_running = !matches!(fields[0], "Z" | "X") && fields[2] == group;
        is_running.then(|| (Pid::from_raw(pid.parse().unwrap()).unwrap(), name.to_owned()))
    };
    stats.flat_map(fs::read_to_string).filter_map(of_group).collect()
}

/// Runs a script and ends the processes that it left running. Returns the output of bash itself, for example errors.
fn run_bash(dir: &Path, script: &str) -> String {
    let file = dir.join(".session");
    fs::write(&file, script).unwrap();
    let log = fs::File::create(dir.join(".log")).unwrap();
    let bin = Path::new(program()).parent().unwrap();
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
    // SIGTERM first: nbdfuse unmounts, and a server removes its sockets. qemu-nbd and nbdkit must end after the server,
    // because it flushes to the disks that they export.
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
