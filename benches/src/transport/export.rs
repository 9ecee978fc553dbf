//! NBD server in this process.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use freestone::device::Device;
use freestone_nbd::{Address, ExportOptions, Limits, Server};

/// Serves a device as the default export of the Unix socket `socket` until the returned server is
/// dropped.
pub fn export(device: Arc<dyn Device>, socket: &Path) -> Result<Server> {
    let server = Server::new(Limits::default());
    publish(&server, &Address::Unix(socket.to_owned()), device)?;
    Ok(server)
}

/// Publishes a device as the default export of an address.
pub fn publish(server: &Server, address: &Address, device: Arc<dyn Device>) -> Result<()> {
    let address = server.listen(address)?;
    let options = ExportOptions { default: true, ..ExportOptions::default() };
    Ok(server.publish(&address, "device", device, options)?)
}
