//! Modules of one crate that use one another in a circle.
//!
//! A file uses another if a path in it leads to something that is defined there, also by way of a
//! `pub use`. A module that uses what its parents define is no part of a circle: that is what being
//! a child means. Tests and loom models are not looked at.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens as _;
use syn::punctuated::Punctuated;
use syn::{Attribute, Expr, Item, Lit, Meta, Token, UseTree};

use super::Problem;

/// How often a path may lead on through a `pub use`; there are a handful in a row at most.
const ALIASES_MAX: usize = 16;

/// The circles among the modules below `root`, the `lib.rs` or `main.rs` of a crate.
pub fn of(root: &Path) -> Result<Vec<Problem>> {
    let mut modules = Modules { all: Vec::new() };
    let dir = root.parent().unwrap_or(Path::new("")).to_owned();
    let text = fs::read_to_string(root).with_context(|| format!("cannot read {}", root.display()))?;
    let items = syn::parse_file(&text).with_context(|| format!("cannot parse {}", root.display()))?.items;
    modules.all.push(Module::new(root.to_owned(), None));
    modules.fill(0, &dir, items)?;
    Ok(circles(&modules.uses()))
}

#[derive(Debug)]
struct Module {
    file: PathBuf,
    parent: Option<usize>,
    children: BTreeMap<String, usize>,
    /// What a `use` brings here, by its name here.
    aliases: BTreeMap<String, Vec<String>>,
    /// Paths in the code, those of `use` among them.
    paths: BTreeSet<Vec<String>>,
}

impl Module {
    fn new(file: PathBuf, parent: Option<usize>) -> Self {
        Self { file, parent, children: BTreeMap::new(), aliases: BTreeMap::new(), paths: BTreeSet::new() }
    }
}

/// The modules of a crate; the first is its root.
#[derive(Debug)]
struct Modules {
    all: Vec<Module>,
}

impl Modules {
    /// Notes what stands in `module`, whose children's files are in `dir`.
    fn fill(&mut self, module: usize, dir: &Path, items: Vec<Item>) -> Result<()> {
        for item in items {
            match item {
                Item::Mod(item) if is_built(&item.attrs) => {
                    let name = item.ident.to_string();
                    let child = self.all.len();
                    let file = match &item.content {
                        Some(_) => self.all[module].file.clone(),
                        None => file_of(&item.attrs, &self.all[module].file, dir, &name),
                    };
                    self.all.push(Module::new(file.clone(), Some(module)));
                    self.all[module].children.insert(name.clone(), child);
                    let items = if let Some((_, items)) = item.content {
                        items
                    } else {
                        let text = fs::read_to_string(&file)
                            .with_context(|| format!("cannot read {}", file.display()))?;
                        syn::parse_file(&text)
                            .with_context(|| format!("cannot parse {}", file.display()))?
                            .items
                    };
                    self.fill(child, &dir.join(&name), items)?;
                }
                Item::Use(item) if is_built(&item.attrs) => self.bring(module, &item.tree, &mut Vec::new()),
                Item::Mod(_) | Item::Use(_) => {}
                // Only items that are built: `#[cfg(test)] fn` and the like.
                item => {
                    if attributes(&item).is_none_or(is_built) {
                        scan(item.into_token_stream(), &mut self.all[module].paths);
                    }
                }
            }
        }
        Ok(())
    }

    fn bring(&mut self, module: usize, tree: &UseTree, before: &mut Vec<String>) {
        let mut note = |name: Option<String>, path: Vec<String>| {
            if let Some(name) = name {
                self.all[module].aliases.insert(name, path.clone());
            }
            self.all[module].paths.insert(path);
        };
        match tree {
            UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.bring(module, &path.tree, before);
                before.pop();
            }
            UseTree::Name(name) if name.ident == "self" => note(before.last().cloned(), before.clone()),
            UseTree::Name(name) => {
                let name = name.ident.to_string();
                note(Some(name.clone()), [&before[..], &[name]].concat());
            }
            UseTree::Rename(rename) => {
                let path = if rename.ident == "self" {
                    before.clone()
                } else {
                    [&before[..], &[rename.ident.to_string()]].concat()
                };
                note(Some(rename.rename.to_string()), path);
            }
            UseTree::Glob(_) => note(None, before.clone()),
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.bring(module, tree, before);
                }
            }
        }
    }

    /// The module that defines what `path` names in `module`; nothing for what is of another crate
    /// or of the function.
    fn resolve(&self, mut module: usize, path: &[String], aliases: usize) -> Option<usize> {
        let (first, mut rest) = path.split_first()?;
        match first.as_str() {
            "crate" => module = 0,
            "self" => {}
            "super" => module = self.all[module].parent?,
            // A name of its own, a child or what a `use` brought.
            _ if self.knows(module, first) => rest = path,
            _ => return None,
        }
        while let Some((name, after)) = rest.split_first() {
            if name == "super" {
                module = self.all[module].parent?;
            } else if let Some(&child) = self.all[module].children.get(name) {
                module = child;
            } else if let Some(alias) = self.all[module].aliases.get(name) {
                if aliases == 0
                    || alias.first() == Some(name) && !self.all[module].children.contains_key(name)
                {
                    return None;
                }
                let path: Vec<String> = alias.iter().chain(after).cloned().collect();
                return self.resolve(module, &path, aliases - 1);
            } else {
                break;
            }
            rest = after;
        }
        Some(module)
    }

    fn knows(&self, module: usize, name: &str) -> bool {
        self.all[module].children.contains_key(name) || self.all[module].aliases.contains_key(name)
    }

    fn is_below(&self, mut module: usize, above: &Path) -> bool {
        while let Some(parent) = self.all[module].parent {
            if self.all[parent].file == above {
                return true;
            }
            module = parent;
        }
        false
    }

    /// Which file uses which, and what of it.
    fn uses(&self) -> Uses {
        let mut uses = Uses::new();
        for (number, module) in self.all.iter().enumerate() {
            for path in &module.paths {
                let Some(target) = self.resolve(number, path, ALIASES_MAX) else { continue };
                let file = &self.all[target].file;
                if *file != module.file && !self.is_below(number, file) {
                    let name = path.last().cloned().unwrap_or_default();
                    uses.entry(module.file.clone())
                        .or_default()
                        .entry(file.clone())
                        .or_default()
                        .insert(name);
                }
            }
        }
        uses
    }
}

type Uses = BTreeMap<PathBuf, BTreeMap<PathBuf, BTreeSet<String>>>;

/// One problem for each group of files of which each reaches each other.
fn circles(uses: &Uses) -> Vec<Problem> {
    let reached: BTreeMap<&PathBuf, BTreeSet<&PathBuf>> =
        uses.keys().map(|file| (file, reach(uses, file))).collect();
    let mut told = BTreeSet::new();
    let mut problems = Vec::new();
    for file in uses.keys() {
        let circle: BTreeSet<&PathBuf> = reached[file]
            .iter()
            .copied()
            .filter(|other| reached.get(*other).is_some_and(|of| of.contains(file)))
            .collect();
        if circle.is_empty() || !told.insert(circle.clone()) {
            continue;
        }
        let mut lines = vec![format!("{} modules use one another in a circle:", circle.len())];
        for from in &circle {
            for (to, names) in uses[*from].iter().filter(|(to, _)| circle.contains(to)) {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                lines.push(format!(
                    "    {} takes {} from {}",
                    from.display(),
                    names.join(", "),
                    to.display()
                ));
            }
        }
        problems.push(Problem::new(file, 0, lines.join("\n")));
    }
    problems
}

/// All files that `from` uses, and those that these use.
fn reach<'a>(uses: &'a Uses, from: &PathBuf) -> BTreeSet<&'a PathBuf> {
    let mut reached = BTreeSet::new();
    let mut next: Vec<&PathBuf> = uses.get(from).into_iter().flat_map(BTreeMap::keys).collect();
    while let Some(file) = next.pop() {
        if reached.insert(file) {
            next.extend(uses.get(file).into_iter().flat_map(BTreeMap::keys));
        }
    }
    reached
}

/// Where the module `name` lies that `parent` declares, whose children are in `dir`.
fn file_of(attributes: &[Attribute], parent: &Path, dir: &Path, name: &str) -> PathBuf {
    for attribute in attributes {
        if let Meta::NameValue(meta) = &attribute.meta
            && meta.path.is_ident("path")
            && let Expr::Lit(value) = &meta.value
            && let Lit::Str(path) = &value.lit
        {
            return parent.with_file_name(path.value());
        }
    }
    let file = dir.join(format!("{name}.rs"));
    if file.is_file() { file } else { dir.join(name).join("mod.rs") }
}

/// Whether the product has what bears these attributes.
fn is_built(attributes: &[Attribute]) -> bool {
    attributes.iter().all(|attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("cfg") => {
            list.parse_args().is_ok_and(|meta: Meta| holds(&meta))
        }
        _ => true,
    })
}

fn holds(meta: &Meta) -> bool {
    let Meta::List(list) = meta else {
        return !["test", "loom", "freestone_sim"].iter().any(|cfg| meta.path().is_ident(cfg));
    };
    let Ok(parts) = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated) else {
        return true;
    };
    if list.path.is_ident("not") {
        !parts.iter().all(holds)
    } else if list.path.is_ident("any") {
        parts.iter().any(holds)
    } else {
        parts.iter().all(holds)
    }
}

fn attributes(item: &Item) -> Option<&[Attribute]> {
    Some(match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        _ => return None,
    })
}

/// Finds paths of more than one part, in macros as well.
fn scan(tokens: TokenStream, paths: &mut BTreeSet<Vec<String>>) {
    let mut path: Vec<String> = Vec::new();
    // Colons since the last name.
    let mut colons = 0;
    for token in tokens {
        match token {
            TokenTree::Ident(name) => {
                if colons != 2 {
                    keep(&mut path, paths);
                }
                path.push(name.to_string());
                colons = 0;
            }
            TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
            TokenTree::Group(group) => {
                keep(&mut path, paths);
                colons = 0;
                scan(group.stream(), paths);
            }
            _ => {
                keep(&mut path, paths);
                colons = 0;
            }
        }
    }
    keep(&mut path, paths);
}

fn keep(path: &mut Vec<String>, paths: &mut BTreeSet<Vec<String>>) {
    if path.len() > 1 {
        paths.insert(path.clone());
    }
    path.clear();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said of a crate of these files.
    fn said(files: &[(&str, &str)]) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let root = format!("{}/", dir.path().display());
        of(&dir.path().join("lib.rs"))
            .unwrap()
            .iter()
            .map(|problem| problem.to_string().replace(&root, ""))
            .collect()
    }

    #[test]
    fn two_that_use_each_other_are_told_with_what_ties_them() {
        let said = said(&[
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use crate::b::B; pub struct A(B);"),
            ("b.rs", "pub struct B; fn f() { assert!(super::a::g(1)); }"),
            ("c.rs", "use super::a::A; use super::b::B;"),
        ]);
        assert_eq!(
            said,
            [
                "a.rs: 2 modules use one another in a circle:\n    a.rs takes B from b.rs\n    b.rs takes g from a.rs"
            ]
        );
    }

    #[test]
    fn a_way_round_over_a_face_is_seen() {
        let said = said(&[
            ("lib.rs", "mod a; mod deep;"),
            ("deep/mod.rs", "mod inner; pub use inner::Inner; pub struct Outer;"),
            ("deep/inner.rs", "use super::Outer; use crate::a::A; pub struct Inner;"),
            ("a.rs", "use crate::deep::Inner as I; pub struct A;"),
        ]);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains("a.rs takes Inner from deep/inner.rs"), "{said:?}");
    }

    #[test]
    fn children_that_use_their_parents_tests_and_models_are_no_circle() {
        let said = said(&[
            ("lib.rs", "pub struct Crate; mod deep; fn f() { deep::inner::g() }"),
            ("deep/mod.rs", "pub mod inner; #[cfg(loom)] mod models; pub struct Outer;"),
            (
                "deep/inner.rs",
                "use super::Outer; use crate::Crate; pub fn g() {} #[cfg(test)] mod tests { use crate::deep; }",
            ),
            ("deep/models.rs", "this is not Rust"),
        ]);
        assert_eq!(said, [""; 0]);
    }
}
