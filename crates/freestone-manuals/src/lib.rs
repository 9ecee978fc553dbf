//! Generates the manual pages, the shell completions and the reference tables of the documentation from the
//! parser of `freestone`. This is a separate crate, so that the program does not contain the generators.

mod page;
pub mod reference;
pub mod site;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap_complete::aot::{Bash, Fish, Generator, Zsh};

/// Name of the documented program.
pub const NAME: &str = "freestone";

/// Writes manual pages and shell completions below `dir`. The pages are `man/NAME-VERB.1` and `man/NAME-devices.7`. The
/// completions are `bash/NAME`, `zsh/_NAME` and `fish/NAME.fish`, the file names that the shells expect.
///
/// # Errors
/// A directory cannot be created, or a file cannot be written.
pub fn write(dir: &Path) -> Result<()> {
    let pages = subdirectory(dir, "man")?;
    page::write_all(&parser(), &pages)?;
    page::write_devices(&pages)?;
    complete(&Bash, &subdirectory(dir, "bash")?.join(NAME))?;
    complete(&Zsh, &subdirectory(dir, "zsh")?.join(format!("_{NAME}")))?;
    complete(&Fish, &subdirectory(dir, "fish")?.join(format!("{NAME}.fish")))
}

/// Returns the command-line parser of the program, without the verb `help`, which the manual pages replace.
pub fn parser() -> clap::Command {
    let mut parser = freestone_cli::parser().disable_help_subcommand(true);
    parser.build();
    parser
}

fn subdirectory(dir: &Path, name: &str) -> Result<PathBuf> {
    let dir = dir.join(name);
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir)
}

fn complete(shell: &impl Generator, path: &Path) -> Result<()> {
    let cannot = || format!("cannot write {}", path.display());
    let mut file = File::create(path).with_context(cannot)?;
    let mut parser = freestone_cli::parser();
    parser.set_bin_name(NAME);
    parser.build();
    shell.try_generate(&parser, &mut file).with_context(cannot)
}
