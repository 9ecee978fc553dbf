//! The program `freestone`, with all code in the library crate `freestone_cli`.

use std::process::ExitCode;

fn main() -> ExitCode {
    freestone_cli::main()
}
