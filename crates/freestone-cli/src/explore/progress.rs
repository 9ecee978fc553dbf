//! Progress and interruption of an exploration.

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use freestone_core::sync::Mutex;
use freestone_explore::{Phase, Progress, Watch};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use signal_hook::consts::SIGTERM;
use signal_hook::flag;

use crate::client::long::catch_interrupt;

/// Shortest time between two progress reports.
const INTERVAL: Duration = Duration::from_millis(200);
const WITH_TOTAL: &str = "explore: {msg} [{wide_bar}] {pos} of {len}";
const WITHOUT_TOTAL: &str = "explore: {msg}, {pos} so far, {elapsed}";

/// Form of the progress on stderr.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ProgressForm {
    Bar,
    Json,
    None,
}

/// Shows the progress, and ends the exploration at the first SIGINT or SIGTERM.
pub struct Observer {
    form: ProgressForm,
    interrupted: Arc<AtomicBool>,
    shown: Mutex<Shown>,
}

struct Shown {
    bar: Option<ProgressBar>,
    last: Option<Instant>,
    phase: Option<Phase>,
}

impl Observer {
    /// Starts to watch for SIGINT and SIGTERM. A second one ends the program.
    pub fn new(form: Option<ProgressForm>) -> Result<Self> {
        let form = match form.unwrap_or(ProgressForm::Bar) {
            ProgressForm::Bar if !io::stderr().is_terminal() => ProgressForm::None,
            form => form,
        };
        let interrupted = catch_interrupt()?;
        // SIGTERM also ends the checks and mounts in order. A second one ends the program.
        flag::register_conditional_default(SIGTERM, Arc::clone(&interrupted))
            .and_then(|_| flag::register(SIGTERM, Arc::clone(&interrupted)))
            .context("cannot take over SIGTERM")?;
        let shown = Mutex::new(Shown { bar: None, last: None, phase: None });
        Ok(Self { form, interrupted, shown })
    }

    /// Returns true after one of these signals.
    pub fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::SeqCst)
    }

    /// Removes the progress bar from the terminal.
    pub fn clear(&self) {
        if let Some(bar) = self.shown.lock().bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Watch for Observer {
    fn should_stop(&self) -> bool {
        self.is_interrupted()
    }

    fn report(&self, progress: &Progress) {
        let mut shown = self.shown.lock();
        let is_due = shown.last.is_none_or(|last| last.elapsed() >= INTERVAL);
        if self.form == ProgressForm::None || !is_due && shown.phase == Some(progress.phase) {
            return;
        }
        shown.last = Some(Instant::now());
        shown.phase = Some(progress.phase);
        let Progress { phase, done, total, failing, duplicates } = *progress;
        if self.form == ProgressForm::Json {
            let phase = match phase {
                Phase::Explore => "explore",
                Phase::Reduce => "reduce",
            };
            let report = json!({
                "phase": phase, "done": done, "total": total, "failing": failing, "duplicates": duplicates,
            });
            // A closed stderr is ignored.
            let _ = writeln!(io::stderr(), "{}", json!({ "progress": report }));
            return;
        }
        let bar = shown
            .bar
            .get_or_insert_with(|| ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr()));
        let template = if total.is_some() { WITH_TOTAL } else { WITHOUT_TOTAL };
        bar.set_style(
            ProgressStyle::with_template(template).expect("the template is a constant").progress_chars("#-"),
        );
        bar.set_message(match phase {
            Phase::Explore => format!("{failing} failing, {duplicates} equal omitted"),
            Phase::Reduce => "reducing failures".to_owned(),
        });
        bar.set_length(total.unwrap_or_default());
        bar.set_position(done);
    }
}
