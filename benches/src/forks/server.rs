//! The NBD server that is measured: a process of its own, so that its CPU time is known.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use clap::ValueEnum;
use freestone::device::Device;
use freestone::null::{self, Null};
use freestone::ram::ForkConfig;

use super::{base_device, family};
use crate::export::export;

/// What it serves, and where.
#[derive(Debug, Clone, clap::Args)]
pub struct ServerArgs {
    /// The device.
    #[arg(value_enum)]
    pub kind: Served,
    /// The base of the fork; the null device has its size.
    pub base: PathBuf,
    /// The socket.
    pub socket: PathBuf,
}

/// A device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Served {
    /// A fork of the base.
    Fork,
    /// Forgets everything.
    Null,
}

/// Serves until the process is killed.
pub fn serve(args: &ServerArgs) -> Result<()> {
    let base = base_device(&args.base)?;
    let device: Arc<dyn Device> = match args.kind {
        Served::Null => Arc::new(Null::new(null::Config::plain(base.geometry().size, 512))?),
        Served::Fork => Arc::new(family()?.fork(Arc::new(base), &ForkConfig::default())?),
    };
    let _server = export(device, &args.socket)?;
    loop {
        std::thread::park();
    }
}
