//! A server whose files are limited in size by `RLIMIT_FSIZE`.

use rustix::process::Resource;

use super::{limit, start_logged};
use crate::harness::prelude::*;

const LIMIT: u64 = 1 << 20;
const ENOSPC: u32 = 28;

#[test]
fn file_size_limit_fails_requests_and_verbs_as_no_space() {
    let devices = ["full=ram,disksize=64M", "later=ram,disksize=64M", "base=null,size=1M"];
    let serve = start_logged(&devices);
    let random: Vec<u8> = (0..4_u32 << 20).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    assert_eq!(Raw::connect(&serve, "full").write(0, 0, &random), 0);
    limit(&serve, Resource::Fsize, LIMIT);
    // The server creates the memory file of this device only at the first write, so the write
    // fails.
    assert_eq!(Raw::connect(&serve, "later").write(0, 0, &[7; 4096]), ENOSPC);
    let refused = |verb: &[&str]| {
        let (code, _, err) = serve.run_verb(&[verb, &["--json"]].concat());
        assert!(
            code == 1 && err.contains("ENOSPC") && err.contains("RLIMIT_FSIZE"),
            "{verb:?}: {code}, {err}"
        );
    };
    refused(&["create", &format!("f=file,path={},size=10M", serve.path("new").display())]);
    refused(&["save", "full", text(&serve.path("saved"))]);
    assert!(!serve.path("saved").exists());
    // Data written before the limit was set stays readable.
    assert_eq!(Raw::connect(&serve, "full").read(0, 4096), Ok(random[..4096].to_vec()));
    let limit = "RLIMIT_FSIZE limits files to 1048576 bytes";
    let log = serve.log_with(limit);
    assert_eq!(log.matches(limit).count(), 1, "{log}");
}

#[test]
fn file_size_limit_is_named_if_the_state_cannot_grow() {
    let serve = Serve::start_in(tempfile::tempdir().unwrap(), &["--state", "state"], true);
    limit(&serve, Resource::Fsize, 1);
    let why = serve.refused(1, &["create", "n=null,size=1M"]);
    assert!(why.starts_with("cannot update the state: "), "{why}");
    assert!(why.contains("RLIMIT_FSIZE limits files to 1 bytes"), "{why}");
}
