//! Publishes the exports of a state, and retries those that cannot be published yet.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use freestone_core::client_log;
use freestone_spec::kinds::Entry;
use tracing::{error, info};

use crate::claims::Claim;
use crate::control::protocol::Fault;
use crate::places::Seen;
use crate::recording::{self, Recording};
use crate::service::Service;

/// Pause between two tries.
pub const PAUSE: Duration = Duration::from_secs(2);

/// Publishes a device wherever a state has it. Logs exports that cannot be published, once for each reason.
pub fn show(service: &Service, claim: &Claim<'_>, entry: &Arc<Entry>, seen: &Seen) {
    for absent in service.show_each(claim, entry, seen) {
        let (name, place, pause) = (entry.name(), absent.place(), PAUSE.as_secs());
        let line = format!(
            "{name}: not published at {place}: {}; the server tries again every {pause} s",
            absent.why
        );
        if service.exports.absent.put(name, absent) {
            error!("{line}");
        }
    }
}

/// Retries in the background until every export is published, or the server ends.
pub fn begin(service: &Arc<Service>) {
    if !service.exports.absent.begin_retries() {
        return;
    }
    let weak = Arc::downgrade(service);
    if let Err(why) = thread::Builder::new().name("exports".into()).spawn(move || run(&weak)) {
        service.exports.absent.end_retries();
        error!("cannot start the thread that retries exports: {why}");
    }
}

fn run(service: &Weak<Service>) {
    loop {
        thread::sleep(PAUSE);
        let Some(service) = service.upgrade() else { return };
        let names = service.exports.absent.names();
        if service.records.is_over() {
            return;
        }
        if names.is_empty() {
            service.exports.absent.end_retries();
            // An export may have been added since `names` was read.
            if !service.exports.absent.begin_retries() {
                return;
            }
        }
        for name in names {
            if let Err(fault) = try_again(&service, &name) {
                // Every try may fail for the same reason.
                client_log!(error, "{}", fault.message);
            }
        }
    }
}

fn try_again(service: &Service, name: &str) -> Result<(), Fault> {
    let claim = service.claim("publish", name)?;
    let seen = service.exports.absent.seen(name);
    let Some(entry) = service.registry.find(name) else { return Ok(()) };
    // Fails only if the server is shutting down.
    let Ok(entered) = service.records.enter(&[name]) else { return Ok(()) };
    show(service, &claim, &entry, &seen);
    drop(entered);
    if service.exports.absent.of(name).is_empty() {
        info!("{name}: all exports are published again");
    }
    if recording::differs(service, &entry) {
        Recording::begin(service, &claim, "publish", &[name])?.commit()?;
    }
    Ok(())
}
