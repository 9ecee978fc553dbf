//! Recovery of RAM disks, forks and snapshots in memory after the server was killed (`serve --recoverable`).
//!
//! The memory of each family is in four files without names (memfds). The server sends their descriptors to a
//! holder, a process of its own that does nothing else, so that the memory outlives the server. The next server
//! on the same state directory gets the descriptors from the holder and adopts the families.
//!
//! The room enters the registry as the holder of its families, and hands adopted devices to `startup`.

use std::path::Path;
use std::sync::Arc;

use freestone_control::protocol::RpcError;

use crate::service::Service;

mod adoption;
mod holder_process;
mod messages;
mod remote;

pub use self::adoption::{HeldFamilies, leave};
pub use self::holder_process::{hold, raise_open_files};
pub use self::remote::{HolderProgram, RemoteHolder};

/// Has the families of a server held by the holder of its state directory, or by a new one with `program`. Called
/// once, before devices exist.
///
/// # Errors
/// Fails if no holder can be started. Without `program`, fails if there is a holder: a killed server has left
/// devices in memory, which this server would not adopt.
pub fn begin(service: &Service, state: &Path, program: Option<HolderProgram>) -> Result<(), RpcError> {
    let at = state.display();
    let Some(program) = program else {
        if let Some(pid) = remote::pid_of_holder(state) {
            let found = format!("{at}: a killed server has left devices in memory, held by process {pid}");
            return Err(rpc_error!(
                EBUSY,
                "{found}; --recoverable adopts them, the end of that process frees them"
            ));
        }
        return Ok(());
    };
    let holder = RemoteHolder::start(state, program);
    let holder =
        holder.map_err(|why| rpc_error!(EIO, "{at}: recoverable: cannot start the holder: {why}"))?;
    let _ = service.registry.holder.set(Arc::clone(&holder) as _);
    let _ = service.recovery.set(holder);
    Ok(())
}
