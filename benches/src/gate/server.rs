//! The server that is counted: a process of its own with a null export, and the requests it gets.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum as _;
use freestone::PAGE_BYTES;
use freestone::budget::{self, Budget};
use freestone::device::{Counting, Device};
use freestone::null::{self, Null};
use freestone_nbd::END_GRACE;
use freestone_vhost_user::{Export, Options};

use crate::callgrind;
use crate::export::export;
use crate::fio_nbd::Direction;
use crate::nbd_client::Client;
use crate::virtio::{DEPTH_MAX, Load, Virtio};

/// Size of the export.
const EXPORT_BYTES: u64 = 1 << 30;
/// Requests of the shorter of the two runs whose difference counts.
pub const FEW: u64 = 1000;
/// How long the server may take to listen, under valgrind on a busy machine.
const START_MAX: Duration = Duration::from_secs(60);
/// Between two attempts to connect.
const RETRY_EVERY: Duration = Duration::from_millis(20);

/// What a client asks for, 4 KiB at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    Read,
    Write,
}

/// How it is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Over {
    Nbd,
    /// With counters and latencies of the requests.
    NbdCounted,
    VhostUser,
}

/// Where it listens.
#[derive(Debug, Clone, clap::Args)]
pub struct ServerArgs {
    /// For what.
    #[arg(value_enum)]
    over: Over,
    /// The socket.
    socket: PathBuf,
}

/// Serves until standard input ends.
pub fn serve(args: &ServerArgs) -> Result<()> {
    let null = Arc::new(Null::new(null::Config::plain(EXPORT_BYTES, 512))?);
    let until_told = || std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).context("standard input");
    match args.over {
        Over::Nbd | Over::NbdCounted => {
            let counted = matches!(args.over, Over::NbdCounted);
            let device: Arc<dyn Device> =
                if counted { Arc::new(Counting::new("device", null)) } else { null };
            let server = export(device, &args.socket)?;
            until_told()?;
            server.shutdown(END_GRACE);
        }
        Over::VhostUser => {
            // How often it looks out is a matter of time.
            let options = Options { look_out: false, ..Options::new(Budget::new(budget::DEFAULT_BYTES)) };
            let _export = Export::new(&args.socket, "null", null, options)?;
            until_told()?;
        }
    }
    Ok(())
}

/// Instructions of a server from start to end, with `count` requests between. One at a time: how
/// many a server finds in its socket at once would be a matter of chance.
pub fn collected(mut command: Command, over: Over, asked: Asked, count: u64) -> Result<u64> {
    let dir = tempfile::tempdir()?;
    let socket = dir.path().join("s");
    command
        .arg("gate-server")
        .arg(over.to_possible_value().expect("none is skipped").get_name())
        .arg(&socket);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| callgrind::MISSING)?;
    let asking = match over {
        Over::Nbd | Over::NbdCounted => {
            connect(&mut child, || Client::connect(&socket)).and_then(|c| ask(c, asked, count))
        }
        Over::VhostUser => {
            connect(&mut child, || Virtio::connect(&socket, 1)).and_then(|c| ask_virtio(c, asked, count))
        }
    };
    if asking.is_err() {
        // It may have ended already.
        let _ = child.kill();
    }
    // Closes its standard input, and so ends it.
    let output = child.wait_with_output().context("the server's end")?;
    asking.with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    callgrind::count_in(&output)
}

fn connect<T>(child: &mut Child, attempt: impl Fn() -> Result<T>) -> Result<T> {
    let begun = Instant::now();
    loop {
        match attempt() {
            Ok(client) => return Ok(client),
            Err(error) if begun.elapsed() > START_MAX => return Err(error).context("the server"),
            Err(_) => std::thread::sleep(RETRY_EVERY),
        }
        if let Some(status) = child.try_wait()? {
            bail!("the server ended with {status}");
        }
    }
}

fn ask(mut client: Client, asked: Asked, count: u64) -> Result<()> {
    let mut page = [0x5A; PAGE_BYTES];
    for number in 0..count {
        let offset = number * PAGE_BYTES as u64 % EXPORT_BYTES;
        match asked {
            Asked::Read => client.read(offset, &mut page)?,
            Asked::Write => client.write(offset, &page)?,
        }
    }
    client.end()
}

/// As many at once as a queue takes: so few wakes that their share does not count.
fn ask_virtio(mut client: Virtio, asked: Asked, count: u64) -> Result<()> {
    let direction = match asked {
        Asked::Read => Direction::Read,
        Asked::Write => Direction::Write,
    };
    let load = Load { direction, depth: DEPTH_MAX, together: DEPTH_MAX };
    client.run(load, count, EXPORT_BYTES).map(drop)
}

#[cfg(test)]
mod tests {
    use freestone::device::Blocking;
    use freestone::null::Memory;

    use super::*;

    #[test]
    fn requests_are_answered() {
        let dir = tempfile::tempdir().unwrap();
        let memory = Arc::new(Memory::new(null::Config::plain(1 << 20, 512)).unwrap());
        let server = export(memory.clone(), &dir.path().join("s")).unwrap();
        for asked in [Asked::Write, Asked::Read] {
            ask(Client::connect(&dir.path().join("s")).unwrap(), asked, 10).unwrap();
        }
        let mut pages = vec![0; 11 * PAGE_BYTES];
        memory.read_at(0, &mut pages).unwrap();
        assert!(pages[..10 * PAGE_BYTES].iter().all(|byte| *byte == 0x5A));
        assert!(pages[10 * PAGE_BYTES..].iter().all(|byte| *byte == 0));
        server.shutdown(END_GRACE);
        assert!(Client::connect(&dir.path().join("s")).is_err());
    }
}
