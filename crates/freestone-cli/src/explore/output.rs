//! The result as text and as JSON.

use std::fmt::Write as _;
use std::path::Path;

use freestone_explore::{End, Failure, LostWrite, Report, StateId, Verdict};
use serde_json::{Value, json};

use super::kept::Kept;
use super::workload::Disk;
use crate::serve::announce::quote;

/// Number of lines of a check's output that the text shows.
const LINES_SHOWN: usize = 20;
/// Number of lost writes that the text lists.
const LOST_SHOWN: usize = 20;

/// The run that was explored, as the command that repeats a state needs it.
pub struct Subject<'a> {
    pub log: &'a Path,
    pub disk: &'a Disk,
    pub check: &'a str,
    /// Options that the check depends on, such as `--mount`.
    pub options: Vec<String>,
}

impl Subject<'_> {
    /// Returns the command that checks one state again.
    pub fn repeat(&self, id: &StateId) -> String {
        let path = |path: &Path| quote(&path.display().to_string());
        let disk = match self.disk {
            Disk::Empty(size) => format!("--size {}", freestone_spec::size::exact(*size)),
            Disk::Image(image) => format!("--base {}", path(image)),
        };
        let options = [vec![String::new()], self.options.clone()].concat().join(" ");
        format!(
            "freestone explore --log {} {disk}{options} --state {id} --check {}",
            path(self.log),
            quote(self.check)
        )
    }
}

/// Returns the reason of the end as a word.
const fn end_word(end: End) -> &'static str {
    match end {
        End::Complete => "complete",
        End::Budget => "budget",
        End::FirstFailure => "first_failure",
        End::Failures => "failures",
        End::FinalState => "final_state",
        End::Stopped => "interrupted",
    }
}

const fn plural(count: u64) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// Returns the report as text.
pub fn text(report: &Report, subject: &Subject<'_>, kept: &[Option<Kept>]) -> String {
    let mut out = String::new();
    let end = match report.end {
        End::Complete => ", all that the models allow",
        End::Budget => ", as --budget allows",
        End::FirstFailure => ", until the first failure",
        End::Failures => ", until there were too many failures",
        End::FinalState => "",
        End::Stopped => ", until the interrupt",
    };
    // Writing to a string cannot fail, so the results of `writeln!` are ignored.
    let _ = writeln!(
        out,
        "{} entries: {} state{} checked{end}; {} failing, {} equal omitted, {:.1} s",
        report.entries,
        report.states,
        plural(report.states),
        report.failing_states,
        report.duplicates,
        report.time.as_secs_f64()
    );
    if report.end == End::FinalState {
        let _ = writeln!(
            out,
            "the check fails after the whole log, with nothing lost: correct the check or the workload first"
        );
    }
    for (index, failure) in report.failures.iter().enumerate() {
        out.push('\n');
        out.push_str(&failure_text(index + 1, failure, subject, kept[index].as_ref()));
    }
    for flaky in &report.flaky {
        let _ = writeln!(
            out,
            "\nflaky: state {} failed once ({}), and passed when repeated",
            flaky.id, flaky.verdict.end
        );
    }
    out
}

/// Returns a failure as text.
pub fn failure_text(number: usize, failure: &Failure, subject: &Subject<'_>, kept: Option<&Kept>) -> String {
    let mut out = String::new();
    let Failure { id, mark, lost, verdict, states, is_minimal } = failure;
    let _ = writeln!(
        out,
        "failure {number}: state {id}, {} ({states} failing state{})",
        verdict.end,
        plural(*states)
    );
    let _ = writeln!(
        out,
        "  mark    {}",
        mark.as_deref().map_or_else(|| "none".to_owned(), |mark| format!("{mark:?}"))
    );
    let note = if *is_minimal { "" } else { " (not reduced)" };
    if lost.is_empty() {
        let _ = writeln!(out, "  lost    nothing of the first {} entries{note}", id.point);
    }
    for (index, write) in lost.iter().take(LOST_SHOWN).enumerate() {
        let _ = writeln!(out, "  {:<7} {}{note}", if index == 0 { "lost" } else { "" }, lost_text(write));
    }
    if lost.len() > LOST_SHOWN {
        let _ = writeln!(out, "          and {} more", lost.len() - LOST_SHOWN);
    }
    let lines: Vec<_> = verdict.output.lines().collect();
    let omitted = lines.len().saturating_sub(LINES_SHOWN);
    if omitted > 0 {
        let _ = writeln!(out, "  output  [{omitted} lines are omitted; --json shows more]");
    }
    for (index, line) in lines[omitted..].iter().enumerate() {
        let label = if index == 0 && omitted == 0 { "output" } else { "" };
        // Control characters could confuse the terminal.
        let line: String =
            line.chars().map(|c| if c.is_control() && c != '\t' { '\u{fffd}' } else { c }).collect();
        let _ = writeln!(out, "  {label:<7} {line}");
    }
    out.push_str(&kept_text(kept));
    let _ = writeln!(out, "  repeat  {}", subject.repeat(id));
    out
}

fn kept_text(kept: Option<&Kept>) -> String {
    kept.map_or_else(String::new, |kept| {
        format!("  kept    {}\n  reopen  {}\n", kept.path.display(), kept.reopen)
    })
}

fn lost_text(lost: &LostWrite) -> String {
    let what = match (lost.is_discard, lost.is_whole) {
        (true, _) => "discard of ",
        (false, true) => "",
        (false, false) => "part of a write: ",
    };
    let mark = lost.mark.as_deref().map_or_else(String::new, |mark| format!(", after mark {mark:?}"));
    format!("entry {}: {what}{} bytes at {}{mark}", lost.entry, lost.len, lost.offset)
}

/// Returns the report as JSON.
pub fn json(report: &Report, subject: &Subject<'_>, seed: u64, kept: &[Option<Kept>]) -> Value {
    let path = |path: &Path| path.display().to_string();
    let failures: Vec<_> = report
        .failures
        .iter()
        .enumerate()
        .map(|(index, failure)| {
            let Failure { id, mark, lost, verdict, states, is_minimal } = failure;
            let lost: Vec<_> = lost
                .iter()
                .map(|lost| {
                    json!({
                        "entry": lost.entry, "offset": lost.offset, "bytes": lost.len, "whole": lost.is_whole,
                        "discard": lost.is_discard, "mark": lost.mark,
                    })
                })
                .collect();
            json!({
                "state": id.to_string(), "entry": id.point, "mark": mark, "lost": lost, "minimal": is_minimal,
                "states": states, "end": verdict.end, "output": verdict.output, "repeat": subject.repeat(id),
                "kept": kept[index].as_ref().map(|kept| path(&kept.path)),
                "reopen": kept[index].as_ref().map(|kept| &kept.reopen),
            })
        })
        .collect();
    let flaky: Vec<_> = report
        .flaky
        .iter()
        .map(|flaky| {
            json!({
                "state": flaky.id.to_string(), "end": flaky.verdict.end, "output": flaky.verdict.output,
            })
        })
        .collect();
    let (base, size) = match subject.disk {
        Disk::Image(image) => (Some(path(image)), None),
        Disk::Empty(size) => (None, Some(size)),
    };
    json!({
        "log": path(subject.log), "base": base, "size": size, "entries": report.entries, "seed": seed,
        "states": report.states, "duplicates": report.duplicates, "failing_states": report.failing_states,
        "reductions": report.reductions, "end": end_word(report.end), "seconds": report.time.as_secs_f64(),
        "failures": failures, "flaky": flaky,
    })
}

/// Returns the result of checking one state as text.
pub fn state_text(id: &StateId, verdict: &Verdict, kept: Option<&Kept>) -> String {
    let result = if verdict.passed { "passed" } else { "failed" };
    format!("{}state {id}: {result}, {}\n{}", verdict.output, verdict.end, kept_text(kept))
}
