//! Permissions and owners of a server's sockets: the keys `socket_mode`, `socket_user` and
//! `socket_group`, and the corresponding keys of the control sockets.

use toml::de::DeValue;

/// Permissions and owner of a Unix socket. A value of `None` keeps the system's default.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct AccessWords {
    /// Permission bits of the socket file, such as `0o660`.
    pub mode: Option<u32>,
    /// Name or number of the user that owns the socket file.
    pub user: Option<String>,
    /// Name or number of the group of the socket file.
    pub group: Option<String>,
}

/// Largest value of the permission bits: set-user-ID, set-group-ID and sticky bits are not
/// accepted.
const MAX_MODE: u32 = 0o777;
const MUST: &str = "must be an octal number of up to 0777, for example 0660";

/// Parses permission bits, an octal number up to 0777.
///
/// # Errors
/// Returns the reason, which the caller puts after `KEY=TEXT: `.
pub fn parse_mode(text: &str) -> Result<u32, String> {
    // `from_str_radix` alone would also accept a sign.
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| digits && *mode <= MAX_MODE);
    mode.ok_or_else(|| MUST.to_owned())
}

/// Formats permission bits in the form that [`parse_mode`] accepts.
pub fn format_mode(mode: u32) -> String {
    format!("{mode:04o}")
}

impl AccessWords {
    /// Sets the value of a configuration key. The suffix of the key (`_mode`, `_user` or `_group`)
    /// selects which one.
    ///
    /// # Errors
    /// Returns a message that names the key.
    pub fn take(&mut self, key: &str, value: &DeValue<'_>) -> Result<(), String> {
        if key.ends_with("_mode") {
            let DeValue::String(text) = value else {
                return Err(format!("{key}: must be an octal number as a text, for example '0660'"));
            };
            self.mode = Some(parse_mode(text).map_err(|why| format!("{key}={text}: {why}"))?);
            return Ok(());
        }
        let owner = match value {
            DeValue::String(text) if !text.is_empty() => text.to_string(),
            DeValue::Integer(number) if number.radix() == 10 => number.as_str().to_owned(),
            _ => return Err(format!("{key}: must be a name as a text, or a number")),
        };
        let field = if key.ends_with("_user") { &mut self.user } else { &mut self.group };
        *field = Some(owner);
        Ok(())
    }

    /// Returns these values. Values that are not set are taken from `others`.
    #[must_use]
    pub fn or(self, others: Self) -> Self {
        Self {
            mode: self.mode.or(others.mode),
            user: self.user.or(others.user),
            group: self.group.or(others.group),
        }
    }

    /// Returns the values that are set as configuration keys and texts. Each key starts with
    /// `prefix_`.
    pub fn keys(&self, prefix: &str) -> Vec<(String, String)> {
        let parts = [
            ("mode", self.mode.map(format_mode)),
            ("user", self.user.clone()),
            ("group", self.group.clone()),
        ];
        let set = parts.into_iter().filter_map(|(part, value)| Some((format!("{prefix}_{part}"), value?)));
        set.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mode_is_octal_and_at_most_0777() {
        assert_eq!(
            (parse_mode("0660"), parse_mode("600"), parse_mode("777")),
            (Ok(0o660), Ok(0o600), Ok(0o777))
        );
        for text in ["", "0800", "1777", "+660", "rw", "0x1", "-1", "99999999999999"] {
            assert_eq!(parse_mode(text), Err(MUST.to_owned()), "{text}");
        }
    }
}
