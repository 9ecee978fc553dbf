//! NBD server for the measurement, in a process of its own, so that its CPU time can be measured.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use clap::ValueEnum;
use freestone::device::Device;
use freestone::null::{self, Null};
use freestone::ram::ForkConfig;

use super::{base_device, family};
use crate::transport::export::export;

/// Device and socket of the server.
#[derive(Debug, Clone, clap::Args)]
pub struct ServerArgs {
    /// Device to serve
    #[arg(value_enum)]
    pub kind: ServedDevice,
    /// Base of the fork; the null device has its size
    pub base: PathBuf,
    /// Socket to listen on
    pub socket: PathBuf,
}

/// A device to serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ServedDevice {
    /// A fork of the base.
    Fork,
    /// A null device.
    Null,
}

/// Serves until the process is killed.
pub fn serve(args: &ServerArgs) -> Result<()> {
    let base = base_device(&args.base)?;
    let device: Arc<dyn Device> = match args.kind {
        ServedDevice::Null => Arc::new(Null::new(null::Config::plain(base.geometry().size, 512))?),
        ServedDevice::Fork => Arc::new(family()?.fork(Arc::new(base), &ForkConfig::default())?),
    };
    let _server = export(device, &args.socket)?;
    loop {
        std::thread::park();
    }
}
