//! Records the compilers and flags of this build in `FREESTONE_BUILD`. Instruction counts are
//! compared only between equal builds.

use std::env;
use std::process::Command;

/// Environment variables that change the code of a release build and do not show in the compiler
/// flags.
const OVERRIDES: [&str; 3] =
    ["CARGO_PROFILE_RELEASE_LTO", "CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "CARGO_PROFILE_RELEASE_OPT_LEVEL"];

fn main() {
    let of = |name: &str| env::var(name).unwrap_or_default();
    let mut build = vec![
        first_line(&env::var("RUSTC").unwrap_or_else(|_| "rustc".into())),
        // The C codecs are built with this compiler.
        first_line(&env::var("CC").unwrap_or_else(|_| "cc".into())),
        of("CARGO_CFG_TARGET_ARCH"),
        of("PROFILE"),
    ];
    build.extend(
        of("CARGO_ENCODED_RUSTFLAGS").split('\u{1f}').filter(|flag| !flag.is_empty()).map(Into::into),
    );
    for name in OVERRIDES {
        println!("cargo:rerun-if-env-changed={name}");
        if let Ok(value) = env::var(name) {
            build.push(format!("{name}={value}"));
        }
    }
    println!("cargo:rerun-if-env-changed=CC");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-env=FREESTONE_BUILD={}", build.join(", "));
}

/// Returns the first line of `compiler --version`.
fn first_line(compiler: &str) -> String {
    let output = Command::new(compiler).arg("--version").output();
    let text = output.map(|output| output.stdout).unwrap_or_default();
    let line = String::from_utf8_lossy(&text).lines().next().unwrap_or_default().trim().to_owned();
    if line.is_empty() { format!("{compiler} of unknown version") } else { line }
}
