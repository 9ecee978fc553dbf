//! An NBD server of this process.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use freestone::device::Device;
use freestone_nbd::{Address, ExportOptions, Limits, Server};

/// Serves a device as the default export, until the server is dropped.
pub fn export(device: Arc<dyn Device>, socket: &Path) -> Result<Server> {
    let server = Server::new(Limits::default());
    let address = server.listen(&Address::Unix(socket.to_owned()))?;
    let options = ExportOptions { default: true, ..ExportOptions::default() };
    server.publish(&address, "device", device, options)?;
    Ok(server)
}
