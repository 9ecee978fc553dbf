//! Templates: a fork for every connection.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use freestone_nbd::{Fresh, Make};
use freestone_spec::build::fork_of;
use freestone_spec::entry::{Entry, Kind};
use freestone_spec::refusal::{Errno, Refusal};
use freestone_spec::registry::{Refused, Registry};
use freestone_spec::spec::{KindSpec, LayerSpec, Spec};

/// What the NBD server calls for each connection to the template. The fork is among the devices, as `NAME@1` and so on,
/// until the connection ends.
pub fn make(registry: &Arc<Registry>, template: &Arc<Entry>) -> Make {
    let (registry, template) = (Arc::clone(registry), Arc::clone(template));
    Arc::new(move || {
        let fork = fresh(&registry, &template).map_err(|error| error.sentence)?;
        let device = Arc::clone(fork.device().expect("a fork is a device"));
        let registry = Arc::clone(&registry);
        let on_end = move || {
            if let Err(users) = registry.remove(&fork) {
                // Snapshots do not stand on their origin.
                tracing::error!("{}: {users} stand on it", fork.name());
            }
        };
        Ok(Fresh { device, on_end: Box::new(on_end) })
    })
}

fn fresh(registry: &Registry, template: &Arc<Entry>) -> Result<Arc<Entry>, Refusal> {
    let (Kind::Template(made), Some(spec), [base]) = (&template.kind, template.fork_spec(), template.needs())
    else {
        unreachable!("only templates are published as such");
    };
    let failed = |errno, why: &str| Refusal::failed(errno, format!("{}: {why}", template.name()));
    let fork = fork_of(base, spec, registry).map_err(|error| failed(error.errno, &error.sentence))?;
    let fork = Arc::new(fork);
    loop {
        let number = made.fetch_add(1, Ordering::SeqCst) + 1;
        let name = format!("{}@{number}", template.name());
        let spec =
            Spec { name, publish: None, kind: KindSpec::Fork(spec.clone()), layers: LayerSpec::default() };
        let device = Arc::clone(&fork);
        let mut entry = Entry::new(spec, Kind::Fork(Arc::clone(&fork)), Some(device), vec![Arc::clone(base)]);
        entry.template = Some(template.name().to_owned());
        let entry = Arc::new(entry);
        return match registry.add(&entry) {
            Ok(()) => Ok(entry),
            // Somebody gave the name to a device of his own.
            Err(Refused::Duplicate) => continue,
            Err(Refused::Full) => Err(failed(Errno::ENOSPC, "no room for another device")),
            Err(Refused::Gone(base)) => Err(failed(Errno::ENODEV, &format!("{base} was removed"))),
        };
    }
}
