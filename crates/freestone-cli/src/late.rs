//! Devices of a state whose remote servers (NBD, Ceph, object storage) do not answer at once. The start
//! leaves them to a thread, and serves the other devices meanwhile.
//!
//! Devices that depend on one another form a group, and a group is created as a whole, so no client can use
//! an origin before the merge of its snapshot continues. Until then the devices count as missing, and the
//! state keeps their records.

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
use crate::start::{self, NewDevice, RestartContext};

/// How long a start waits for remote servers before it leaves their devices to the thread.
pub const GRACE: Duration = Duration::from_secs(1);

/// Devices that a start has left to the thread.
pub struct PendingDevices {
    groups: Vec<Vec<Device>>,
    context: RestartContext,
    ahead: OpenAhead,
}

/// Creates the devices of a state in its order, except groups with a remote server that has not answered by
/// `until`. `None` waits for all servers.
pub fn set_up_state(
    service: &Service,
    topology: &Topology,
    until: Option<Instant>,
) -> Result<(Vec<NewDevice>, PendingDevices), Fault> {
    let mut context = RestartContext::new(service, topology.clone())?;
    let specs: Vec<Spec> = topology.devices().filter_map(|device| device.words.parse().ok()).collect();
    let ahead = service.registry.ahead.begin(specs.iter());
    let groups = pending_groups(topology, &ahead, until);
    let left: HashSet<&str> = groups.iter().flatten().map(|device| device.name.as_str()).collect();
    let there = topology.devices().filter(|device| !left.contains(device.name.as_str()));
    let created = there.filter_map(|device| start::set_up(service, device, &mut context)).collect();
    for name in left {
        warn!("{name}: {PENDING}; the device is served as soon as it does");
        service.records.miss(name, PENDING);
    }
    Ok((created, PendingDevices { groups, context, ahead }))
}

/// Waits until all servers have answered, or until `until`. Returns the groups with a device whose server has
/// not answered, each in the order of the state.
fn pending_groups(topology: &Topology, ahead: &OpenAhead, until: Option<Instant>) -> Vec<Vec<Device>> {
    let mut groups: Vec<BTreeMap<usize, &Device>> = Vec::new();
    let mut group_of: HashMap<&str, usize> = HashMap::new();
    for (number, device) in topology.devices().enumerate() {
        let needs = device.words.parse::<Spec>().map(|spec| needs(&spec)).unwrap_or_default();
        let joined: BTreeSet<usize> =
            needs.iter().filter_map(|name| group_of.get(name.as_str()).copied()).collect();
        let mut joined = joined.into_iter();
        let group = joined.next().unwrap_or_else(|| {
            groups.push(BTreeMap::new());
            groups.len() - 1
        });
        for other in joined {
            let members = std::mem::take(&mut groups[other]);
            group_of.extend(members.values().map(|member| (member.name.as_str(), group)));
            groups[group].extend(members);
        }
        group_of.insert(&device.name, group);
        groups[group].insert(number, device);
    }
    let waits = |group: &BTreeMap<usize, &Device>, is_pending: &dyn Fn(&str) -> bool| {
        group.values().any(|device| is_pending(&device.name))
    };
    groups.retain(|group| waits(group, &|name| ahead.is_pending(name)));
    ahead.wait(until, |is_pending| (!groups.iter().any(|group| waits(group, is_pending))).then_some(()));
    groups.retain(|group| waits(group, &|name| ahead.is_pending(name)));
    groups.into_iter().map(|group| group.into_values().cloned().collect()).collect()
}

/// Returns the names of devices that a device needs.
fn needs(spec: &Spec) -> Vec<String> {
    let kind = &spec.kind;
    let base = kind.fork().map(|fork| fork.base.as_str());
    let takes = kind.takes();
    let all = kind.below().into_iter().chain(kind.copies_to()).chain(base);
    all.chain(takes.iter().map(|takes| takes.name)).map(str::to_owned).collect()
}

impl PendingDevices {
    /// Creates and publishes each group as soon as its servers answer.
    pub fn begin(self, service: &Arc<Service>) {
        if self.groups.is_empty() {
            return;
        }
        let weak = Arc::downgrade(service);
        if let Err(why) = thread::Builder::new().name("late".into()).spawn(move || self.run(&weak)) {
            error!("cannot start the thread that opens devices of slow servers: {why}");
        }
    }

    fn run(mut self, service: &Weak<Service>) {
        while !self.groups.is_empty() {
            let groups = &self.groups;
            let next = self.ahead.wait(None, |is_pending| {
                groups.iter().position(|group| !group.iter().any(|device| is_pending(&device.name)))
            });
            // `None` means that the server is shutting down.
            let (Some(next), Some(service)) = (next, service.upgrade()) else { return };
            let group = self.groups.swap_remove(next);
            let names: Vec<&str> = group.iter().map(|device| device.name.as_str()).collect();
            let Ok(_entered) = service.records.enter(&names) else { return };
            if let Err(fault) = start::publish_late(&service, &group, &mut self.context) {
                error!("{}", fault.message);
            }
        }
    }
}
