//! A fake ublk driver for tests. It accepts the same commands, enforces the same rules, and
//! delivers requests to the queues like the block layer.

mod lane;
mod ring;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use crate::kernel::abi::{CtrlCmd, DevInfo, IoDesc, Params, ZoneRow, control, feature, op, param, state};
use crate::kernel::control::RECOVERY_FEATURES;
use crate::kernel::{BlockDevice, CharDevice, Kernel, NodeClaim, RingEvent, RingEventKind};
use lane::{Lane, Pending, ring_bell};

pub const ID: u32 = 7;
/// User id and group id of the user that creates devices.
pub const OWNER: (u32, u32) = (1000, 100);
pub const PATIENCE: Duration = Duration::from_secs(20);
pub const ABORT: i32 = -19;
/// Number of zones per report request; small, like that of a kernel that is short of memory.
const ROWS_ASKED: u32 = 5;

pub type Outcome = (i32, Vec<u8>);

/// The driver as a process uses it.
#[derive(Clone, Default)]
pub struct Driver {
    inner: Arc<Inner>,
    /// True once the process was killed.
    is_killed: Arc<AtomicBool>,
}

#[derive(Default)]
struct Inner {
    state: Mutex<State>,
    changed: Condvar,
}

/// Settings and observations of tests.
#[derive(Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent faults, each with a name")]
pub struct State {
    pub is_absent: bool,
    /// Feature bits that the driver lacks.
    pub lacks: u64,
    pub refused: HashMap<u32, Errno>,
    /// Number of attempts to recover the device that fail, because the former server's files are still open.
    pub still_open: u32,
    /// True if the device goes when its recovery is tried.
    pub goes: bool,
    pub no_node: bool,
    pub no_fetch: bool,
    /// True if `START_DEV` reads a sector, like a partition scan.
    pub scans: bool,
    /// True if the kernel is built without zones.
    pub no_zones: bool,
    /// Feature bits that the driver reports but does not grant.
    pub withholds: u64,
    /// Results of the next data copies: a number of bytes or a negative errno.
    pub copies: VecDeque<i32>,
    /// True if completed data fetches are delivered only by [`Driver::deliver_fetched`].
    pub holds_fetched: bool,
    pub claimed: bool,
    pub mounted_at: Option<PathBuf>,
    pub cache_drops: u32,
    /// True if the caller has no privileges.
    pub is_user: bool,
    /// True if the device nodes do not belong to the user.
    pub not_given: bool,
    pub log: Vec<u32>,
    pub info: Option<DevInfo>,
    pub params: Option<Params>,
    pub sectors: u64,
    /// Zones reported when the block device starts.
    pub zones: Vec<ZoneRow>,
    pub lanes: Vec<Lane>,
    next_ticket: u64,
}

impl Driver {
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.inner.state.lock().unwrap()
    }

    /// Waits until `look` returns a value, and returns that value.
    pub fn wait_for<T>(&self, look: impl Fn(&mut State) -> Option<T>) -> T {
        let end = Instant::now() + PATIENCE;
        let mut state = self.state();
        loop {
            if let Some(found) = look(&mut state) {
                return found;
            }
            let left = end.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "timed out waiting for the fake driver");
            state = self.inner.changed.wait_timeout(state, left).unwrap().0;
        }
    }

    pub fn submit(&self, lane: usize, op_flags: u32, sector: u64, sectors: u32, data: &[u8]) -> u64 {
        let mut state = self.state();
        let ticket = state.add(lane, op_flags, sector, sectors, data);
        state.lanes[lane].dispatch();
        ticket
    }

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

    /// Returns all zones, from several reports. Fails if a report fails or is inconsistent.
    pub fn report(&self) -> Result<Vec<ZoneRow>, Errno> {
        let (sectors, zone) = {
            let state = self.state();
            (state.sectors, u64::from(state.params.unwrap().basic.chunk_sectors))
        };
        let mut rows = Vec::new();
        while (rows.len() as u64) < sectors / zone {
            let (result, data) = self.io(op::REPORT_ZONES.into(), rows.len() as u64 * zone, ROWS_ASKED, &[]);
            if result < 0 {
                return Err(Errno::from_raw_os_error(-result));
            }
            let rows_read =
                data.chunks(size_of::<ZoneRow>()).map(|row| ZoneRow::read_from_bytes(row).unwrap());
            let before = rows.len();
            rows.extend(rows_read.take_while(|row| row.len > 0));
            if rows.len() == before {
                return Err(Errno::NODEV);
            }
        }
        let ends = rows.iter().scan(0, |end, row| (row.start == *end).then(|| *end += row.len));
        if ends.count() == rows.len() { Ok(rows) } else { Err(Errno::NODEV) }
    }

    /// Delivers up to `most` completed data fetches, the most recent one first.
    pub fn deliver_fetched(&self, lane: usize, most: usize) {
        let lane = &mut self.state().lanes[lane];
        let rest = lane.fetched.len().saturating_sub(most);
        lane.arrived.extend(lane.fetched.drain(rest..).rev());
        ring_bell(&lane.bell);
    }

    pub fn has_received(&self, command: u32) -> bool {
        self.state().log.contains(&command)
    }

    /// Kills the process, and returns the driver as the next process uses it.
    pub fn kill(&self) -> Self {
        self.is_killed.store(true, Ordering::SeqCst);
        self.state().lanes.iter().for_each(|lane| ring_bell(&lane.bell));
        self.wait_for(|state| (!state.lanes.iter().any(|lane| lane.is_open)).then_some(()));
        Self { inner: Arc::clone(&self.inner), is_killed: Arc::default() }
    }

    fn check_alive(&self) -> Result<(), Errno> {
        if self.is_killed.load(Ordering::SeqCst) { Err(Errno::CANCELED) } else { Ok(()) }
    }

    /// Waits until all tags of all queues are fetched.
    fn wait_until_fetched(&self) {
        let all = |lane: &Lane| lane.is_open && lane.tags.iter().all(|tag| tag.fetched.is_some());
        self.wait_for(|state| state.lanes.iter().all(all).then_some(()));
    }

    fn stop(&self) {
        // Requests that wait for a server fail.
        for lane in self.state().lanes.iter_mut().filter(|lane| lane.quiesced) {
            lane.quiesced = false;
            lane.fail_all();
        }
        // Waits for open requests, then fails new ones.
        self.wait_for(|state| (!state.lanes.iter().any(Lane::is_busy)).then_some(()));
        let mut state = self.state();
        for lane in &mut state.lanes {
            lane.aborted = true;
            for (number, tag) in lane.tags.iter_mut().enumerate() {
                if tag.fetched.take().is_some() {
                    lane.arrived.push_back(RingEvent {
                        tag: number as u16,
                        kind: RingEventKind::Command,
                        result: ABORT,
                    });
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

    fn start_recovery(&mut self) -> Result<(), Errno> {
        if self.goes {
            self.info = None;
            return Err(Errno::NODEV);
        }
        let is_open = self.lanes.iter().any(|lane| lane.is_open) || self.still_open > 0;
        self.still_open = self.still_open.saturating_sub(1);
        if is_open || self.info.is_none_or(|info| info.state != state::QUIESCED) {
            return Err(Errno::BUSY);
        }
        self.lanes.iter_mut().for_each(Lane::reset);
        Ok(())
    }

    /// Returns true if requests wait for the next server when the rings are closed.
    fn is_recoverable(&self) -> bool {
        self.info.is_some_and(|info| {
            info.flags & RECOVERY_FEATURES == RECOVERY_FEATURES && info.state != state::DEAD
        })
    }

    fn features(&self) -> u64 {
        let of_recovery = feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE;
        let of_zones = feature::USER_COPY | feature::ZONED;
        let others = feature::UPDATE_SIZE | feature::SAFE_STOP_DEV | feature::UNPRIVILEGED_DEV | 1 << 40;
        (feature::CMD_IOCTL_ENCODE | others | of_zones | of_recovery) & !self.lacks
    }
}

impl Kernel for Driver {
    fn check(&self) -> Result<(), Errno> {
        if self.state().is_absent { Err(Errno::NOENT) } else { Ok(()) }
    }

    fn is_admin(&self) -> bool {
        !self.state().is_user
    }

    fn command(&self, command: u32, header: CtrlCmd, payload: &mut [u8]) -> Result<(), Errno> {
        self.check_alive()?;
        let (path, payload) = payload.split_at_mut(header.dev_path_len.into());
        {
            let mut state = self.state();
            state.log.push(command);
            self.inner.changed.notify_all();
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
                assert!(path.is_empty(), "the driver would read a path as payload");
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
                } else {
                    info.flags &= !RECOVERY_FEATURES;
                }
                (info.owner_uid, info.owner_gid) = OWNER;
                let user_copy = info.flags & feature::USER_COPY != 0;
                if user_copy && state.is_user {
                    return Err(Errno::INVAL);
                }
                if info.flags & feature::ZONED != 0 && (state.no_zones || !user_copy) {
                    return Err(Errno::INVAL);
                }
                info.flags &= !state.withholds;
                let lane = || Lane::new(info.queue_depth, user_copy);
                state.lanes = (0..info.nr_hw_queues).map(|_| lane()).collect();
                state.info = Some(info);
                payload.copy_from_slice(info.as_bytes());
            }
            control::SET_PARAMS => {
                let params = Params::read_from_bytes(payload).unwrap();
                assert_eq!(params.len as usize, payload.len());
                let mut state = self.state();
                let is_zoned = state.info.unwrap().flags & feature::ZONED != 0;
                assert_eq!(params.types & param::ZONED != 0, is_zoned);
                let (zone, append) = (params.basic.chunk_sectors, params.zoned.max_zone_append_sectors);
                assert_eq!((zone > 0, append > 0), (is_zoned, is_zoned));
                state.sectors = params.basic.dev_sectors;
                state.params = Some(params);
            }
            control::START_DEV => {
                self.wait_until_fetched();
                assert_eq!(header.data, u64::from(std::process::id()));
                if self.state().params.unwrap().types & param::ZONED != 0 {
                    let zones = self.report()?;
                    self.state().zones = zones;
                }
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
                // The requests that waited for a server fail.
                state.lanes.iter_mut().for_each(Lane::fail_all);
            }
            control::UPDATE_SIZE => {
                let mut state = self.state();
                state.sectors = header.data;
                state.params.as_mut().unwrap().basic.dev_sectors = header.data;
            }
            control::GET_PARAMS => {
                let params = self.state().params.unwrap();
                assert_eq!(payload[..4], params.len.to_ne_bytes(), "the driver returns `len` bytes");
                payload.copy_from_slice(params.as_bytes());
            }
            control::START_USER_RECOVERY => self.state().start_recovery()?,
            control::END_USER_RECOVERY => {
                self.wait_until_fetched();
                assert_eq!(header.data, u64::from(std::process::id()));
                let mut state = self.state();
                let info = state.info.as_mut().unwrap();
                if info.state != state::QUIESCED {
                    return Err(Errno::BUSY);
                }
                info.state = state::LIVE;
                for lane in &mut state.lanes {
                    lane.quiesced = false;
                    lane.dispatch();
                }
            }
            control::GET_DEV_INFO | control::GET_DEV_INFO2 => {
                payload.copy_from_slice(self.state().info.unwrap().as_bytes());
            }
            _ => return Err(Errno::OPNOTSUPP),
        }
        self.inner.changed.notify_all();
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
        if self.state().lanes.iter().any(|lane| lane.is_open) {
            return Err(Errno::BUSY.into());
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

    fn claim(&self) -> io::Result<Option<Box<dyn NodeClaim>>> {
        if std::mem::replace(&mut self.state().claimed, true) {
            return Err(Errno::BUSY.into());
        }
        Ok(Some(Box::new(FakeClaim(self.clone()))))
    }

    fn mount_point(&self) -> Option<PathBuf> {
        self.state().mounted_at.clone()
    }
}

/// A claim on the block device. `sync` sends a flush to the driver, and `drop_cache` counts its
/// calls.
struct FakeClaim(Driver);

impl NodeClaim for FakeClaim {
    fn sync(&self) -> io::Result<()> {
        let result = self.0.io(op::FLUSH.into(), 0, 0, &[]).0;
        if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(-result)) }
    }

    fn drop_cache(&self) -> io::Result<()> {
        self.0.state().cache_drops += 1;
        Ok(())
    }
}

impl Drop for FakeClaim {
    fn drop(&mut self) {
        self.0.state().claimed = false;
    }
}
