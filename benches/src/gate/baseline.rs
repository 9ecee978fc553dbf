//! Committed baseline of instruction counts.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

/// Instruction counts, and the build in which they were measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Baseline {
    /// Compilers and flags of the build.
    pub build: String,
    /// Instructions per request, by name of the path.
    pub paths: BTreeMap<String, f64>,
}

impl Baseline {
    /// Creates a baseline. Counts are rounded to a tenth of an instruction to avoid noise in diffs.
    pub fn new(build: &str, paths: BTreeMap<String, f64>) -> Self {
        let paths = paths.into_iter().map(|(name, count)| (name, (count * 10.0).round() / 10.0)).collect();
        Self { build: build.into(), paths }
    }

    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| {
            format!("{}: no baseline; cargo xtask bench gate --accept makes one", path.display())
        })?;
        let baseline: Self =
            serde_json::from_str(&text).with_context(|| format!("{} is not a baseline", path.display()))?;
        let counts = baseline.paths.values().all(|count| count.is_finite() && *count > 0.0);
        ensure!(counts, "{}: every count must be above 0", path.display());
        Ok(baseline)
    }

    pub fn save(&self, path: &Path) -> Result<()> {
        std::fs::write(path, serde_json::to_string_pretty(self)? + "\n")
            .with_context(|| format!("{}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn baseline_round_trips_and_invalid_file_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("baseline.json");
        let error = Baseline::load(&path).unwrap_err().to_string();
        assert!(error.contains("--accept"), "{error}");
        let baseline = Baseline::new("rustc 1", [("a".to_owned(), 1.26)].into());
        assert!((baseline.paths["a"] - 1.3).abs() < 1e-9);
        baseline.save(&path).unwrap();
        assert_eq!(Baseline::load(&path).unwrap(), baseline);
        for bad in
            ["", "{}", "{\"build\":\"\",\"paths\":{\"a\":0}}", "{\"build\":\"\",\"paths\":{\"a\":\"1\"}}"]
        {
            std::fs::write(&path, bad).unwrap();
            assert!(Baseline::load(&path).is_err(), "{bad}");
        }
    }
}
