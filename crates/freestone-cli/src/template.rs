//! Templates: a fork for every connection.

use std::sync::Arc;

use freestone_nbd::{Fresh, Make};
use freestone_spec::kinds::Entry;
use freestone_spec::kinds::registry::Registry;

/// What the NBD server calls for each connection to the template. The fork is among the devices, as
/// `NAME@1` and so on, until the connection ends.
pub fn make(registry: &Arc<Registry>, template: &Arc<Entry>) -> Make {
    let (registry, template) = (Arc::clone(registry), Arc::clone(template));
    Arc::new(move || {
        let fork = template.kind.fresh(&template, &registry).map_err(|refusal| refusal.sentence)?;
        let device = Arc::clone(fork.device().expect("a fork is a device"));
        let registry = Arc::clone(&registry);
        let on_end = move || {
            if let Some(faults) = &fork.layers.faults {
                // What hangs is not waited for: nobody has its answer.
                faults.close();
            }
            if let Err(users) = registry.remove(&fork) {
                // Snapshots do not stand on their origin.
                tracing::error!("{}: {users} stand on it", fork.name());
            }
        };
        Ok(Fresh { device, on_end: Box::new(on_end) })
    })
}
