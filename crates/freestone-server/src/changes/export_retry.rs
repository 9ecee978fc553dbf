//! Publishes the exports that the state directory records, and retries those that cannot be published yet.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use freestone_control::protocol::RpcError;
use freestone_core::client_log;
use freestone_spec::kinds::Entry;
use tracing::{error, info};

use crate::changes::recording::{self, Recording};
use crate::devices::claims::Claim;
use crate::exports::DeviceExports;
use crate::exports::export_spec::{ExportSet, ExportSpec};
use crate::service::Service;

/// Pause between two attempts to publish an export.
pub const PAUSE: Duration = Duration::from_secs(2);

/// Publishes a device at each export of `export_set`, which the state directory records. An export that
/// cannot be published is logged, once for each reason, and retried later.
pub fn publish_or_retry(service: &Service, claim: &Claim<'_>, entry: &Arc<Entry>, export_set: &ExportSet) {
    let (name, pause) = (entry.name(), PAUSE.as_secs());
    let retry = |export: Option<&ExportSpec>, fault: &RpcError| {
        let why = fault.message.strip_prefix(&format!("{name}: ")).unwrap_or(&fault.message);
        if service.exports.change(name, |device| device.set_absent(export, why)) {
            let at = export.map_or("the server's addresses".into(), |export| export.address.to_string());
            error!("{name}: not published at {at}: {why}; the server tries again every {pause} s");
        }
    };
    if export_set.at_server_addresses
        && let Err(fault) = service.exports.publish_at_server_addresses(claim, entry)
    {
        retry(None, &fault);
    }
    for export in &export_set.exports {
        if let Err(fault) = service.publish_one(claim, entry, export) {
            retry(Some(export), &fault);
        }
    }
}

/// Starts the thread that retries exports, unless it is running. The thread ends when every export is
/// published, or with the server.
pub fn start(service: &Arc<Service>) {
    if !service.exports.begin_retries() {
        return;
    }
    let weak = Arc::downgrade(service);
    if let Err(why) = thread::Builder::new().name("exports".into()).spawn(move || run(&weak)) {
        service.exports.end_retries();
        error!("cannot start the thread that retries exports: {why}");
    }
}

fn run(service: &Weak<Service>) {
    loop {
        thread::sleep(PAUSE);
        let Some(service) = service.upgrade() else { return };
        let names = service.exports.absent_devices();
        if service.records.is_closed() {
            return;
        }
        if names.is_empty() {
            service.exports.end_retries();
            // An export may have been added since `names` was read. Then this thread continues, unless
            // another was started.
            if !service.exports.begin_retries() {
                return;
            }
        }
        for name in names {
            if let Err(fault) = retry_exports(&service, &name) {
                // Every attempt may fail for the same reason, so the log is rate limited.
                client_log!(error, "{}", fault.message);
            }
        }
    }
}

fn retry_exports(service: &Service, name: &str) -> Result<(), RpcError> {
    let claim = service.claim("publish", name)?;
    let export_set = service.exports.read(name, DeviceExports::to_publish);
    let Some(entry) = service.registry.find(name) else { return Ok(()) };
    // `begin_change` fails only if the server is shutting down.
    let Ok(entered) = service.records.begin_change(&[name]) else { return Ok(()) };
    publish_or_retry(service, &claim, &entry, &export_set);
    drop(entered);
    if service.exports.read(name, |device| device.absent().next().is_none()) {
        info!("{name}: all exports are published again");
    }
    if recording::has_changed(service, &entry) {
        Recording::begin(service, &claim, "publish", &[name])?.commit()?;
    }
    Ok(())
}
