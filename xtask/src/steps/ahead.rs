//! Builds of later steps, which use the CPU time that tests leave while they wait.

use std::process::{Command, Stdio};
use std::thread;

use anyhow::Result;

use super::{Step, actions};
use crate::torture;

/// Step beside which the builds run.
const BESIDE: Step = Step::Test;

/// Starts the builds of `later` steps if `step` is the one beside which they run. A later step runs its build again,
/// which waits for cargo's lock, and reports errors. So nothing waits here for the builds, and their output is omitted.
/// The builds have the usual priority: with a lower one, a step could wait for long on a busy machine.
pub fn start(step: Step, later: &[Step]) {
    let builds: Vec<_> = later.iter().filter_map(|&step| build(step)).collect();
    if step != BESIDE || builds.is_empty() {
        return;
    }
    thread::spawn(move || {
        for mut command in builds.into_iter().flatten() {
            drop(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status());
        }
    });
}

fn build(step: Step) -> Option<Result<Command>> {
    match step {
        Step::Models => Some(actions::models_build()),
        Step::Torture => Some(torture::simulation_build()),
        _ => None,
    }
}
