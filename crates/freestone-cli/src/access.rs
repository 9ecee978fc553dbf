//! Who may connect to the sockets of a server: the options that say so, and whom they mean here.
#![expect(unsafe_code)]
// UNSAFETY: users and groups are known to the C library, also those of a directory service.

use std::ffi::{CString, c_char, c_int};
use std::mem::MaybeUninit;
use std::path::Path;
use std::ptr;

use clap::Args;
use freestone_nbd::Access;
use freestone_spec::access::{self, AccessWords};
use freestone_spec::config::FileConfig;
use tracing::warn;

use crate::error::Usage;

/// An entry of the lists of users and groups is read into so much at first, and at most.
const ENTRY_BYTES: usize = 1 << 10;
const ENTRY_BYTES_MAX: usize = 1 << 20;

const SOCKET_MODE_HELP: &str = "Mode of the NBD and vhost-user sockets that the server makes: who may write them may \
                                connect [default: 0600]";
const CONTROL_MODE_HELP: &str =
    "Mode of the control socket; who may write it does what the server may do [default: 0600]";

/// The options.
#[derive(Debug, Default, Args)]
pub struct AccessArgs {
    /// Mode of sockets.
    #[arg(long, value_name = "OCTAL", help = SOCKET_MODE_HELP, value_parser = access::mode)]
    socket_mode: Option<u32>,
    /// Their owner, by name or number; another user than the server's takes root
    #[arg(long, value_name = "USER")]
    socket_user: Option<String>,
    /// Their group, by name or number; one of the server's user's groups, or any where that is root
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
    /// Mode of the control socket.
    #[arg(long, value_name = "OCTAL", help = CONTROL_MODE_HELP, value_parser = access::mode)]
    control_mode: Option<u32>,
    /// Owner of the control socket
    #[arg(long, value_name = "USER")]
    control_user: Option<String>,
    /// Its group
    #[arg(long, value_name = "GROUP")]
    control_group: Option<String>,
    /// Mode of the socket of --control-read-only [default: 0600]
    #[arg(long, value_name = "OCTAL", value_parser = access::mode)]
    control_read_only_mode: Option<u32>,
    /// Its owner
    #[arg(long, value_name = "USER")]
    control_read_only_user: Option<String>,
    /// Its group
    #[arg(long, value_name = "GROUP")]
    control_read_only_group: Option<String>,
}

/// Who may connect, as it was said and as it is.
#[derive(Debug, Default, Clone)]
pub struct Who {
    /// As it was said.
    pub words: AccessWords,
    /// In numbers.
    pub is: Access,
}

/// Of all the sockets of a server.
#[derive(Debug, Default, Clone)]
pub struct AccessOf {
    /// Those of devices.
    pub sockets: Who,
    /// The control socket.
    pub control: Who,
    /// The one that changes nothing.
    pub control_read_only: Who,
}

impl AccessOf {
    /// What the command line says, and of the rest what the file says.
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
            sockets: Who::new(sockets, "socket", of_file(|file| &file.sockets))?,
            control: Who::new(control, "control", of_file(|file| &file.control_socket))?,
            control_read_only: Who::new(
                read_only,
                "control_read_only",
                of_file(|file| &file.control_read_only_socket),
            )?,
        })
    }
}

impl AccessOf {
    /// All of them, behind what their keys begin with.
    pub fn each(&self) -> [(&'static str, &Who); 3] {
        [
            ("socket", &self.sockets),
            ("control", &self.control),
            ("control_read_only", &self.control_read_only),
        ]
    }

    /// Refuses what is said of a socket that is not there.
    pub fn check_read_only(&self, is_there: bool) -> Result<(), Usage> {
        match self.control_read_only.words.keys("control_read_only").first() {
            Some((key, _)) if !is_there => {
                let key = key.replace('_', "-");
                Err(Usage(format!("--{key}: without --control-read-only there is no such socket")))
            }
            _ => Ok(()),
        }
    }

    /// Warns where a mode lets others in, and the directory, which is ours alone, does not.
    pub fn warn_of_private(&self, dir: &Path, sockets_are_there: bool, control_is_there: bool) {
        for (is_there, who, what, option) in [
            (sockets_are_there, &self.sockets, "socket", "--nbd"),
            (control_is_there, &self.control, "control", "--control"),
        ] {
            if is_there && who.is != Access::default() {
                let said: Vec<_> =
                    who.words.keys(what).into_iter().map(|(key, value)| format!("{key}={value}")).collect();
                warn!(
                    "{}: nobody else may enter {}; name another place with {option}",
                    said.join(" "),
                    dir.display()
                );
            }
        }
    }
}

impl Who {
    fn new(args: AccessWords, what: &str, file: Option<(AccessWords, String)>) -> Result<Self, Usage> {
        // Each is asked for where it is said, so that what is wrong is named as it stands there.
        resolved(&args, |part| format!("--{}-{part}", what.replace('_', "-")))?;
        let words = match file {
            Some((words, at)) => {
                resolved(&words, |part| format!("{at}{what}_{part}"))?;
                args.or(words)
            }
            None => args,
        };
        let is = resolved(&words, |part| format!("{what}_{part}"))?;
        Ok(Self { words, is })
    }
}

/// Whom the words mean here; `key` names what is wrong.
fn resolved(words: &AccessWords, key: impl Fn(&str) -> String) -> Result<Access, Usage> {
    let number = |part: &'static str, text: &Option<String>, find: Find| {
        let Some(text) = text else { return Ok(None) };
        let number =
            find_number(text, part, find).map_err(|why| Usage(format!("{}={text}: {why}", key(part))))?;
        Ok(Some(number))
    };
    let user = number("user", &words.user, user_of)?;
    let group = number("group", &words.group, group_of)?;
    Ok(Access { mode: words.mode.unwrap_or(Access::default().mode), user, group })
}

/// The number of a user. Half a sentence where there is none.
pub fn find_user(text: &str) -> Result<u32, String> {
    find_number(text, "user", user_of)
}

/// The number of a group. Half a sentence where there is none.
pub fn find_group(text: &str) -> Result<u32, String> {
    find_number(text, "group", group_of)
}

/// The number of a user or group by its name; `None` where there is none.
type Find = fn(&str) -> Result<Option<u32>, c_int>;

fn find_number(text: &str, part: &str, find: Find) -> Result<u32, String> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // The last number means nobody at all.
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
    entry_of(name, |name, entry, room, len, found| {
        // SAFETY: `entry_of` says what they point to.
        unsafe { libc::getpwnam_r(name, entry, room, len, found) }
    })
    .map(|entry| entry.map(|entry: libc::passwd| entry.pw_uid))
}

fn group_of(name: &str) -> Result<Option<u32>, c_int> {
    entry_of(name, |name, entry, room, len, found| {
        // SAFETY: as above.
        unsafe { libc::getgrnam_r(name, entry, room, len, found) }
    })
    .map(|entry| entry.map(|entry: libc::group| entry.gr_gid))
}

/// Asks for an entry. `ask` gets a name that ends with zero, room for the entry, room of that many
/// bytes for its texts, and where it says that it was found. Of the entry only numbers may be used:
/// the texts are gone.
fn entry_of<T: Copy>(
    name: &str,
    ask: impl Fn(*const c_char, *mut T, *mut c_char, usize, *mut *mut T) -> c_int,
) -> Result<Option<T>, c_int> {
    let Ok(name) = CString::new(name) else { return Ok(None) };
    let mut room: Vec<c_char> = vec![0; ENTRY_BYTES];
    loop {
        let mut entry = MaybeUninit::<T>::uninit();
        let mut found = ptr::null_mut();
        let errno = ask(name.as_ptr(), entry.as_mut_ptr(), room.as_mut_ptr(), room.len(), &raw mut found);
        match errno {
            // SAFETY: where it was found, it was written.
            0 if !found.is_null() => return Ok(Some(unsafe { entry.assume_init() })),
            // Some of the services say it so that there is no such name.
            0 | libc::ENOENT | libc::ESRCH => return Ok(None),
            libc::EINTR => {}
            libc::ERANGE if room.len() < ENTRY_BYTES_MAX => room.resize(room.len() * 2, 0),
            errno => return Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_found() {
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
