//! Runs fio with the engine built for the tests.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// Timeout of a fio run, far longer than any of these tests takes.
const RUN_TIMEOUT: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Returns the path of the engine as a value of fio's `ioengine` option.
pub fn engine() -> String {
    // The engine is beside the test program or in the parent directory, depending on the cargo version.
    let test = env::current_exe().unwrap();
    let dir = test.parent().unwrap();
    let found = [dir, dir.parent().unwrap()].map(|dir| dir.join("libfreestone_fio.so"));
    let found = found.iter().find(|path| path.is_file()).expect("the engine was built with its tests");
    format!("external:{}", found.display())
}

pub struct WorkDir(TempDir);

pub struct Run {
    status: ExitStatus,
    output: String,
    report: Option<Value>,
}

impl WorkDir {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn job(&self, device: &str, options: &str) -> Run {
        let mut file = format!("[job]\nioengine={}\ndevice={device}\n", engine());
        for option in options.split_whitespace() {
            file.push_str(option);
            file.push('\n');
        }
        self.jobs(&file)
    }

    pub fn jobs(&self, text: &str) -> Run {
        let (job, report, stderr) = (self.path("jobs.fio"), self.path("report"), self.path("stderr"));
        fs::write(&job, text).unwrap();
        let mut command = Command::new("fio");
        command.arg("--output-format=json").arg("--output").arg(&report).arg(&job);
        command.current_dir(self.0.path()).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(fs::File::create(&stderr).unwrap());
        let status = run_to_end(&mut command, text);
        let printed = read(&report);
        // fio prints notes before and after the JSON.
        let json = printed.find("\n{").map_or(printed.as_str(), |at| &printed[at..]);
        let json = json.rfind("\n}").map_or(json, |at| &json[..at + 2]);
        Run { status, output: read(&stderr) + &printed, report: serde_json::from_str(json).ok() }
    }
}

impl Run {
    #[track_caller]
    pub fn ok(self) -> Self {
        assert!(self.status.success(), "{}: {}", self.status, self.output);
        assert_eq!(self.errors(), vec![0; self.errors().len()], "{}", self.output);
        self
    }

    /// Checks that fio failed and printed `sentence`.
    #[track_caller]
    pub fn fails_with(self, sentence: &str) -> Self {
        assert_eq!(self.status.code(), Some(1), "{}", self.output);
        assert!(self.output.contains(sentence), "{sentence}: {}", self.output);
        self
    }

    pub fn errors(&self) -> Vec<i64> {
        self.each_job(|job| job["error"].as_i64().unwrap())
    }

    /// Returns the sum over all jobs of the number `key` in the section `part` of fio's report.
    pub fn sum(&self, part: &str, key: &str) -> u64 {
        self.each_job(|job| job[part][key].as_u64().unwrap()).iter().sum()
    }

    /// Returns the percentage of requests that fio issued at a queue depth, added up over all jobs.
    pub fn depth(&self, level: &str) -> f64 {
        self.each_job(|job| job["iodepth_level"][level].as_f64().unwrap()).iter().sum()
    }

    fn each_job<T>(&self, what: impl Fn(&Value) -> T) -> Vec<T> {
        let report = self.report.as_ref().unwrap_or_else(|| panic!("no report: {}", self.output));
        report["jobs"].as_array().unwrap().iter().map(what).collect()
    }
}

fn read(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}

fn run_to_end(command: &mut Command, what: &str) -> ExitStatus {
    let mut child = command.spawn().expect("fio is installed");
    let deadline = Instant::now() + RUN_TIMEOUT;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("fio does not end: {what}");
        }
        thread::sleep(POLL_INTERVAL);
    }
}
