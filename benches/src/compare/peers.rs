//! Programs of the peers (nbdkit, qemu): those installed on this machine, or those of Debian 13,
//! unpacked into a directory.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use crate::programs::tool;

/// Script that unpacks the peers. `sh` receives the text as an argument, so the script needs no
/// file.
const UNPACK: &str = include_str!("../../peers/debian13.sh");

/// Options of benchmarks that use peers.
#[derive(Debug, Clone, clap::Args)]
pub struct PeerArgs {
    /// Versions of nbdkit and qemu-nbd to compare with
    #[arg(long, value_enum, default_value = "debian13")]
    peers: PeerVersion,
    /// Directory in which Debian 13's peers are unpacked
    #[arg(long, default_value = "target/peers/debian13")]
    peers_dir: PathBuf,
    /// Fail if a peer cannot be downloaded or started, instead of reporting it in the table
    #[arg(long)]
    pub require_peers: bool,
}

/// Version of the peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PeerVersion {
    /// Programs installed on this machine.
    Installed,
    /// Debian 13's programs, unpacked into --peers-dir at the first use. Falls back to the
    /// installed programs.
    Debian13,
}

pub struct Peers {
    tree: Option<Tree>,
    /// Note for the report if installed programs are used instead of the requested ones.
    pub fallback_note: Option<String>,
}

/// Directory with programs and libraries of another system. The programs need the C library of that
/// system, so its dynamic loader starts them.
struct Tree {
    root: PathBuf,
    loader: PathBuf,
    libraries: PathBuf,
}

impl Peers {
    pub fn find(args: &PeerArgs) -> Result<Self> {
        if args.peers == PeerVersion::Installed {
            return Ok(Self { tree: None, fallback_note: None });
        }
        match Tree::unpacked(&args.peers_dir) {
            Ok(tree) => Ok(Self { tree: Some(tree), fallback_note: None }),
            Err(error) if args.require_peers => Err(error),
            Err(error) => Ok(Self {
                tree: None,
                fallback_note: Some(format!(
                    "Debian 13's peers are not available, so the installed ones are used: {error:#}."
                )),
            }),
        }
    }

    pub fn program(&self, name: &str) -> Command {
        let Some(tree) = &self.tree else { return Command::new(name) };
        let mut command = Command::new(&tree.loader);
        command.arg("--library-path").arg(&tree.libraries).arg(tree.root.join("usr/bin").join(name));
        command
    }

    /// Returns true if the peers are Debian 13's.
    pub fn are_unpacked(&self) -> bool {
        self.tree.is_some()
    }

    /// Sets the module directory in the command of a qemu program, if the programs are unpacked.
    pub fn with_modules(&self, command: &mut Command) {
        if let Some(tree) = &self.tree {
            command.env("QEMU_MODULE_DIR", tree.libraries.join("qemu"));
        }
    }

    /// Returns the argument with which nbdkit loads a plugin.
    pub fn plugin(&self, name: &str) -> String {
        self.module("plugins", name, "plugin")
    }

    /// Returns the argument with which nbdkit loads a filter.
    pub fn filter(&self, name: &str) -> String {
        self.module("filters", name, "filter")
    }

    fn module(&self, dir: &str, name: &str, kind: &str) -> String {
        let Some(tree) = &self.tree else { return name.to_owned() };
        tree.libraries.join(format!("nbdkit/{dir}/nbdkit-{name}-{kind}.so")).display().to_string()
    }

    pub fn origin(&self) -> String {
        match &self.tree {
            Some(tree) => format!(
                "Debian 13's, unpacked by benches/peers/debian13.sh; PEERS is that directory, RUN is {}",
                relative(&tree.with_placeholder(&tree.loader_command()))
            ),
            None => "as installed on this machine".into(),
        }
    }

    /// Removes the names of this machine's directories from a text.
    pub fn shown(&self, text: &str) -> String {
        match &self.tree {
            Some(tree) => relative(&tree.with_placeholder(&text.replace(&tree.loader_command(), "RUN"))),
            None => relative(text),
        }
    }

    pub fn version(&self, name: &str) -> String {
        let version = self.shown(&tool::version(self.program(name)));
        // The version output of an unpacked program may contain its path.
        version.strip_prefix("PEERS/usr/bin/").map_or(version.clone(), str::to_owned)
    }
}

/// Removes the current directory from a text.
fn relative(text: &str) -> String {
    match std::env::current_dir() {
        Ok(dir) => text.replace(&format!("{}/", dir.display()), ""),
        Err(_) => text.to_owned(),
    }
}

impl Tree {
    /// Returns the tree in `dir`. Unpacks the programs there unless an earlier run has unpacked
    /// them.
    fn unpacked(dir: &Path) -> Result<Self> {
        if !dir.join(".unpacked").exists() {
            eprintln!("unpacking Debian 13's nbdkit and qemu into {}", dir.display());
        }
        let mut script = Command::new("sh");
        script.args(["-c", UNPACK, "debian13.sh"]).arg(dir).stdin(Stdio::null());
        let output = script.output().context("cannot start sh")?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{}", stderr.trim());
        let root = dir.canonicalize().with_context(|| format!("{}", dir.display()))?;
        let (loader, libraries) = loader(&root.join("usr/lib"))?;
        Ok(Self { root, loader, libraries })
    }

    fn loader_command(&self) -> String {
        format!("{} --library-path {}", self.loader.display(), self.libraries.display())
    }

    /// Replaces the directory of the tree by PEERS.
    fn with_placeholder(&self, text: &str) -> String {
        text.replace(&format!("{}/", self.root.display()), "PEERS/")
    }
}

/// Returns the dynamic loader of a tree and the directory of the tree's libraries, for any
/// architecture.
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
    bail!("{}: contains no loader", lib.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a tree with the layout of an unpacked one.
    fn create_tree(dir: &Path) {
        let libraries = dir.join("usr/lib/some-linux-gnu");
        std::fs::create_dir_all(&libraries).unwrap();
        for name in ["ld-linux-some.so.2", "libc.so.6"] {
            std::fs::write(libraries.join(name), "").unwrap();
        }
        std::fs::write(dir.join(".unpacked"), "").unwrap();
    }

    #[test]
    fn unpacked_programs_run_through_loader() {
        let dir = tempfile::tempdir().unwrap();
        create_tree(dir.path());
        let peers = Peers { tree: Some(Tree::unpacked(dir.path()).unwrap()), fallback_note: None };
        let command = peers.program("nbdkit");
        assert!(command.get_program().to_string_lossy().ends_with("some-linux-gnu/ld-linux-some.so.2"));
        let words: Vec<_> = std::iter::once(command.get_program()).chain(command.get_args()).collect();
        let line = words.into_iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
        assert_eq!(peers.shown(&line), "RUN PEERS/usr/bin/nbdkit");
        let expected = "RUN is PEERS/usr/lib/some-linux-gnu/ld-linux-some.so.2 --library-path PEERS/usr/lib/some-linux-gnu";
        assert!(peers.origin().ends_with(expected), "{}", peers.origin());
        let plugin = peers.shown(&peers.plugin("memory"));
        assert_eq!(plugin, "PEERS/usr/lib/some-linux-gnu/nbdkit/plugins/nbdkit-memory-plugin.so");
    }

    #[test]
    fn tree_without_loader_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("usr/lib/some")).unwrap();
        std::fs::write(dir.path().join(".unpacked"), "").unwrap();
        assert!(Tree::unpacked(dir.path()).is_err());
    }
}
