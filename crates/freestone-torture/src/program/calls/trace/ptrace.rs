//! System calls for tracing a process: a thin wrapper around ptrace(2), for x86-64.

#![expect(unsafe_code)]
// UNSAFETY: ptrace(2), seccomp(2) and waitpid(2) for threads have no safe interface in the libraries used here.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};
use std::ptr;

use libc::{c_int, c_long, pid_t, sock_filter, sock_fprog, user_regs_struct};

/// Why a traced thread stopped, or that it ended.
#[derive(Debug, Clone, Copy)]
pub enum Stop {
    /// A thread ended with this status of waitpid(2). If its number is that of the process, the process ended.
    Ended(c_int),
    /// The thread is about to make a system call that the filter names.
    Call,
    /// The system call on which the thread was resumed has returned.
    Done,
    /// A signal is about to be delivered to the thread.
    Signal(c_int),
    /// A new thread or program starts.
    Other,
}

/// Returns a seccomp filter that stops the process for the tracer before these system calls.
pub fn filter(numbers: &[c_long]) -> Vec<sock_filter> {
    let step = |code: u32, jt: usize, k: u32| sock_filter {
        code: code as u16,
        jt: u8::try_from(jt).expect("fewer calls than a jump is long"),
        jf: 0,
        k,
    };
    // Load the call number, the first field of the data that a filter reads.
    let mut steps = vec![step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0)];
    for (at, &number) in numbers.iter().enumerate() {
        steps.push(step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, numbers.len() - at, number as u32));
    }
    steps.push(step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW));
    steps.push(step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_TRACE));
    steps
}

/// Starts a process traced by the calling thread. The process stops with [`Stop::Signal`] before its first
/// instruction.
pub fn spawn(command: &mut Command, filter: Vec<sock_filter>) -> io::Result<Child> {
    let begin = move || {
        let program = sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
        // SAFETY: plain system calls between fork and exec; `program` and its filter live until they return.
        let failed = unsafe {
            libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) != 0
                || libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                || libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program) != 0
        };
        if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: `begin` allocates nothing and takes no lock.
    unsafe { command.pre_exec(begin) };
    command.spawn()
}

/// Sets the tracing options of a stopped process, which also apply to its new threads.
pub fn set_options(pid: pid_t) -> io::Result<()> {
    let options = libc::PTRACE_O_EXITKILL
        | libc::PTRACE_O_TRACESECCOMP
        | libc::PTRACE_O_TRACESYSGOOD
        | libc::PTRACE_O_TRACECLONE
        | libc::PTRACE_O_TRACEFORK
        | libc::PTRACE_O_TRACEVFORK
        | libc::PTRACE_O_TRACEEXEC;
    request(libc::PTRACE_SETOPTIONS, pid, options as usize)
}

/// Waits for the next stop of any thread that the calling thread traces. Returns `None` if no such thread is left.
pub fn wait() -> io::Result<Option<(pid_t, Stop)>> {
    let mut status = 0;
    // SAFETY: `status` is written by the call alone.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | libc::__WNOTHREAD) };
    if pid < 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::ECHILD) => Ok(None),
            Some(libc::EINTR) => wait(),
            _ => Err(error),
        };
    }
    if !libc::WIFSTOPPED(status) {
        return Ok(Some((pid, Stop::Ended(status))));
    }
    let stop = match (libc::WSTOPSIG(status), status >> 16) {
        (libc::SIGTRAP, libc::PTRACE_EVENT_SECCOMP) => Stop::Call,
        (signal, 0) if signal == libc::SIGTRAP | 0x80 => Stop::Done,
        (signal, 0) => Stop::Signal(signal),
        _ => Stop::Other,
    };
    Ok(Some((pid, stop)))
}

/// Resumes a thread, and delivers this signal unless it is 0.
pub fn resume(thread: pid_t, signal: c_int) {
    // An error means that the thread was killed meanwhile, which `wait` will report.
    let _ = request(libc::PTRACE_CONT, thread, signal as usize);
}

/// Resumes a thread until its system call has returned.
pub fn resume_until_return(thread: pid_t) {
    // An error means that the thread was killed meanwhile, which `wait` will report.
    let _ = request(libc::PTRACE_SYSCALL, thread, 0);
}

pub fn registers(thread: pid_t) -> io::Result<user_regs_struct> {
    // SAFETY: a struct of integers, for which zeroes are valid.
    let mut registers: user_regs_struct = unsafe { std::mem::zeroed() };
    let to = &raw mut registers;
    // SAFETY: the kernel fills the struct that it is given.
    let done = unsafe { libc::ptrace(libc::PTRACE_GETREGS, thread, ptr::null_mut::<u8>(), to) };
    if done == 0 { Ok(registers) } else { Err(io::Error::last_os_error()) }
}

pub fn set_registers(thread: pid_t, registers: &user_regs_struct) {
    let from = ptr::from_ref(registers);
    // SAFETY: the kernel reads the struct. A thread that was killed meanwhile needs no registers.
    let _ = unsafe { libc::ptrace(libc::PTRACE_SETREGS, thread, ptr::null_mut::<u8>(), from) };
}

fn request(request: libc::c_uint, pid: pid_t, data: usize) -> io::Result<()> {
    // SAFETY: these requests take numbers only.
    let done = unsafe { libc::ptrace(request, pid, ptr::null_mut::<u8>(), data) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
