//! A device of the program's own behind each export: NBD, vhost-user for virtual machines, ublk for this machine.
//!
//! `cargo run -p freestone-server --example own_device nbd|vhost-user SOCKET`, or `own_device ublk`, serves until a line
//! or the end of standard input. The crates of the exports are internal to Freestone: a program that uses them requires
//! exactly their version.

use std::env;
use std::error::Error;
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::Arc;

use freestone::budget::{Budget, DEFAULT_BYTES};
use freestone::device::{
    Buffer, Completion, Device, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Result, TryResult,
    range_end,
};
use freestone_nbd::{Address, ExportOptions, Limits};
use freestone_ublk as ublk;
use freestone_vhost_user as vhost_user;

/// Size of a number in the content, in bytes.
const NUMBER: u64 = 8;
const BLOCK: u32 = 512;

/// A read-only device without storage: every eight bytes are their own offset, in little-endian order. A reader can
/// check that each block comes from the right place.
#[derive(Debug)]
pub struct Offsets {
    /// Size in bytes, a multiple of 512.
    pub size: u64,
}

impl Offsets {
    fn read(offset: u64, data: &mut [u8]) {
        for (offset, number) in
            (offset..).step_by(NUMBER as usize).zip(data.chunks_exact_mut(NUMBER as usize))
        {
            number.copy_from_slice(&offset.to_le_bytes());
        }
    }
}

impl Device for Offsets {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size,
            padding: 0,
            logical_block: BLOCK,
            physical_block: 4096,
            io_min: 4096,
            io_opt: 0,
            max_request: 0,
            discard_granularity: 0,
            fast_zeroes: false,
            volatile_cache: false,
            volatile_media: false,
            rotational: false,
            read_only: true,
            ignores_data: false,
            zones: None,
        }
    }

    // Every request completes at once, so exports never submit one.
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry())?;
        if let Buffer::Read(data) = buffer {
            Self::read(request.offset, data);
        }
        Ok(TryResult::Done)
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        let outcome = request.check(&self.geometry());
        if outcome.is_ok() && request.op == Op::Read {
            Self::read(request.offset, &mut buffer);
        }
        done.complete(outcome, buffer);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        range_end(offset, len, self.size)?;
        row(Extent { offset, len, kind: ExtentKind::Data });
        Ok(len)
    }
}

/// Serves a device over NBD as `offsets`. The server ends when it is dropped.
pub fn serve_nbd(
    device: Arc<dyn Device>,
    address: &Address,
) -> std::result::Result<freestone_nbd::Server, Box<dyn Error>> {
    let server = freestone_nbd::Server::new(Limits::default());
    let address = server.listen(address)?;
    server.publish(&address, "offsets", device, ExportOptions::default())?;
    Ok(server)
}

/// Serves a device to a virtual machine at a Unix socket.
pub fn serve_vhost_user(
    device: Arc<dyn Device>,
    socket: &Path,
) -> std::result::Result<vhost_user::Export, vhost_user::ListenError> {
    let options = vhost_user::Options::new(Budget::new(DEFAULT_BYTES));
    vhost_user::Export::new(socket, "offsets", device, options)
}

/// Runs the example.
pub fn main() -> std::result::Result<(), Box<dyn Error>> {
    const USAGE: &str = "usage: own_device nbd SOCKET | own_device vhost-user SOCKET | own_device ublk";
    let mut args = env::args().skip(1);
    let (export, socket) = (args.next().ok_or(USAGE)?, args.next());
    let device: Arc<dyn Device> = Arc::new(Offsets { size: 1 << 30 });
    // The export ends when this is dropped.
    let _export: Box<dyn std::any::Any> = match export.as_str() {
        "nbd" => {
            let server = serve_nbd(device, &Address::Unix(socket.ok_or(USAGE)?.into()))?;
            println!("{}", server.exports()[0].uri());
            Box::new(server)
        }
        "vhost-user" => {
            let export = serve_vhost_user(device, Path::new(&socket.ok_or(USAGE)?))?;
            println!("{}", export.path().display());
            Box::new(export)
        }
        "ublk" => {
            let export =
                ublk::Export::new("offsets", device, ublk::Options::new(Budget::new(DEFAULT_BYTES)))?;
            println!("{}", export.path().display());
            Box::new(export)
        }
        _ => return Err(USAGE.into()),
    };
    io::stdout().flush()?;
    io::stdin().read_line(&mut String::new())?;
    Ok(())
}
