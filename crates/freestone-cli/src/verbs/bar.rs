//! How far a verb is, on a terminal: `ram0: save [######--------] 1.2G of 4.0G, 30 %, 98.3M/s, 29s left`.

use std::fmt;

use freestone_spec::size::human;
use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use crate::job::Shown;

/// What is shown while it is known how much there is to do.
const PARTS: &str = "{prefix} [{wide_bar}] {done} of {total}, {percent} %{left}";
/// While it is not.
const TIME: &str = "{prefix}, {elapsed}";
/// Once it is told to end.
const ENDS: &str = "{prefix}, is told to end; Ctrl-C again does not wait for that";

/// A line of the terminal that stderr is. Nothing is left of it when this is dropped.
pub struct Bar {
    line: ProgressBar,
    template: &'static str,
}

impl Bar {
    /// Of a verb that has come so far.
    pub fn new(job: &Shown) -> Self {
        Self::of(&job.name, &job.verb)
    }

    /// Of a verb.
    pub fn of(name: &str, verb: &str) -> Self {
        let line = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        Self { line: line.with_prefix(format!("{name}: {verb}")), template: "" }
    }

    /// It has come so far.
    pub fn show(&mut self, job: &Shown, is_told: bool) {
        self.at(job.done_bytes, job.total_bytes, is_told);
    }

    /// The same.
    pub fn at(&mut self, done: u64, total: u64, is_told: bool) {
        let template = match total {
            _ if is_told => ENDS,
            0 => TIME,
            _ => PARTS,
        };
        if self.template != template {
            self.template = template;
            self.line.set_style(style(template));
        }
        self.line.update(|state| {
            state.set_len(total);
            state.set_pos(done);
        });
    }
}

fn style(template: &str) -> ProgressStyle {
    type Out<'a> = &'a mut dyn fmt::Write;
    // What cannot be written is not shown.
    ProgressStyle::with_template(template)
        .expect("it is a constant")
        .progress_chars("#-")
        .with_key("done", |state: &ProgressState, out: Out<'_>| {
            let _ = out.write_str(&human(state.pos()));
        })
        .with_key("total", |state: &ProgressState, out: Out<'_>| {
            let _ = out.write_str(&human(state.len().unwrap_or_default()));
        })
        .with_key("left", |state: &ProgressState, out: Out<'_>| {
            let (rate, left) = (state.per_sec(), HumanDuration(state.eta()));
            // Before that it is anybody's guess.
            if rate >= 1.0 {
                let _ = write!(out, ", {}/s, {left:#} left", human(rate as u64));
            }
        })
}
