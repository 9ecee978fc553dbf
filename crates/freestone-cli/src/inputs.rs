//! Control protocol without sockets, for fuzzing. Not part of the library's interface.

use std::sync::Arc;

use freestone_nbd::Limits;
use freestone_spec::kinds::Spec;
use serde_json::Value;

use crate::access::ServerAccess;
use crate::control::protocol::Fault;
use crate::control::server::{Handler, answer_to};
use crate::service::Service;
use crate::tls::Tls;

/// A server with devices but without sockets.
pub struct Control(Arc<Service>);

impl Control {
    /// Creates the devices, each written as on the command line.
    ///
    /// # Errors
    /// The message of the first device that cannot be created.
    pub fn new(devices: &[&str]) -> Result<Self, String> {
        let service = Service::new(Limits::default(), ServerAccess::default(), Tls::default());
        for device in devices {
            let spec: Spec = device.parse().map_err(|error| format!("{error}"))?;
            let claim = service.claim_new("open", [&spec]).map_err(|fault| fault.message)?;
            service.create(&claim, spec, false).map_err(|fault| fault.message)?;
        }
        Ok(Self(service))
    }

    /// Returns the response to a request line. Requests that `runs` rejects fail.
    pub fn answer(&self, line: &[u8], runs: fn(&str, Option<&Value>) -> bool) -> Vec<u8> {
        answer_to(line, &|method, params| {
            if runs(method, params.as_ref()) {
                self.0.call(method, params)
            } else {
                Err(Fault::invalid(format!("{method}: not here")))
            }
        })
    }
}
