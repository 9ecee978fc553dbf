//! Templates: a fork for every connection.

use std::sync::Arc;

use freestone_nbd::{Fresh, Make};
use freestone_spec::kinds::Entry;
use freestone_spec::kinds::registry::Registry;

use crate::limited::Limited;

/// What the NBD server calls for each connection to the template. The fork is among the devices, as
/// `NAME@1` and so on, until the connection ends.
pub fn make(registry: &Arc<Registry>, template: &Arc<Entry>, limited: &Arc<Limited>) -> Make {
    let (registry, template, limited) = (Arc::clone(registry), Arc::clone(template), Arc::clone(limited));
    Arc::new(move || {
        let fork = template.kind.fresh(&template, &registry).map_err(|refusal| refusal.sentence)?;
        let way = fork.way().expect("a fork is a device");
        let joined = limited.join(&way);
        let (device, own) = (Arc::clone(&way) as _, Arc::downgrade(&way));
        let registry = Arc::clone(&registry);
        let on_end = move || {
            // Nobody waits any more but for what a connection that was cut had asked for.
            let ways: Vec<_> = own.upgrade().into_iter().collect();
            let _gone = fork.end_waiting(&ways);
            if let Some(faults) = &fork.layers.faults {
                // What hangs is not waited for: nobody has its answer.
                faults.close();
            }
            if let Err(users) = registry.remove(&fork) {
                // Snapshots do not stand on their origin.
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
