//! Mode, owner and group of a server's sockets: the options, and the lookup of user and group names.
#![expect(unsafe_code)]
// UNSAFETY: only the C library can look up users and groups of a directory service (NSS).

use std::ffi::{CString, c_char, c_int};
use std::mem::MaybeUninit;
use std::path::Path;
use std::ptr;

use clap::Args;
use freestone_nbd::Access;
use tracing::warn;

use crate::config::FileConfig;
use crate::config::access::{self, AccessWords};
use crate::usage::Usage;

/// Initial buffer size for an entry of the user or group database, in bytes.
const ENTRY_BYTES: usize = 1 << 10;
/// Largest buffer size for an entry of the user or group database, in bytes. A larger entry fails with
/// ERANGE.
const ENTRY_BYTES_MAX: usize = 1 << 20;

const SOCKET_MODE_HELP: &str =
    "Mode of NBD and vhost-user sockets; clients with write permission may connect [default: 0600]";
const CONTROL_MODE_HELP: &str =
    "Mode of the control socket; users with write permission control the server [default: 0600]";

/// Options for the permissions of sockets.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Socket permissions")]
pub struct AccessArgs {
    /// Mode of NBD and vhost-user sockets.
    #[arg(long, value_name = "OCTAL", help = SOCKET_MODE_HELP, value_parser = access::parse_mode)]
    socket_mode: Option<u32>,
    /// Owner of these sockets, by name or number; another user than the server's needs root
    #[arg(long, value_name = "USER")]
    socket_user: Option<String>,
    /// Group of these sockets, by name or number; root may use any group
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
    /// Mode of the control socket.
    #[arg(long, value_name = "OCTAL", help = CONTROL_MODE_HELP, value_parser = access::parse_mode)]
    control_mode: Option<u32>,
    /// Owner of the control socket
    #[arg(long, value_name = "USER")]
    control_user: Option<String>,
    /// Group of the control socket
    #[arg(long, value_name = "GROUP")]
    control_group: Option<String>,
    /// Mode of the read-only control socket [default: 0600]
    #[arg(long, value_name = "OCTAL", value_parser = access::parse_mode)]
    control_read_only_mode: Option<u32>,
    /// Owner of the read-only control socket
    #[arg(long, value_name = "USER")]
    control_read_only_user: Option<String>,
    /// Group of the read-only control socket
    #[arg(long, value_name = "GROUP")]
    control_read_only_group: Option<String>,
}

/// Mode, owner and group of a socket, as configured and as numbers.
#[derive(Debug, Default, Clone)]
pub struct SocketAccess {
    /// Mode, user and group as written in the options or the configuration file.
    pub words: AccessWords,
    /// Mode bits, user ID and group ID that `words` resolve to.
    pub resolved: Access,
}

/// Permissions of all sockets of a server.
#[derive(Debug, Default, Clone)]
pub struct ServerAccess {
    /// Permissions of NBD and vhost-user sockets.
    pub sockets: SocketAccess,
    /// Permissions of the control socket.
    pub control: SocketAccess,
    /// Permissions of the read-only control socket.
    pub control_read_only: SocketAccess,
}

impl ServerAccess {
    /// Combines the command line options with the keys of the configuration file. An option overrides its
    /// key.
    pub fn new(args: &AccessArgs, file: Option<(&FileConfig, &Path)>) -> Result<Self, Usage> {
        let words = |mode: Option<u32>, user: &Option<String>, group: &Option<String>| AccessWords {
            mode,
            user: user.clone(),
            group: group.clone(),
        };
        let sockets = words(args.socket_mode, &args.socket_user, &args.socket_group);
        let control = words(args.control_mode, &args.control_user, &args.control_group);
        let read_only =
            words(args.control_read_only_mode, &args.control_read_only_user, &args.control_read_only_group);
        let of_file = |words: fn(&FileConfig) -> &AccessWords| {
            file.map(|(file, path)| (words(file).clone(), format!("{}: ", path.display())))
        };
        Ok(Self {
            sockets: SocketAccess::new(sockets, "socket", of_file(|file| &file.sockets))?,
            control: SocketAccess::new(control, "control", of_file(|file| &file.control_socket))?,
            control_read_only: SocketAccess::new(
                read_only,
                "control_read_only",
                of_file(|file| &file.control_read_only_socket),
            )?,
        })
    }
}

impl ServerAccess {
    /// Returns the permissions of each kind of socket, with the prefix of the configuration keys for them.
    pub fn each(&self) -> [(&'static str, &SocketAccess); 3] {
        [
            ("socket", &self.sockets),
            ("control", &self.control),
            ("control_read_only", &self.control_read_only),
        ]
    }

    /// Fails if permissions are set for the read-only control socket, but the server does not have that
    /// socket (`is_there` is false).
    pub fn check_read_only(&self, is_there: bool) -> Result<(), Usage> {
        match self.control_read_only.words.keys("control_read_only").first() {
            Some((key, _)) if !is_there => {
                let key = key.replace('_', "-");
                Err(Usage(format!("--{key}: needs --control-read-only")))
            }
            _ => Ok(()),
        }
    }

    /// Warns about socket permissions that have no effect, because only the owner may enter `dir`, the
    /// directory of the sockets.
    pub fn warn_of_private(&self, dir: &Path, has_sockets: bool, has_control: bool) {
        for (is_in_dir, access, prefix, option) in [
            (has_sockets, &self.sockets, "socket", "--nbd"),
            (has_control, &self.control, "control", "--control"),
        ] {
            if is_in_dir && access.resolved != Access::default() {
                let keys = access.words.keys(prefix).into_iter();
                let keys: Vec<_> = keys.map(|(key, value)| format!("{key}={value}")).collect();
                warn!(
                    "{}: only the owner may enter {}; choose another path with {option}",
                    keys.join(" "),
                    dir.display()
                );
            }
        }
    }
}

impl SocketAccess {
    fn new(args: AccessWords, what: &str, file: Option<(AccessWords, String)>) -> Result<Self, Usage> {
        // The command line and the file are resolved separately, so that an error names the option or key at
        // fault.
        resolve(&args, |part| format!("--{}-{part}", what.replace('_', "-")))?;
        let words = match file {
            Some((words, at)) => {
                resolve(&words, |part| format!("{at}{what}_{part}"))?;
                args.or(words)
            }
            None => args,
        };
        let resolved = resolve(&words, |part| format!("{what}_{part}"))?;
        Ok(Self { words, resolved })
    }
}

/// Resolves the mode, user and group to numbers. `key` returns the option or key that an error names.
fn resolve(words: &AccessWords, key: impl Fn(&str) -> String) -> Result<Access, Usage> {
    let number = |part: &'static str, text: &Option<String>, find: Find| {
        let Some(text) = text else { return Ok::<_, Usage>(None) };
        let number =
            find_number(text, part, find).map_err(|why| Usage(format!("{}={text}: {why}", key(part))))?;
        Ok(Some(number))
    };
    let user = number("user", &words.user, user_of)?;
    let group = number("group", &words.group, group_of)?;
    Ok(Access { mode: words.mode.unwrap_or(Access::default().mode), user, group })
}

/// Returns the user ID for a user name or a decimal number.
///
/// # Errors
/// Returns the reason without the name, which the caller puts before it.
pub fn find_user(text: &str) -> Result<u32, String> {
    find_number(text, "user", user_of)
}

/// Returns the group ID for a group name or a decimal number.
///
/// # Errors
/// Returns the reason without the name, which the caller puts before it.
pub fn find_group(text: &str) -> Result<u32, String> {
    find_number(text, "group", group_of)
}

/// Function that returns the ID of a user or group by name, `None` if the name is unknown, or an errno.
type Find = fn(&str) -> Result<Option<u32>, c_int>;

fn find_number(text: &str, part: &str, find: Find) -> Result<u32, String> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // chown(2) leaves the owner or group unchanged for 4294967295, so that number is not a valid ID.
        let number = text.parse().ok().filter(|number| *number != u32::MAX);
        return number.ok_or_else(|| {
            format!("must be a {part} of this machine: a name, or a number below 4294967295")
        });
    }
    match find(text) {
        Ok(Some(number)) => Ok(number),
        Ok(None) => Err(format!("there is no such {part}")),
        Err(errno) => {
            Err(format!("the {part} cannot be looked up: {}", std::io::Error::from_raw_os_error(errno)))
        }
    }
}

fn user_of(name: &str) -> Result<Option<u32>, c_int> {
    entry_of(name, |name, entry, buffer, len, found| {
        // SAFETY: `entry_of` passes valid pointers and the size of the buffer.
        unsafe { libc::getpwnam_r(name, entry, buffer, len, found) }
    })
    .map(|entry| entry.map(|entry: libc::passwd| entry.pw_uid))
}

fn group_of(name: &str) -> Result<Option<u32>, c_int> {
    entry_of(name, |name, entry, buffer, len, found| {
        // SAFETY: `entry_of` passes valid pointers and the size of the buffer.
        unsafe { libc::getgrnam_r(name, entry, buffer, len, found) }
    })
    .map(|entry| entry.map(|entry: libc::group| entry.gr_gid))
}

/// Looks up an entry of the user or group database. `look_up` receives the name with a terminating zero, the
/// entry, the buffer for its strings with the size, and the result pointer. The caller may use only the
/// numbers of the returned entry: its strings point into a buffer that is freed.
fn entry_of<T: Copy>(
    name: &str,
    look_up: impl Fn(*const c_char, *mut T, *mut c_char, usize, *mut *mut T) -> c_int,
) -> Result<Option<T>, c_int> {
    let Ok(name) = CString::new(name) else { return Ok(None) };
    let mut buffer: Vec<c_char> = vec![0; ENTRY_BYTES];
    loop {
        let mut entry = MaybeUninit::<T>::uninit();
        let mut found = ptr::null_mut();
        let errno =
            look_up(name.as_ptr(), entry.as_mut_ptr(), buffer.as_mut_ptr(), buffer.len(), &raw mut found);
        match errno {
            // SAFETY: the function has written the entry if `found` is not null.
            0 if !found.is_null() => return Ok(Some(unsafe { entry.assume_init() })),
            // Some NSS services report an unknown name with ENOENT or ESRCH instead of a null result.
            0 | libc::ENOENT | libc::ESRCH => return Ok(None),
            libc::EINTR => {}
            libc::ERANGE if buffer.len() < ENTRY_BYTES_MAX => buffer.resize(buffer.len() * 2, 0),
            errno => return Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn find_number_accepts_names_and_numbers() {
        assert_eq!(find_number("root", "user", user_of), Ok(0));
        assert_eq!(find_number("root", "group", group_of), Ok(0));
        assert_eq!(find_number("12345", "group", group_of), Ok(12345));
        let said = find_number("no-such-one", "user", user_of).unwrap_err();
        assert_eq!(said, "there is no such user");
        assert_eq!(find_number("a\0b", "group", group_of).unwrap_err(), "there is no such group");
        for number in ["4294967295", "99999999999"] {
            assert!(find_number(number, "user", user_of).unwrap_err().contains("below 4294967295"));
        }
    }
}
