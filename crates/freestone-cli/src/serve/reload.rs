//! Reload on SIGHUP: reads the TLS files and the configuration file again. The main thread starts the reload.

use std::io::{self, Write as _};
use std::path::Path;
use std::sync::Weak;
use std::thread;

use freestone_server::changes::apply::{ApplyOptions, apply};
use freestone_server::service::Service;
use tracing::{error, info};

use crate::serve::supervisor;

/// Reloads the TLS files and applies the configuration file, on a thread of its own: the main thread continues to
/// wait for signals.
pub fn reload_in_background(service: &Weak<Service>, file: Option<&Path>) {
    let (service, file) = (Weak::clone(service), file.map(Path::to_owned));
    let work = move || {
        let Some(service) = service.upgrade() else { return };
        supervisor::notify_reloading();
        let exports = &service.exports;
        match exports.tls.renew(&exports.nbd) {
            Ok(()) if exports.tls.mode().is_some() => info!("TLS files reloaded"),
            Ok(()) => {}
            Err(why) => error!("{why}; TLS keeps using the previous files"),
        }
        let Some(file) = file else { return supervisor::notify_ready(service.registry.all().len()) };
        let applied =
            apply(&service, &file, ApplyOptions { prune: false, force: false, check: false, adds: false });
        supervisor::notify_ready(service.registry.all().len());
        match applied {
            Ok(changes) => {
                let mut out = io::stdout().lock();
                // The reader of stdout may be gone, so errors are ignored.
                let _ = changes
                    .iter()
                    .try_for_each(|change| writeln!(out, "{change}"))
                    .and_then(|()| out.flush());
                info!("{}: {} changes were made", file.display(), changes.len());
            }
            Err(fault) => error!("{}", fault.message),
        }
    };
    if let Err(why) = thread::Builder::new().name("apply".into()).spawn(work) {
        error!("cannot start the thread that applies the file: {why}");
    }
}
