//! The peers' programs: those that are installed here, or Debian 13's, unpacked beside the
//! system's.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use super::Args;
use crate::tool;

/// Unpacks them; `sh` reads it from here, so it needs no place.
const UNPACK: &str = include_str!("../../peers/debian13.sh");

/// Which ones are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Wanted {
    /// What is installed on this machine.
    Installed,
    /// Debian 13's, unpacked into --peers-dir at the first use; what is installed where they cannot
    /// be had.
    Debian13,
}

/// Where they come from.
pub struct Peers {
    tree: Option<Tree>,
    /// Why it is not what was asked for.
    pub instead: Option<String>,
}

/// Programs and libraries of another system. They run on their own C library, so through its
/// loader.
struct Tree {
    root: PathBuf,
    loader: PathBuf,
    libraries: PathBuf,
}

impl Peers {
    pub fn find(args: &Args) -> Result<Self> {
        if args.peers == Wanted::Installed {
            return Ok(Self { tree: None, instead: None });
        }
        match Tree::unpacked(&args.peers_dir) {
            Ok(tree) => Ok(Self { tree: Some(tree), instead: None }),
            Err(error) if args.require_peers => Err(error),
            Err(error) => Ok(Self {
                tree: None,
                instead: Some(format!(
                    "Debian 13's peers could not be had, these are the installed ones: {error:#}."
                )),
            }),
        }
    }

    /// One of their programs.
    pub fn program(&self, name: &str) -> Command {
        let Some(tree) = &self.tree else { return Command::new(name) };
        let mut command = Command::new(&tree.loader);
        command.arg("--library-path").arg(&tree.libraries).arg(tree.root.join("usr/bin").join(name));
        command
    }

    /// Whether they are Debian 13's.
    pub fn are_unpacked(&self) -> bool {
        self.tree.is_some()
    }

    /// Has a program of qemu find its modules.
    pub fn with_modules(&self, command: &mut Command) {
        if let Some(tree) = &self.tree {
            command.env("QEMU_MODULE_DIR", tree.libraries.join("qemu"));
        }
    }

    /// What nbdkit is told to load a plugin.
    pub fn plugin(&self, name: &str) -> String {
        self.module("plugins", name, "plugin")
    }

    /// What nbdkit is told to load a filter.
    pub fn filter(&self, name: &str) -> String {
        self.module("filters", name, "filter")
    }

    fn module(&self, dir: &str, name: &str, kind: &str) -> String {
        let Some(tree) = &self.tree else { return name.to_owned() };
        tree.libraries.join(format!("nbdkit/{dir}/nbdkit-{name}-{kind}.so")).display().to_string()
    }

    /// Where they are, for people.
    pub fn origin(&self) -> String {
        match &self.tree {
            Some(tree) => format!(
                "Debian 13's, unpacked by benches/peers/debian13.sh; PEERS is that directory, RUN is {}",
                relative(&tree.rooted(&tree.run()))
            ),
            None => "as installed on this machine".into(),
        }
    }

    /// A text without this machine's own directories.
    pub fn shown(&self, text: &str) -> String {
        match &self.tree {
            Some(tree) => relative(&tree.rooted(&text.replace(&tree.run(), "RUN"))),
            None => relative(text),
        }
    }

    /// The first line of what a program says of its version.
    pub fn version(&self, name: &str) -> String {
        let told = self.shown(&tool::version(self.program(name)));
        // One that was started by a path may say so.
        told.strip_prefix("PEERS/usr/bin/").map_or(told.clone(), str::to_owned)
    }
}

/// A text without the directory that this program runs in.
fn relative(text: &str) -> String {
    match std::env::current_dir() {
        Ok(dir) => text.replace(&format!("{}/", dir.display()), ""),
        Err(_) => text.to_owned(),
    }
}

impl Tree {
    /// Unpacks them where that was not done before.
    fn unpacked(dir: &Path) -> Result<Self> {
        if !dir.join(".unpacked").exists() {
            eprintln!("unpacking Debian 13's nbdkit and qemu into {}", dir.display());
        }
        let mut script = Command::new("sh");
        script.args(["-c", UNPACK, "debian13.sh"]).arg(dir).stdin(Stdio::null());
        let output = script.output().context("sh could not be started")?;
        let told = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{}", told.trim());
        let root = dir.canonicalize().with_context(|| format!("{}", dir.display()))?;
        let (loader, libraries) = loader(&root.join("usr/lib"))?;
        Ok(Self { root, loader, libraries })
    }

    /// What stands before each of its programs.
    fn run(&self) -> String {
        format!("{} --library-path {}", self.loader.display(), self.libraries.display())
    }

    /// A text with a word for its directory.
    fn rooted(&self, text: &str) -> String {
        text.replace(&format!("{}/", self.root.display()), "PEERS/")
    }
}

/// The loader of a tree and the directory of its libraries, whatever its architecture.
fn loader(lib: &Path) -> Result<(PathBuf, PathBuf)> {
    let context = || format!("{}", lib.display());
    for dir in std::fs::read_dir(lib).with_context(context)? {
        let dir = dir.with_context(context)?.path();
        let Ok(files) = std::fs::read_dir(&dir) else { continue };
        for file in files {
            let file = file.with_context(context)?;
            let name = file.file_name();
            if name.to_string_lossy().starts_with("ld-linux") && dir.join("libc.so.6").exists() {
                return Ok((file.path(), dir));
            }
        }
    }
    bail!("{}: there is no loader", lib.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree that looks as an unpacked one does.
    fn tree(dir: &Path) {
        let libraries = dir.join("usr/lib/some-linux-gnu");
        std::fs::create_dir_all(&libraries).unwrap();
        for name in ["ld-linux-some.so.2", "libc.so.6"] {
            std::fs::write(libraries.join(name), "").unwrap();
        }
        std::fs::write(dir.join(".unpacked"), "").unwrap();
    }

    #[test]
    fn a_tree_s_programs_run_through_its_loader_and_are_shown_without_its_place() {
        let dir = tempfile::tempdir().unwrap();
        tree(dir.path());
        let peers = Peers { tree: Some(Tree::unpacked(dir.path()).unwrap()), instead: None };
        let command = peers.program("nbdkit");
        assert!(command.get_program().to_string_lossy().ends_with("some-linux-gnu/ld-linux-some.so.2"));
        let words: Vec<_> = std::iter::once(command.get_program()).chain(command.get_args()).collect();
        let line = words.into_iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
        assert_eq!(peers.shown(&line), "RUN PEERS/usr/bin/nbdkit");
        let run = "RUN is PEERS/usr/lib/some-linux-gnu/ld-linux-some.so.2 --library-path PEERS/usr/lib/some-linux-gnu";
        assert!(peers.origin().ends_with(run), "{}", peers.origin());
        let plugin = peers.shown(&peers.plugin("memory"));
        assert_eq!(plugin, "PEERS/usr/lib/some-linux-gnu/nbdkit/plugins/nbdkit-memory-plugin.so");
    }

    #[test]
    fn a_tree_without_a_loader_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("usr/lib/some")).unwrap();
        std::fs::write(dir.path().join(".unpacked"), "").unwrap();
        assert!(Tree::unpacked(dir.path()).is_err());
    }
}
