//! `cargo xtask site`: the documentation as pages for browsers, `target/site/book`, with a search.
//!
//! mdBook builds the pages from a copy of the documentation ([`stage`]). The step fails if mdBook warns, or if a link of a
//! page leads nowhere.

mod stage;

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::build::cargo_tools::{self, HYPERLINK, MDBOOK};
use crate::cargo::{self, Outcome, cargo};
use crate::package::empty_dir;

/// Directory of the site below the target directory.
const DIR: &str = "site";

/// Builds the site and checks its links. Each of the two counts as one test.
pub fn run() -> Result<Outcome> {
    let dir = std::path::absolute(cargo::target_dir())?.join(DIR);
    empty_dir(&dir)?;
    let generated = dir.join("generated");
    generate(&generated)?;
    stage::fill(&dir, &generated)?;
    let mut outcome = Outcome::of_test(build(&dir)?);
    let book = dir.join("book");
    // Also checks that headings exist, and that no file has two of the same name.
    let checked = Command::new(cargo_tools::ensure(&HYPERLINK)?).arg(&book).arg("--check-anchors").status();
    outcome.add(Outcome::of_test(checked.context("cannot start hyperlink")?.success()));
    println!("site: {}", book.join("index.html").display());
    Ok(outcome)
}

/// Writes the pages of verbs and kinds, which the program describes.
fn generate(dir: &Path) -> Result<()> {
    let mut manuals = cargo();
    manuals.args(["run", "--quiet", "--package", "freestone-manuals", "--", "--site"]).arg(dir);
    ensure!(
        manuals.status().context("cannot start cargo")?.success(),
        "the pages of the program were not written"
    );
    Ok(())
}

/// Runs mdBook. Returns true if the site was built without warnings.
fn build(dir: &Path) -> Result<bool> {
    let mut mdbook = Command::new(cargo_tools::ensure(&MDBOOK)?);
    let output = mdbook.arg("build").arg(dir).stdin(Stdio::null()).output().context("cannot start mdbook")?;
    let printed = String::from_utf8_lossy(&output.stderr);
    print!("{printed}");
    let warns = |line: &str| line.contains("WARN") || line.contains("ERROR");
    Ok(output.status.success() && !printed.lines().any(warns) && dir.join("book/index.html").is_file())
}
