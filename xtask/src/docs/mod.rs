//! `cargo xtask bench docs`: writes the figures of published benchmark runs into README.md and docs/.
//!
//! A region between `<!-- begin NAME ... -->` and `<!-- end NAME -->` is generated from `docs/runs/NAME.json`, the output
//! of a benchmark. Figures in sentences are compared with their runs ([`prose`]). Tidy calls [`problems`].

mod prose;
mod region;
mod take;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
// Writing to a String cannot fail: results are dropped.
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::Parser;
use freestone_report::Document;

use region::{BEGIN, Piece, Region};

pub const RUNS_DIR: &str = "docs/runs";
const CHARTS_DIR: &str = "docs/charts";
const DOCS_DIR: &str = "docs";
/// Directories of the book's pages, one for each part.
pub const PARTS: [&str; 4] = ["docs/tutorials", "docs/how-to", "docs/reference", "docs/explanation"];
/// Page on which every figure must be from a published run.
const BENCHMARKS: &str = "docs/explanation/benchmarks.md";

/// `cargo xtask bench docs`.
#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask bench docs",
    about = "Write the figures of published runs into README.md and docs/"
)]
struct Args {
    /// First publish these runs, copying `benches/out/NAME.json` to docs/runs/; `reproduce` stands for all experiments
    /// and their charts
    #[arg(long, value_name = "NAME", num_args = 1..)]
    take: Vec<String>,
}

/// Publishes runs and writes their figures. Returns true if no problems remain.
pub fn command(args: &[OsString]) -> Result<bool> {
    let args = Args::parse_from([OsString::from("docs")].iter().chain(args));
    for name in &args.take {
        take::take(name)?;
    }
    let pages = Pages::load()?;
    for (path, text) in &pages.texts {
        let (new, _) = pages.regenerate(path, text);
        if new != *text {
            fs::write(path, &new).with_context(|| format!("cannot write {}", path.display()))?;
            println!("{}: updated", path.display());
        }
    }
    let problems = problems()?;
    for (path, line, what) in &problems {
        println!("{}:{line}: {what}", path.display());
    }
    Ok(problems.is_empty())
}

/// Returns the places where a page differs from its runs: file, line, problem.
pub fn problems() -> Result<Vec<(PathBuf, usize, String)>> {
    let pages = Pages::load()?;
    let mut problems = pages.broken.clone();
    for (path, text) in &pages.texts {
        let (new, found) = pages.regenerate(path, text);
        let all = path == Path::new(BENCHMARKS) || path.starts_with(RUNS_DIR);
        let prose = prose::problems(text, &pages.runs, all);
        problems.extend(found.into_iter().chain(prose).map(|(line, what)| (path.clone(), line, what)));
        if new != *text {
            let line = 1 + new.lines().zip(text.lines()).take_while(|(new, old)| new == old).count();
            problems.push((path.clone(), line, "differs from the run: run cargo xtask bench docs".into()));
        }
    }
    for (name, run) in &pages.runs {
        let path = run_path(name);
        let begin = format!("{BEGIN}{name} ");
        if !pages.texts.values().any(|text| text.contains(&begin)) {
            problems.push((path.clone(), 0, "no page uses this run".into()));
        }
        for chart in run.charts() {
            if !Path::new(CHARTS_DIR).join(chart).is_file() {
                problems.push((path.clone(), 0, format!("its chart {CHARTS_DIR}/{chart} is missing")));
            }
        }
    }
    let wanted: BTreeSet<&str> = pages.runs.values().flat_map(Document::charts).collect();
    for path in files(Path::new(CHARTS_DIR), "svg")? {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if !wanted.contains(name) {
            problems.push((path.clone(), 0, "no run refers to this chart".into()));
        }
    }
    Ok(problems)
}

struct Pages {
    texts: BTreeMap<PathBuf, String>,
    runs: BTreeMap<String, Document>,
    /// Runs that cannot be read: file, line, problem.
    broken: Vec<(PathBuf, usize, String)>,
}

impl Pages {
    fn load() -> Result<Self> {
        let mut pages = Self { texts: BTreeMap::new(), runs: BTreeMap::new(), broken: Vec::new() };
        let mut paths = files(Path::new(DOCS_DIR), "md")?;
        paths.push("README.md".into());
        for dir in PARTS.into_iter().chain([RUNS_DIR]) {
            paths.extend(files(Path::new(dir), "md")?);
        }
        for path in paths {
            let text =
                fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            pages.texts.insert(path, text);
        }
        for path in files(Path::new(RUNS_DIR), "json")? {
            let name = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default().to_owned();
            match Document::load(&path) {
                Ok(run) => drop(pages.runs.insert(name, run)),
                Err(error) => pages.broken.push((path, 0, format!("{error:#}"))),
            }
        }
        Ok(pages)
    }

    /// Returns the page with every region regenerated, and the problems: line, text. A region that cannot be generated
    /// stays unchanged.
    fn regenerate(&self, path: &Path, text: &str) -> (String, Vec<(usize, String)>) {
        let pieces = match region::split(text) {
            Ok(pieces) => pieces,
            Err(problem) => return (text.to_owned(), vec![problem]),
        };
        // Links are relative to the directory of the page.
        let to_docs = match path.parent() {
            Some(dir) if dir == Path::new(DOCS_DIR) => "",
            Some(dir) if dir.starts_with(DOCS_DIR) => "../",
            _ => "docs/",
        };
        let (mut new, mut problems) = (String::new(), Vec::new());
        for piece in pieces {
            match piece {
                Piece::Prose(prose) => new.push_str(prose),
                Piece::Region(region) if region.is_unmeasured() && !self.runs.contains_key(&region.name) => {
                    new.push_str(region.whole);
                }
                Piece::Region(region) => match self.figures(&region, to_docs) {
                    Ok(figures) => {
                        let mut lines = region.whole.lines();
                        let [begin, end] = [lines.next(), lines.next_back()].map(Option::unwrap_or_default);
                        let _ = write!(new, "{begin}\n{}\n{end}\n", figures.trim_end());
                    }
                    Err(what) => {
                        new.push_str(region.whole);
                        problems.push((region.line, what));
                    }
                },
            }
        }
        (new, problems)
    }

    /// Returns the generated content of a region, or the reason why it cannot be generated.
    fn figures(&self, region: &Region, to_docs: &str) -> Result<String, String> {
        let Some(run) = self.runs.get(&region.name) else {
            return Err(format!("there is no {}", run_path(&region.name).display()));
        };
        let figures = run.markdown(&region.choice)?;
        let link = format!("{to_docs}runs/{}.json", region.name);
        Ok(format!("{}\n\n{figures}", run.provenance(&link)))
    }
}

fn run_path(name: &str) -> PathBuf {
    Path::new(RUNS_DIR).join(format!("{name}.json"))
}

/// Returns the files of a directory that have an extension, sorted. Returns none if the directory does not exist.
fn files(dir: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    if !dir.exists() {
        return Ok(Vec::new());
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let path = entry.with_context(|| format!("cannot read {}", dir.display()))?.path();
        if path.extension().is_some_and(|found| found == extension) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use freestone_report::{Machine, Report, Row, Summary, Unit};

    use super::*;

    fn regenerate(text: &str) -> (String, Vec<(usize, String)>) {
        regenerate_at("docs/a.md", text)
    }

    fn regenerate_at(path: &str, text: &str) -> (String, Vec<(usize, String)>) {
        let row = Row::new("reads", Unit::Ratio, Summary::one(1.5));
        let run = Document {
            command: "c".into(),
            date: Some("d".into()),
            machine: Machine { cpu: "c".into(), cpus: 2, memory_mib: 2048, ..Machine::here() },
            reports: vec![Report::new("x", "none", 0, "none").rows(vec![row])],
            ..Document::new("0.1.0", String::new())
        };
        let runs = [("zones".to_owned(), run)].into();
        let pages = Pages { texts: BTreeMap::new(), runs, broken: Vec::new() };
        pages.regenerate(Path::new(path), text)
    }

    #[test]
    fn links_are_relative_to_the_page() {
        let region = "<!-- begin zones -->\n<!-- end zones -->\n";
        for (page, link) in [
            ("README.md", "(docs/runs/zones.json)"),
            ("docs/explanation/a.md", "(../runs/zones.json)"),
            ("docs/runs/a.md", "(../runs/zones.json)"),
        ] {
            let (text, problems) = regenerate_at(page, region);
            assert!(problems.is_empty() && text.contains(link), "{page}: {text}");
        }
    }

    #[test]
    fn regenerate_twice_changes_nothing() {
        let (text, problems) = regenerate("a\n<!-- begin zones -->\n9.99\n<!-- end zones -->\nb\n");
        assert!(problems.is_empty());
        assert!(
            text.starts_with("a\n<!-- begin zones -->\n[`c`](runs/zones.json), d: c, 2 CPUs, 2 GiB,"),
            "{text}"
        );
        assert!(
            text.contains("| reads | 1.500 |") && !text.contains("9.99") && text.ends_with("zones -->\nb\n"),
            "{text}"
        );
        assert_eq!(regenerate(&text), (text, Vec::new()));
    }

    #[test]
    fn unmeasured_region_waits_for_its_run() {
        let region = |name, body| format!("<!-- begin {name} -->\n{body}\n<!-- end {name} -->\n");
        let unmeasured = region("forks", "Not measured yet.");
        assert_eq!(regenerate(&unmeasured), (unmeasured, Vec::new()));
        assert_eq!(regenerate(&region("forks", "Not measured yet.\n9.99")).1.len(), 1);
        let (text, problems) = regenerate(&region("zones", "Not measured yet."));
        assert!(problems.is_empty() && text.contains("| reads | 1.500 |"), "{text}");
    }

    #[test]
    fn regenerate_keeps_regions_with_problems() {
        for bad in [
            "<!-- begin forks -->\n9.99\n<!-- end forks -->\n",
            "<!-- begin zones report=\"y\" -->\n<!-- end zones -->\n",
        ] {
            let (text, problems) = regenerate(bad);
            assert_eq!((text.as_str(), problems.len()), (bad, 1));
        }
    }
}
