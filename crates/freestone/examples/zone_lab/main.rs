//! Compares the zoned devices and null devices of this crate with the kernel's `null_blk`. Both execute the
//! same random operations. After each operation, the results, zone conditions and write pointers are
//! compared. `lab/run-zones.sh` runs this program.
//!
//! ```text
//! zone_lab make SEED                     print a script
//! zone_lab run SCRIPT                    print the results of this crate; lab/zone_guest.c has those of the kernel
//! zone_lab compare SCRIPT KERNEL OURS    compare the results
//! ```
//!
//! Exit status: 0, or 1 if there is an unexpected difference.

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
