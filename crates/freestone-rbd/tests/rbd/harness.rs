//! The fake library, and images that it opens.

use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use freestone_rbd::{Config, Rbd};
use freestone_testkit::librbd;
use tempfile::TempDir;

/// Directory with complete versions of `librbd.so.1` and `librados.so.2`.
pub static WHOLE: LazyLock<PathBuf> = LazyLock::new(|| built("whole", false));
/// Directory with libraries of an old version.
pub static OLD: LazyLock<PathBuf> = LazyLock::new(|| built("old", true));

/// Builds the library once per version of its source, in whichever process comes first.
fn built(name: &str, old: bool) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    librbd::SOURCE.hash(&mut hasher);
    let place =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("librbd-{name}-{:016x}", hasher.finish()));
    if !place.exists() {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        librbd::build(dir.path(), old);
        // Another process may have built the same library first.
        if fs::rename(dir.path(), &place).is_err() {
            assert!(place.exists(), "the library is not at {}", place.display());
        }
    }
    place
}

/// A cluster: a directory with images.
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

    /// Returns the file of an image.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Creates an image, or changes its size.
    pub fn image(&self, name: &str, size: u64) {
        let file = fs::File::options().create(true).truncate(false).write(true).open(self.file(name));
        file.unwrap().set_len(size).unwrap();
    }

    /// Sets the library's behaviour from now on.
    pub fn control(&self, lines: &str) {
        let new = self.dir.path().join("control.new");
        fs::write(&new, lines).unwrap();
        fs::rename(new, self.dir.path().join("control")).unwrap();
    }

    /// Returns the calls that the library has logged.
    pub fn log(&self) -> Vec<String> {
        let text = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Returns the I/O operations that the library has performed.
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

/// Waits until the condition is true.
pub fn wait_for(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
