//! Templates: the server creates a fork for each connection.

use std::sync::Arc;

use freestone_nbd::{ConnectionDevice, DeviceFactory};
use freestone_spec::kinds::Entry;
use freestone_spec::kinds::registry::Registry;

use crate::exports::export_limits::ExportLimits;

/// Returns the function with which the NBD server creates a fork for each connection to the template. The
/// fork is registered as `NAME@1` and so on until the connection ends.
pub fn connection_fork_factory(
    registry: &Arc<Registry>,
    template: &Arc<Entry>,
    limited: &Arc<ExportLimits>,
) -> DeviceFactory {
    let (registry, template, limited) = (Arc::clone(registry), Arc::clone(template), Arc::clone(limited));
    Arc::new(move || {
        let fork =
            template.kind.create_connection_fork(&template, &registry).map_err(|refusal| refusal.sentence)?;
        let access_path = fork.new_access_path().expect("a fork has a device");
        let joined = limited.join(&access_path);
        let (device, own) = (Arc::clone(&access_path) as _, Arc::downgrade(&access_path));
        let registry = Arc::clone(&registry);
        let on_end = move || {
            // Only requests of a connection that was cut can still wait: this guard makes them fail.
            let access_paths: Vec<_> = own.upgrade().into_iter().collect();
            let _gone = fork.fail_waiting(&access_paths);
            if let Some(faults) = &fork.layers.faults {
                // Fails requests held by a fault rule, because their connection is gone.
                faults.close();
            }
            if let Err(users) = registry.remove(&fork) {
                // Should not happen, because snapshots do not depend on the fork that is their origin.
                tracing::error!("{}: {users} stand on it", fork.name());
            }
        };
        if let Err(error) = joined {
            on_end();
            return Err(format!(
                "{}: limits need a thread, which cannot be started: {error}",
                template.name()
            ));
        }
        Ok(ConnectionDevice { device, on_end: Box::new(on_end) })
    })
}
