//! Runs fio with the engine that was built with the tests.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// No run of these tests takes nearly as long.
const LIMIT: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(10);

/// The engine, as fio is told of it.
pub fn engine() -> String {
    // It lies beside the test, or in the directory above, as the version of cargo has it.
    let test = env::current_exe().unwrap();
    let dir = test.parent().unwrap();
    let found = [dir, dir.parent().unwrap()].map(|dir| dir.join("libfreestone_fio.so"));
    let found = found.iter().find(|path| path.is_file()).expect("the engine was built with its tests");
    format!("external:{}", found.display())
}

/// A directory in which fio runs.
pub struct Place(TempDir);

/// What a run came to.
pub struct Run {
    status: ExitStatus,
    said: String,
    report: Option<Value>,
}

impl Place {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// One job on a device.
    pub fn job(&self, device: &str, options: &str) -> Run {
        let mut file = format!("[job]\nioengine={}\ndevice={device}\n", engine());
        for option in options.split_whitespace() {
            file.push_str(option);
            file.push('\n');
        }
        self.jobs(&file)
    }

    /// The jobs of a job file.
    pub fn jobs(&self, text: &str) -> Run {
        let (job, report, stderr) = (self.path("jobs.fio"), self.path("report"), self.path("stderr"));
        fs::write(&job, text).unwrap();
        let mut command = Command::new("fio");
        command.arg("--output-format=json").arg("--output").arg(&report).arg(&job);
        command.current_dir(self.0.path()).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(fs::File::create(&stderr).unwrap());
        let status = ended(&mut command, text);
        let printed = read(&report);
        // fio's notes stand before and behind it.
        let json = printed.find("\n{").map_or(printed.as_str(), |at| &printed[at..]);
        let json = json.rfind("\n}").map_or(json, |at| &json[..at + 2]);
        Run { status, said: read(&stderr) + &printed, report: serde_json::from_str(json).ok() }
    }
}

impl Run {
    /// fio succeeded.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert!(self.status.success(), "{}: {}", self.status, self.said);
        assert_eq!(self.errors(), vec![0; self.errors().len()], "{}", self.said);
        self
    }

    /// fio failed, and said this.
    #[track_caller]
    pub fn fails_with(self, sentence: &str) -> Self {
        assert_eq!(self.status.code(), Some(1), "{}", self.said);
        assert!(self.said.contains(sentence), "{sentence}: {}", self.said);
        self
    }

    /// The errno of each job.
    pub fn errors(&self) -> Vec<i64> {
        self.each(|job| job["error"].as_i64().unwrap())
    }

    /// The sum of a number over all jobs.
    pub fn sum(&self, part: &str, key: &str) -> u64 {
        self.each(|job| job[part][key].as_u64().unwrap()).iter().sum()
    }

    /// How many percent of the requests found this depth.
    pub fn depth(&self, level: &str) -> f64 {
        self.each(|job| job["iodepth_level"][level].as_f64().unwrap()).iter().sum()
    }

    fn each<T>(&self, what: impl Fn(&Value) -> T) -> Vec<T> {
        let report = self.report.as_ref().unwrap_or_else(|| panic!("no report: {}", self.said));
        report["jobs"].as_array().unwrap().iter().map(what).collect()
    }
}

fn read(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}

fn ended(command: &mut Command, what: &str) -> ExitStatus {
    let mut child = command.spawn().expect("fio is installed");
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("fio does not end: {what}");
        }
        thread::sleep(PAUSE);
    }
}
