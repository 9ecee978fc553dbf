//! The kinds of system calls that the sweep can make fail, and how each may fail.

use libc::c_long;

/// The object on which a call operates, by the positions of the arguments that name it.
#[derive(Debug, Clone, Copy)]
pub enum Subject {
    /// A path, at this argument position.
    Path(usize),
    /// The descriptor of a directory and a path relative to it, at these argument positions.
    PathAt(usize, usize),
    /// The descriptor of a file or directory, at this argument position. Calls on sockets, pipes and eventfds
    /// are not numbered.
    File(usize),
    /// A descriptor of any type, at this argument position.
    Descriptor(usize),
    /// The file of an `io_uring` entry with this opcode, which the call submits.
    Entry(u8),
    /// The call operates on no named object.
    None,
}

#[derive(Debug, Clone, Copy)]
pub struct CallKind {
    /// Name in the tables of a report and in the lines that repeat a case.
    pub name: &'static str,
    pub number: c_long,
    /// Position and value of an argument: only calls with this value are of the kind.
    pub only: Option<(usize, u64)>,
    pub subject: Subject,
    /// Errnos that a kernel may return for the call.
    pub errnos: &'static [i32],
    /// The call may return an error although it took effect, as on a network file system whose reply was
    /// lost.
    pub may_be_done: bool,
    /// Argument position of the length that a short transfer halves; any number for an `io_uring` entry.
    /// `None`: no short transfers.
    pub length: Option<usize>,
    /// The calls of the kind that fail on a read-only file system.
    pub writes: Writes,
}

/// The calls of a kind that change a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writes {
    None,
    All,
    /// Calls whose argument at this position has an open(2) flag for writing or creating.
    WithFlags(usize),
}

impl Writes {
    /// Returns true if a call with these arguments changes a file system.
    pub fn is_met(self, arguments: &[u64; 6]) -> bool {
        const WRITING: i32 = libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC;
        match self {
            Self::None => false,
            Self::All => true,
            Self::WithFlags(at) => arguments[at] & WRITING as u64 != 0,
        }
    }
}

const fn kind(name: &'static str, number: c_long, subject: Subject, errnos: &'static [i32]) -> CallKind {
    CallKind {
        name,
        number,
        only: None,
        subject,
        errnos,
        may_be_done: false,
        length: None,
        writes: Writes::None,
    }
}

const fn done(kind: CallKind) -> CallKind {
    CallKind { may_be_done: true, ..writes(kind) }
}

const fn writes(kind: CallKind) -> CallKind {
    CallKind { writes: Writes::All, ..kind }
}

const fn opens(flags: usize, kind: CallKind) -> CallKind {
    CallKind { writes: Writes::WithFlags(flags), ..kind }
}

const fn only(at: usize, value: i32, kind: CallKind) -> CallKind {
    CallKind { only: Some((at, value as u64)), ..kind }
}

const fn length(at: usize, kind: CallKind) -> CallKind {
    CallKind { length: Some(at), ..kind }
}

const fn entry(name: &'static str, opcode: u8, errnos: &'static [i32]) -> CallKind {
    kind(name, libc::SYS_io_uring_enter, Subject::Entry(opcode), errnos)
}

const IORING_OP_FSYNC: u8 = 3;
const IORING_OP_FALLOCATE: u8 = 17;
const IORING_OP_READ: u8 = 22;
const IORING_OP_WRITE: u8 = 23;

const OPEN: &[i32] = &[libc::EIO, libc::EMFILE, libc::ENOMEM, libc::ENOSPC, libc::EINTR];
const NAME: &[i32] = &[libc::EIO, libc::ENOSPC, libc::EDQUOT, libc::ENOMEM];
const UNLINK: &[i32] = &[libc::EIO, libc::ENOMEM];
const SYNC: &[i32] = &[libc::EIO, libc::ENOSPC, libc::EDQUOT];
const WRITE: &[i32] = &[libc::EIO, libc::ENOSPC, libc::EDQUOT, libc::EINTR];
const READ: &[i32] = &[libc::EIO, libc::ENOMEM, libc::EINTR];
const LOOK: &[i32] = &[libc::EIO, libc::ENOMEM];
const LOCK: &[i32] = &[libc::EIO, libc::ENOLCK, libc::EINTR];
const DESCRIPTOR: &[i32] = &[libc::EMFILE, libc::ENFILE, libc::ENOMEM];
const THREAD: &[i32] = &[libc::EAGAIN, libc::ENOMEM];
const SOCKET: &[i32] = &[libc::EMFILE, libc::ENOBUFS];
const BIND: &[i32] = &[libc::EADDRINUSE, libc::EIO];
const ACCEPT: &[i32] = &[libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::ECONNABORTED, libc::EINTR];
const RING: &[i32] = &[libc::EPERM, libc::ENOMEM, libc::EMFILE];
const ENTER: &[i32] = &[libc::EAGAIN, libc::EBUSY, libc::EINTR, libc::ENOMEM];
const MEMORY: &[i32] = &[libc::ENOMEM];
const AGAIN: &[i32] = &[libc::EINTR];

use Subject::{Descriptor, File, Path, PathAt};

/// All kinds of calls that can fail. Calls with which the server waits, wakes threads or communicates with
/// clients are not included.
pub const KINDS: &[CallKind] = &[
    opens(2, kind("openat", libc::SYS_openat, PathAt(0, 1), OPEN)),
    opens(1, kind("open", libc::SYS_open, Path(0), OPEN)),
    done(kind("linkat", libc::SYS_linkat, PathAt(2, 3), NAME)),
    done(kind("link", libc::SYS_link, Path(1), NAME)),
    done(kind("rename", libc::SYS_rename, Path(1), NAME)),
    done(kind("renameat", libc::SYS_renameat, PathAt(2, 3), NAME)),
    done(kind("renameat2", libc::SYS_renameat2, PathAt(2, 3), NAME)),
    done(kind("mkdir", libc::SYS_mkdir, Path(0), NAME)),
    done(kind("mkdirat", libc::SYS_mkdirat, PathAt(0, 1), NAME)),
    done(kind("unlink", libc::SYS_unlink, Path(0), UNLINK)),
    done(kind("unlinkat", libc::SYS_unlinkat, PathAt(0, 1), UNLINK)),
    done(kind("rmdir", libc::SYS_rmdir, Path(0), UNLINK)),
    writes(kind("fsync", libc::SYS_fsync, File(0), SYNC)),
    writes(kind("fdatasync", libc::SYS_fdatasync, File(0), SYNC)),
    writes(kind("sync_file_range", libc::SYS_sync_file_range, File(0), SYNC)),
    done(kind("ftruncate", libc::SYS_ftruncate, File(0), WRITE)),
    done(kind("fallocate", libc::SYS_fallocate, File(0), WRITE)),
    length(2, done(kind("write", libc::SYS_write, File(0), WRITE))),
    length(2, done(kind("pwrite64", libc::SYS_pwrite64, File(0), WRITE))),
    done(kind("writev", libc::SYS_writev, File(0), WRITE)),
    done(kind("pwritev", libc::SYS_pwritev, File(0), WRITE)),
    done(kind("pwritev2", libc::SYS_pwritev2, File(0), WRITE)),
    length(2, kind("read", libc::SYS_read, File(0), READ)),
    length(2, kind("pread64", libc::SYS_pread64, File(0), READ)),
    kind("preadv", libc::SYS_preadv, File(0), READ),
    kind("preadv2", libc::SYS_preadv2, File(0), READ),
    writes(kind("copy_file_range", libc::SYS_copy_file_range, File(2), WRITE)),
    kind("getdents64", libc::SYS_getdents64, File(0), LOOK),
    kind("statx", libc::SYS_statx, PathAt(0, 1), LOOK),
    kind("newfstatat", libc::SYS_newfstatat, PathAt(0, 1), LOOK),
    kind("stat", libc::SYS_stat, Path(0), LOOK),
    kind("lstat", libc::SYS_lstat, Path(0), LOOK),
    kind("fstat", libc::SYS_fstat, File(0), LOOK),
    kind("statfs", libc::SYS_statfs, Path(0), LOOK),
    kind("fstatfs", libc::SYS_fstatfs, File(0), LOOK),
    kind("readlink", libc::SYS_readlink, Path(0), LOOK),
    kind("readlinkat", libc::SYS_readlinkat, PathAt(0, 1), LOOK),
    writes(kind("chmod", libc::SYS_chmod, Path(0), LOOK)),
    writes(kind("fchmod", libc::SYS_fchmod, File(0), LOOK)),
    kind("fgetxattr", libc::SYS_fgetxattr, File(0), LOOK),
    done(kind("fsetxattr", libc::SYS_fsetxattr, File(0), NAME)),
    done(kind("fremovexattr", libc::SYS_fremovexattr, File(0), NAME)),
    kind("flock", libc::SYS_flock, File(0), LOCK),
    only(1, libc::F_OFD_SETLK, kind("lock", libc::SYS_fcntl, File(0), LOCK)),
    only(1, libc::F_SETLK, kind("lock", libc::SYS_fcntl, File(0), LOCK)),
    only(1, libc::F_DUPFD_CLOEXEC, kind("dup", libc::SYS_fcntl, Descriptor(0), DESCRIPTOR)),
    kind("memfd_create", libc::SYS_memfd_create, Subject::None, DESCRIPTOR),
    kind("mmap", libc::SYS_mmap, Subject::None, MEMORY),
    kind("clone3", libc::SYS_clone3, Subject::None, THREAD),
    kind("socket", libc::SYS_socket, Subject::None, SOCKET),
    kind("bind", libc::SYS_bind, Subject::None, BIND),
    kind("listen", libc::SYS_listen, Subject::None, BIND),
    kind("accept4", libc::SYS_accept4, Subject::None, ACCEPT),
    kind("socketpair", libc::SYS_socketpair, Subject::None, DESCRIPTOR),
    kind("pipe2", libc::SYS_pipe2, Subject::None, DESCRIPTOR),
    kind("eventfd2", libc::SYS_eventfd2, Subject::None, DESCRIPTOR),
    kind("epoll_create1", libc::SYS_epoll_create1, Subject::None, DESCRIPTOR),
    kind("timerfd_create", libc::SYS_timerfd_create, Subject::None, DESCRIPTOR),
    kind("io_uring_setup", libc::SYS_io_uring_setup, Subject::None, RING),
    kind("io_uring_enter", libc::SYS_io_uring_enter, Subject::None, ENTER),
    length(0, entry("ring-read", IORING_OP_READ, READ)),
    writes(length(0, entry("ring-write", IORING_OP_WRITE, WRITE))),
    writes(entry("ring-fsync", IORING_OP_FSYNC, SYNC)),
    writes(entry("ring-fallocate", IORING_OP_FALLOCATE, WRITE)),
    kind("io_uring_register", libc::SYS_io_uring_register, Subject::None, MEMORY),
    kind("getrandom", libc::SYS_getrandom, Subject::None, AGAIN),
];

/// Number and first argument of the call that marks the start of `serve`: no library makes this call.
pub const MARKER: (c_long, u64) = (libc::SYS_prctl, 57);

const ERRNOS: &[(i32, &str)] = &[
    (libc::EPERM, "EPERM"),
    (libc::EINTR, "EINTR"),
    (libc::EIO, "EIO"),
    (libc::EAGAIN, "EAGAIN"),
    (libc::ENOMEM, "ENOMEM"),
    (libc::EBUSY, "EBUSY"),
    (libc::ENFILE, "ENFILE"),
    (libc::EMFILE, "EMFILE"),
    (libc::ENOSPC, "ENOSPC"),
    (libc::ENOLCK, "ENOLCK"),
    (libc::EADDRINUSE, "EADDRINUSE"),
    (libc::ECONNABORTED, "ECONNABORTED"),
    (libc::ENOBUFS, "ENOBUFS"),
    (libc::EDQUOT, "EDQUOT"),
    (libc::EFBIG, "EFBIG"),
    (libc::EROFS, "EROFS"),
];

/// Returns the name of an errno, or `E?` if it is not in the table.
pub fn errno_name(errno: i32) -> &'static str {
    ERRNOS.iter().find(|(number, _)| *number == errno).map_or("E?", |(_, name)| name)
}

/// Returns the errno with this name, or `None` if it is not in the table.
pub fn errno_of(name: &str) -> Option<i32> {
    ERRNOS.iter().find(|(_, known)| *known == name).map(|(number, _)| *number)
}
