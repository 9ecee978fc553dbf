//! The systemd units in packaging: `systemd-analyze verify` accepts them, and each service has few rights.

use std::os::unix::fs::PermissionsExt as _;

use crate::harness::prelude::*;

/// Largest exposure level allowed for each unit by `systemd-analyze security`, times ten: 0 has no rights, 96 is a unit
/// without restrictions. The servers of block devices need `CAP_SYS_ADMIN`, as does the NBD client.
const EXPOSURE_MAX: [(&str, u32); 6] = [
    ("freestone.service", 26),
    ("freestone@.service", 10),
    ("freestone-mkfs@.service", 16),
    ("freestone-nbd@.service", 28),
    ("freestone-server.service", 16),
    ("freestone-tmp.service", 20),
];

/// Copies the units to the directory `to`, with program paths of this machine. Returns the file names.
fn units(to: &Path) -> Vec<String> {
    let packaging = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/systemd"));
    let mkfs = packaging.join("freestone-mkfs");
    assert_eq!(fs::metadata(&mkfs).unwrap().permissions().mode() & 0o111, 0o111, "{}", mkfs.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(packaging).unwrap() {
        let path: PathBuf = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if !name.contains('.') {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let text = text.replace("/usr/bin/freestone ", &format!("{} ", program()));
        let text = text.replace("/usr/lib/freestone/freestone-mkfs", mkfs.to_str().unwrap());
        // Programs of other packages may be missing on this machine.
        let text =
            text.replace("+/usr/bin/udevadm", "+/bin/true").replace("/usr/sbin/nbd-client", "/bin/true");
        fs::write(to.join(name), &text).unwrap();
        names.push(name.to_owned());
    }
    names.sort();
    names
}

#[test]
fn units_pass_systemd_verify() {
    let dir = tempfile::tempdir().unwrap();
    let verify = |name: &str| {
        // systemd-analyze verifies a template only under the name of an instance.
        let instance = name.replace("@.", "@x.");
        let file = dir.path().join(&instance);
        if instance != name {
            fs::copy(dir.path().join(name), &file).unwrap();
        }
        let mut command = Command::new(freestone_testkit::tools::find("systemd-analyze"));
        command.env("SYSTEMD_UNIT_PATH", format!("{}:", dir.path().display()));
        finish(command.args(["verify", "--man=no"]).arg(file))
    };
    let names = units(dir.path());
    assert!(names.len() >= 8, "{names:?}");
    for name in &names {
        let (code, _, err) = verify(name);
        let ours: Vec<_> =
            err.lines().filter(|line| line.contains("freestone") || line.contains(name)).collect();
        assert_eq!((code, ours), (0, Vec::new()), "{name}: {err}");
    }
    fs::write(
        dir.path().join("wrong.service"),
        "[Service]\nExecStart=/no/such/freestone\nProtectSytem=strict\n",
    )
    .unwrap();
    let (code, _, err) = verify("wrong.service");
    assert!(code != 0 && err.contains("ProtectSytem"), "it finds what is wrong: {err}");
}

#[test]
fn units_stay_below_exposure_limits() {
    let dir = tempfile::tempdir().unwrap();
    let services: Vec<_> = units(dir.path()).into_iter().filter(|name| name.ends_with(".service")).collect();
    let mut known: Vec<_> = EXPOSURE_MAX.map(|(name, _)| name).into();
    known.sort_unstable();
    assert_eq!(services, known);
    for (name, most) in EXPOSURE_MAX {
        let mut command = Command::new(freestone_testkit::tools::find("systemd-analyze"));
        command.args(["security", "--no-pager", "--offline=true"]).arg(format!("--threshold={most}"));
        let (code, out, err) = finish(command.arg(dir.path().join(name)));
        assert_eq!(code, 0, "{name}: {} {err}", out.lines().last().unwrap_or_default());
    }
}
