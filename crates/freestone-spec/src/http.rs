//! What a file says of an address of HTTP.

use toml::de::DeValue;

use crate::numbers::integer;

/// Its words, unchecked.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct HttpWords {
    /// Where it is listened.
    pub address: Option<String>,
    /// Others than this machine's users may ask there.
    pub open: bool,
}

impl HttpWords {
    /// Takes a key of the file: an address, or a word for others, which ends in `_open`. The error is a
    /// sentence.
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
