//! The number of hits of each file that the prose check allows. The counts may only fall.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use anyhow::{Context as _, Result};

use super::Hit;
use crate::tidy::Problem;

/// Hits per file, one `COUNT PATH` a line, sorted by path. A file that is not listed may have no
/// hits.
const RECORD: &str = "xtask/src/tidy/prose.txt";

/// The hits of the tree by file, without files that have none.
pub type Hits = BTreeMap<PathBuf, Vec<Hit>>;

type Record = BTreeMap<PathBuf, usize>;

pub fn problems(hits: &Hits) -> Result<Vec<Problem>> {
    Ok(compare(hits, &read()?.unwrap_or_default()))
}

/// Lowers the counts of the record to the hits of the tree. Creates the record if it does not
/// exist.
pub fn lower(hits: &Hits) -> Result<()> {
    let text = lowered(hits, read()?.as_ref());
    fs::write(RECORD, text).with_context(|| format!("cannot write {RECORD}"))
}

fn compare(hits: &Hits, record: &Record) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (path, hits) in hits {
        let recorded = record.get(path).copied().unwrap_or_default();
        if hits.len() > recorded {
            let what = format!("the prose check finds {}, {RECORD} allows {recorded}:", hits.len());
            problems.push(Problem::new(path, 0, what));
            problems.extend(hits.iter().map(|hit| Problem::new(path, hit.line, &hit.what)));
        }
    }
    for (path, recorded) in record {
        let found = hits.get(path).map_or(0, Vec::len);
        if found < *recorded {
            let what =
                format!("the prose check finds {found}, {recorded} recorded: run cargo xtask tidy --lower");
            problems.push(Problem::new(path, 0, what));
        }
    }
    problems
}

fn lowered(hits: &Hits, record: Option<&Record>) -> String {
    let mut text = String::new();
    for (path, hits) in hits {
        let allowed = record.map_or(usize::MAX, |record| record.get(path).copied().unwrap_or_default());
        let count = hits.len().min(allowed);
        if count > 0 {
            let _ = writeln!(text, "{count} {}", path.display());
        }
    }
    text
}

fn read() -> Result<Option<Record>> {
    match fs::read_to_string(RECORD) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        text => parse(&text.with_context(|| format!("cannot read {RECORD}"))?).map(Some),
    }
}

fn parse(text: &str) -> Result<Record> {
    let entry = |line: &str| {
        let (count, path) = line.split_once(' ')?;
        Some((PathBuf::from(path), count.parse().ok()?))
    };
    text.lines()
        .map(|line| entry(line).with_context(|| format!("{RECORD}: {line:?} is not COUNT PATH")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_may_only_fall() {
        let record = parse("2 fewer\n1 gone\n1 more\n2 same\n").unwrap();
        let hit = |line| Hit { line, what: "rule: sentence".into() };
        let tree = [("fewer", 1), ("more", 2), ("new", 1), ("same", 2)];
        let tree: Hits = tree.map(|(path, count)| (path.into(), (1..=count).map(hit).collect())).into();
        let problems: Vec<_> = compare(&tree, &record).iter().map(ToString::to_string).collect();
        let places: Vec<_> =
            problems.iter().map(|problem| problem.split(": ").next().unwrap_or_default()).collect();
        assert_eq!(places, ["more", "more:1", "more:2", "new", "new:1", "fewer", "gone"]);
        assert!(problems[1].ends_with("rule: sentence"), "{problems:?}");
        assert_eq!(lowered(&tree, Some(&record)), "1 fewer\n1 more\n2 same\n");
        assert_eq!(lowered(&tree, None), "1 fewer\n2 more\n1 new\n2 same\n");
        assert!(parse("x path\n").is_err());
    }
}
