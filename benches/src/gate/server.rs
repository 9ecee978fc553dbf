//! Server process with a null export, whose instructions the gate counts, and the client that sends
//! requests to the server.

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
use freestone_nbd::SHUTDOWN_GRACE;
use freestone_vhost_user::{Export, Options};

use crate::callgrind;
use crate::transport::export::export;
use crate::transport::fio_nbd::Direction;
use crate::transport::nbd_client::Client;
use crate::transport::virtio::{DEPTH_MAX, Load, Virtio};

const EXPORT_BYTES: u64 = 1 << 30;
/// Number of requests of the shorter of the two runs. The difference of the runs excludes start and
/// end of the server.
pub const FEW: u64 = 1000;
/// Time limit until the server listens, under valgrind on a busy machine.
const START_MAX: Duration = Duration::from_secs(60);
const RETRY_EVERY: Duration = Duration::from_millis(20);

/// Request type; each request is 4 KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    Read,
    Write,
}

/// Protocol between client and server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Transport {
    Nbd,
    /// NBD, with counters and latencies of the requests.
    NbdCounted,
    VhostUser,
}

/// Arguments of the server process.
#[derive(Debug, Clone, clap::Args)]
pub struct ServerArgs {
    /// Protocol to serve
    #[arg(value_enum)]
    transport: Transport,
    /// Socket to listen on
    socket: PathBuf,
}

/// Serves until standard input ends.
pub fn serve(args: &ServerArgs) -> Result<()> {
    let null = Arc::new(Null::new(null::Config::plain(EXPORT_BYTES, 512))?);
    let wait_for_stdin =
        || std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).context("standard input");
    match args.transport {
        Transport::Nbd | Transport::NbdCounted => {
            let counted = matches!(args.transport, Transport::NbdCounted);
            let device: Arc<dyn Device> =
                if counted { Arc::new(Counting::new("device", null)) } else { null };
            let server = export(device, &args.socket)?;
            wait_for_stdin()?;
            server.shutdown(SHUTDOWN_GRACE);
        }
        Transport::VhostUser => {
            // The number of polls of the queue depends on timing, so polling is disabled.
            let options = Options { busy_poll: false, ..Options::new(Budget::new(budget::DEFAULT_BYTES)) };
            let _export = Export::new(&args.socket, "null", null, options)?;
            wait_for_stdin()?;
        }
    }
    Ok(())
}

/// Returns the number of instructions that a server executes from start to end, with `count`
/// requests in between. NBD requests are sent one at a time, because the number of requests that a
/// server finds in its socket at once depends on timing.
pub fn count_instructions(
    mut command: Command,
    transport: Transport,
    kind: RequestKind,
    count: u64,
) -> Result<u64> {
    let dir = tempfile::tempdir()?;
    let socket = dir.path().join("s");
    command
        .arg("gate-server")
        .arg(transport.to_possible_value().expect("every transport has a name").get_name())
        .arg(&socket);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| callgrind::VALGRIND_MISSING)?;
    let result = match transport {
        Transport::Nbd | Transport::NbdCounted => {
            connect(&mut child, || Client::connect(&socket)).and_then(|c| send_requests(c, kind, count))
        }
        Transport::VhostUser => connect(&mut child, || Virtio::connect(&socket, 1))
            .and_then(|c| send_virtio_requests(c, kind, count)),
    };
    if result.is_err() {
        // The process may have ended already.
        let _ = child.kill();
    }
    // Closing standard input ends the server.
    let output = child.wait_with_output().context("waiting for the server")?;
    result.with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    callgrind::parse_count(&output)
}

fn connect<T>(child: &mut Child, attempt: impl Fn() -> Result<T>) -> Result<T> {
    let started = Instant::now();
    loop {
        match attempt() {
            Ok(client) => return Ok(client),
            Err(error) if started.elapsed() > START_MAX => {
                return Err(error).context("connecting to the server");
            }
            Err(_) => std::thread::sleep(RETRY_EVERY),
        }
        if let Some(status) = child.try_wait()? {
            bail!("the server ended with {status}");
        }
    }
}

fn send_requests(mut client: Client, kind: RequestKind, count: u64) -> Result<()> {
    let mut page = [0x5A; PAGE_BYTES];
    for number in 0..count {
        let offset = number * PAGE_BYTES as u64 % EXPORT_BYTES;
        match kind {
            RequestKind::Read => client.read(offset, &mut page)?,
            RequestKind::Write => client.write(offset, &page)?,
        }
    }
    client.end()
}

/// Sends as many requests at a time as a queue holds, so that the cost of notifications is
/// negligible.
fn send_virtio_requests(mut client: Virtio, kind: RequestKind, count: u64) -> Result<()> {
    let direction = match kind {
        RequestKind::Read => Direction::Read,
        RequestKind::Write => Direction::Write,
    };
    let load = Load { direction, depth: DEPTH_MAX, batch: DEPTH_MAX };
    client.run(load, count, EXPORT_BYTES).map(drop)
}

#[cfg(test)]
mod tests {
    use freestone::device::Blocking;
    use freestone::null::Memory;

    use super::*;

    #[test]
    fn requests_reach_the_device() {
        let dir = tempfile::tempdir().unwrap();
        let memory = Arc::new(Memory::new(null::Config::plain(1 << 20, 512)).unwrap());
        let server = export(memory.clone(), &dir.path().join("s")).unwrap();
        for kind in [RequestKind::Write, RequestKind::Read] {
            send_requests(Client::connect(&dir.path().join("s")).unwrap(), kind, 10).unwrap();
        }
        let mut pages = vec![0; 11 * PAGE_BYTES];
        memory.read_at(0, &mut pages).unwrap();
        assert!(pages[..10 * PAGE_BYTES].iter().all(|byte| *byte == 0x5A));
        assert!(pages[10 * PAGE_BYTES..].iter().all(|byte| *byte == 0));
        server.shutdown(SHUTDOWN_GRACE);
        assert!(Client::connect(&dir.path().join("s")).is_err());
    }
}
