//! The program `freestone`; all of it is in the library beside.

use std::process::ExitCode;

fn main() -> ExitCode {
    freestone_cli::main()
}
