//! The program `freestone`. The library contains all of its code.

use std::process::ExitCode;

fn main() -> ExitCode {
    freestone_cli::main()
}
