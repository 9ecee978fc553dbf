//! Fakes of the Ceph libraries, and the images that the fakes open.

use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use freestone_rbd::{Config, Rbd};
use freestone_testkit::librbd;
use tempfile::TempDir;

/// Directory with fakes of `librbd.so.1` and `librados.so.2` that have all functions.
pub static WHOLE: LazyLock<PathBuf> = LazyLock::new(|| built("whole", false));
/// Directory with fakes of an old version of both libraries.
pub static OLD: LazyLock<PathBuf> = LazyLock::new(|| built("old", true));

/// Builds the fake libraries once per version of their source, in the first test process. Returns the
/// directory.
fn built(name: &str, old: bool) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    librbd::SOURCE.hash(&mut hasher);
    let place =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("librbd-{name}-{:016x}", hasher.finish()));
    if !place.exists() {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        librbd::build(dir.path(), old);
        // Another test process may have built the same libraries first.
        if fs::rename(dir.path(), &place).is_err() {
            assert!(place.exists(), "the library is not at {}", place.display());
        }
    }
    place
}

/// A fake cluster: a directory that contains images as files.
pub struct Cluster {
    pub dir: TempDir,
}

impl Cluster {
    /// Creates a cluster with one image, `rbd/vm`, of `size` bytes.
    pub fn new(size: u64) -> Self {
        let cluster = Self { dir: tempfile::tempdir().unwrap() };
        fs::write(cluster.conf(), format!("root = {}\n", cluster.dir.path().display())).unwrap();
        cluster.image("rbd.vm", size);
        cluster
    }

    pub fn conf(&self) -> PathBuf {
        self.dir.path().join("ceph.conf")
    }

    /// Returns the path of an image's file.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Creates an image of `size` bytes, or changes the size of an image.
    pub fn image(&self, name: &str, size: u64) {
        let file = fs::File::options().create(true).truncate(false).write(true).open(self.file(name));
        file.unwrap().set_len(size).unwrap();
    }

    /// Sets the behavior of the fake libraries from now on.
    pub fn control(&self, lines: &str) {
        let new = self.dir.path().join("control.new");
        fs::write(&new, lines).unwrap();
        fs::rename(new, self.dir.path().join("control")).unwrap();
    }

    /// Returns the calls that the fake libraries have logged.
    pub fn log(&self) -> Vec<String> {
        let text = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Returns the I/O operations that the fake libraries have performed.
    pub fn operations(&self) -> Vec<String> {
        self.log().iter().filter_map(|line| line.strip_prefix("did ").map(str::to_owned)).collect()
    }

    pub fn config(&self) -> Config {
        Config {
            conf: Some(self.conf()),
            libraries: Some(WHOLE.clone()),
            ..Config::new("rbd/vm".parse().unwrap())
        }
    }

    pub fn open(&self) -> Rbd {
        Rbd::open(&self.config()).unwrap()
    }
}

/// Waits until the condition is true, for at most 20 seconds.
pub fn wait_for(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
