//! Architectures of packages, and the tools that build for each.

use std::env;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;

use crate::build::packages::{self, Tool};
use crate::cargo::output;

/// Architecture of a package, by its Debian name, or the target of the static program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Arch {
    Amd64,
    /// Built on amd64 and tested in an emulator, so the package is called experimental.
    Arm64,
    /// amd64 with the C library musl, which is linked into the program: for machines that are not Debian's.
    #[value(skip)]
    Musl,
}

/// Tools that packages of every architecture need, besides cargo.
const TOOLS: [Tool; 4] =
    [("dpkg-deb", "dpkg"), ("dpkg-shlibdeps", "dpkg-dev"), ("gzip", "gzip"), ("objcopy", "binutils")];
/// Additional tools for arm64: C compiler, linker, and libraries. `dpkg-shlibdeps` reads the same libraries.
const ARM64_TOOLS: [Tool; 4] = [
    ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
    ("aarch64-linux-gnu-objcopy", "binutils-aarch64-linux-gnu"),
    ("/usr/aarch64-linux-gnu/include/stdio.h", "libc6-dev-arm64-cross"),
    ("/var/lib/dpkg/info/libc6:arm64.list", "libc6:arm64"),
];
/// Debian's compiler, used if cargo's compiler has no standard library for arm64.
const ARM64_COMPILER: [Tool; 2] = [
    (DEBIANS_COMPILER, "rustc-web"),
    ("/var/lib/dpkg/info/libstd-rust-web-dev:arm64.list", "libstd-rust-web-dev:arm64"),
];
const DEBIANS_COMPILER: &str = "/usr/bin/rustc";
/// Additional tools for a static program: a C compiler with the headers of musl. Rust brings the library itself.
const MUSL_TOOLS: [Tool; 1] = [(MUSL_COMPILER, "musl-tools")];
const MUSL_COMPILER: &str = "musl-gcc";

impl Arch {
    pub fn debian(self) -> &'static str {
        match self {
            Self::Amd64 | Self::Musl => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    pub fn triple(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-gnu",
            Self::Arm64 => "aarch64-unknown-linux-gnu",
            Self::Musl => "x86_64-unknown-linux-musl",
        }
    }

    pub fn is_cross(self) -> bool {
        self != Self::Amd64
    }

    /// Returns the name of a binutils or gcc program for this architecture.
    pub fn tool(self, name: &str) -> String {
        match self {
            Self::Amd64 | Self::Musl => name.to_owned(),
            Self::Arm64 => format!("aarch64-linux-gnu-{name}"),
        }
    }

    /// Installs the missing tools for this architecture. Fails unless this machine is amd64.
    pub fn ensure(self) -> Result<()> {
        if env::consts::ARCH != "x86_64" {
            bail!("packages are built on amd64, and this is {}", env::consts::ARCH);
        }
        packages::ensure(&TOOLS)?;
        if self == Self::Arm64 {
            packages::ensure(&ARM64_TOOLS)?;
            if !self.is_known_to_compiler()? {
                packages::ensure(&ARM64_COMPILER)?;
            }
        }
        if self == Self::Musl {
            packages::ensure(&MUSL_TOOLS)?;
            if !self.is_known_to_compiler()? {
                let added = Command::new("rustup").args(["target", "add", self.triple()]).status();
                let added = added.is_ok_and(|status| status.success()) && self.is_known_to_compiler()?;
                ensure!(added, "the Rust compiler has no standard library for {}", self.triple());
            }
        }
        Ok(())
    }

    /// Returns the environment variables of cargo builds for this architecture; empty for amd64.
    pub fn environment(self) -> Result<Vec<(&'static str, OsString)>> {
        if self == Self::Musl {
            return Ok(vec![("CC_x86_64_unknown_linux_musl", MUSL_COMPILER.into())]);
        }
        let Self::Arm64 = self else { return Ok(Vec::new()) };
        let mut all = vec![
            ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", self.tool("gcc").into()),
            ("CC_aarch64_unknown_linux_gnu", self.tool("gcc").into()),
            ("AR_aarch64_unknown_linux_gnu", self.tool("ar").into()),
        ];
        if !self.is_known_to_compiler()? {
            all.push(("RUSTC", DEBIANS_COMPILER.into()));
        }
        Ok(all)
    }

    /// Returns true if the compiler of this cargo has a standard library for this architecture.
    fn is_known_to_compiler(self) -> Result<bool> {
        let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let mut command = Command::new(rustc);
        let dir = output(command.args(["--print", "target-libdir", "--target", self.triple()]))?;
        Ok(Path::new(&dir).is_dir())
    }
}
