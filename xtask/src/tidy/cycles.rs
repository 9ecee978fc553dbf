//! Finds cyclic dependencies between the modules of a crate.
//!
//! A file depends on another file if a path in it resolves to an item of that file, also through a `pub use`. A child may
//! use items of its ancestors; such uses are ignored. Tests and loom models are not checked.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens as _;
use syn::punctuated::Punctuated;
use syn::{Attribute, Expr, Item, Lit, Meta, Token, UseTree};

use super::Problem;

/// Maximum number of `use` declarations through which a path is resolved, as a guard against endless loops.
const ALIASES_MAX: usize = 16;

/// Returns a problem per cycle among the modules of a crate. `root` is the crate's `lib.rs` or `main.rs`.
pub fn of(root: &Path) -> Result<Vec<Problem>> {
    let mut modules = Modules { all: Vec::new() };
    let dir = root.parent().unwrap_or(Path::new("")).to_owned();
    let text = fs::read_to_string(root).with_context(|| format!("cannot read {}", root.display()))?;
    let items = syn::parse_file(&text).with_context(|| format!("cannot parse {}", root.display()))?.items;
    modules.all.push(Module::new(root.to_owned(), None));
    modules.collect(0, &dir, items)?;
    Ok(cycles(&modules.uses()))
}

#[derive(Debug)]
struct Module {
    file: PathBuf,
    parent: Option<usize>,
    children: BTreeMap<String, usize>,
    /// Imported paths, by local name.
    aliases: BTreeMap<String, Vec<String>>,
    /// Paths in the code, including those of `use` declarations.
    paths: BTreeSet<Vec<String>>,
}

impl Module {
    fn new(file: PathBuf, parent: Option<usize>) -> Self {
        Self { file, parent, children: BTreeMap::new(), aliases: BTreeMap::new(), paths: BTreeSet::new() }
    }
}

/// The modules of a crate. The first is the root; other modules are referred to by index.
#[derive(Debug)]
struct Modules {
    all: Vec<Module>,
}

impl Modules {
    /// Collects the paths and the child modules of `module`. The files of its children are in `dir`.
    fn collect(&mut self, module: usize, dir: &Path, items: Vec<Item>) -> Result<()> {
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
                    self.collect(child, &dir.join(&name), items)?;
                }
                Item::Use(item) if is_built(&item.attrs) => self.import(module, &item.tree, &mut Vec::new()),
                Item::Mod(_) | Item::Use(_) => {}
                // Items under `#[cfg(test)]` and the like are ignored.
                item => {
                    if attributes(&item).is_none_or(is_built) {
                        scan(item.into_token_stream(), &mut self.all[module].paths);
                    }
                }
            }
        }
        Ok(())
    }

    /// Adds the paths and local names of a `use` declaration. `before` is the path in front of `tree`.
    fn import(&mut self, module: usize, tree: &UseTree, before: &mut Vec<String>) {
        let mut add = |name: Option<String>, path: Vec<String>| {
            if let Some(name) = name {
                self.all[module].aliases.insert(name, path.clone());
            }
            self.all[module].paths.insert(path);
        };
        match tree {
            UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.import(module, &path.tree, before);
                before.pop();
            }
            UseTree::Name(name) if name.ident == "self" => add(before.last().cloned(), before.clone()),
            UseTree::Name(name) => {
                let name = name.ident.to_string();
                add(Some(name.clone()), [&before[..], &[name]].concat());
            }
            UseTree::Rename(rename) => {
                let path = if rename.ident == "self" {
                    before.clone()
                } else {
                    [&before[..], &[rename.ident.to_string()]].concat()
                };
                add(Some(rename.rename.to_string()), path);
            }
            UseTree::Glob(_) => add(None, before.clone()),
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.import(module, tree, before);
                }
            }
        }
    }

    /// Returns the module that defines the item to which `path` in `module` resolves. Returns None for items of other
    /// crates and local items of functions. `aliases` limits the number of `use` declarations.
    fn resolve(&self, mut module: usize, path: &[String], aliases: usize) -> Option<usize> {
        let (first, mut rest) = path.split_first()?;
        match first.as_str() {
            "crate" => module = 0,
            "self" => {}
            "super" => module = self.all[module].parent?,
            // A child or an imported name.
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

    /// Returns the names that each file uses from other files, except from files of its ancestors.
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

/// Names that a file uses from another file, by using file and used file.
type Uses = BTreeMap<PathBuf, BTreeMap<PathBuf, BTreeSet<String>>>;

/// Returns a problem for each group of files that depend on each other.
fn cycles(uses: &Uses) -> Vec<Problem> {
    let reached: BTreeMap<&PathBuf, BTreeSet<&PathBuf>> =
        uses.keys().map(|file| (file, reach(uses, file))).collect();
    let mut reported = BTreeSet::new();
    let mut problems = Vec::new();
    for file in uses.keys() {
        let cycle: BTreeSet<&PathBuf> = reached[file]
            .iter()
            .copied()
            .filter(|other| reached.get(*other).is_some_and(|of| of.contains(file)))
            .collect();
        if cycle.is_empty() || !reported.insert(cycle.clone()) {
            continue;
        }
        let mut lines = vec![format!("{} modules depend on each other:", cycle.len())];
        for from in &cycle {
            for (to, names) in uses[*from].iter().filter(|(to, _)| cycle.contains(to)) {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                lines.push(format!("    {} uses {} of {}", from.display(), names.join(", "), to.display()));
            }
        }
        problems.push(Problem::new(file, 0, lines.join("\n")));
    }
    problems
}

/// Returns all files that `from` uses, directly or indirectly.
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

/// Returns the file of the module `name` that `parent` declares. `dir` is the directory with the files of `parent`'s
/// children.
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

/// Returns true if an item with these attributes is part of the product.
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

/// Collects paths of more than one segment, also in the arguments of macros.
fn scan(tokens: TokenStream, paths: &mut BTreeSet<Vec<String>>) {
    let mut path: Vec<String> = Vec::new();
    // Number of colons since the last identifier.
    let mut colons = 0;
    for token in tokens {
        match token {
            TokenTree::Ident(name) => {
                if colons != 2 {
                    add_path(&mut path, paths);
                }
                path.push(name.to_string());
                colons = 0;
            }
            TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
            TokenTree::Group(group) => {
                add_path(&mut path, paths);
                colons = 0;
                scan(group.stream(), paths);
            }
            _ => {
                add_path(&mut path, paths);
                colons = 0;
            }
        }
    }
    add_path(&mut path, paths);
}

fn add_path(path: &mut Vec<String>, paths: &mut BTreeSet<Vec<String>>) {
    if path.len() > 1 {
        paths.insert(path.clone());
    }
    path.clear();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(files: &[(&str, &str)]) -> Vec<String> {
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
    fn cycle_of_two_is_reported_with_its_uses() {
        let found = problems(&[
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use crate::b::B; pub struct A(B);"),
            ("b.rs", "pub struct B; fn f() { assert!(super::a::g(1)); }"),
            ("c.rs", "use super::a::A; use super::b::B;"),
        ]);
        assert_eq!(
            found,
            ["a.rs: 2 modules depend on each other:\n    a.rs uses B of b.rs\n    b.rs uses g of a.rs"]
        );
    }

    #[test]
    fn cycle_through_reexport_is_found() {
        let found = problems(&[
            ("lib.rs", "mod a; mod deep;"),
            ("deep/mod.rs", "mod inner; pub use inner::Inner; pub struct Outer;"),
            ("deep/inner.rs", "use super::Outer; use crate::a::A; pub struct Inner;"),
            ("a.rs", "use crate::deep::Inner as I; pub struct A;"),
        ]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("a.rs uses Inner of deep/inner.rs"), "{found:?}");
    }

    #[test]
    fn uses_of_parents_and_in_tests_are_ignored() {
        let found = problems(&[
            ("lib.rs", "pub struct Crate; mod deep; fn f() { deep::inner::g() }"),
            ("deep/mod.rs", "pub mod inner; #[cfg(loom)] mod models; pub struct Outer;"),
            (
                "deep/inner.rs",
                "use super::Outer; use crate::Crate; pub fn g() {} #[cfg(test)] mod tests { use crate::deep; }",
            ),
            ("deep/models.rs", "this is not Rust"),
        ]);
        assert_eq!(found, [""; 0]);
    }
}
