//! The steps of tests, gate and slow lane. [`runner`] runs them, measures their time and prints the summary.
//!
//! `main` and `gate` use this room; the checks that the steps run know nothing of it.

mod actions;
mod ahead;
mod failures;
mod runner;

use anyhow::Result;
use clap::ValueEnum;

use crate::build::api::Mode;
use crate::build::documentation;
use crate::build::packages;
use crate::build::variants::{CopiedWorkspace, with_variants};
use crate::build::workspace;
use crate::cargo::{self, Outcome, cargo};
use crate::instructions;
use crate::package::crates;
use crate::python;
use crate::release;
use crate::sanitize::{self, Extent, Sanitizer};
use crate::site;
use crate::suites;
use crate::tidy;
use crate::torture;
use actions::{
    ci_templates, install_packages, lab, models, recipes, reproduce, slow_scripts, tasks, variants, with,
};
pub use runner::{Verdict, run, run_all, summary};

/// A step of the gate. The order is that of a run: cheap checks first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Step {
    /// Install missing Debian packages that the tests use, and the source of fio
    Packages,
    /// Formatting
    Fmt,
    /// Rules of CONTRIBUTING.md that a machine can check
    Tidy,
    /// Build of all tests and programs, with clippy
    Build,
    /// Documentation, without warnings; interfaces of the public crates as in `crates/NAME/api.txt`
    Doc,
    /// All tests, including those with real clients and the examples in the documentation
    Test,
    /// Types and tests of the Python package
    Python,
    /// Loom models of the lock protocols
    Models,
    /// Torture: fixed seeds in simulation, with real threads, and with servers that are killed
    Torture,
    /// Gate: instructions of the hot paths, at most 3 % over `benches/baseline.json`
    Instructions,
    /// Gate: clippy over the experiments and over the program without its default features
    Variants,
    /// Gate: stock kernel: zram writeback, virtual machines, ublk, zones
    Lab,
    /// Gate: `ThreadSanitizer` over the suites that share the most between threads
    Tsan,
    /// Gate: `AddressSanitizer` over the suites with most unchecked memory access
    Asan,
    /// Gate: two minutes of servers with failing system calls; each commit tests others
    TortureCalls,
    /// Slow: all tests with all their cases
    TestFull,
    /// Slow: all loom models, including the longest
    ModelsFull,
    /// Slow: each experiment once
    Reproduce,
    /// Slow: reintroduce known faults, each of which the torture must find
    Mutants,
    /// Slow: reintroduce known faults, each of which failing system calls must find
    MutantsCalls,
    /// Slow: the torture with more seeds, and servers that are killed for six minutes
    TortureLong,
    /// Slow: all failing system calls of starts, verbs and ends
    TortureCallsServer,
    /// Slow: all failing system calls of saves, rewrites, snapshots, merges, zones and files
    TortureCallsDisks,
    /// Slow: all failing system calls of pushes, pulls and prunes
    TortureCallsStore,
    /// Slow: zram writeback in a stock kernel, all sequences
    LabWriteback,
    /// Slow: the same random operations on zones of `null_blk` and of Freestone
    LabZones,
    /// Slow: COW devices and merges, exchanged between dm-snapshot and Freestone
    LabSnapshots,
    /// Slow: virtual machines: file systems, power cuts, growth
    LabVhostUser,
    /// Slow: every operation on a ublk RAM disk, two kernels
    LabUblkDevice,
    /// Slow: ublk disks of the program, a hundred of them, little memory, an unprivileged user; two kernels
    LabUblk,
    /// Slow: recoverable servers that are killed under ublk disks, two kernels
    LabUblkRecovery,
    /// Slow: ublk disks under four file systems, two kernels
    LabUblkUse,
    /// Slow: zoned ublk devices under file systems, two kernels
    LabUblkZones,
    /// Slow: fio's own tests of zoned devices
    LabUblkZbd,
    /// Slow: newer NBD clients, and the kernel's
    LabNbd,
    /// Slow: torture of the program with block devices
    LabTorture,
    /// Slow: a virtual machine that libvirt starts
    LabLibvirt,
    /// Slow: systemd units and udev rules on a host
    LabSystemd,
    /// Slow: tasks of users on real mounts: with `freestone mount`, by hand, and in a stock kernel
    Tasks,
    /// Slow: object stores and RBD of a one-node Ceph whose daemons are killed
    Ceph,
    /// Slow: licences and sources of all dependencies, by the policy in `deny.toml`
    Licences,
    /// Slow: a release rehearsed in two directories, with the same bytes: version, licences, crates, components
    Release,
    /// Slow: the actions of GitHub and the template of GitLab: linted, run with jobs that pass and fail
    CiTemplates,
    /// Slow: the published crates, built from their packages alone
    Crates,
    /// Slow: the documentation as a site: built without warnings, links checked
    Site,
    /// Slow: the Debian package: lintian; installed, used, updated and purged in a clean root
    PackageRoot,
    /// Slow: upgrade from the package of an earlier commit and back, with a state, saved files and stores
    PackageUpgrade,
    /// Slow: the archive of the static program, used without any library
    PackageArchive,
    /// Slow: the Debian package for arm64: lintian; its program in an emulator
    PackageArm64,
    /// Slow: the image for containers, and the manifest for Kubernetes
    PackageContainer,
    /// Slow: recipes of runners of GitHub and GitLab, as an unprivileged user
    RecipesJobs,
    /// Slow: recipes of sandboxes in virtual machines
    RecipesMachines,
    /// Slow: recipes of containers: compose, and tests in Go and Java by Testcontainers
    RecipesContainers,
    /// Slow: all tests of the pytest plugin: databases, killed sessions, a thousand tests in eight workers
    PythonPlugin,
    /// Slow: `explore` of databases from registries on ext4
    ExploreDatabases,
    /// Slow: the suite of a project from a registry, moved over to the pytest plugin
    PythonSuite,
    /// Slow: the wheel of the Python package: its tests with each Python of this machine; pyright
    PythonWheel,
    /// Slow: the wheel of the Python package for arm64, used in an emulator
    PythonWheelArm64,
    /// Slow: the other suites of all devices together under `ThreadSanitizer`
    TsanDevices,
    /// Slow: the other suites of single crates under `ThreadSanitizer`
    TsanCrates,
    /// Slow: the other suites under `AddressSanitizer`
    AsanRest,
}

/// First step of the gate beyond the tests.
const FIRST_OF_GATE: Step = Step::Instructions;
/// First piece of the slow lane.
const FIRST_SLOW: Step = Step::TestFull;

/// Group of steps that one command runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// `cargo xtask test`.
    Test,
    /// `cargo xtask gate`, after the tests.
    Gate,
    /// A few pieces in every gate, those that ran longest ago first.
    Slow,
}

impl Step {
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    pub fn lane(self) -> Lane {
        match self as u8 {
            step if step < FIRST_OF_GATE as u8 => Lane::Test,
            step if step < FIRST_SLOW as u8 => Lane::Gate,
            _ => Lane::Slow,
        }
    }

    fn about(self) -> String {
        let value = self.to_possible_value();
        value.and_then(|v| v.get_help().map(ToString::to_string)).unwrap_or_default()
    }

    fn run(self) -> Result<Outcome> {
        match self {
            Self::Packages => install_packages(),
            Self::Fmt => cargo::run_each([
                with(cargo(), &["fmt", "--all", "--check"]),
                with(with_variants("fmt", CopiedWorkspace::Research)?, &["--all", "--check"]),
            ]),
            Self::Tidy => tidy::run().map(Outcome::of),
            Self::Build => workspace::build(),
            Self::Doc => documentation::document(Mode::Check),
            Self::Test => suites::run(suites::Extent::Quick),
            Self::TestFull => suites::run(suites::Extent::Full),
            // Instructions are counted in the release build, because inlining across crates affects the counts.
            Self::Instructions => instructions::run(),
            Self::Torture => torture::fixed(torture::SHORT),
            Self::Mutants => torture::mutants(&torture::names(false)),
            Self::MutantsCalls => torture::mutants(&torture::names(true)),
            Self::TortureLong => torture::fixed(torture::LONG),
            Self::TortureCalls => torture::calls(&[]),
            Self::TortureCallsServer => torture::calls(&torture::SERVER_SCENES),
            Self::TortureCallsDisks => torture::calls(&torture::DISK_SCENES),
            Self::TortureCallsStore => torture::calls(&torture::STORE_SCENES),
            Self::Variants => variants(),
            Self::Reproduce => reproduce(),
            Self::Python => python::run(),
            Self::Models => models(suites::Extent::Quick),
            Self::ModelsFull => models(suites::Extent::Full),
            Self::Tsan => sanitize::run(Sanitizer::Thread, Extent::Gate),
            Self::Asan => sanitize::run(Sanitizer::Address, Extent::Gate),
            Self::TsanDevices => sanitize::run(Sanitizer::Thread, Extent::RestOfDevices),
            Self::TsanCrates => sanitize::run(Sanitizer::Thread, Extent::RestOfCrates),
            Self::AsanRest => sanitize::run(Sanitizer::Address, Extent::Rest),
            Self::Ceph => slow_scripts(&packages::CEPH, &[&["lab/run-ceph.sh"]]),
            Self::Licences => release::licences().map(Outcome::of_test),
            Self::Release => release::rehearse(),
            Self::CiTemplates => ci_templates(),
            Self::Crates => crates::check().map(Outcome::of_test),
            Self::Site => site::run(),
            Self::PackageRoot => {
                slow_scripts(&packages::PACKAGING, &[&["lab/run-packages.sh", "lintian", "root"]])
            }
            Self::PackageUpgrade => {
                slow_scripts(&packages::PACKAGING, &[&["lab/run-packages.sh", "upgrade"]])
            }
            Self::PackageArchive => {
                slow_scripts(&packages::PACKAGING, &[&["lab/run-packages.sh", "archive"]])
            }
            Self::PackageArm64 => {
                slow_scripts(&packages::PACKAGING, &[&["lab/run-packages.sh", "lintian", "arm64"]])
            }
            Self::PackageContainer => {
                slow_scripts(&packages::PACKAGING, &[&["lab/run-packages.sh", "container"]])
            }
            Self::RecipesJobs => recipes(&["github", "gitlab"]),
            Self::RecipesMachines => recipes(&["qemu", "firecracker"]),
            Self::RecipesContainers => recipes(&["compose", "go", "java"]),
            Self::PythonPlugin => python::plugin(),
            Self::ExploreDatabases => python::explore("ext4"),
            Self::PythonSuite => python::suite(),
            Self::PythonWheel => {
                slow_scripts(&packages::PACKAGING, &[&["lab/run-packages.sh", "types", "wheel"]])
            }
            Self::PythonWheelArm64 => {
                slow_scripts(&packages::PACKAGING, &[&["lab/run-packages.sh", "wheel-arm64"]])
            }
            Self::Lab => lab(&[
                &["lab/run-writeback.sh", "first"],
                &["lab/run-vhost-user.sh", "boot", "killed", "adopted"],
                &["lab/run-ublk.sh", "program", "7"],
                &["lab/run-ublk-zones.sh", "drive", "7"],
            ]),
            Self::LabWriteback => lab(&[&["lab/run-writeback.sh"]]),
            Self::LabZones => lab(&[&["lab/run-zones.sh"]]),
            Self::LabSnapshots => lab(&[&["lab/run-snapshots.sh"]]),
            Self::LabVhostUser => lab(&[&["lab/run-vhost-user.sh", "use", "cut", "files"]]),
            Self::LabUblkDevice => lab(&[&["lab/run-ublk.sh", "device"]]),
            Self::LabUblk => lab(&[
                &["lab/run-ublk.sh", "program"],
                &["lab/run-ublk.sh", "many"],
                &["lab/run-ublk.sh", "user"],
                &["lab/run-ublk.sh", "memory"],
            ]),
            Self::LabUblkRecovery => lab(&[&["lab/run-ublk.sh", "recovery"]]),
            Self::LabUblkUse => lab(&[&["lab/run-ublk.sh", "use"]]),
            Self::LabUblkZones => lab(&[&["lab/run-ublk-zones.sh"]]),
            Self::LabUblkZbd => lab(&[&["lab/run-ublk-zbd.sh"]]),
            Self::LabNbd => lab(&[&["lab/run-nbd.sh"]]),
            Self::LabTorture => lab(&[&["lab/run-torture.sh"]]),
            Self::LabLibvirt => {
                packages::ensure(&packages::LIBVIRT).and_then(|()| lab(&[&["lab/run-libvirt.sh"]]))
            }
            Self::LabSystemd => lab(&[&["lab/run-systemd.sh"]]),
            Self::Tasks => tasks(),
        }
    }
}

pub fn list() {
    for step in Step::value_variants() {
        println!("{:<18} {}", step.name(), step.about());
    }
}

pub fn of_lane(lane: Lane) -> Vec<Step> {
    Step::value_variants().iter().copied().filter(|step| step.lane() == lane).collect()
}

pub fn of_sanitizer(sanitizer: Option<Sanitizer>) -> Vec<Step> {
    let thread = [Step::Tsan, Step::TsanDevices, Step::TsanCrates];
    let address = [Step::Asan, Step::AsanRest];
    match sanitizer {
        Some(Sanitizer::Thread) => thread.to_vec(),
        Some(Sanitizer::Address) => address.to_vec(),
        None => [&thread[..], &address[..]].concat(),
    }
}

/// Returns the steps that `--only` selects, in the order of a run.
pub fn chosen(only: &[Step]) -> Vec<Step> {
    Step::value_variants().iter().copied().filter(|step| only.contains(step)).collect()
}

#[cfg(test)]
mod tests {
    use super::{Lane, Step, chosen, of_lane};

    #[test]
    fn chosen_keeps_the_order_of_a_run() {
        assert_eq!(chosen(&[Step::Test, Step::Fmt]), [Step::Fmt, Step::Test]);
        assert_eq!(of_lane(Lane::Test).first(), Some(&Step::Packages));
        assert_eq!(of_lane(Lane::Test).last(), Some(&Step::Torture));
        assert_eq!(of_lane(Lane::Gate).last(), Some(&Step::TortureCalls));
        assert!(of_lane(Lane::Slow).contains(&Step::Reproduce));
    }
}
