//! Runs the steps of `steps.txt` with a program and collects the JSON keys that the program prints.

use std::ffi::OsString;
use std::net::TcpStream;
use std::process::Output;

use freestone_spec::{aliases, size};

use super::keys::Keys;
use crate::harness::prelude::*;
use crate::watching::{self, openmetrics};

const STEPS: &str = include_str!("steps.txt");
const SERVER: &str = include_str!("server.toml");
/// Additional device in the configuration file `more.toml`.
const MORE: &str = "\n[[device]]\nname = 'more'\nkind = 'null'\nsize = '1M'\n";
const FILE_BYTES: usize = 1 << 20;
const REQUEST_BYTES: u32 = 4096;
const NBD_TRIM: u16 = 4;
/// Subcommands that run without a server.
const ALONE: [&str; 2] = ["images", "prune"];

/// Runs all steps with the program at the path `release`, or with the current program if `None`.
/// Returns the keys.
pub fn run(release: Option<OsString>) -> Keys {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("server.toml"), SERVER).unwrap();
    fs::write(dir.path().join("more.toml"), SERVER.to_owned() + MORE).unwrap();
    let mut scenario = Scenario {
        release,
        keys: Keys::default(),
        at: Place::Directory(dir),
        peer: None,
        kept: Vec::new(),
        job: String::new(),
    };
    for step in STEPS.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        scenario = scenario.step(step);
    }
    scenario.keys
}

/// The directory of the server, which is running or not.
enum Place {
    Directory(TempDir),
    Server(Box<Serve>),
}

struct Scenario {
    release: Option<OsString>,
    keys: Keys,
    at: Place,
    peer: Option<Serve>,
    /// Connections that stay open until the end of the scenario.
    kept: Vec<UnixStream>,
    /// Job number of the last background job, as text.
    job: String,
}

impl Scenario {
    fn dir(&self) -> &Path {
        match &self.at {
            Place::Directory(dir) => dir.path(),
            Place::Server(server) => server.dir.path(),
        }
    }

    fn command(&self, dir: &Path, args: &[String]) -> Command {
        let current = freestone(dir);
        let mut command = Command::new(self.release.as_deref().unwrap_or(current.get_program()));
        for (key, value) in current.get_envs() {
            match value {
                Some(value) => command.env(key, value),
                None => command.env_remove(key),
            };
        }
        command.args(args).current_dir(dir);
        command
    }

    fn step(mut self, step: &str) -> Self {
        let peer = self.peer.as_ref().map_or_else(String::new, |peer| peer.path("nbd").display().to_string());
        let line = step.replace("$DIR", &self.dir().display().to_string());
        let line = line.replace("$PEER", &peer).replace("$JOB", &self.job);
        if let Some((fails, request)) = line.split_once("> ").filter(|(start, _)| ["", "!"].contains(start)) {
            self.request(step, request, !fails.is_empty());
            return self;
        }
        let words = shlex::split(&line).unwrap_or_else(|| panic!("{step}"));
        let path = |name: &str| self.dir().join(name);
        match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["file", name] => fs::write(path(name), vec![7; FILE_BYTES]).unwrap(),
            ["rm", name] => fs::remove_file(path(name)).unwrap(),
            ["serve", ..] => return self.serve(&words),
            ["kill"] => return self.end(Signal::KILL),
            ["stop"] => return self.end(Signal::TERM),
            ["peer"] => {
                let dir = tempdir().unwrap();
                let args = ["serve", "--nbd", "unix:nbd", "--control", "control"].map(str::to_owned);
                let command = self.command(dir.path(), &args);
                self.peer = Some(Serve::ready(dir, command));
            }
            ["connect", socket, export] => {
                let mut stream = UnixStream::connect(path(socket)).unwrap();
                connect_nbd(&mut stream, export);
                self.kept.push(stream);
            }
            ["disconnect"] => self.kept.clear(),
            [request @ ("read" | "write" | "zero" | "flush" | "discard"), device, offset, count] => {
                requests(&path("nbd"), request, device, offset, count);
            }
            [request @ ("read" | "write" | "zero" | "flush" | "discard"), device, offset, count, socket] => {
                requests(&path(socket), request, device, offset, count);
            }
            ["metrics"] => self.metrics(step),
            ["state"] => self.state(step),
            ["!", ..] => self.subcommand(step, &words[1..], true),
            _ => self.subcommand(step, &words, false),
        }
        self
    }

    fn serve(mut self, words: &[String]) -> Self {
        let Place::Directory(dir) = self.at else { panic!("a server runs already") };
        self.at = Place::Directory(tempdir().unwrap());
        let args = ["--nbd", "unix:nbd", "--control", "control"].map(str::to_owned);
        let mut command = self.command(dir.path(), &[words, &args].concat());
        command.stderr(fs::File::create(dir.path().join("log")).unwrap());
        self.at = Place::Server(Box::new(Serve::ready(dir, command)));
        self
    }

    fn end(mut self, signal: Signal) -> Self {
        let Place::Server(server) = self.at else { panic!("no server runs") };
        server.signal(signal);
        self.at = Place::Directory(server.wait().1);
        self
    }

    fn server(&self) -> &Serve {
        let Place::Server(server) = &self.at else { panic!("no server runs") };
        server
    }

    fn request(&mut self, step: &str, request: &str, fails: bool) {
        let (method, params) = request.split_once(' ').unwrap();
        let params: Value = serde_json::from_str(params).unwrap();
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        let reply = ask(&self.server().control(), request.to_string().as_bytes());
        assert_eq!(reply["error"].is_object(), fails, "{step}: {reply}");
        self.keys.add(step, &reply);
    }

    fn subcommand(&mut self, step: &str, words: &[String], fails: bool) {
        let mut command = self.command(self.dir(), words);
        command.arg("--json");
        if !ALONE.contains(&words[0].as_str()) {
            command.args(["--control", "control"]);
        }
        let Output { status, stdout, stderr } = command.output().unwrap();
        let (out, err) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
        assert_eq!(status.success(), !fails, "{step}: {out}{err}");
        for line in err.lines().filter(|_| fails) {
            let error: Value =
                serde_json::from_str(line).unwrap_or_else(|why| panic!("{step}: {why}: {line}"));
            self.keys.add(step, &error);
        }
        if out.is_empty() {
            return;
        }
        let mut reply: Value =
            serde_json::from_str(&out).unwrap_or_else(|why| panic!("{step}: {why}: {out}"));
        if let Some(file) = reply["toml"].as_str() {
            let table: toml::Table = file.parse().unwrap();
            reply["toml"] = serde_json::to_value(table).unwrap();
            // A file has only the present names, and the program reads both.
            for device in reply["toml"]["device"].as_array_mut().into_iter().flatten() {
                aliases::add_former_device_keys(device.as_object_mut().unwrap());
            }
        }
        if let Some(job) = reply["job"].as_u64() {
            self.job = job.to_string();
        }
        self.keys.add(step, &reply);
    }

    fn metrics(&mut self, step: &str) {
        let output = &self.server().startup_output;
        let at = output.lines().find_map(|line| line.strip_prefix("metrics: http://"));
        let at = at.and_then(|at| at.strip_suffix("/metrics")).expect(output);
        let mut stream = TcpStream::connect(at).unwrap();
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: {at}\r\n\r\n").unwrap();
        let (status, _, body) = watching::answer(&mut stream);
        assert_eq!(status, 200, "{body}");
        self.keys.add_metrics(step, &openmetrics::parse(&body).unwrap());
    }

    /// Adds the keys of the state file, each line of which is a checksum and JSON.
    fn state(&mut self, step: &str) {
        let state = fs::read_to_string(self.dir().join("state/topology")).unwrap();
        for line in state.lines() {
            let (_, line) = line.split_once(' ').unwrap();
            self.keys.add(step, &serde_json::from_str(line).unwrap());
        }
    }
}

/// Sends `count` requests for the same block. Their errors are ignored, because faulty devices may
/// fail them.
fn requests(socket: &Path, request: &str, device: &str, offset: &str, count: &str) {
    let offset = if offset == "0" { 0 } else { size::parse(offset).unwrap() };
    let mut client = Raw::connect_at(socket, device);
    for number in 0..count.parse().unwrap() {
        match request {
            "read" => {
                let _ = client.read(offset, REQUEST_BYTES);
            }
            "write" => {
                client.write(0, offset, &noise(number, REQUEST_BYTES.into()));
            }
            "zero" => {
                client.zero(offset, REQUEST_BYTES);
            }
            "flush" => {
                client.flush();
            }
            _ => {
                client.send(0, NBD_TRIM, offset, REQUEST_BYTES, &[]);
                client.reply().unwrap();
            }
        }
    }
}
