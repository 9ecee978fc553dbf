//! Exports of NBD servers as devices.
//!
//! [`Nbd`] speaks the fixed newstyle handshake, structured replies, `base:allocation` and TLS with any
//! server of the protocol's specification (`doc/proto.md` of the `NetworkBlockDevice` project), over
//! several connections where the server says that these see the same. What waits for the network is
//! submitted; a try never does.
//!
//! **Losses.** A connection that is lost is made again, with longer and longer pauses, for as long as
//! the device is there. Requests that were not answered are sent again, reads and writes alike; one that
//! finds no server for [`Config::timeout`] fails with
//! [`Error::Media`](freestone_core::device::Error::Media). A write that was answered and not flushed may
//! be lost with the server: the flushes that would have made it durable fail, or the next one does,
//! once.
//!
//! A write that is sent again may be carried out twice, by the old connection and by the new one. A
//! server that carries out what it received over a connection long after that was closed, when the
//! same was already answered over another, can bring old content back; the protocol has nothing
//! against that, and servers do not do it: they end what a connection asked for, or forget it, when
//! it closes.
//!
//! **Trust.** A server is not trusted with more than its content: all that it says is checked, and
//! what is kept of it has a bound.

mod config;
mod covered;
mod device;
mod error;
mod facts;
mod handshake;
mod job;
mod lane;
mod ledger;
mod link;
mod outgoing;
mod receive;
mod shared;
mod socket;
mod state;
mod status;
mod table;
mod tls;
mod uri;
mod wake;

pub use config::{
    Config, DEFAULT_CONNECTIONS, DEFAULT_TIMEOUT, MAX_CONNECTIONS, MAX_TIMEOUT, MIN_TIMEOUT, TlsFiles,
};
pub use device::Nbd;
pub use error::{LinkError, SetupError};
pub use uri::{DEFAULT_PORT, Place, Uri, UriError};
