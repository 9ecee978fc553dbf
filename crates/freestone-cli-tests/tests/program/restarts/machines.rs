//! A virtual machine whose server is killed and that continues with the next one (`serve --recoverable`).

use std::collections::HashMap;
use std::io::ErrorKind;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use freestone_testkit::vhost_user::{Data, Machine, MachineConfig, QueueRequest, wire};
use freestone_testkit::{Rng, effort};

use super::{kept::row, serve};
use crate::harness::prelude::*;

const QUEUES: usize = 2;
const BLOCK: usize = 4096;
/// Size of the disk in blocks.
const BLOCKS: usize = 4096;
/// Maximum size of a request in blocks.
const REQUEST_BLOCKS: usize = 16;
/// Some requests are executed at once and complete later, so that others overtake them.
const DISK: &str = "disk=ram,disksize=16M,faults=write chance=20% delay=3ms; read chance=20% delay=1ms; write chance=1% delay=20ms";
/// Minimum number of completions of each queue between two kills.
const PROGRESS: u64 = 100;

/// A guest with two queues and a model of its disk. Each block contains its version, repeated.
struct Guest {
    machine: Machine,
    rng: Rng,
    versions: Vec<u64>,
    is_busy: Vec<bool>,
    /// Blocks of the requests in flight, and their new version if the request is a write, by queue and slot.
    in_flight: HashMap<(usize, u16), (Range<usize>, Option<u64>)>,
    begun: u64,
    /// Number of connections that ended before the machine was set up.
    cut_handshakes: usize,
}

fn block(version: u64) -> Vec<u8> {
    version.to_le_bytes().repeat(BLOCK / 8)
}

impl Guest {
    fn connect(path: &Path, seed: u64) -> Self {
        let rng = Rng::new(seed);
        let shape = MachineConfig {
            queues: QUEUES as u16,
            slot_bytes: (REQUEST_BLOCKS * BLOCK) as u64,
            // Even seeds use event indices, by which a lost notification silences later ones.
            event_idx: seed.is_multiple_of(2),
            inflight: true,
            ..MachineConfig::default()
        };
        let machine = Machine::connect(path, shape, ANSWER_MAX).unwrap();
        let (versions, is_busy) = (vec![0; BLOCKS], vec![false; BLOCKS]);
        Self { machine, rng, versions, is_busy, in_flight: HashMap::new(), begun: 0, cut_handshakes: 0 }
    }

    /// Submits a request to blocks that no other request uses. Returns false if that is not possible now.
    fn begin(&mut self, queue: usize) -> bool {
        let first = self.rng.below((BLOCKS - REQUEST_BLOCKS) as u64) as usize;
        let blocks = first..first + 1 + self.rng.below(REQUEST_BLOCKS as u64) as usize;
        let version = self.rng.chance(70).then_some(self.begun + 1);
        let bytes = version.map(|version| block(version).repeat(blocks.len()));
        let (kind, data) = match &bytes {
            Some(bytes) => (wire::OUT, Data::Out(bytes)),
            None => (wire::IN, Data::In(blocks.len() * BLOCK)),
        };
        let request =
            QueueRequest { kind, offset: (first * BLOCK) as u64, data, pieces: 1 + self.rng.below(8) };
        if self.is_busy[blocks.clone()].contains(&true) {
            return false;
        }
        let Some(slot) = self.machine.queues[queue].begin(request) else { return false };
        self.begun += 1;
        self.is_busy[blocks.clone()].fill(true);
        assert!(self.in_flight.insert((queue, slot), (blocks, version)).is_none());
        true
    }

    /// Takes all completions of a queue, and compares what was read with the model. Returns their number.
    fn complete(&mut self, queue: usize) -> u64 {
        let mut count = 0;
        while let Some(completion) = self.machine.queues[queue].take_completion().unwrap() {
            let request = self.in_flight.remove(&(queue, completion.slot));
            let (blocks, written) = request.expect("each request completes once");
            assert_eq!(completion.status, wire::OK);
            for (at, read) in blocks.clone().zip(completion.data.chunks(BLOCK)) {
                assert!(read == block(self.versions[at]), "block {at} has version {:?}", &read[..8]);
            }
            if let Some(version) = written {
                self.versions[blocks.clone()].fill(version);
            }
            self.is_busy[blocks].fill(false);
            count += 1;
        }
        count
    }

    /// Uses the disk until `ends`, and then completes all requests. Like the driver of an operating system, the guest
    /// takes completions only after a notification.
    fn run(&mut self, path: &Path, done: &[AtomicU64; QUEUES], ends: &AtomicBool) {
        let mut notified = [0; QUEUES];
        while !ends.load(Ordering::SeqCst) || !self.in_flight.is_empty() {
            for queue in 0..QUEUES {
                let notifications = self.machine.queues[queue].notifications();
                if notifications != notified[queue] {
                    notified[queue] = notifications;
                    done[queue].fetch_add(self.complete(queue), Ordering::SeqCst);
                }
                while !ends.load(Ordering::SeqCst) && self.begin(queue) {}
            }
            if !self.in_flight.is_empty() && self.machine.wait().is_err() {
                wait_until("the machine is connected", || self.reconnect(path));
            }
        }
    }

    /// Returns false if no server listens, or if it is killed meanwhile.
    fn reconnect(&mut self, path: &Path) -> bool {
        match self.machine.reconnect(path, ANSWER_MAX).map_err(|error| error.kind()) {
            Ok(()) => return true,
            Err(ErrorKind::ConnectionRefused | ErrorKind::NotFound) => {}
            Err(ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                self.cut_handshakes += 1;
            }
            Err(error) => panic!("the server refuses the machine: {error}"),
        }
        false
    }
}

#[test]
fn requests_of_machine_survive_kills() {
    let kills = effort(8, 100);
    for seed in [1, 2] {
        let dir = tempdir().unwrap();
        let path = dir.path().join("machine");
        let (done, ends) = ([(); QUEUES].map(|()| AtomicU64::new(0)), AtomicBool::new(false));
        let counts = || done.each_ref().map(|count| count.load(Ordering::SeqCst));
        let mut rng = Rng::new(seed);
        let (server, mut guest) = thread::scope(|scope| {
            let mut server = serve(dir, &["--recoverable", DISK]);
            server.text(&["publish", "disk", "--vhost-user", "unix:machine"]);
            let mut guest = Guest::connect(&path, seed);
            let guest = scope.spawn(|| {
                guest.run(&path, &done, &ends);
                guest
            });
            for _ in 0..kills {
                // A kill without a pause may end the handshake of the machine.
                if rng.chance(70) {
                    let before = counts();
                    let progress =
                        || counts().iter().zip(before).all(|(now, before)| *now >= before + PROGRESS);
                    wait_until("each queue completes requests", || guest.is_finished() || progress());
                    thread::sleep(Duration::from_micros(rng.below(20_000)));
                }
                server = serve(server.kill(), &["--recoverable"]);
                assert_eq!(row(&server, "disk")["adopted"], true);
            }
            ends.store(true, Ordering::SeqCst);
            wait_until("all requests complete", || guest.is_finished());
            (server, guest.join().unwrap())
        });
        assert_eq!((guest.complete(0), guest.complete(1)), (0, 0), "a request has completed twice");
        assert_eq!(counts().iter().sum::<u64>(), guest.begun);
        assert!(guest.cut_handshakes <= kills, "{} handshakes, {kills} kills", guest.cut_handshakes);
        let expected: Vec<u8> = guest.versions.iter().flat_map(|version| block(*version)).collect();
        assert!(content(&server, "disk") == expected, "the content differs from the model");
        drop(server.end());
    }
}
