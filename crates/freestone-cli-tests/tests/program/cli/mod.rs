//! Tests of the command line: the built program, its sockets, messages and exit statuses.

mod access;
mod config_files;
mod control_socket;
mod devices;
mod messages;
mod ram;
mod read_only;
mod remote_servers;
mod scripts;
mod single;
mod starts_and_ends;
mod statistics;
mod supervision;
mod units;
mod wait_verb;

use std::os::unix::fs::FileTypeExt as _;

use crate::harness::prelude::*;

fn sockets_in(dir: &Path) -> usize {
    fs::read_dir(dir).unwrap().filter(|e| e.as_ref().unwrap().file_type().unwrap().is_socket()).count()
}
