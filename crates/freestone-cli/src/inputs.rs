//! What comes through the control socket, for the checks of very many inputs: without sockets. No
//! part of the library's interface.

use std::sync::Arc;

use freestone_nbd::Limits;
use freestone_spec::kinds::Spec;
use serde_json::Value;

use crate::access::AccessOf;
use crate::control::protocol::Fault;
use crate::control::server::{Handler, answer_to};
use crate::service::Service;
use crate::tls::Tls;

/// Devices behind a control socket that is not there.
pub struct Control(Arc<Service>);

impl Control {
    /// With these devices, each as on the command line.
    ///
    /// # Errors
    /// A sentence: they cannot be set up.
    pub fn new(devices: &[&str]) -> Result<Self, String> {
        let service = Service::new(Limits::default(), AccessOf::default(), Tls::default());
        for device in devices {
            let spec: Spec = device.parse().map_err(|error| format!("{error}"))?;
            let claim = service.claim_new("open", [&spec]).map_err(|fault| fault.message)?;
            service.create(&claim, spec, false).map_err(|fault| fault.message)?;
        }
        Ok(Self(service))
    }

    /// What a connection says to a line. Requests that `runs` does not want are refused.
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
