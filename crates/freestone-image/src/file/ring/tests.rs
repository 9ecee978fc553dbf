use super::*;
use freestone_core::device::{Completion, IoBuf, Op, Request};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc;

const SIZE: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// Returns a ring whose thread has completed a read and waits for completions.
fn ring() -> Ring {
    let backing = Backing::in_memory(SIZE, false);
    let ring = Ring::start(&Arc::new(backing)).unwrap();
    let (tx, rx) = mpsc::channel();
    ring.submit(read(&tx));
    assert_eq!(rx.recv_timeout(PATIENCE), Ok(Ok(())));
    ring
}

fn read(tx: &mpsc::Sender<Result<()>>) -> Job {
    let tx = tx.clone();
    let done = Completion::new(move |outcome, _| tx.send(outcome).unwrap());
    Job::new(Request::read(0, 4096), IoBuf::zeroed(4096).unwrap(), done)
}

/// If the submission call of a submitter fails, the entries stay queued and the ring's thread is
/// woken.
#[test]
fn thread_submits_entries_left_by_submitter() {
    let ring = ring();
    let (tx, rx) = mpsc::channel();
    for round in 1..=3 {
        {
            let mut state = ring.shared.lock();
            for _ in 0..2 * DEPTH_JOBS {
                state.schedule.add(read(&tx));
            }
            ring.shared.start_ready(&mut state);
            assert_eq!(state.in_kernel, DEPTH_JOBS);
        }
        assert_eq!(rx.recv_timeout(Duration::from_millis(50)), Err(mpsc::RecvTimeoutError::Timeout));
        ring.shared.wake_reaper();
        for _ in 0..2 * DEPTH_JOBS {
            assert_eq!(rx.recv_timeout(PATIENCE), Ok(Ok(())), "round {round}");
        }
    }
    assert!(ring.shared.lock().schedule.is_empty());
}

/// The kernel frees the places of entries in the queue only when it has taken a whole batch. Requests of the batch
/// may complete before, in threads of the kernel, and the ring's thread queues the next ones.
#[test]
fn queue_has_room_for_entries_of_a_batch_and_the_next() {
    const BLOCKS: u64 = SIZE / 4096;
    let ring = ring();
    let (tx, rx) = mpsc::channel();
    for round in 0..500 {
        {
            let mut state = ring.shared.lock();
            for block in 0..BLOCKS {
                let tx = tx.clone();
                let done = Completion::new(move |outcome, _| tx.send(outcome).unwrap());
                let discard = Request::new(Op::Discard, block * 4096, 4096);
                let mut job = Job::new(discard, IoBuf::zeroed(0).unwrap(), done);
                assert!(matches!(job.begin(&ring.shared.backing), Step::Io(_)));
                state.schedule.add(job);
            }
            ring.shared.start_ready(&mut state);
        }
        ring.shared.submit_queued();
        for _ in 0..BLOCKS {
            assert_eq!(rx.recv_timeout(PATIENCE), Ok(Ok(())), "round {round}");
        }
    }
}

/// The thread that has the claim also submits entries that other threads queue meanwhile.
#[test]
fn claimant_submits_for_other_threads() {
    let ring = ring();
    let (tx, rx) = mpsc::channel();
    {
        let mut state = ring.shared.lock();
        state.schedule.add(read(&tx));
        ring.shared.start_ready(&mut state);
        assert!(ring.shared.claim(&mut state) && !ring.shared.claim(&mut state));
    }
    ring.submit(read(&tx));
    assert_eq!(rx.recv_timeout(Duration::from_millis(50)), Err(mpsc::RecvTimeoutError::Timeout));
    ring.shared.hand_over(1).unwrap();
    for _ in 0..2 {
        assert_eq!(rx.recv_timeout(PATIENCE), Ok(Ok(())));
    }
    let mut state = ring.shared.lock();
    assert!(!state.handing_over && !ring.shared.claim(&mut state));
}

/// The ring's thread may sleep while another thread submits. If that submission fails, the ring's
/// thread is woken.
#[test]
fn failed_hand_over_is_left_to_sleeping_thread() {
    let ring = ring();
    let (tx, rx) = mpsc::channel();
    for failures in 1..=3 {
        {
            let mut state = ring.shared.lock();
            state.schedule.add(read(&tx));
            ring.shared.start_ready(&mut state);
            assert!(ring.shared.claim(&mut state));
        }
        // The ring's thread wakes up, finds the claim taken, and sleeps again.
        ring.shared.wake_reaper();
        assert_eq!(rx.recv_timeout(Duration::from_millis(50)), Err(mpsc::RecvTimeoutError::Timeout));
        ring.shared.refusals.store(failures, SeqCst);
        ring.shared.hand_over(1).unwrap_err();
        ring.shared.wake_reaper();
        assert_eq!(rx.recv_timeout(PATIENCE), Ok(Ok(())), "{failures} failures");
    }
}

#[test]
fn refused_entries_are_carried_out_by_thread() {
    let ring = ring();
    let (tx, rx) = mpsc::channel();
    ring.shared.refusals.store(u32::MAX, SeqCst);
    let write = |byte: u8| {
        let (tx, data) = (tx.clone(), IoBuf::copy_of(&[byte; 4096]).unwrap());
        let done = Completion::new(move |outcome, _| tx.send(outcome).unwrap());
        Job::new(Request::write(0, 4096).with(freestone_core::device::Flags::FUA), data, done)
    };
    (1..=9).for_each(|byte| ring.submit(write(byte)));
    (0..200).for_each(|_| ring.submit(read(&tx)));
    for _ in 0..209 {
        assert_eq!(rx.recv_timeout(PATIENCE), Ok(Ok(())));
    }
    // Later requests are completed, too, in submission order.
    ring.submit(write(10));
    ring.submit(read(&tx));
    for _ in 0..2 {
        assert_eq!(rx.recv_timeout(PATIENCE), Ok(Ok(())));
    }
    let mut first = [0; 4096];
    rustix::io::pread(&ring.shared.backing.fd, &mut first, 0).unwrap();
    assert_eq!(first, [10; 4096]);
    let state = ring.shared.lock();
    assert!(state.mode == Mode::Syscalls && state.in_kernel == 0 && state.schedule.is_empty());
}

/// A disabled ring behaves as with a seccomp filter that allows only the setup call.
#[test]
fn ring_that_cannot_be_entered_is_refused_at_start() {
    let mut ring = IoUring::builder().setup_r_disabled().build(4).unwrap();
    let error = check_enter(&mut ring).unwrap_err();
    assert_eq!(Errno::from_io_error(&error), Some(Errno::BADFD));
    check_enter(&mut IoUring::new(4).unwrap()).unwrap();
}

#[test]
fn ended_thread_fails_every_job() {
    let ring = ring();
    let (tx, rx) = mpsc::channel();
    let mut waiting = Schedule::default();
    waiting.add(read(&tx));
    let bad = Completion::new(|_, _| panic!("on purpose"));
    waiting.add(Job::new(Request::flush(), IoBuf::empty(), bad));
    waiting.add(read(&tx));
    ring.shared.lock().schedule = waiting;
    let shared = Arc::clone(&ring.shared);
    drop(Worker { shared, completions: Vec::new(), finished: Vec::new(), failures: 0 });
    ring.submit(read(&tx));
    for _ in 0..3 {
        assert_eq!(rx.try_recv(), Ok(Err(freestone_core::device::Error::Gone)));
    }
}

#[test]
fn cancelled_entries_are_retried() {
    assert_eq!(entry_result(4096), Ok(4096));
    assert_eq!(entry_result(-libc::ECANCELED), Err(Errno::INTR));
    assert_eq!(entry_result(-libc::EFAULT), Err(Errno::INTR));
    assert_eq!(entry_result(-libc::EIO), Err(Errno::IO));
}
