//! Writes the file `copyright` in Debian's format: the owners and licences of the program and of all crates built into it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use crate::cargo::{cargo, output};

/// Identifier of the file format.
const FORMAT: &str = concat!("https://www.debian", ".org/doc/packaging-manuals/copyright-format/1.0/");
const PROGRAM: &str = "freestone-cli";
/// Directory of licence texts, `NAME.txt`.
const TEXTS: &str = "packaging/debian/licences";
/// Licences in the order of preference, for crates that offer a choice.
const PREFERRED: [&str; 7] = ["MIT", "Apache-2.0", "BSD-3-Clause", "BSD-2-Clause", "ISC", "Zlib", "BSL-1.0"];

/// Bundled C sources: crate, path of the licence in it, name of the licence.
const BUNDLED: [(&str, &str, &str); 2] =
    [("lz4-sys", "liblz4/lib/LICENSE", "BSD-2-Clause"), ("zstd-sys", "zstd/LICENSE", "BSD-3-Clause")];

/// Libraries in a static program besides the crates: files, owners, licence.
const STATIC: [(&str, &str, &str); 2] =
    [("musl/*", "2005-2020 Rich Felker, et al.", "MIT"), ("libunwind/*", "the LLVM Project", "Apache-2.0")];

/// A package in the output of `cargo metadata`.
#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    authors: Vec<String>,
    /// Registry of the package; None for packages of the workspace.
    source: Option<String>,
    manifest_path: String,
}

#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

/// A stanza of the file `copyright`: files, owners, licence.
struct Stanza {
    files: String,
    copyright: BTreeSet<String>,
    licence: String,
}

/// Returns the file `copyright` of a build for `target`; `root` is the workspace. Fails if a crate has a licence without
/// a text in [`TEXTS`].
pub fn file(root: &Path, target: &str) -> Result<String> {
    let mut stanzas = vec![Stanza {
        files: "*".to_owned(),
        copyright: copyright_lines(&root.join("LICENSE-MIT")),
        licence: "MIT or Apache-2.0".to_owned(),
    }];
    stanzas.push(Stanza {
        files: "rust-std/*".to_owned(),
        copyright: ["The Rust Project Developers".to_owned()].into(),
        licence: "MIT".to_owned(),
    });
    if target.ends_with("-musl") {
        stanzas.extend(STATIC.map(|(files, owners, licence)| Stanza {
            files: files.to_owned(),
            copyright: [owners.to_owned()].into(),
            licence: licence.to_owned(),
        }));
    }
    for package in built_in(root, target)? {
        stanzas.extend(of_package(&package)?);
    }
    let names: BTreeSet<String> =
        stanzas.iter().flat_map(|stanza| names(&stanza.licence)).map(str::to_owned).collect();
    let mut text = format!(
        "Format: {FORMAT}\nUpstream-Name: Freestone\n\
         Comment: The program is linked statically with the crates (packages of Rust) that it uses. CRATE-VERSION\n \
         stands for the files of a crate, rust-std for the standard library of Rust. For a crate that offers a\n \
         choice of licences, only the licence used here is listed.\n"
    );
    for Stanza { files, copyright, licence } in &stanzas {
        let copyright = copyright.iter().map(String::as_str).collect::<Vec<_>>().join("\n ");
        write!(text, "\nFiles: {files}\nCopyright: {copyright}\nLicense: {licence}\n")?;
    }
    for name in names {
        let path = root.join(TEXTS).join(format!("{name}.txt"));
        let body = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        write!(text, "\nLicense: {name}\n")?;
        for line in body.lines() {
            let line = line.trim_end();
            writeln!(text, " {}", if line.is_empty() { "." } else { line })?;
        }
    }
    Ok(text)
}

/// Returns the packages that are linked into the program with its features for this target, each once. Procedural macros
/// and build scripts are omitted, because they only run at compile time.
fn built_in(root: &Path, target: &str) -> Result<Vec<Package>> {
    let mut tree = cargo();
    tree.args([
        "tree",
        "--locked",
        "--package",
        PROGRAM,
        "--target",
        target,
        "--edges",
        "normal,no-proc-macro",
    ]);
    let tree = output(tree.args(["--prefix", "none", "--no-dedupe", "--format", "{p}"]).current_dir(root))?;
    // Each line is NAME vVERSION, then the directory.
    let used: BTreeSet<_> = tree
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            Some((words.next()?, words.next()?.strip_prefix('v')?))
        })
        .collect();
    let metadata = output(cargo().args(["metadata", "--locked", "--format-version", "1"]).current_dir(root))?;
    let Metadata { packages } = serde_json::from_str(&metadata).context("cargo metadata")?;
    let packages: Vec<_> = packages
        .into_iter()
        .filter(|p| p.source.is_some() && used.contains(&(p.name.as_str(), p.version.as_str())))
        .collect();
    if packages.len() < 10 {
        bail!("cargo tree lists only {} packages of the program, which cannot be right", packages.len());
    }
    Ok(packages)
}

fn of_package(package: &Package) -> Result<Vec<Stanza>> {
    let Package { name, version, license, authors, manifest_path, .. } = package;
    let expression = license.as_deref().unwrap_or_default();
    let licence = chosen(expression)
        .with_context(|| format!("{name} {version}: there is no text in {TEXTS} for {expression:?}"))?;
    let dir = Path::new(manifest_path).parent().unwrap_or(Path::new("/"));
    let mut copyright = BTreeSet::new();
    for entry in fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let path = entry?.path();
        let file = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        let names_owners =
            ["LICEN", "COPYING", "COPYRIGHT", "NOTICE"].iter().any(|word| file.starts_with(word));
        if names_owners && path.is_file() {
            copyright.append(&mut copyright_lines(&path));
        }
    }
    if copyright.is_empty() {
        copyright = authors.iter().cloned().collect();
    }
    if copyright.is_empty() {
        copyright.insert(format!("the authors of {name}"));
    }
    let mut stanzas = vec![Stanza { files: format!("{name}-{version}/*"), copyright, licence }];
    for (_, path, licence) in BUNDLED.iter().filter(|(bundler, ..)| bundler == name) {
        let part = path.split('/').next().unwrap_or_default();
        let copyright = copyright_lines(&dir.join(path));
        if copyright.is_empty() {
            bail!("{name} {version}: {path} names no owner");
        }
        let files = format!("{name}-{version}/{part}/*");
        stanzas.push(Stanza { files, copyright, licence: (*licence).to_owned() });
    }
    Ok(stanzas)
}

/// Returns the copyright owners that a file names, or an empty set if the file does not exist.
fn copyright_lines(path: &Path) -> BTreeSet<String> {
    let text = fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&text).lines().filter_map(owner).collect()
}

/// Returns the owner in a copyright line, with the years, or None for any other line.
fn owner(line: &str) -> Option<String> {
    let line = line.trim_start_matches([' ', '\t', '*', '/', '#']).trim_end();
    let rest = line.strip_prefix("Copyright ").or_else(|| line.strip_prefix("copyright "))?;
    let rest = rest.trim_start_matches("(c) ").trim_start_matches("(C) ").trim_start_matches("© ");
    let begins = rest.starts_with(|c: char| c.is_ascii_digit() || c.is_uppercase());
    // Licence texts contain the word "copyright" in other sentences, and placeholders for a name.
    let is_text =
        ["License", "Notice", "OWNER", "HOLDER", "[yyyy]"].iter().any(|word| rest.starts_with(word));
    (begins && !is_text && line.len() < 200)
        .then(|| rest.trim_end_matches(". All rights reserved.").to_owned())
}

/// Returns the licence names in an expression that [`chosen`] returned.
fn names(licence: &str) -> impl Iterator<Item = &str> {
    licence.split(' ').filter(|word| !["and", "or"].contains(word))
}

/// Returns the licences to use under an SPDX expression, joined by " and ": every required licence, and one of each
/// choice. Returns None if a choice has no licence with a text in [`TEXTS`].
fn chosen(expression: &str) -> Option<String> {
    let flat = expression.replace('/', " OR ").replace(['(', ')'], "");
    // Crates use only conjunctions of choices, never `a AND b OR c`.
    let licences = flat.split(" AND ").map(|choice| {
        let offered: Vec<_> = choice.split(" OR ").map(str::trim).collect();
        PREFERRED.iter().copied().find(|name| offered.contains(name))
    });
    let licences: Option<BTreeSet<_>> = licences.collect();
    Some(licences?.into_iter().collect::<Vec<_>>().join(" and "))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{PREFERRED, TEXTS, chosen, file, owner};

    #[test]
    fn chosen_takes_one_licence_of_each_choice() {
        assert_eq!(chosen("Apache-2.0 OR MIT").as_deref(), Some("MIT"));
        assert_eq!(chosen("MIT/Apache-2.0").as_deref(), Some("MIT"));
        assert_eq!(chosen("Apache-2.0 OR GPL-2.0-only").as_deref(), Some("Apache-2.0"));
        assert_eq!(chosen("Apache-2.0 AND ISC").as_deref(), Some("Apache-2.0 and ISC"));
        assert_eq!(chosen("(MIT OR Apache-2.0) AND ISC").as_deref(), Some("ISC and MIT"));
        assert_eq!(chosen("GPL-3.0-only"), None);
        assert_eq!(chosen("MIT AND GPL-3.0-only"), None);
        assert_eq!(chosen(""), None);
    }

    #[test]
    fn each_licence_has_its_text() {
        for name in PREFERRED {
            let path = Path::new("..").join(TEXTS).join(format!("{name}.txt"));
            let text =
                std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert!(text.to_uppercase().contains("WARRANT"), "{name}");
        }
    }

    #[test]
    fn file_lists_all_crates_of_the_program() {
        let text = file(Path::new(".."), "x86_64-unknown-linux-gnu").unwrap();
        let stanza = |files: &str| {
            let begin = text.find(&format!("\nFiles: {files}")).unwrap_or_else(|| panic!("{files}: {text}"));
            text[begin + 1..].split("\n\n").next().unwrap_or_default()
        };
        assert!(stanza("*").contains("Freestone authors\nLicense: MIT or Apache-2.0"), "{text}");
        assert!(stanza("ring-").contains("License: Apache-2.0 and ISC"), "{text}");
        assert!(stanza("clap_builder-").contains("License: MIT"), "{text}");
        assert!(
            text.contains("/liblz4/*\nCopyright: 2011-") && text.contains("/zstd/*\nCopyright: Meta"),
            "{text}"
        );
        // Procedural macros and dependencies of tests are not in the program.
        assert!(!text.contains("Files: syn-") && !text.contains("Files: proptest-"), "{text}");
        assert!(!text.contains("Files: musl/"), "{text}");
        let text = file(Path::new(".."), "x86_64-unknown-linux-musl").unwrap();
        assert!(text.contains("Files: musl/*\nCopyright: 2005-2020 Rich Felker"), "{text}");
        for licence in text.lines().filter_map(|line| line.strip_prefix("License: ")) {
            for name in licence.split(" and ").flat_map(|names| names.split(" or ")) {
                assert!(text.contains(&format!("\n\nLicense: {name}\n ")), "{name} has no text");
            }
        }
    }

    #[test]
    fn owner_is_found_in_copyright_lines_only() {
        assert_eq!(owner("Copyright (c) 2020 A. Person").as_deref(), Some("2020 A. Person"));
        assert_eq!(
            owner("   Copyright 2019-2021 The Team. All rights reserved.").as_deref(),
            Some("2019-2021 The Team")
        );
        assert_eq!(owner("   Copyright [yyyy] [name of copyright owner]"), None);
        assert_eq!(owner("copyright notice that is included in"), None);
        assert_eq!(owner("The above copyright notice and this permission notice shall be"), None);
    }
}
