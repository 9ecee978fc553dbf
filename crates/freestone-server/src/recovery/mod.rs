//! Recovery of RAM disks, forks and snapshots in memory after the server was killed (`serve --recoverable`).
//!
//! The memory of each family is in four files without names (memfds). The server sends their descriptors to a
//! holder, so that the memory outlives the server: to the service manager if it stores descriptors for the service,
//! else to a process that does nothing else. The next server gets the descriptors from the holder and adopts the
//! families.
//!
//! The room enters the registry as the holder of its families, and hands adopted devices to `startup`.

use std::path::Path;
use std::sync::Arc;

use freestone_control::protocol::RpcError;

use crate::service::Service;

mod adoption;
mod families;
mod holder_process;
mod manager;
mod messages;
mod process;

pub use self::adoption::{HeldFamilies, leave};
pub use self::families::RemoteFamilies;
pub use self::holder_process::{hold, raise_open_files};
pub use self::manager::{DescriptorStore, ServiceManager, is_family_file};
pub use self::process::HolderProgram;

use self::families::Holder;
use self::manager::ManagerHolder;
use self::process::{HolderProcess, pid_of_holder};

/// Process that holds the memory of a server's devices.
pub enum HolderChoice {
    /// A process that the server starts.
    Process(HolderProgram),
    /// The service manager.
    Manager(ServiceManager),
}

/// Has the families of a server held. Called once, before devices exist.
///
/// # Errors
/// Fails if no holder can be started. Without `holder`, fails if there is one: a killed server has left devices in
/// memory, which this server would not adopt.
pub fn begin(service: &Service, state: &Path, holder: Option<HolderChoice>) -> Result<(), RpcError> {
    let at = state.display();
    let Some(holder) = holder else {
        if let Some(pid) = pid_of_holder(state) {
            let found = format!("{at}: a killed server has left devices in memory, held by process {pid}");
            return Err(rpc_error!(
                EBUSY,
                "{found}; --recoverable adopts them, the end of that process frees them"
            ));
        }
        return Ok(());
    };
    let holder: Box<dyn Holder> = match holder {
        HolderChoice::Process(program) => Box::new(HolderProcess::new(state, program)),
        HolderChoice::Manager(manager) => Box::new(ManagerHolder::new(manager)),
    };
    let holder = RemoteFamilies::start(holder);
    let holder =
        holder.map_err(|why| rpc_error!(EIO, "{at}: recoverable: cannot start the holder: {why}"))?;
    let _ = service.registry.holder.set(Arc::clone(&holder) as _);
    let _ = service.recovery.set(holder);
    Ok(())
}
