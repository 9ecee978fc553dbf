//! The tracing thread: starts the process, and decides for each of its calls whether and how it fails.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, ExitStatus};
use std::sync::mpsc;

use libc::{c_int, c_long, pid_t, user_regs_struct};
use rustix::process::Signal;

use super::kill;
use super::ptrace::{self, Stop};
use super::record::{Shared, lock};
use super::ring;
use crate::program::calls::fault::{End, FailureMode};
use crate::program::calls::kinds::{CallKind, KINDS, MARKER, Subject, Writes};
use crate::program::server;

const PATH_MAX_BYTES: usize = 4096;

pub(super) type SpawnResult = io::Result<(pid_t, ChildStdout)>;

pub(super) fn trace(mut command: Command, dir: &Path, shared: &Shared, tell: &mpsc::Sender<SpawnResult>) {
    let mut numbers: Vec<c_long> = KINDS.iter().map(|kind| kind.number).chain([MARKER.0]).collect();
    numbers.dedup();
    let spawned = ptrace::spawn(&mut command, ptrace::filter(&numbers)).and_then(|mut child| {
        let output = child.stdout.take().ok_or_else(|| io::Error::other("no output"))?;
        let pid = child.id() as pid_t;
        let Some((_, Stop::Signal(_))) = ptrace::wait()? else {
            return Err(io::Error::other("the server did not stop before its first instruction"));
        };
        ptrace::set_options(pid)?;
        Ok((pid, output))
    });
    let (pid, output) = match spawned {
        Ok(spawned) => spawned,
        Err(error) => {
            let _ = tell.send(Err(error));
            return;
        }
    };
    let mut tracer = Tracer {
        pid,
        dir: dir.to_owned(),
        program: command.get_program().into(),
        own: None,
        replaced: HashMap::new(),
    };
    let _ = tell.send(Ok((pid, output)));
    ptrace::resume(pid, 0);
    while let Ok(Some((thread, stop))) = ptrace::wait() {
        match stop {
            Stop::Ended(status) if thread == pid => {
                lock(&shared.record).status = Some(ExitStatus::from_raw(status));
                shared.changed.notify_all();
            }
            Stop::Ended(_) => {}
            Stop::Call => tracer.on_call(thread, shared),
            Stop::Done => tracer.on_return(thread, shared),
            // A new thread starts with this stop, so the signal is not delivered.
            Stop::Other | Stop::Signal(libc::SIGSTOP) => ptrace::resume(thread, 0),
            Stop::Signal(signal) => ptrace::resume(thread, signal),
        }
    }
    let mut record = lock(&shared.record);
    // If the tracer failed, set a status, so that waiters do not wait forever.
    record.status.get_or_insert(ExitStatus::from_raw(libc::SIGKILL));
    shared.changed.notify_all();
}

struct Tracer {
    pid: pid_t,
    dir: PathBuf,
    program: PathBuf,
    /// Address range of the program's own code, once it was read from `/proc/PID/maps`.
    own: Option<(u64, u64)>,
    /// Errnos that replace the results of calls in progress, by thread.
    replaced: HashMap<pid_t, c_int>,
}

enum CallDecision {
    Fails(FailureMode),
    Succeeds,
}

impl Tracer {
    fn on_call(&mut self, thread: pid_t, shared: &Shared) {
        let Ok(mut registers) = ptrace::registers(thread) else { return ptrace::resume(thread, 0) };
        if registers.orig_rax as c_long == libc::SYS_io_uring_enter
            && self.on_ring_entries(registers.rdi, shared)
        {
            return;
        }
        match self.decide(thread, &registers, shared) {
            CallDecision::Succeeds => ptrace::resume(thread, 0),
            CallDecision::Fails(FailureMode::Fails(errno)) => {
                // No system call has this number, so the kernel skips the call and returns the value in rax.
                registers.orig_rax = u64::MAX;
                registers.rax = i64::from(-errno) as u64;
                ptrace::set_registers(thread, &registers);
                self.resume_after_failure(thread, shared);
            }
            CallDecision::Fails(FailureMode::Done(errno)) => {
                self.replaced.insert(thread, errno);
                ptrace::resume_until_return(thread);
            }
            CallDecision::Fails(FailureMode::Short) => {
                registers.rdx = (registers.rdx / 2).max(1);
                ptrace::set_registers(thread, &registers);
                self.replaced.insert(thread, 0);
                ptrace::resume_until_return(thread);
            }
        }
    }

    /// Numbers the `io_uring` entries that a call submits, and makes the chosen ones fail. Returns true if the server
    /// was killed.
    fn on_ring_entries(&self, ring: u64, shared: &Shared) -> bool {
        if !lock(&shared.record).is_armed {
            return false;
        }
        // A ring that is being closed cannot be read, and has no entries.
        for entry in ring::read_queued_entries(self.pid, ring).unwrap_or_default() {
            let is_it =
                |kind: &&CallKind| matches!(kind.subject, Subject::Entry(code) if code == entry.opcode());
            let Some(kind) = KINDS.iter().find(is_it) else { continue };
            let Some((object, is_of_run)) =
                descriptor_target(self.pid, entry.file()).and_then(|path| self.name(&path))
            else {
                continue;
            };
            let changes = is_of_run && kind.writes == Writes::All;
            let failed = match lock(&shared.record).number(kind, object, changes) {
                Some(FailureMode::Fails(errno)) => entry.fail(self.pid, errno),
                Some(FailureMode::Short) => entry.shorten(self.pid),
                Some(FailureMode::Done(_)) | None => continue,
            };
            if failed.is_ok() && self.note_failure(shared) {
                return true;
            }
        }
        false
    }

    /// Handles the return of a call, and replaces its result if the call must fail after taking effect.
    fn on_return(&mut self, thread: pid_t, shared: &Shared) {
        let Some(errno) = self.replaced.remove(&thread) else { return ptrace::resume(thread, 0) };
        if errno != 0
            && let Ok(mut registers) = ptrace::registers(thread)
        {
            registers.rax = i64::from(-errno) as u64;
            ptrace::set_registers(thread, &registers);
        }
        self.resume_after_failure(thread, shared);
    }

    /// Counts a failed call, and resumes the thread unless the case kills the server now.
    fn resume_after_failure(&self, thread: pid_t, shared: &Shared) {
        if !self.note_failure(shared) {
            ptrace::resume(thread, 0);
        }
    }

    /// Counts a failed call. Returns true if the case kills the server at this call, which is then done.
    fn note_failure(&self, shared: &Shared) -> bool {
        let mut record = lock(&shared.record);
        record.hits += 1;
        record.is_killed |= record.case.as_ref().is_some_and(|case| case.end == End::AtCall);
        if record.is_killed {
            kill(self.pid, Signal::KILL);
        }
        record.is_killed
    }

    /// Numbers a call, and decides whether it fails.
    fn decide(&mut self, thread: pid_t, registers: &user_regs_struct, shared: &Shared) -> CallDecision {
        let number = registers.orig_rax as c_long;
        let arguments =
            [registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8, registers.r9];
        {
            let mut record = lock(&shared.record);
            if number == MARKER.0 {
                if record.waits_for_marker && arguments[0] == MARKER.1 {
                    record.waits_for_marker = false;
                    record.arm(self.pid, &self.dir);
                }
                return CallDecision::Succeeds;
            }
            if !record.is_armed && !record.waits_for_file {
                return CallDecision::Succeeds;
            }
        }
        let is_it = |kind: &&CallKind| {
            kind.number == number
                && !matches!(kind.subject, Subject::Entry(_))
                && kind.only.is_none_or(|(at, value)| arguments[at] & u64::from(u32::MAX) == value)
        };
        let Some(kind) = KINDS.iter().find(is_it) else { return CallDecision::Succeeds };
        if kind.number == libc::SYS_mmap && !self.is_own(registers) {
            return CallDecision::Succeeds;
        }
        let Some((object, is_of_run)) = self.object(thread, kind, &arguments) else {
            return CallDecision::Succeeds;
        };
        let mut record = lock(&shared.record);
        if record.waits_for_file {
            if !is_of_run {
                return CallDecision::Succeeds;
            }
            record.waits_for_file = false;
            record.arm(self.pid, &self.dir);
        }
        let changes = is_of_run && kind.writes.is_met(&arguments);
        record.number(kind, object, changes).map_or(CallDecision::Succeeds, CallDecision::Fails)
    }

    /// Returns true if a memory mapping is of a file or made by the program's own code. The mappings of allocators must
    /// not fail, since std aborts without memory.
    fn is_own(&mut self, registers: &user_regs_struct) -> bool {
        const ANONYMOUS: u64 = libc::MAP_ANONYMOUS as u64;
        let program = self.program.to_string_lossy();
        let (first, last) = *self.own.get_or_insert_with(|| {
            let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid)).unwrap_or_default();
            let ranges = maps.lines().filter(|line| line.ends_with(&*program)).filter_map(|line| {
                let (first, last) = line.split_whitespace().next()?.split_once('-')?;
                Some((u64::from_str_radix(first, 16).ok()?, u64::from_str_radix(last, 16).ok()?))
            });
            ranges.reduce(|(first, _), (_, last)| (first, last)).unwrap_or_default()
        });
        registers.r10 & ANONYMOUS == 0 || (first..last).contains(&registers.rip)
    }

    /// Returns the name of the object of a call, and true if it is in the directory of the run. `None` if the call is
    /// not numbered.
    fn object(&self, thread: pid_t, kind: &CallKind, arguments: &[u64; 6]) -> Option<(String, bool)> {
        let path = match kind.subject {
            Subject::None | Subject::Entry(_) => return Some(("-".to_owned(), false)),
            // The server's working directory is the directory of the run.
            Subject::Path(at) => self.dir.join(self.read_string(arguments[at])?),
            Subject::PathAt(fd, at) => {
                // A call on the descriptor itself may have an empty path.
                let path = PathBuf::from(self.read_string(arguments[at]).unwrap_or_default());
                if path.is_absolute() || arguments[fd] as c_int == libc::AT_FDCWD {
                    self.dir.join(path)
                } else {
                    let of = descriptor_target(thread, arguments[fd])?;
                    if path.as_os_str().is_empty() { of } else { of.join(path) }
                }
            }
            Subject::File(at) => {
                descriptor_target(thread, arguments[at]).filter(|path| path.is_absolute())?
            }
            Subject::Descriptor(at) => descriptor_target(thread, arguments[at])?,
        };
        self.name(&path)
    }

    fn name(&self, path: &Path) -> Option<(String, bool)> {
        // The directories above that of the run have different names in each run.
        if path != self.dir && path.has_root() && self.dir.starts_with(path) {
            return Some(("above".to_owned(), false));
        }
        let text = path.to_string_lossy();
        // Libraries loaded at run time are not files of the server.
        if text.starts_with("/usr/lib") || text.starts_with("/lib") || text.starts_with("/etc/ld.so") {
            return None;
        }
        let text = text.strip_prefix(&*self.dir.to_string_lossy()).unwrap_or(&text);
        let text = text.trim_start_matches("./").trim_start_matches('/');
        // Do not number calls on the log: the judge reads it, so it must be complete.
        if text == server::LOG { None } else { Some((normalize(text), path.starts_with(&self.dir))) }
    }

    /// Reads a string that ends with a zero byte from the memory of the server.
    fn read_string(&self, address: u64) -> Option<String> {
        if address == 0 {
            return None;
        }
        let memory = File::open(format!("/proc/{}/mem", self.pid)).ok()?;
        let mut bytes = vec![0; PATH_MAX_BYTES];
        let got = memory.read_at(&mut bytes, address).ok()?;
        let len = bytes[..got].iter().position(|&byte| byte == 0)?;
        bytes.truncate(len);
        String::from_utf8(bytes).ok()
    }
}

/// Returns the path to which a descriptor of a process refers.
fn descriptor_target(process: pid_t, descriptor: u64) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{process}/fd/{}", descriptor as c_int)).ok()
}

/// Replaces the parts of a name that differ between runs: UUIDs and numbers.
fn normalize(text: &str) -> String {
    let mut normal = String::new();
    let is_word =
        |part: &str| part.len() >= 16 && part.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    for part in text.split_inclusive(['/', '.', ' ', ':']) {
        let (word, end) = match part.char_indices().last() {
            Some((at, last)) if "/. :".contains(last) => part.split_at(at),
            _ => (part, ""),
        };
        if is_word(word) {
            normal.push('#');
        } else {
            for c in word.chars() {
                match c {
                    '0'..='9' if normal.ends_with('#') => {}
                    '0'..='9' => normal.push('#'),
                    c => normal.push(c),
                }
            }
        }
        normal.push_str(if end == " " { "_" } else { end });
    }
    if normal.is_empty() { ".".to_owned() } else { normal }
}

#[cfg(test)]
mod tests {
    use super::normalize;

    #[test]
    fn normalize_replaces_numbers_and_uuids() {
        let names = [
            ("state/content/0f3a9c0f3a9c4d5e8f00112233445566/12.whole", "state/content/#/#.whole"),
            ("socket:[4711]", "socket:[#]"),
            ("memfd:pool 3 (deleted)", "memfd:pool_#_(deleted)"),
            ("", "."),
        ];
        for (name, wanted) in names {
            assert_eq!(normalize(name), wanted);
        }
    }
}
