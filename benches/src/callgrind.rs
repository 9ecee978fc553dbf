//! Instructions of one request, as callgrind counts them: the same on every machine and under any
//! load. Two versions of this program, built from two commits, tell what the difference between
//! them costs.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use freestone_report::{Report, Row, Summary, Target, Unit};

use crate::instructions::{Content, DISK_BYTES, What};

/// Requests of the two runs whose difference counts.
const COUNTS: [u64; 2] = [10_000, 30_000];
/// The loop's name on the command line.
const LOOP: &str = "instructions-loop";

/// The disk that the requests go to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Disk {
    Plain,
    /// With a backing device.
    Backed,
    /// A fork that has every page itself.
    Fork,
}

impl Disk {
    /// The word for it on the loop's command line.
    fn word(self) -> Option<&'static str> {
        match self {
            Self::Plain => None,
            Self::Backed => Some("--backed"),
            Self::Fork => Some("--fork"),
        }
    }
}

/// What it can be told.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// This program built from another commit, to compare with.
    #[arg(long)]
    against: Option<PathBuf>,
}

/// Counts every kind of request.
pub fn run(args: &Args) -> Result<Vec<Report>> {
    let own = std::env::current_exe().context("this program's own file")?;
    let mut rows = Vec::new();
    for request in [What::Read, What::Write] {
        for content in [Content::Compressible, Content::Same] {
            let what = format!("{} of a {} page", name(&request), name(&content));
            let other = match &args.against {
                Some(path) => Some(per_request(path, request, content, Disk::Plain)?),
                None => None,
            };
            let plain = per_request(&own, request, content, Disk::Plain)?;
            let backed = per_request(&own, request, content, Disk::Backed)?;
            let fork = per_request(&own, request, content, Disk::Fork)?;
            for (disk, count) in [("", plain), (", with a backing device", backed)] {
                rows.push(Row::one(format!("{what}{disk}"), Unit::Count, count));
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
            rows.push(if request == What::Write { row.target(Target::AtMost(1.02)) } else { row });
        }
    }
    Ok(vec![
        Report::new("instructions", "fio's compressible pages, same-filled pages", DISK_BYTES, "lz4")
            .note(format!(
                "Instructions of one 4 KiB request to a random page, by callgrind: the difference of {} \
                 and {} requests. Nothing is spilled. A fork's own: a fork of a snapshot that has written \
                 every page before. Before: {}.",
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

fn per_request(program: &Path, request: What, content: Content, disk: Disk) -> Result<f64> {
    let [few, many] = COUNTS;
    let counted = |count: u64| {
        let mut command = self::command(program, &[]);
        command.args([LOOP, &name(&request), &name(&content), &count.to_string()]).args(disk.word());
        collected(&mut command)
    };
    let (few_count, many_count) = (counted(few)?, counted(many)?);
    Ok(many_count.saturating_sub(few_count) as f64 / (many - few) as f64)
}

/// What is told where valgrind cannot be started.
pub const MISSING: &str = "valgrind could not be started; the package is called valgrind";

/// A command that runs `program` under callgrind with `options`; the program's own arguments are to
/// be added.
pub fn command(program: &Path, options: &[&str]) -> Command {
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).args(options);
    command.arg(program).stdin(Stdio::null());
    command
}

/// Instructions that the command took from start to end.
pub fn collected(command: &mut Command) -> Result<u64> {
    count_in(&command.output().context(MISSING)?)
}

/// What callgrind said at the end of a command.
pub fn count_in(output: &Output) -> Result<u64> {
    let told = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "a program under valgrind failed: {told}");
    parse(&told).with_context(|| format!("callgrind gave no count: {told}"))
}

/// `==17== Collected : 123456`.
fn parse(told: &str) -> Option<u64> {
    let line = told.lines().find_map(|line| line.split_once("Collected :"))?;
    line.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_count_is_found() {
        let told = "==17== Events    : Ir\n==17== Collected : 123456\n==17== \n";
        assert_eq!(super::parse(told), Some(123_456));
        assert_eq!(super::parse("==17== Collected : many\n"), None);
    }
}
