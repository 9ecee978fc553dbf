//! The zones and test drives of this crate beside the kernel's `null_blk`: both do the same random
//! operations, and every answer is compared, as are the conditions and write pointers after each.
//! `lab/run-zones.sh` runs it.
//!
//! ```text
//! zone_lab make SEED               a script
//! zone_lab run SCRIPT              what ours answers to it; the kernel's answers come from lab/zone_guest.c
//! zone_lab compare SCRIPT KERNEL OURS    the answers
//! ```
//!
//! Exit status: 0, 1 where something differs that should not.

mod compare;
mod ours;
mod random;
mod scenes;
mod script;

use std::fs;
use std::process::ExitCode;

use ours::{Ours, Result};

fn run(words: &[&str]) -> Result<bool> {
    match *words {
        ["make", seed] => {
            println!("{}", random::script(seed.parse()?)?.join("\n"));
            Ok(true)
        }
        ["run", script] => {
            let mut ours = Ours::default();
            for (number, line) in (1..).zip(fs::read_to_string(script)?.lines()) {
                println!("> {line}");
                let answers = ours.line(line).map_err(|error| format!("line {number}: {error}"))?;
                for answer in answers {
                    println!("{answer}");
                }
            }
            Ok(true)
        }
        ["compare", script, kernel, ours] => {
            let [script, kernel, ours] = [script, kernel, ours].map(fs::read_to_string);
            compare::compare(&script?, &kernel?, &ours?)
        }
        _ => Err("make SEED, run SCRIPT, or compare SCRIPT KERNEL OURS".into()),
    }
}

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args().skip(1).collect();
    match run(&words.iter().map(String::as_str).collect::<Vec<_>>()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("zone_lab: {error}");
            ExitCode::FAILURE
        }
    }
}
