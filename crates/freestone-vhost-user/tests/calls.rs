//! Counts the system calls of a virtqueue.

use std::sync::Arc;
use std::time::Duration;

use freestone_core::budget::{self, Budget};
use freestone_drive::null::{self, Memory};
use freestone_testkit::vhost_user::{Data, Machine, MachineConfig, QueueRequest, wire};
use freestone_vhost_user::{Export, Options};

const PATIENCE: Duration = Duration::from_secs(20);
const DEPTH: u64 = 32;
const ROUNDS: u64 = 200;
const PAGE: u64 = 4096;
/// Maximum number of system calls per request at queue depth 32.
const CALLS_MAX: f64 = 0.1;

/// In each round, the thread of the queue sleeps once, until the single kick, and notifies the
/// guest only on request.
#[test]
fn requests_take_few_system_calls() {
    for write in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let device = Arc::new(Memory::new(null::Config::plain(DEPTH * PAGE, 512)).unwrap());
        // Polling depends on timing, so it is disabled.
        let options = Options { busy_poll: false, ..Options::new(Budget::new(budget::DEFAULT_BYTES)) };
        let export = Export::new(&dir.path().join("v"), "disk", device, options).unwrap();
        let shape = MachineConfig { slots: DEPTH as u16, slot_bytes: PAGE, ..MachineConfig::default() };
        let mut machine = Machine::connect(export.path(), shape, PATIENCE).unwrap();
        let mut queue = machine.queues.remove(0);
        let page = [7; PAGE as usize];
        let before = queue.notifications();
        for _ in 0..ROUNDS {
            for number in 0..DEPTH {
                let (kind, data) =
                    if write { (wire::OUT, Data::Out(&page)) } else { (wire::IN, Data::In(page.len())) };
                let asked = QueueRequest { kind, offset: number * PAGE, data, pieces: 1 };
                queue.begin(asked).expect("a slot is free");
            }
            queue.kick();
            while queue.in_flight() > 0 {
                if let Some(answer) = queue.take_completion().unwrap() {
                    assert_eq!(answer.status, 0);
                } else {
                    assert!(queue.wait(PATIENCE).unwrap(), "no answer in time");
                }
            }
        }
        let calls = ROUNDS + queue.notifications() - before;
        let of_one = calls as f64 / (ROUNDS * DEPTH) as f64;
        assert!(of_one <= CALLS_MAX, "{of_one} calls a request");
        drop(machine);
    }
}
