//! Verbs, or parts of verbs, that the client runs itself: without a server (`images`, `prune`, `push`), around calls of a
//! server (`stat`, `top`, `shutdown`, `upgrade`, `wait`), or for udev (`ublk_owner`). All other verbs are in `freestone-server`.

pub mod hold;
pub mod images;
pub mod prune;
pub mod push_here;
pub mod shutdown;
pub mod stat;
pub mod top;
pub mod ublk_owner;
pub mod upgrade;
pub mod wait;
