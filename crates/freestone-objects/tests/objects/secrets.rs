//! Tests that secrets do not appear in messages, logs or `Debug` output.

use std::fmt::Write as _;
use std::io;
use std::sync::{Arc, Mutex};

use freestone_store::objects::{Fault, WriteCondition};
use freestone_testkit::s3::ServerFault;
use tracing_subscriber::fmt::MakeWriter;

use crate::{SECRET, Store, TOKEN, soon};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// The subscriber is global, so this test also captures the logs of other tests in the same process.
#[test]
fn secrets_are_not_logged() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_writer(log.clone());
    tracing::subscriber::set_global_default(subscriber.finish()).unwrap();
    let mut said = String::new();
    let mut note = |fault: Option<Fault>| {
        if let Some(fault) = fault {
            // Writing to a string does not fail.
            let _ = writeln!(said, "{fault} {fault:?}");
        }
    };
    let echo = format!("<Error><Code>{TOKEN}!{SECRET}</Code><Message>{TOKEN} {SECRET}</Message></Error>");
    let echo = format!(
        "HTTP/1.1 403 {TOKEN}\r\nx-amz-id: {TOKEN}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{echo}",
        echo.len()
    );
    for trouble in [
        ServerFault::Status(403, "SignatureDoesNotMatch"),
        ServerFault::Status(404, "NoSuchKey"),
        ServerFault::Raw(echo.into_bytes()),
        ServerFault::ResetBefore,
        ServerFault::Cut(1),
        ServerFault::Flip(0),
    ] {
        let store = Store::new();
        store.objects.put("before", b"1", WriteCondition::Always, soon()).unwrap();
        store.server.add_fault(|_| true, trouble);
        note(store.objects.get("x", None, 1, soon()).err());
        note(store.objects.put("x", b"1", WriteCondition::Absent, soon()).err());
        note(store.objects.head("x", soon()).err());
        note(store.objects.list("", &mut |_| true, soon()).err());
        note(store.objects.delete("x", soon()).err());
    }
    assert!(said.contains("SignatureDoesNotMatch"), "{said}");
    for secret in [SECRET, TOKEN] {
        assert!(!said.contains(secret), "{said}");
    }
    let log = String::from_utf8_lossy(&log.0.lock().unwrap()).into_owned();
    assert!(log.len() > 1000, "nothing was logged: {log}");
    for secret in [SECRET, TOKEN] {
        let line = log.lines().find(|line| line.contains(secret));
        assert_eq!(line, None);
    }
}
