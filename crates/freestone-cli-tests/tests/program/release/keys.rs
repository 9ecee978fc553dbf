//! Key paths of JSON replies, by the step of the scenario that printed them, and their text format.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use crate::harness::prelude::*;
use crate::watching::openmetrics::Exposition;

/// Keys whose values programs compare. Key paths of these keys end in `=VALUE`.
const WITH_VALUES: [&str; 8] = ["kind", "errno", "code", "state", "condition", "type", "merge", "verb"];
/// Key of the latencies. These are measured for a sample of the requests, so the replies of a step may lack some of
/// their keys. The keys are recorded under a step of their own, for the operations `SAMPLED_ALWAYS`, of which the
/// scenario has enough requests.
const SAMPLED: &str = "latency";
const SAMPLED_ALWAYS: [&str; 2] = ["read", "write"];
/// Width of the text format in columns.
const COLUMNS: usize = 118;
/// Separates the keys of a JSON object in the text format.
const SEPARATOR: &str = ", ";

/// Set of key paths for each step of the scenario.
#[derive(Debug, Default, PartialEq)]
pub struct Keys(BTreeMap<String, BTreeSet<String>>);

impl Keys {
    /// Adds the key paths of a JSON reply to a step.
    pub fn add(&mut self, step: &str, reply: &Value) {
        let mut paths = BTreeSet::new();
        collect(reply, "", "", &mut paths);
        for path in paths {
            let Some((object, latency)) = path.split_once(&format!("{SAMPLED}.")) else {
                self.insert(step, path);
                continue;
            };
            self.insert(step, format!("{object}{SAMPLED}"));
            if SAMPLED_ALWAYS.iter().any(|op| latency.starts_with(op)) {
                self.insert(SAMPLED, latency.to_owned());
            }
        }
    }

    /// Adds the names, types and labels of metrics to a step.
    pub fn add_metrics(&mut self, step: &str, metrics: &Exposition) {
        for (name, kind) in &metrics.families {
            self.insert(step, format!("{name}={kind}"));
        }
        for (name, labels, _) in &metrics.samples {
            let labels: Vec<_> = labels.keys().map(String::as_str).collect();
            self.insert(step, format!("{name}{{{}}}", labels.join(",")));
        }
    }

    fn insert(&mut self, step: &str, path: String) {
        self.0.entry(step.to_owned()).or_default().insert(path);
    }

    /// Removes the key paths that `other` lacks in the same step.
    pub fn intersect(&mut self, other: &Self) {
        for (step, paths) in &mut self.0 {
            let others = other.0.get(step);
            paths.retain(|path| others.is_some_and(|others| others.contains(path)));
        }
    }

    /// Returns the key paths that `current` lacks, one a line, each with its step.
    pub fn missing_in(&self, current: &Self) -> String {
        let mut missing = String::new();
        for (step, paths) in &self.0 {
            let now = current.0.get(step);
            for path in paths.iter().filter(|path| now.is_none_or(|now| !has(now, path))) {
                let _ = writeln!(missing, "{step}: {path}");
            }
        }
        missing
    }

    /// Parses the text format: a line for each step, and below it, indented, `OBJECT: KEY, KEY` or keys of the whole
    /// reply. Lines that begin with `# ` are comments.
    pub fn parse(text: &str) -> Self {
        let (mut keys, mut step) = (Self::default(), "");
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with("# ")) {
            let Some(line) = line.strip_prefix("  ") else {
                step = line;
                continue;
            };
            let (object, names) = line.split_once(": ").unwrap_or(("", line));
            for name in names.split(SEPARATOR) {
                keys.insert(step, join(object, name));
            }
        }
        keys
    }

    /// Returns the key paths in the text format.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (step, paths) in &self.0 {
            let _ = writeln!(text, "{step}");
            let mut objects: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
            for path in paths {
                let key = path.find('=').unwrap_or(path.len());
                let (object, name) =
                    path[..key].rfind('.').map_or(("", &path[..]), |dot| (&path[..dot], &path[dot + 1..]));
                objects.entry(object).or_default().push(name);
            }
            for (object, names) in objects {
                let start = if object.is_empty() { "  ".to_owned() } else { format!("  {object}: ") };
                let mut line = start.clone();
                for name in names {
                    if line.len() > start.len() && line.len() + SEPARATOR.len() + name.len() > COLUMNS {
                        let _ = writeln!(text, "{line}");
                        line.clone_from(&start);
                    }
                    if line.len() > start.len() {
                        line += SEPARATOR;
                    }
                    line += name;
                }
                let _ = writeln!(text, "{line}");
            }
        }
        text
    }
}

/// Returns true if `paths` contains `path`, or paths below it. If a list or object was empty when recorded, it may now
/// have keys.
fn has(paths: &BTreeSet<String>, path: &str) -> bool {
    let below = |known: &String| known.strip_prefix(path).is_some_and(|rest| rest.starts_with(['.', '[']));
    paths.contains(path) || paths.iter().any(below)
}

/// Adds the key paths of all values in `value`, which is at `path`, to `paths`. A list element that has a kind is
/// written as `[KIND]`, other elements as `[]`.
fn collect(value: &Value, path: &str, key: &str, paths: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) if !object.is_empty() => {
            for (key, value) in object {
                collect(value, &join(path, key), key, paths);
            }
        }
        Value::Array(list) if !list.is_empty() => {
            for value in list {
                let kind = value["kind"].as_str().unwrap_or_default();
                collect(value, &format!("{path}[{kind}]"), "", paths);
            }
        }
        Value::String(_) | Value::Number(_) if WITH_VALUES.contains(&key) => {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            // In a configuration file the value of the key `state` is a directory, which differs in each run.
            let value = if value.contains('/') { String::new() } else { format!("={value}") };
            paths.insert(format!("{path}{value}"));
        }
        _ => {
            paths.insert(path.to_owned());
        }
    }
}

fn join(object: &str, key: &str) -> String {
    if object.is_empty() { key.to_owned() } else { format!("{object}.{key}") }
}

#[test]
fn key_paths_survive_the_text_form() {
    let mut keys = Keys::default();
    let reply = serde_json::json!({
        "devices": [{ "name": "a", "kind": "ram", "latency": { "read": { "p50_ns": 1 }, "flush": { "p50_ns": 1 } } }],
        "names": ["a"],
        "missing": [],
        "error": { "data": { "errno": "EBUSY" } },
    });
    keys.add("list", &reply);
    let text = "\
latency
  read: p50_ns
list
  missing, names[]
  devices[ram]: kind=ram, latency, name
  error.data: errno=EBUSY
";
    assert_eq!(keys.text(), text);
    assert_eq!(Keys::parse(text), keys);
    let mut fewer = Keys::default();
    fewer.add("list", &serde_json::json!({ "names": ["b"], "missing": [] }));
    assert_eq!(fewer.missing_in(&keys), "");
    let missing = "\
latency: read.p50_ns
list: devices[ram].kind=ram
list: devices[ram].latency
list: devices[ram].name
list: error.data.errno=EBUSY
";
    assert_eq!(keys.missing_in(&fewer), missing);
}
