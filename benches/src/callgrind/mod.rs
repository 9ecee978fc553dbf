//! `instructions` benchmark: instructions per request, counted by callgrind. The counts are the
//! same on every machine and under any load. Comparing two builds of this program shows what a
//! change costs.

pub mod instructions;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use freestone_report::{Report, Row, Summary, Target, Unit};

use instructions::{Content, DISK_BYTES, RequestKind};

/// Request counts of the two runs. The setup costs the same in both, so their difference excludes
/// it.
const COUNTS: [u64; 2] = [10_000, 30_000];
/// Hidden command of this program that runs the counted loop.
const LOOP: &str = "instructions-loop";

/// Disk that serves the requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Disk {
    Plain,
    /// A disk with a backing device.
    Backed,
    /// A fork that has written every page.
    Fork,
}

impl Disk {
    /// Returns the option that selects this disk in the loop's command, or None for a plain disk.
    fn word(self) -> Option<&'static str> {
        match self {
            Self::Plain => None,
            Self::Backed => Some("--backed"),
            Self::Fork => Some("--fork"),
        }
    }
}

/// Options of the `instructions` benchmark.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Program built from another commit, to compare with.
    #[arg(long)]
    against: Option<PathBuf>,
}

/// Counts the instructions of reads and writes, for each page content and each kind of disk.
pub fn run(args: &Args) -> Result<Vec<Report>> {
    let own = std::env::current_exe().context("this program's own file")?;
    let mut rows = Vec::new();
    for request in [RequestKind::Read, RequestKind::Write] {
        for content in [Content::Compressible, Content::Same] {
            let what = format!("{} of a {} page", name(&request), name(&content));
            let other = match &args.against {
                Some(path) => Some(instructions_per_request(path, request, content, Disk::Plain)?),
                None => None,
            };
            let plain = instructions_per_request(&own, request, content, Disk::Plain)?;
            let backed = instructions_per_request(&own, request, content, Disk::Backed)?;
            let fork = instructions_per_request(&own, request, content, Disk::Fork)?;
            for (disk, count) in [("", plain), (", with a backing device", backed)] {
                rows.push(Row::single(format!("{what}{disk}"), Unit::Count, count));
                if let Some(other) = other {
                    let more = Summary::one(count / other);
                    let row = Row::ratio(format!("{what}{disk} / before"), more)
                        .target(Target::AtMost(1.02))
                        .part("before", other);
                    rows.push(row);
                }
            }
            let more = Summary::one(fork / plain);
            let row = Row::ratio(format!("{what}, of a fork's own / of a disk"), more)
                .part("fork", fork)
                .part("disk", plain);
            rows.push(if request == RequestKind::Write { row.target(Target::AtMost(1.02)) } else { row });
        }
    }
    Ok(vec![
        Report::new("instructions", "fio's compressible pages, same-filled pages", DISK_BYTES, "lz4")
            .note(format!(
                "Instructions of one 4 KiB request to a random page, counted by callgrind as the difference of \
                 {} and {} requests. Nothing is written back. A fork's own: a fork of a snapshot that has \
                 written every page before. Before: {}.",
                COUNTS[1],
                COUNTS[0],
                args.against.as_ref().map_or("not given".into(), |path| path.display().to_string())
            ))
            .rows(rows)
            .print(),
    ])
}

fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned())
}

fn instructions_per_request(
    program: &Path,
    request: RequestKind,
    content: Content,
    disk: Disk,
) -> Result<f64> {
    let [few, many] = COUNTS;
    let counted = |count: u64| {
        let mut command = self::command(program, &[]);
        command.args([LOOP, &name(&request), &name(&content), &count.to_string()]).args(disk.word());
        count_instructions(&mut command)
    };
    let (few_count, many_count) = (counted(few)?, counted(many)?);
    Ok(many_count.saturating_sub(few_count) as f64 / (many - few) as f64)
}

pub const VALGRIND_MISSING: &str = "cannot start valgrind; install the package valgrind";

/// Returns a command that runs `program` under callgrind with `options`. The caller adds the
/// program's own arguments.
pub fn command(program: &Path, options: &[&str]) -> Command {
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).args(options);
    command.arg(program).stdin(Stdio::null());
    command
}

/// Runs a command of callgrind and returns the number of instructions that its process executed.
pub fn count_instructions(command: &mut Command) -> Result<u64> {
    parse_count(&command.output().context(VALGRIND_MISSING)?)
}

/// Returns the instruction count that callgrind printed at the end of a command.
pub fn parse_count(output: &Output) -> Result<u64> {
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "a program under valgrind failed: {stderr}");
    parse(&stderr).with_context(|| format!("callgrind gave no count: {stderr}"))
}

/// Parses callgrind's line `==17== Collected : 123456`. Returns None if `stderr` has no such line.
fn parse(stderr: &str) -> Option<u64> {
    let line = stderr.lines().find_map(|line| line.split_once("Collected :"))?;
    line.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn instruction_count_is_parsed() {
        let stderr = "==17== Events    : Ir\n==17== Collected : 123456\n==17== \n";
        assert_eq!(crate::callgrind::parse(stderr), Some(123_456));
        assert_eq!(crate::callgrind::parse("==17== Collected : many\n"), None);
    }
}
