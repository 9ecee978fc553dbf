//! The interface of the public crates, one item a line, in `crates/NAME/api.txt`.
//!
//! Rustdoc writes the interface of a crate as JSON, and the crate public-api lists the items. `freestone` re-exports modules
//! of other crates, so the list of it has the items of these modules. Hidden items are omitted.
//!
//! The JSON is not stable: public-api reads that of certain compilers, [`FORMAT`].

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use serde_json::Value;

use super::packages;
use crate::cargo::Outcome;
use crate::tidy::published::PUBLIC;

/// Crates whose modules `freestone` re-exports.
const REEXPORTED: [&str; 8] = [
    "freestone-codec",
    "freestone-core",
    "freestone-cow",
    "freestone-drive",
    "freestone-image",
    "freestone-ram",
    "freestone-save",
    "freestone-store",
];
/// Version of rustdoc's JSON that public-api reads.
const FORMAT: u32 = 57;
/// Largest number of differences that are printed.
const SHOWN_MAX: usize = 40;

/// Use of the lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Compares them with the tree.
    Check,
    /// Writes them to the tree.
    Write,
}

/// Returns true if the interface of this library is needed. `library` is the name in code, with underscores.
pub fn needs(library: &str) -> bool {
    PUBLIC.iter().chain(&REEXPORTED).any(|name| name.replace('-', "_") == library)
}

/// Output of rustdoc about a crate.
#[derive(Deserialize)]
struct Document {
    format_version: u32,
    root: u64,
    index: BTreeMap<String, Item>,
}

#[derive(Deserialize)]
struct Item {
    inner: Value,
}

/// Lists of a crate.
struct Interface {
    /// Items of the crate, one a line.
    lines: Vec<String>,
    /// Re-exports in the root of the crate: name, and the path that is re-exported.
    uses: BTreeMap<String, String>,
}

/// Compares the lists with the tree, or writes them. `dir` has the JSON of each library that is [needed](needs). Each
/// public crate counts as one test.
pub fn run(dir: &Path, mode: Mode) -> Result<Outcome> {
    let mut interfaces = BTreeMap::new();
    for name in PUBLIC.iter().chain(&REEXPORTED) {
        let library = name.replace('-', "_");
        let path = dir.join(format!("{library}.json"));
        let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let document: Document = serde_json::from_slice(&text).with_context(|| path.display().to_string())?;
        if document.format_version != FORMAT {
            let found = document.format_version;
            let why = format!(
                "the interface of crates: rustdoc writes format {found}, and public-api reads {FORMAT}"
            );
            if packages::is_ci() || mode == Mode::Write {
                bail!("{why}");
            }
            return Ok(Outcome { skipped: vec![why], ..Outcome::of(true) });
        }
        let uses = uses(&document).with_context(|| path.display().to_string())?;
        interfaces.insert(library, Interface { lines: items(&path)?, uses });
    }
    let mut outcome = Outcome::of(true);
    for name in PUBLIC {
        let list = list(&interfaces, &name.replace('-', "_"))?;
        let path = PathBuf::from(format!("crates/{name}/api.txt"));
        if mode == Mode::Write {
            fs::write(&path, list.join("\n") + "\n")
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let differences = differences(&text, &list);
        if !differences.is_empty() {
            println!("{} differs from the interface of the crate:", path.display());
            differences.iter().take(SHOWN_MAX).for_each(|line| println!("{line}"));
            println!("{} lines; `cargo xtask api` writes the file again", differences.len());
        }
        outcome.add(Outcome::of_test(differences.is_empty()));
    }
    Ok(outcome)
}

fn items(path: &Path) -> Result<Vec<String>> {
    let mut builder = public_api::Builder::from_rustdoc_json(path);
    builder = builder.omit_blanket_impls(true).omit_auto_trait_impls(true).omit_auto_derived_impls(true);
    let api = builder.build().with_context(|| path.display().to_string())?;
    Ok(api.items().map(ToString::to_string).collect())
}

/// Returns the re-exports in the root of a crate.
fn uses(document: &Document) -> Result<BTreeMap<String, String>> {
    let root = document.index.get(&document.root.to_string()).context("no root")?;
    let items =
        root.inner.pointer("/module/items").and_then(Value::as_array).context("the root has no items")?;
    let used = items.iter().filter_map(|id| {
        let item = document.index.get(&id.to_string())?.inner.get("use")?;
        Some((item.get("name")?.as_str()?.to_owned(), item.get("source")?.as_str()?.to_owned()))
    });
    Ok(used.collect())
}

/// Returns the sorted items of a public crate, with those of the modules of other crates that it re-exports.
fn list(interfaces: &BTreeMap<String, Interface>, library: &str) -> Result<Vec<String>> {
    let own = interfaces.get(library).context("no interface")?;
    let mut list: BTreeSet<String> = own.lines.iter().cloned().collect();
    for (name, source) in &own.uses {
        let Some(source) = origin(interfaces, source) else { continue };
        let owner = source.split("::").next().unwrap_or_default();
        let face = format!("{library}::{name}");
        let lines = interfaces.get(owner).map(|interface| &interface.lines).into_iter().flatten();
        list.extend(lines.filter(|line| is_in(line, &source)).map(|line| line.replace(&source, &face)));
    }
    Ok(list.into_iter().collect())
}

/// Follows re-exports from crate to crate. Returns None for an item of another crate.
fn origin(interfaces: &BTreeMap<String, Interface>, source: &str) -> Option<String> {
    let (owner, path) = source.split_once("::").unwrap_or((source, ""));
    let interface = interfaces.get(owner)?;
    let next = interface.uses.get(path).filter(|next| {
        let next = next.split("::").next().unwrap_or_default();
        next != owner && interfaces.contains_key(next)
    });
    next.map_or_else(|| Some(source.to_owned()), |next| origin(interfaces, next))
}

/// Returns true if the item of a line is in the module `path`: the item itself, or the type of an implementation.
fn is_in(line: &str, path: &str) -> bool {
    let item = match line.rsplit_once(" for ") {
        Some((before, of)) if before.starts_with("impl") => of,
        _ => line,
    };
    let Some(start) = item.find("freestone_") else { return false };
    let rest = item[start..].strip_prefix(path);
    rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
}

/// Returns the lines that only the text (`-`) or only the list (`+`) has.
fn differences(text: &str, list: &[String]) -> Vec<String> {
    let (old, new): (BTreeSet<_>, BTreeSet<_>) =
        (text.lines().collect(), list.iter().map(String::as_str).collect());
    let gone = old.difference(&new).map(|line| format!("-{line}"));
    gone.chain(new.difference(&old).map(|line| format!("+{line}"))).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{Interface, differences, list};

    fn interface(lines: &[&str], uses: &[(&str, &str)]) -> Interface {
        let owned = |(name, source): &(&str, &str)| ((*name).to_owned(), (*source).to_owned());
        Interface {
            lines: lines.iter().map(|line| (*line).to_owned()).collect(),
            uses: uses.iter().map(owned).collect(),
        }
    }

    #[test]
    fn reexported_modules_have_the_public_name() {
        let face = interface(
            &["pub mod freestone"],
            &[("ram", "freestone_ram::ram"), ("codec", "freestone_ram::codec")],
        );
        let ram = interface(
            &[
                "pub fn freestone_ram::ram::Ram::new()",
                "pub fn freestone_ram::ramp::other()",
                "pub fn freestone_ram::internal::f(freestone_ram::ram::Ram)",
                "impl freestone_core::device::Device for freestone_ram::ram::Ram",
            ],
            &[("codec", "freestone_codec")],
        );
        let codec = interface(&["pub enum freestone_codec::Algorithm"], &[]);
        let all = BTreeMap::from([
            ("freestone".to_owned(), face),
            ("freestone_ram".to_owned(), ram),
            ("freestone_codec".to_owned(), codec),
        ]);
        let expected = [
            "impl freestone_core::device::Device for freestone::ram::Ram",
            "pub enum freestone::codec::Algorithm",
            "pub fn freestone::ram::Ram::new()",
            "pub mod freestone",
        ];
        assert_eq!(list(&all, "freestone").unwrap(), expected);
    }

    #[test]
    fn differences_name_lines_that_are_gone_or_new() {
        assert_eq!(differences("a\nb\n", &["b".to_owned(), "c".to_owned()]), ["-a", "+c"]);
        assert!(differences("a\n", &["a".to_owned()]).is_empty());
    }
}
