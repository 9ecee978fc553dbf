//! Tests of TLS: exports, client certificates, and attacks on the connection between client and server.

mod certificates;
mod requests;
mod starting;

use std::sync::Arc;

use freestone_nbd::{TlsMode, Visibility};

use crate::common::device::MemDevice;
use crate::common::secure::Secure;

fn serving(mode: TlsMode) -> (Secure, Arc<MemDevice>) {
    let secure = Secure::new(mode);
    let device = MemDevice::new(64 << 20);
    secure.publish("disk", &device, Visibility::All);
    (secure, device)
}
