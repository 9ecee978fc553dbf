//! Entry to the control protocol without sockets, and to the configuration file, for fuzzing. Not part of this crate's public
//! interface.

use std::sync::Arc;

use freestone_control::server::{Handler, answer_to};
use freestone_nbd::Limits;
use freestone_spec::check_input::{CheckedDevice, checked};
use freestone_spec::kinds::Spec;
use serde_json::Value;

use crate::config;
use crate::service::Service;
use crate::settings::access::ServerAccess;
use crate::settings::tls::Tls;

/// A server with devices but without sockets.
pub struct Control(Arc<Service>);

impl Control {
    /// Creates a server with these devices, each specified as on the command line.
    ///
    /// # Errors
    /// Returns the message for the first device that cannot be created.
    pub fn new(devices: &[&str]) -> Result<Self, String> {
        let service = Service::new(Limits::default(), ServerAccess::default(), Tls::default());
        for device in devices {
            let spec: Spec = device.parse().map_err(|error| format!("{error}"))?;
            let claim = service.claim_new("open", [&spec]).map_err(|fault| fault.message)?;
            service.create(&claim, spec, false).map_err(|fault| fault.message)?;
        }
        Ok(Self(service))
    }

    /// Returns the JSON response to a JSON request line. A request fails if `runs` returns false
    /// for its method and parameters.
    pub fn answer(&self, line: &[u8], runs: fn(&str, Option<&Value>) -> bool) -> Vec<u8> {
        answer_to(line, &|method, params| {
            if runs(method, params.as_ref()) {
                self.0.call(method, params)
            } else {
                Err(rpc_error!(invalid, "{method}: not here"))
            }
        })
    }
}

/// Parses the text of a configuration file of `serve --config`, and checks each of its devices.
///
/// # Errors
/// Returns the error message if parsing fails.
pub fn config_file(text: &str) -> Result<Vec<CheckedDevice>, String> {
    Ok(config::parse(text)?.devices.into_iter().map(|device| checked(device.entries)).collect())
}
