//! The library that stands for Ceph's, and images that it opens.

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use freestone_rbd::{Config, Rbd};
use freestone_testkit::librbd;
use tempfile::TempDir;

/// Directories with `librbd.so.1` and `librados.so.2`: one that has all, one of an old version.
pub struct Built {
    pub whole: PathBuf,
    pub old: PathBuf,
    _dir: TempDir,
}

/// Built once for a process, as what is loaded stays.
pub static BUILT: LazyLock<Built> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let build = |name: &str, old| {
        let at = dir.path().join(name);
        fs::create_dir(&at).unwrap();
        librbd::build(&at, old);
        at
    };
    Built { whole: build("whole", false), old: build("old", true), _dir: dir }
});

/// A cluster: a directory with images.
pub struct Cluster {
    pub dir: TempDir,
}

impl Cluster {
    /// With one image, `rbd/vm`, of so many bytes.
    pub fn new(size: u64) -> Self {
        let cluster = Self { dir: tempfile::tempdir().unwrap() };
        fs::write(cluster.conf(), format!("root = {}\n", cluster.dir.path().display())).unwrap();
        cluster.image("rbd.vm", size);
        cluster
    }

    pub fn conf(&self) -> PathBuf {
        self.dir.path().join("ceph.conf")
    }

    /// The file of an image.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Makes an image, or gives one another size.
    pub fn image(&self, name: &str, size: u64) {
        let file = fs::File::options().create(true).truncate(false).write(true).open(self.file(name));
        file.unwrap().set_len(size).unwrap();
    }

    /// What the library does from now on.
    pub fn control(&self, lines: &str) {
        let new = self.dir.path().join("control.new");
        fs::write(&new, lines).unwrap();
        fs::rename(new, self.dir.path().join("control")).unwrap();
    }

    /// What was asked of the library.
    pub fn log(&self) -> Vec<String> {
        let text = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// What it has done to the image.
    pub fn did(&self) -> Vec<String> {
        self.log().iter().filter_map(|line| line.strip_prefix("did ").map(str::to_owned)).collect()
    }

    pub fn config(&self) -> Config {
        Config {
            conf: Some(self.conf()),
            libraries: Some(BUILT.whole.clone()),
            ..Config::new("rbd/vm".parse().unwrap())
        }
    }

    /// `rbd/vm` as a device.
    pub fn open(&self) -> Rbd {
        Rbd::open(&self.config()).unwrap()
    }
}

/// Waits until it is so.
pub fn soon(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
