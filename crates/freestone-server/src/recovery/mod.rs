//! Recovery of RAM disks, forks and snapshots in memory after the server was killed (`serve --recoverable`).
//!
//! The memory of each family is in four files without names (memfds). The server sends their descriptors to a
//! holder, so that the memory outlives the server: to the service manager if it stores descriptors for the service,
//! else to a process that does nothing else. The next server gets the descriptors from the holder and adopts the
//! families.
//!
//! The room knows families, and no devices. `startup` makes it the holder of the registry's families, and adopts.

mod families;
mod holder;
mod holder_process;
mod manager;
mod messages;
mod process;

pub use self::families::{HolderChoice, RemoteFamilies};
pub use self::holder_process::hold;
pub use self::manager::{DescriptorStore, ServiceManager, is_family_file};
pub use self::process::HolderProgram;
pub(crate) use self::process::pid_of_holder;
