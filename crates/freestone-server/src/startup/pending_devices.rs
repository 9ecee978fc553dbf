//! Devices of the state directory whose remote servers (NBD, Ceph, object storage) do not answer at once. A
//! background thread creates these devices, while the server already serves the others.
//!
//! Devices that depend on one another form a group, which is created as a whole. So no client can use an
//! origin before the merge of its snapshot continues. Until the group is created, its devices count as
//! missing, and the state directory keeps their records.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use freestone_control::protocol::RpcError;
use freestone_spec::kinds::{Entry, ParallelOpenGuard, Spec};
use tracing::{error, warn};

use crate::persistence::recorded::{RecordedDevice, RecordedDevices};
use crate::persistence::records::PENDING;
use crate::service::Service;
use crate::startup::recreate::RestartContext;
use crate::startup::start;

/// Longest wait for remote servers at the start, before their devices are left to the background thread.
pub const GRACE: Duration = Duration::from_secs(1);

/// Devices that depend on one another, in the recorded order.
type Group = Vec<Arc<RecordedDevice>>;

/// Groups of devices that the start has left to the background thread.
pub struct PendingDevices {
    groups: Vec<Group>,
    context: RestartContext,
    opening: ParallelOpenGuard,
}

/// Creates the devices of the state directory in the recorded order, except groups with a remote server that
/// has not answered by `until`. `None` waits for all servers. Returns the created devices and those groups.
pub fn set_up_state(
    service: &Service,
    recorded: RecordedDevices,
    until: Option<Instant>,
) -> Result<(Vec<Arc<Entry>>, PendingDevices), RpcError> {
    let all = recorded.all().to_vec();
    let mut context = RestartContext::new(service, recorded)?;
    let specs = all.iter().filter_map(|device| device.spec.as_ref().ok());
    let opening = service.registry.parallel_open.begin(specs);
    let groups = pending_groups(&all, &opening, until);
    let left: HashSet<&str> = groups.iter().flatten().map(|device| device.record.name.as_str()).collect();
    let there = all.iter().filter(|device| !left.contains(device.record.name.as_str()));
    let created = there.filter_map(|device| start::set_up(service, device, &mut context)).collect();
    for name in left {
        warn!("{name}: {PENDING}; the device is served as soon as it does");
        service.records.add_missing(name, PENDING);
    }
    Ok((created, PendingDevices { groups, context, opening }))
}

/// Waits until all servers have answered, or until `until`. Returns the groups with a device whose server has
/// not answered, each in the recorded order.
fn pending_groups(
    recorded: &[Arc<RecordedDevice>],
    opening: &ParallelOpenGuard,
    until: Option<Instant>,
) -> Vec<Group> {
    let mut groups: Vec<BTreeMap<usize, &Arc<RecordedDevice>>> = Vec::new();
    let mut group_of: HashMap<&str, usize> = HashMap::new();
    for (number, device) in recorded.iter().enumerate() {
        let needs = device.spec.as_ref().map(needs).unwrap_or_default();
        let joined: BTreeSet<usize> =
            needs.iter().filter_map(|name| group_of.get(name.as_str()).copied()).collect();
        let mut joined = joined.into_iter();
        let group = joined.next().unwrap_or_else(|| {
            groups.push(BTreeMap::new());
            groups.len() - 1
        });
        for other in joined {
            let members = std::mem::take(&mut groups[other]);
            group_of.extend(members.values().map(|member| (member.record.name.as_str(), group)));
            groups[group].extend(members);
        }
        group_of.insert(&device.record.name, group);
        groups[group].insert(number, device);
    }
    let waits = |group: &BTreeMap<usize, &Arc<RecordedDevice>>, is_pending: &dyn Fn(&str) -> bool| {
        group.values().any(|device| is_pending(&device.record.name))
    };
    groups.retain(|group| waits(group, &|name| opening.is_pending(name)));
    opening.wait(until, |is_pending| (!groups.iter().any(|group| waits(group, is_pending))).then_some(()));
    groups.retain(|group| waits(group, &|name| opening.is_pending(name)));
    groups.into_iter().map(|group| group.into_values().cloned().collect()).collect()
}

/// Returns the names of the devices that a device needs: origin or base, COW device, and devices in exclusive
/// use.
fn needs(spec: &Spec) -> Vec<String> {
    let kind = &spec.kind;
    let base = kind.fork().map(|fork| fork.base.as_str());
    let takes = kind.exclusive_uses();
    let all = kind.parent_name().into_iter().chain(kind.cow_device_name()).chain(base);
    all.chain(takes.iter().map(|takes| takes.name)).map(str::to_owned).collect()
}

impl PendingDevices {
    /// Starts the thread that creates and publishes each group as soon as the servers of its devices answer.
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
            let next = self.opening.wait(None, |is_pending| {
                groups.iter().position(|group| !group.iter().any(|device| is_pending(&device.record.name)))
            });
            // `None` means that the server is shutting down.
            let (Some(next), Some(service)) = (next, service.upgrade()) else { return };
            let group = self.groups.swap_remove(next);
            let names: Vec<&str> = group.iter().map(|device| device.record.name.as_str()).collect();
            let Ok(_entered) = service.records.begin_change(&names) else { return };
            if let Err(fault) = start::publish_late(&service, &group, &mut self.context) {
                error!("{}", fault.message);
            }
        }
    }
}
