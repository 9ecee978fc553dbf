//! A small key-value store over NBD, with an error to choose, as a subject for `freestone explore`.
//!
//! ```console
//! $ cargo build --release -p freestone-explore --example tiny_store
//! $ store=target/release/examples/tiny_store
//! $ freestone explore --size 1M --run "$store write lost-fua" --check "$store verify lost-fua"
//! ```
//!
//! The disk is `$uri`. `write` marks each acknowledged put with `freestone mark`, and `verify` reads the last of these
//! marks from `$mark`.

mod store;

use std::env;
use std::error::Error;
use std::process::Command;

use freestone_nbd_client::{Config, Nbd};
use store::{Bug, verify, workload};

const PUTS: u64 = 12;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = env::args().skip(1).collect();
    let usage = || format!("usage: tiny_store write|verify {}", Bug::ALL.map(|(name, _)| name).join("|"));
    let [verb, name] = &words[..] else { return Err(usage().into()) };
    let (_, bug) = Bug::ALL.into_iter().find(|(known, _)| known == name).ok_or_else(usage)?;
    let disk = Nbd::open(&Config { connections: 1, ..Config::new(env::var("uri")?.parse()?) })?;
    match verb.as_str() {
        "write" => {
            let device = env::var("device")?;
            let mut failed = false;
            workload(&disk, bug, PUTS, &mut |put| {
                let mark = Command::new("freestone").args(["mark", &device, &format!("put {put}")]).output();
                failed |= !mark.is_ok_and(|output| output.status.success());
            })?;
            if failed { Err("`freestone mark` failed".into()) } else { Ok(()) }
        }
        "verify" => {
            let mark = env::var("mark").unwrap_or_default();
            Ok(verify(&disk, bug, mark.strip_prefix("put ").and_then(|put| put.parse().ok()))?)
        }
        _ => Err(usage().into()),
    }
}
