//! Counts the instructions of hot paths whose packages have changed since they last passed.

use anyhow::{Context as _, Result};

use crate::bench::bench;
use crate::build::packages;
use crate::cargo::Outcome;
use crate::record::Record;
use crate::record::content::Packages;

/// Groups of paths: name of the group, beginnings of the paths' names, and the packages whose code they run.
const GROUPS: [(&str, &[&str], &[&str]); 5] = [
    ("ram", &["ram-", "fork-"], &["freestone-ram", "freestone-codec", "freestone-spill"]),
    ("snapshots", &["origin-", "snapshot-"], &["freestone-cow", "freestone-ram"]),
    ("drives", &["zone-", "null-", "layers-"], &["freestone-drive"]),
    ("nbd", &["nbd-"], &["freestone-nbd", "freestone"]),
    ("vhost-user", &["vhost-user-"], &["freestone-vhost-user", "freestone"]),
];
/// Reference counts that `bench gate` compares with.
const BASELINE: &str = "benches/baseline.json";
/// Files that affect every count, besides the packages.
const OWN_FILES: [&str; 3] = [BASELINE, "benches/src/gate", "benches/src/callgrind/mod.rs"];

/// Counts the instructions of the paths in groups whose packages have changed.
pub fn run() -> Result<Outcome> {
    let sources = Packages::read()?;
    let mut record = Record::read()?;
    let names =
        path_names(&std::fs::read_to_string(BASELINE).with_context(|| format!("cannot read {BASELINE}"))?)?;
    let (mut paths, mut changed) = (Vec::new(), Vec::new());
    for (group, beginnings, used) in GROUPS {
        let content = sources.content(used, &OWN_FILES)?;
        let check = format!("instructions {group}");
        if !record.has_passed(&check, &content) {
            paths.extend(names.iter().filter(|name| beginnings.iter().any(|b| name.starts_with(b))));
            changed.push((check, content));
        }
    }
    if changed.is_empty() {
        println!("no package of a hot path has changed since its paths last passed");
        return Ok(Outcome::of(true));
    }
    packages::ensure(&packages::INSTRUCTIONS)?;
    let paths: Vec<&str> = paths.into_iter().map(String::as_str).collect();
    let count = || bench(&["gate".into(), "--path".into(), paths.join(",").into()]);
    // Server paths also count retried system calls, so only two rises in a row fail.
    let ok = count()? || count()?;
    if ok {
        for (check, content) in changed {
            record.pass(&check, &content)?;
        }
        record.write()?;
    }
    Ok(Outcome::of(ok))
}

fn path_names(baseline: &str) -> Result<Vec<String>> {
    let value: serde_json::Value = serde_json::from_str(baseline)?;
    let paths = value["paths"].as_object();
    Ok(paths.into_iter().flat_map(|paths| paths.keys().cloned()).collect())
}

#[cfg(test)]
mod tests {
    use super::{BASELINE, GROUPS, path_names};

    #[test]
    fn every_path_belongs_to_one_group() {
        let baseline = std::fs::read_to_string(format!("../{BASELINE}")).unwrap();
        let names = path_names(&baseline).unwrap();
        assert!(names.len() > 20, "{names:?}");
        for name in names {
            let groups =
                GROUPS.iter().filter(|(_, beginnings, _)| beginnings.iter().any(|b| name.starts_with(b)));
            assert_eq!(groups.count(), 1, "{name}");
        }
    }
}
