//! Progress bar of a verb on a terminal, for example `ram0: save [######--------] 1.2G of 4.0G, 30 %,
//! 98.3M/s, 29s left`.

use std::fmt;

use freestone_server::jobs::JobInfo;
use freestone_spec::size::human;
use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

/// Template of the bar while the total number of bytes is known.
const WITH_TOTAL: &str = "{prefix} [{wide_bar}] {done} of {total}, {percent} %{left}";
/// Template of the bar while the total number of bytes is unknown.
const WITHOUT_TOTAL: &str = "{prefix}, {elapsed}";
/// Template of the bar after the user has cancelled the verb.
const CANCELLING: &str = "{prefix}, is being cancelled; press Ctrl-C again to exit at once";

/// A progress bar on stderr. Dropping this value removes the bar from the terminal.
pub struct Bar {
    line: ProgressBar,
    template: &'static str,
}

impl Bar {
    /// Creates the progress bar of a job in the server.
    pub fn new(job: &JobInfo) -> Self {
        Self::of(&job.name, &job.verb)
    }

    /// Creates the progress bar of the verb `verb` on the device `name`.
    pub fn of(name: &str, verb: &str) -> Self {
        let line = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        Self { line: line.with_prefix(format!("{name}: {verb}")), template: "" }
    }

    /// Draws the current progress of the job.
    pub fn show(&mut self, job: &JobInfo, is_cancelling: bool) {
        self.update(job.done_bytes, job.total_bytes, is_cancelling);
    }

    /// Draws the progress in bytes. `total` is 0 while the total is unknown.
    pub fn update(&mut self, done: u64, total: u64, is_cancelling: bool) {
        let template = match total {
            _ if is_cancelling => CANCELLING,
            0 => WITHOUT_TOTAL,
            _ => WITH_TOTAL,
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
    ProgressStyle::with_template(template)
        .expect("the template is a constant")
        .progress_chars("#-")
        .with_key("done", |state: &ProgressState, out: Out<'_>| {
            let _ = out.write_str(&human(state.pos()));
        })
        .with_key("total", |state: &ProgressState, out: Out<'_>| {
            let _ = out.write_str(&human(state.len().unwrap_or_default()));
        })
        .with_key("left", |state: &ProgressState, out: Out<'_>| {
            let (rate, left) = (state.per_sec(), HumanDuration(state.eta()));
            // Below one byte per second, the estimate of the time left is meaningless.
            if rate >= 1.0 {
                let _ = write!(out, ", {}/s, {left:#} left", human(rate as u64));
            }
        })
}
