//! Devices of a state whose servers do not answer at once. A start leaves them, and what belongs to
//! them, to a thread, and serves the others meanwhile.
//!
//! Devices are left or made by families: what stands on one another. So nobody sees an origin before
//! the merge of its snapshot goes on. Until then such a device is missing, and the state keeps what it
//! knows of it.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use freestone_spec::kinds::{OpenAhead, Spec};
use freestone_state::{Device, Topology};
use tracing::{error, warn};

use crate::control::protocol::Fault;
use crate::records::PENDING;
use crate::service::Service;
use crate::start::{self, Again, Begun};

/// How long a start waits for servers before it leaves their devices.
pub const GRACE: Duration = Duration::from_secs(1);

/// Devices that a start has left.
pub struct Late {
    families: Vec<Vec<Device>>,
    again: Again,
    ahead: OpenAhead,
}

/// Makes the devices of a state again, in its order, but for those that stand on a server which has not
/// answered when it is `until`.
pub fn of_state(
    service: &Service,
    topology: &Topology,
    until: Option<Instant>,
) -> Result<(Vec<Begun>, Late), Fault> {
    let mut again = Again::new(service, topology.clone())?;
    let specs: Vec<Spec> = topology.devices().filter_map(|device| device.words.parse().ok()).collect();
    let ahead = service.registry.ahead.begin(specs.iter());
    let families = pending(topology, &ahead, until);
    let left: HashSet<&str> = families.iter().flatten().map(|device| device.name.as_str()).collect();
    let there = topology.devices().filter(|device| !left.contains(device.name.as_str()));
    let begun = there.filter_map(|device| start::begin(service, device, &mut again)).collect();
    for name in left {
        warn!("{name}: {PENDING}; the device is served as soon as it does");
        service.records.miss(name, PENDING);
    }
    Ok((begun, Late { families, again, ahead }))
}

/// Families of devices whose servers have not answered when it is `until`, or that stand on such a
/// device; each in the order of the state.
fn pending(topology: &Topology, ahead: &OpenAhead, until: Option<Instant>) -> Vec<Vec<Device>> {
    let mut families: Vec<BTreeMap<usize, &Device>> = Vec::new();
    let mut family_of: HashMap<&str, usize> = HashMap::new();
    for (number, device) in topology.devices().enumerate() {
        let needs = device.words.parse::<Spec>().map(|spec| needs(&spec)).unwrap_or_default();
        let joined: BTreeSet<usize> =
            needs.iter().filter_map(|name| family_of.get(name.as_str()).copied()).collect();
        let mut joined = joined.into_iter();
        let family = joined.next().unwrap_or_else(|| {
            families.push(BTreeMap::new());
            families.len() - 1
        });
        for other in joined {
            let members = std::mem::take(&mut families[other]);
            family_of.extend(members.values().map(|member| (member.name.as_str(), family)));
            families[family].extend(members);
        }
        family_of.insert(&device.name, family);
        families[family].insert(number, device);
    }
    let waits = |family: &BTreeMap<usize, &Device>, is_pending: &dyn Fn(&str) -> bool| {
        family.values().any(|device| is_pending(&device.name))
    };
    families.retain(|family| waits(family, &|name| ahead.is_pending(name)));
    ahead.wait(until, |is_pending| (!families.iter().any(|family| waits(family, is_pending))).then_some(()));
    families.retain(|family| waits(family, &|name| ahead.is_pending(name)));
    families.into_iter().map(|family| family.into_values().cloned().collect()).collect()
}

/// The names of what a device stands on.
fn needs(spec: &Spec) -> Vec<String> {
    let kind = &spec.kind;
    let base = kind.fork().map(|fork| fork.base.as_str());
    let takes = kind.takes();
    let all = kind.below().into_iter().chain(kind.copies_to()).chain(base);
    all.chain(takes.iter().map(|takes| takes.name)).map(str::to_owned).collect()
}

impl Late {
    /// Makes and shows the devices as soon as their servers answer.
    pub fn begin(self, service: &Arc<Service>) {
        if self.families.is_empty() {
            return;
        }
        let weak = Arc::downgrade(service);
        if let Err(why) = thread::Builder::new().name("late".into()).spawn(move || self.run(&weak)) {
            error!("devices of servers that have not answered yet are not there: no thread: {why}");
        }
    }

    fn run(mut self, service: &Weak<Service>) {
        while !self.families.is_empty() {
            let families = &self.families;
            let next = self.ahead.wait(None, |is_pending| {
                families.iter().position(|family| !family.iter().any(|device| is_pending(&device.name)))
            });
            // The server ends.
            let (Some(next), Some(service)) = (next, service.upgrade()) else { return };
            let family = self.families.swap_remove(next);
            let names: Vec<&str> = family.iter().map(|device| device.name.as_str()).collect();
            let Ok(_entered) = service.records.enter(&names) else { return };
            if let Err(fault) = start::show_late(&service, &family, &mut self.again) {
                error!("{}", fault.message);
            }
        }
    }
}
