//! vhost-user-blk exports for virtual machines, with the vhost-user driver of libblkio as the
//! client.
#![expect(unsafe_code)]
// UNSAFETY: accesses the client's buffer by the address that the client provides.

use std::mem::MaybeUninit;

use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};

use crate::harness::prelude::*;

const BLOCK: usize = 4096;
/// Deadline for a completion that must arrive.
const PATIENCE: Duration = Duration::from_secs(20);
const SILENCE: Duration = Duration::from_millis(300);

/// A vhost-user client with one queue and a buffer of one block.
struct Machine {
    queue: Blkioq,
    buffer: MemoryRegion,
    _client: Blkio,
}

impl Machine {
    fn connect(path: &Path, read_only: bool) -> Self {
        let mut client = Blkio::new("virtio-blk-vhost-user").unwrap();
        client.set_str("path", path.to_str().unwrap()).unwrap();
        client.set_bool("read-only", read_only).unwrap();
        client.connect().unwrap();
        let queue = client.start().unwrap().queues.remove(0);
        let buffer = client.alloc_mem_region(BLOCK).unwrap();
        client.map_mem_region(&buffer).unwrap();
        Self { queue, buffer, _client: client }
    }

    fn block(&mut self) -> &mut [u8] {
        // SAFETY: the buffer lives as long as the client, and no request is in flight.
        unsafe {
            std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(self.buffer.addr), BLOCK)
        }
    }

    /// Waits for the queued request. Returns its result, or `None` if the request does not complete
    /// within `patience`.
    fn outcome(&mut self, patience: Duration) -> Option<i32> {
        let mut completions = [const { MaybeUninit::<Completion>::uninit() }];
        let mut timeout = patience;
        let done = self.queue.do_io(&mut completions, 1, Some(&mut timeout), None).ok()?;
        // SAFETY: `do_io` filled in `done` completions.
        (done == 1).then(|| unsafe { completions[0].assume_init_ref() }.ret)
    }

    fn begin_write(&mut self, offset: u64, byte: u8) {
        self.block().fill(byte);
        let address = std::ptr::with_exposed_provenance(self.buffer.addr);
        self.queue.write(offset, address, BLOCK, 0, ReqFlags::empty());
    }

    fn write(&mut self, offset: u64, byte: u8) -> i32 {
        self.begin_write(offset, byte);
        self.outcome(PATIENCE).expect("a write is answered")
    }

    fn flush(&mut self) {
        self.queue.flush(0, ReqFlags::empty());
        assert_eq!(self.outcome(PATIENCE), Some(0));
    }

    /// Reads a block, which must consist of one repeated byte. Returns this byte.
    fn read(&mut self, offset: u64) -> u8 {
        let address = std::ptr::with_exposed_provenance_mut(self.buffer.addr);
        self.queue.read(offset, address, BLOCK, 0, ReqFlags::empty());
        assert_eq!(self.outcome(PATIENCE), Some(0));
        let block = self.block();
        assert!(block.iter().all(|byte| *byte == block[0]), "the block is torn");
        block[0]
    }

    /// Returns true if the server closed the connection, so that a request does not complete.
    fn is_cut_off(&mut self) -> bool {
        self.begin_write(0, 0xcc);
        self.outcome(SILENCE).is_none()
    }
}

/// Publishes a device at the socket `NAME.sock`, and connects a client.
fn publish(serve: &Serve, name: &str) -> Machine {
    let path = serve.path(name);
    let output = serve.text(&["publish", name, "--vhost-user", &format!("unix:{name}.sock")]);
    let path = path.with_extension("sock");
    assert_eq!(output, format!("vhost-user:{}\n", path.display()));
    Machine::connect(&path, false)
}

#[test]
fn device_serves_machine_and_nbd_clients() {
    let serve = Serve::start(&["r=ram,disksize=16M"]);
    let mut machine = publish(&serve, "r");
    assert_eq!(machine.write(MIB, 0xab), 0);
    qemu_io(&uri(&serve, "r"), &["read -P 0xab 1M 4k", "write -P 0xcd 2M 4k"]);
    assert_eq!(machine.read(2 * MIB), 0xcd);

    let socket = format!("vhost-user:{}", serve.path("r.sock").display());
    let listed = serve.json(&["list"]);
    let exports = listed["devices"][0]["exports"].as_array().unwrap();
    let [_, export] = &exports[..] else { panic!("{listed}") };
    assert_eq!((&export["address"], &export["connections"]), (&json!(socket), &json!(1)));
    assert!(export["uri"].is_null(), "{export}");
    assert!(serve.text(&["list"]).contains(&socket));
    // `stat` lists the same exports as `list`, with counters for each export.
    let mut counted = serve.json(&["stat", "r"])["exports"].take();
    for export in counted.as_array_mut().unwrap() {
        let export = export.as_object_mut().unwrap();
        let (io, latency) = (export.remove("io").unwrap(), export.remove("latency").unwrap());
        assert_eq!((&io["reads"], &io["writes"]), (&json!(1), &json!(1)), "{io}");
        assert_eq!(latency["read"]["requests"], 1, "{latency}");
    }
    assert_eq!(counted, listed["devices"][0]["exports"]);

    for verb in ["unpublish", "remove"] {
        let refused = serve.refused(1, &[verb, "r"]);
        assert!(refused.starts_with("r: a client is connected; "), "{refused}");
    }
    let refused = serve.refused(1, &["reset", "r"]);
    assert!(refused.starts_with(&format!("r: a virtual machine uses {socket}; ")), "{refused}");
    assert_eq!(serve.json(&["unpublish", "r", "--force"])["connections_ended"], 1);
    assert!(!serve.path("r.sock").exists());
    assert!(machine.is_cut_off());
    assert_eq!(serve.json(&["list"])["devices"][0]["exports"], json!([]));
    // The export accepts the next client, and the content is unchanged.
    assert_eq!(publish(&serve, "r").read(MIB), 0xab);
}

#[test]
fn read_only_machine_cannot_write() {
    let serve = Serve::start(&["r=ram,disksize=1M"]);
    serve.text(&["publish", "r", "--read-only", "--vhost-user", "unix:r.sock"]);
    assert!(serve.text(&["list"]).contains("r.sock (ro)"));
    let mut machine = Machine::connect(&serve.path("r.sock"), true);
    assert_eq!(machine.read(0), 0);
    assert!(machine.write(0, 1) < 0);
}

#[test]
fn publish_failure_publishes_nowhere() {
    let serve = Serve::start(&["r=ram,disksize=1M"]);
    std::fs::write(serve.path("taken"), "").unwrap();
    let refused = serve.refused(1, &["publish", "r", "--vhost-user", "unix:r.sock", "--nbd", "unix:taken"]);
    assert!(refused.contains("taken: the path exists and is not a socket"), "{refused}");
    assert!(!serve.path("r.sock").exists());
    let output = serve.text(&["publish", "r", "--vhost-user", "unix:r.sock", "--nbd", "unix:own"]);
    assert_eq!(output.lines().count(), 2, "{output}");
    let refused = serve.refused(1, &["publish", "r", "--vhost-user", "unix:r.sock"]);
    let place = format!("vhost-user:{}", serve.path("r.sock").display());
    let why = format!("r: cannot listen at {place}: another server listens there (pid ");
    assert!(refused.starts_with(&why), "{refused}");

    let refused = serve.refused(2, &["publish", "r", "--vhost-user", "tcp:127.0.0.1:1"]);
    let why = "a virtual machine shares its memory: it must be unix:PATH";
    assert_eq!(refused, format!("r: --vhost-user: tcp:127.0.0.1:1: {why}"));
    let refused = serve.refused(2, &["publish", "r", "--template", "--vhost-user", "unix:t.sock"]);
    assert!(refused.contains("a template is published over NBD"), "{refused}");
    let refused = serve.refused(2, &["publish", "r"]);
    assert!(refused.starts_with("r: publish: say where: --nbd, --vhost-user or --ublk"), "{refused}");
}

#[test]
fn fork_in_use_by_machine_is_rewound() {
    let serve = Serve::start(&["base=ram,disksize=1M"]);
    qemu_io(&uri(&serve, "base"), &["write -P 0x11 0 64k"]);
    serve.text(&["snapshot", "base", "golden"]);
    serve.text(&["fork", "golden", "job"]);
    let mut machine = publish(&serve, "job");
    assert_eq!((machine.read(0), machine.write(0, 0x22), machine.read(0)), (0x11, 0, 0x22));
    assert!(serve.refused(1, &["rewind", "job"]).contains("a virtual machine uses "));
    serve.text(&["rewind", "job", "--force"]);
    assert_eq!(machine.read(0), 0x11, "it stays, and reads the base");
    assert_eq!(machine.write(0, 0x33), 0);
    serve.text(&["snapshot", "job", "trial"]);
    assert_eq!((machine.write(0, 0x44), machine.read(0)), (0, 0x44));
    assert_eq!(serve.json(&["rewind", "job", "--to", "trial", "--force"])["connections_ended"], 1);
    assert!(machine.is_cut_off());
    let mut next = Machine::connect(&serve.path("job.sock"), false);
    assert_eq!(next.read(0), 0x33);
}

#[test]
fn power_cut_keeps_flushed_data_of_machine() {
    let serve = Serve::start(&["r=ram,disksize=1M,power_cut=yes"]);
    let mut machine = publish(&serve, "r");
    assert_eq!(machine.write(0, 0x11), 0);
    machine.flush();
    assert_eq!(machine.write(0, 0x22), 0);
    // A reset is refused, because the machine would not notice it.
    assert!(serve.refused(1, &["reset", "r", "--force"]).contains("keeps unflushed writes apart"));
    let cut = serve.json(&["power-cut", "r", "--seed", "1"]);
    assert_eq!(cut["connections_ended"], 1, "{cut}");
    assert!(machine.is_cut_off());
    let found = Machine::connect(&serve.path("r.sock"), false).read(0);
    assert_eq!(found, if cut["kept_blocks"] == 1 { 0x22 } else { 0x11 }, "{cut}");
}

#[test]
fn hung_requests_delay_neither_remove_nor_shutdown() {
    let serve = Serve::start(&[
        "bad=ram,disksize=1M,faults=none",
        "worse=ram,disksize=1M,faults=none",
        "r=ram,disksize=1M",
    ]);
    let mut machines = [publish(&serve, "bad"), publish(&serve, "worse")];
    let mut other = publish(&serve, "r");
    for (name, machine) in ["bad", "worse"].into_iter().zip(&mut machines) {
        serve.text(&["set", name, "faults=write hang"]);
        machine.begin_write(0, 1);
        assert!(machine.outcome(SILENCE).is_none(), "it hangs");
    }
    let began = Instant::now();
    assert_eq!(serve.json(&["remove", "bad", "--force"])["connections_ended"], 1);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!((other.write(0, 7), other.read(0)), (0, 7));
    serve.signal(Signal::TERM);
    let (status, dir) = serve.wait();
    assert_eq!(status, Some(0));
    for name in ["bad.sock", "worse.sock", "r.sock", "nbd", "control"] {
        assert!(!dir.path().join(name).exists(), "{name} is left");
    }
}

#[test]
fn socket_of_killed_server_is_replaced() {
    let serve = Serve::start(&["r=ram,disksize=1M"]);
    let _machine = publish(&serve, "r");
    let dir = serve.kill();
    assert!(dir.path().join("r.sock").exists());
    let serve = Serve::start_in(dir, &["r=ram,disksize=1M"], true);
    let mut machine = publish(&serve, "r");
    assert_eq!((machine.write(0, 9), machine.read(0)), (0, 9));
}

#[test]
fn hundred_machines_share_request_memory() {
    let devices: Vec<_> = (0..100).map(|n| format!("n{n}=null,size=1M,publish=no")).collect();
    let mut words: Vec<_> = devices.iter().map(String::as_str).collect();
    words.extend(["--max-memory-in-flight", "64M"]);
    let serve = Serve::start(&words);
    let mut machines: Vec<_> = (0..100).map(|n| publish(&serve, &format!("n{n}"))).collect();
    for machine in &mut machines {
        assert_eq!((machine.write(0, 1), machine.read(0)), (0, 0));
    }
    // NBD clients use the same `--max-memory-in-flight` limit.
    serve.text(&["create", "r=ram,disksize=1M,publish=yes"]);
    let mut client = Raw::connect(&serve, "r");
    assert_eq!(client.write(0, 0, &[1; 4096]), 0);
}

#[test]
fn rate_and_client_limits_apply_to_machines() {
    let serve = Serve::start(&["r=ram,disksize=16M,max_clients=1"]);
    let mut machine = publish(&serve, "r");
    serve.text(&["publish", "r", "--vhost-user", "unix:r.sock", "--iops", "20", "--iops-burst", "1"]);
    let begun = Instant::now();
    for n in 0..11 {
        assert_eq!(machine.write(n * 4096, 7), 0);
    }
    assert!(begun.elapsed() >= Duration::from_millis(500), "{:?}", begun.elapsed());
    serve.text(&["set", "r", "iops=10", "iops_burst=1"]);
    let begun = Instant::now();
    for n in 0..6 {
        assert_eq!(machine.read(n * 4096), 7);
    }
    assert!(begun.elapsed() >= Duration::from_millis(500), "{:?}", begun.elapsed());
    // The connection of the machine uses the only slot of `max_clients=1`.
    let path = serve.path("nbd");
    let (tx, rx) = std::sync::mpsc::channel();
    std::thread::spawn(move || tx.send(Raw::connect_at(&path, "r").read(0, 4096).unwrap()[0]));
    assert!(rx.recv_timeout(SILENCE).is_err(), "the client got in");
    drop(machine);
    assert_eq!(rx.recv_timeout(PATIENCE), Ok(7));
}
