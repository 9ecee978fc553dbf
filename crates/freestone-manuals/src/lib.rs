//! The manual pages of the program `freestone` and its completions, from its own parser: what it does not take is in
//! none of them. The program itself has no part in this, and does not grow by it.

mod page;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap_complete::aot::{Bash, Fish, Generator, Zsh};

/// The program.
pub const NAME: &str = "freestone";

/// Writes all of it into a directory: pages as `man/NAME-VERB.1`, completions as `bash/NAME`, `zsh/_NAME` and
/// `fish/NAME.fish`, which are the names that the shells look for.
///
/// # Errors
/// A file cannot be written.
pub fn write(dir: &Path) -> Result<()> {
    page::write_all(&parser(), &subdirectory(dir, "man")?)?;
    complete(&Bash, &subdirectory(dir, "bash")?.join(NAME))?;
    complete(&Zsh, &subdirectory(dir, "zsh")?.join(format!("_{NAME}")))?;
    complete(&Fish, &subdirectory(dir, "fish")?.join(format!("{NAME}.fish")))
}

/// The program's parser, with the pages of its verbs in place of a verb `help`.
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
