//! Templates: each connection gets a fork of its own.

use std::sync::Arc;

use freestone_nbd::{Fresh, Make};
use freestone_spec::kinds::Entry;
use freestone_spec::kinds::registry::Registry;

use crate::limited::Limited;

/// Returns the function that the NBD server calls for each connection to the template. The fork is registered
/// as `NAME@1` and so on until the connection ends.
pub fn make(registry: &Arc<Registry>, template: &Arc<Entry>, limited: &Arc<Limited>) -> Make {
    let (registry, template, limited) = (Arc::clone(registry), Arc::clone(template), Arc::clone(limited));
    Arc::new(move || {
        let fork = template.kind.fresh(&template, &registry).map_err(|refusal| refusal.sentence)?;
        let way = fork.way().expect("a fork has a device");
        let joined = limited.join(&way);
        let (device, own) = (Arc::clone(&way) as _, Arc::downgrade(&way));
        let registry = Arc::clone(&registry);
        let on_end = move || {
            // Only requests of a connection that was cut can still wait: they fail.
            let ways: Vec<_> = own.upgrade().into_iter().collect();
            let _gone = fork.end_waiting(&ways);
            if let Some(faults) = &fork.layers.faults {
                // Fails requests held by a fault rule: their connection is gone.
                faults.close();
            }
            if let Err(users) = registry.remove(&fork) {
                // Should not happen: snapshots do not depend on their origin.
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
        Ok(Fresh { device, on_end: Box::new(on_end) })
    })
}
