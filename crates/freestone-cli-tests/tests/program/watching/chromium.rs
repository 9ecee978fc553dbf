//! A headless Chromium, controlled through pipes by the `DevTools` protocol.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::process::ChildStdin;
use std::sync::mpsc::{self, Receiver};

use crate::harness::prelude::*;

/// Time limit for replies of the browser and for expected changes of the page.
const PATIENCE: Duration = Duration::from_secs(60);

/// A browser process with one open page.
pub struct Chromium {
    _process: KillOnDrop,
    to: ChildStdin,
    from: Receiver<Value>,
    session: Option<String>,
    number: u64,
    events: VecDeque<Value>,
    /// Directory with the browser's profile and log.
    dir: TempDir,
}

impl Chromium {
    /// Starts the browser with an empty page of `width` times `height` pixels.
    pub fn start(width: u32, height: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let log = File::create(dir.path().join("log")).unwrap();
        // Chromium reads protocol messages from descriptor 3 and writes them to descriptor 4.
        let line = r#"exec "$0" "$@" 3<&0 4>&1 0</dev/null 1>&2"#;
        let mut command = Command::new("sh");
        command.args(["-c", line]).arg(find("chromium")).args([
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
            "--no-default-browser-check",
            "--remote-debugging-pipe",
        ]);
        command.arg(format!("--user-data-dir={}", dir.path().join("profile").display()));
        command.arg(format!("--window-size={width},{height}"));
        command.arg("about:blank").env("HOME", dir.path());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let to = child.stdin.take().unwrap();
        let mut answers = BufReader::new(child.stdout.take().unwrap());
        let (tell, from) = mpsc::channel();
        thread::spawn(move || {
            let mut message = Vec::new();
            while answers.read_until(0, &mut message).is_ok_and(|read| read > 0) {
                message.pop();
                let reply = serde_json::from_slice(&message).unwrap();
                if tell.send(reply).is_err() {
                    return;
                }
                message.clear();
            }
        });
        let (process, events) = (KillOnDrop(child), VecDeque::new());
        let mut browser = Self { _process: process, to, from, session: None, number: 0, events, dir };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = browser.call("Target.attachToTarget", attach);
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser.resize(width, height);
        browser
    }

    /// Calls a method of the `DevTools` protocol and returns the result.
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.number += 1;
        let mut message = json!({ "id": self.number, "method": method });
        message["params"] = params;
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = serde_json::to_vec(&message).unwrap();
        bytes.push(0);
        self.to.write_all(&bytes).unwrap();
        loop {
            let reply = self.from.recv_timeout(PATIENCE).unwrap_or_else(|why| {
                let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
                panic!("{method}: no answer of chromium: {why}\n{log}")
            });
            if reply["id"] == json!(self.number) {
                assert!(reply.get("error").is_none(), "{method}: {reply}");
                return reply["result"].clone();
            }
            self.events.push_back(reply);
        }
    }

    pub fn resize(&mut self, width: u32, height: u32) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", size);
    }

    pub fn open(&mut self, url: &str) {
        let opened = self.call("Page.navigate", json!({ "url": url }));
        assert!(opened.get("errorText").is_none(), "{url}: {opened}");
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'");
    }

    /// Evaluates a JavaScript expression in the page and returns its value.
    pub fn eval(&mut self, expression: &str) -> Value {
        let how = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let reply = self.call("Runtime.evaluate", how);
        assert!(reply.get("exceptionDetails").is_none(), "{expression}: {reply}");
        reply["result"].get("value").cloned().unwrap_or(Value::Null)
    }

    pub fn text(&mut self, expression: &str) -> String {
        let value = self.eval(expression);
        value.as_str().unwrap_or_else(|| panic!("{expression}: {value}")).to_owned()
    }

    /// Waits until a JavaScript expression is true in the page. Fails after a time limit.
    #[track_caller]
    pub fn until(&mut self, expression: &str) {
        let end = Instant::now() + PATIENCE;
        while self.eval(&format!("Boolean({expression})")) != json!(true) {
            if Instant::now() > end {
                let shown = self.text("document.body?.innerText ?? ''");
                panic!("not in a minute: {expression}\n{shown}");
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Presses and releases a key.
    pub fn press(&mut self, key: &str) {
        for kind in ["rawKeyDown", "keyUp"] {
            let code = match key {
                "Enter" => 13,
                "Tab" => 9,
                "ArrowRight" => 39,
                _ => 0,
            };
            let mut params = json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code });
            if key == "Enter" && kind == "rawKeyDown" {
                params["type"] = json!("keyDown");
                params["text"] = json!("\r");
            }
            self.call("Input.dispatchKeyEvent", params);
        }
    }

    /// Returns the errors and requests of the page since the last call.
    pub fn take_events(&mut self) -> PageEvents {
        // The browser sends events in order, so all earlier events have arrived when this reply
        // does.
        self.eval("0");
        let mut events = PageEvents::default();
        for event in self.events.drain(..) {
            let params = &event["params"];
            match event["method"].as_str() {
                Some("Runtime.exceptionThrown" | "Runtime.consoleAPICalled") => {
                    events.errors.push(params.to_string());
                }
                Some("Log.entryAdded") => {
                    let entry = &params["entry"];
                    events.errors.push(format!("{} {}", entry["text"], entry["url"]));
                }
                Some("Network.requestWillBeSent") => {
                    events.requests.push(params["request"]["url"].as_str().unwrap().to_owned());
                }
                _ => {}
            }
        }
        events
    }
}

/// Errors and requests of a page.
#[derive(Debug, Default)]
pub struct PageEvents {
    /// Exceptions, and lines written to the console or the browser's log.
    pub errors: Vec<String>,
    /// URLs of all requests that the page sent.
    pub requests: Vec<String>,
}
