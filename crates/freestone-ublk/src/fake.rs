//! A driver for tests: takes the same commands, keeps the same rules, and gives requests to the
//! queues as the block layer does.
#![expect(unsafe_code)]
// UNSAFETY: copies to and from buffers by the addresses that it was given, as the driver does.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use crate::abi::{CtrlCmd, DevInfo, IoDesc, Params, control, feature, op, state};
use crate::kernel::{Arrived, BlockDevice, CharDevice, Kernel, Ring, Wait};

pub const ID: u32 = 7;
/// Who makes devices.
pub const OWNER: (u32, u32) = (1000, 100);
pub const PATIENCE: Duration = Duration::from_secs(20);
pub const ABORT: i32 = -19;

/// A request's outcome, and what was read.
pub type Outcome = (i32, Vec<u8>);

#[derive(Clone, Default)]
pub struct Driver(Arc<Inner>);

#[derive(Default)]
struct Inner {
    state: Mutex<State>,
    changed: Condvar,
}

/// What is set by tests, and what they look at.
#[derive(Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent faults, each with a name")]
pub struct State {
    pub is_absent: bool,
    /// Bits that it lacks.
    pub lacks: u64,
    /// Commands that fail.
    pub refused: HashMap<u32, Errno>,
    /// Nodes that cannot be opened.
    pub no_node: bool,
    /// A fetch fails.
    pub no_fetch: bool,
    /// Reads a sector while it starts.
    pub scans: bool,
    pub claimed: bool,
    /// Who asks has no privileges.
    pub is_user: bool,
    /// Nodes are not its user's.
    pub not_given: bool,
    /// All commands that came.
    pub log: Vec<u32>,
    pub info: Option<DevInfo>,
    pub params: Option<Params>,
    pub sectors: u64,
    pub lanes: Vec<Lane>,
    next_ticket: u64,
}

/// A queue.
pub struct Lane {
    tags: Vec<Tag>,
    queued: VecDeque<Pending>,
    done: HashMap<u64, Outcome>,
    arrived: VecDeque<Arrived>,
    bell: OwnedFd,
    /// How often it was entered, and how many requests it had.
    pub enters: u64,
    pub requests: u64,
    pub is_open: bool,
    aborted: bool,
}

#[derive(Default)]
struct Tag {
    /// The buffer it was fetched with, while no request has come.
    fetched: Option<u64>,
    busy: Option<u64>,
    descriptor: IoDesc,
}

struct Pending {
    ticket: u64,
    descriptor: IoDesc,
    data: Vec<u8>,
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn ring_bell(bell: &OwnedFd) {
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

impl Lane {
    fn new(depth: u16) -> Self {
        Self {
            tags: (0..depth).map(|_| Tag::default()).collect(),
            queued: VecDeque::new(),
            done: HashMap::new(),
            arrived: VecDeque::new(),
            bell: event(),
            enters: 0,
            requests: 0,
            is_open: false,
            aborted: false,
        }
    }

    fn is_busy(&self) -> bool {
        !self.queued.is_empty() || self.tags.iter().any(|tag| tag.busy.is_some())
    }

    /// Gives requests to tags that are fetched.
    fn dispatch(&mut self) {
        for (number, tag) in self.tags.iter_mut().enumerate() {
            if tag.fetched.is_none() {
                continue;
            }
            let Some(pending) = self.queued.pop_front() else { return };
            let addr = tag.fetched.take().unwrap();
            tag.busy = Some(pending.ticket);
            tag.descriptor = IoDesc { addr, ..pending.descriptor };
            if pending.descriptor.op() == op::WRITE {
                let to = std::ptr::with_exposed_provenance_mut::<u8>(addr as usize);
                // SAFETY: the server keeps a buffer of the largest request there until the tag arrives.
                unsafe { to.copy_from_nonoverlapping(pending.data.as_ptr(), pending.data.len()) };
            }
            self.requests += 1;
            self.arrived.push_back(Arrived { tag: number as u16, result: 0 });
            ring_bell(&self.bell);
        }
    }

    fn commit(&mut self, number: u16, result: i32, addr: u64) {
        assert_ne!(addr, 0, "a buffer is mandatory");
        let tag = &mut self.tags[usize::from(number)];
        let ticket = tag.busy.take().expect("a commit without a request");
        let mut data = Vec::new();
        if tag.descriptor.op() == op::READ && result > 0 {
            let len = result as usize;
            assert_eq!(len as u64, u64::from(tag.descriptor.nr_sectors) * 512, "short results loop");
            data = vec![0; len];
            let from = std::ptr::with_exposed_provenance::<u8>(addr as usize);
            // SAFETY: as above; the server has not got the tag back.
            unsafe { from.copy_to_nonoverlapping(data.as_mut_ptr(), len) };
        }
        self.done.insert(ticket, (result, data));
        self.fetch(number, addr);
    }

    fn fetch(&mut self, number: u16, addr: u64) {
        if self.aborted {
            self.arrived.push_back(Arrived { tag: number, result: ABORT });
            return ring_bell(&self.bell);
        }
        let tag = &mut self.tags[usize::from(number)];
        assert!(tag.fetched.is_none() && tag.busy.is_none(), "a tag that is the kernel's");
        tag.fetched = Some(addr);
    }
}

impl Driver {
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap()
    }

    /// Waits until something is so.
    pub fn wait_for<T>(&self, look: impl Fn(&mut State) -> Option<T>) -> T {
        let end = Instant::now() + PATIENCE;
        let mut state = self.state();
        loop {
            if let Some(found) = look(&mut state) {
                return found;
            }
            let left = end.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "it never comes");
            state = self.0.changed.wait_timeout(state, left).unwrap().0;
        }
    }

    /// A request, as the block layer has it.
    pub fn submit(&self, lane: usize, op_flags: u32, sector: u64, sectors: u32, data: &[u8]) -> u64 {
        let mut state = self.state();
        let ticket = state.add(lane, op_flags, sector, sectors, data);
        state.lanes[lane].dispatch();
        ticket
    }

    /// Many at once.
    pub fn submit_all(&self, lane: usize, requests: impl Iterator<Item = (u32, u64, u32)>) -> Vec<u64> {
        let mut state = self.state();
        let tickets =
            requests.map(|(op, sector, sectors)| state.add(lane, op, sector, sectors, &[])).collect();
        state.lanes[lane].dispatch();
        tickets
    }

    pub fn wait(&self, lane: usize, ticket: u64) -> Outcome {
        self.wait_for(|state| state.lanes[lane].done.remove(&ticket))
    }

    pub fn is_done(&self, lane: usize, ticket: u64) -> bool {
        self.state().lanes[lane].done.contains_key(&ticket)
    }

    pub fn io(&self, op_flags: u32, sector: u64, sectors: u32, data: &[u8]) -> Outcome {
        let ticket = self.submit(0, op_flags, sector, sectors, data);
        self.wait(0, ticket)
    }

    pub fn has_come(&self, command: u32) -> bool {
        self.state().log.contains(&command)
    }

    fn stop(&self) {
        // New ones fail; those that are there are waited for.
        self.wait_for(|state| (!state.lanes.iter().any(Lane::is_busy)).then_some(()));
        let mut state = self.state();
        for lane in &mut state.lanes {
            lane.aborted = true;
            for (number, tag) in lane.tags.iter_mut().enumerate() {
                if tag.fetched.take().is_some() {
                    lane.arrived.push_back(Arrived { tag: number as u16, result: ABORT });
                }
            }
            ring_bell(&lane.bell);
        }
        if let Some(info) = &mut state.info {
            info.state = state::DEAD;
        }
    }
}

impl State {
    fn add(&mut self, lane: usize, op_flags: u32, sector: u64, sectors: u32, data: &[u8]) -> u64 {
        self.next_ticket += 1;
        let ticket = self.next_ticket;
        let descriptor = IoDesc { op_flags, nr_sectors: sectors, start_sector: sector, addr: 0 };
        self.lanes[lane].queued.push_back(Pending { ticket, descriptor, data: data.to_vec() });
        ticket
    }

    fn features(&self) -> u64 {
        let all = feature::UPDATE_SIZE | feature::SAFE_STOP_DEV | feature::UNPRIVILEGED_DEV | 1 << 40;
        (feature::CMD_IOCTL_ENCODE | all) & !self.lacks
    }
}

impl Kernel for Driver {
    fn check(&self) -> Result<(), Errno> {
        if self.state().is_absent { Err(Errno::NOENT) } else { Ok(()) }
    }

    fn command(&self, command: u32, header: CtrlCmd, payload: &mut [u8]) -> Result<(), Errno> {
        let (path, payload) = payload.split_at_mut(header.dev_path_len.into());
        {
            let mut state = self.state();
            state.log.push(command);
            self.0.changed.notify_all();
            if let Some(errno) = state.refused.get(&command) {
                return Err(*errno);
            }
            let is_new = matches!(command, control::GET_FEATURES | control::ADD_DEV);
            if !is_new && (state.info.is_none() || header.dev_id != ID) {
                return Err(Errno::NODEV);
            }
            assert_eq!(is_new, header.dev_id == u32::MAX);
            let is_users = state.info.is_some_and(|info| info.flags & feature::UNPRIVILEGED_DEV != 0);
            if !is_new && (is_users || command == control::GET_DEV_INFO2) {
                let node = [self.char_path(ID).as_os_str().as_encoded_bytes(), &[0]].concat();
                assert_eq!(path, node, "the path of the character device");
                if state.not_given {
                    return Err(Errno::ACCESS);
                }
            } else {
                assert!(path.is_empty(), "it would be taken for what the command carries");
                if !is_new && state.is_user {
                    return Err(Errno::PERM);
                }
            }
        }
        match command {
            control::GET_FEATURES => payload.copy_from_slice(self.state().features().as_bytes()),
            control::ADD_DEV => {
                let mut state = self.state();
                let mut info = DevInfo::read_from_bytes(payload).unwrap();
                assert_eq!(info.dev_id, header.dev_id);
                info.dev_id = ID;
                info.nr_hw_queues = info.nr_hw_queues.min(2);
                info.flags &= state.features();
                info.flags |= feature::CMD_IOCTL_ENCODE;
                if !state.is_user {
                    info.flags &= !feature::UNPRIVILEGED_DEV;
                } else if info.flags & feature::UNPRIVILEGED_DEV == 0 {
                    return Err(Errno::PERM);
                }
                (info.owner_uid, info.owner_gid) = OWNER;
                state.lanes = (0..info.nr_hw_queues).map(|_| Lane::new(info.queue_depth)).collect();
                state.info = Some(info);
                payload.copy_from_slice(info.as_bytes());
            }
            control::SET_PARAMS => {
                let params = Params::read_from_bytes(payload).unwrap();
                assert_eq!(params.len as usize, payload.len());
                let mut state = self.state();
                state.sectors = params.basic.dev_sectors;
                state.params = Some(params);
            }
            control::START_DEV => {
                let all = |lane: &Lane| lane.is_open && lane.tags.iter().all(|tag| tag.fetched.is_some());
                self.wait_for(|state| state.lanes.iter().all(all).then_some(()));
                assert_eq!(header.data, u64::from(std::process::id()));
                if self.state().scans {
                    self.io(op::READ.into(), 0, 8, &[]);
                }
                self.state().info.as_mut().unwrap().state = state::LIVE;
            }
            control::TRY_STOP_DEV if self.state().claimed => return Err(Errno::BUSY),
            control::STOP_DEV | control::TRY_STOP_DEV => self.stop(),
            control::DEL_DEV | control::DEL_DEV_ASYNC => {
                let mut state = self.state();
                assert!(state.lanes.iter().all(|lane| !lane.is_open), "rings are closed first");
                state.info = None;
            }
            control::UPDATE_SIZE => self.state().sectors = header.data,
            control::GET_DEV_INFO | control::GET_DEV_INFO2 => {
                payload.copy_from_slice(self.state().info.unwrap().as_bytes());
            }
            _ => return Err(Errno::OPNOTSUPP),
        }
        self.0.changed.notify_all();
        Ok(())
    }

    fn char_path(&self, id: u32) -> PathBuf {
        format!("/dev/ublkc{id}").into()
    }

    fn open(&self, id: u32, _: Instant) -> io::Result<Arc<dyn CharDevice>> {
        assert_eq!(id, ID);
        if self.state().not_given {
            return Err(Errno::ACCESS.into());
        }
        if self.state().no_node { Err(Errno::NOENT.into()) } else { Ok(Arc::new(self.clone())) }
    }

    fn block(&self, _: u32, _: Instant) -> io::Result<Arc<dyn BlockDevice>> {
        Ok(Arc::new(self.clone()))
    }

    fn devices(&self) -> io::Result<Vec<u32>> {
        Ok(self.state().info.iter().map(|info| info.dev_id).collect())
    }
}

impl BlockDevice for Driver {
    fn path(&self) -> PathBuf {
        format!("/dev/ublkb{ID}").into()
    }

    fn is_claimed(&self) -> io::Result<bool> {
        Ok(self.state().claimed)
    }
}

impl CharDevice for Driver {
    fn ring(&self, queue: u16, _: u16, wake: &OwnedFd) -> io::Result<Box<dyn Ring>> {
        let lane = usize::from(queue);
        self.state().lanes[lane].is_open = true;
        Ok(Box::new(FakeRing { driver: self.clone(), lane, queued: Vec::new(), wake: wake.try_clone()? }))
    }
}

enum Entry {
    Fetch(u16, u64),
    Commit(u16, i32, u64),
}

struct FakeRing {
    driver: Driver,
    lane: usize,
    queued: Vec<Entry>,
    wake: OwnedFd,
}

impl Ring for FakeRing {
    fn fetch(&mut self, tag: u16, buffer: u64) {
        self.queued.push(Entry::Fetch(tag, buffer));
    }

    fn commit(&mut self, tag: u16, result: i32, buffer: u64) {
        self.queued.push(Entry::Commit(tag, result, buffer));
    }

    fn has_queued(&mut self) -> bool {
        !self.queued.is_empty()
    }

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        let bell = {
            let mut state = self.driver.state();
            let refuses = state.no_fetch;
            let lane = &mut state.lanes[self.lane];
            lane.enters += 1;
            for entry in self.queued.drain(..) {
                match entry {
                    Entry::Fetch(tag, _) if refuses => {
                        lane.arrived.push_back(Arrived { tag, result: -22 });
                    }
                    Entry::Fetch(tag, buffer) => lane.fetch(tag, buffer),
                    Entry::Commit(tag, result, buffer) => lane.commit(tag, result, buffer),
                }
            }
            lane.dispatch();
            self.driver.0.changed.notify_all();
            if wait == Wait::No || !lane.arrived.is_empty() {
                return Ok(());
            }
            lane.bell.try_clone()?
        };
        let time = match wait {
            Wait::AtMost(time) => Some(Timespec::try_from(time).unwrap()),
            Wait::No | Wait::Forever => None,
        };
        let mut fds = [&bell, &self.wake].map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN));
        let _ = poll(&mut fds, time.as_ref());
        for fd in [&bell, &self.wake] {
            let _ = rustix::io::read(fd, &mut [0_u8; 8]);
        }
        Ok(())
    }

    fn arrived(&mut self, into: &mut Vec<Arrived>) {
        into.extend(self.driver.state().lanes[self.lane].arrived.drain(..));
    }

    fn descriptor(&self, tag: u16) -> IoDesc {
        self.driver.state().lanes[self.lane].tags[usize::from(tag)].descriptor
    }

    fn is_deferred(&self) -> bool {
        true
    }
}

impl Drop for FakeRing {
    fn drop(&mut self) {
        let mut state = self.driver.state();
        let lane = &mut state.lanes[self.lane];
        (lane.is_open, lane.aborted) = (false, true);
        // What the server has then fails.
        for tag in &mut lane.tags {
            tag.fetched = None;
            if let Some(ticket) = tag.busy.take() {
                lane.done.insert(ticket, (-5, Vec::new()));
            }
        }
        let lost: Vec<_> = lane.queued.drain(..).collect();
        lane.done.extend(lost.into_iter().map(|pending| (pending.ticket, (-5, Vec::new()))));
        self.driver.0.changed.notify_all();
    }
}
