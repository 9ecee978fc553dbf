//! Parses the address of an HTTP endpoint in a configuration file.

use freestone_spec::numbers::integer;
use toml::de::DeValue;

/// Address of an HTTP endpoint, not checked yet.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct HttpWords {
    /// Address or port to listen on, or `None` without an endpoint.
    pub address: Option<String>,
    /// True if the address may be reachable from other machines.
    pub open: bool,
}

impl HttpWords {
    /// Sets the value of a configuration key. A key that ends in `_open` sets `open`, another key
    /// sets `address`. The error message names the key.
    pub fn take(&mut self, key: &str, value: &DeValue<'_>) -> Result<(), String> {
        match (key.ends_with("_open"), value) {
            (true, DeValue::Boolean(yes)) => self.open = *yes,
            (true, _) => return Err(format!("{key}: must be true or false")),
            (false, DeValue::String(address)) => self.address = Some(address.clone().into_owned()),
            (false, value) => {
                let must = "must be a port, or an address as a text, for example '127.0.0.1:9100'";
                let port = integer(value).ok_or_else(|| format!("{key}: {must}"))?;
                self.address = Some(port.to_string());
            }
        }
        Ok(())
    }
}
