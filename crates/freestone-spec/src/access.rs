//! Who may connect to the sockets of a server, as it is written: `socket_mode`, `socket_user`,
//! `socket_group`, and the same of the control socket.

use toml::de::DeValue;

/// What was said; the rest is as the system has it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct AccessWords {
    /// Permission bits of the socket's file.
    pub mode: Option<u32>,
    /// A name or a number.
    pub user: Option<String>,
    /// A name or a number.
    pub group: Option<String>,
}

/// Most of the permission bits.
const MAX_MODE: u32 = 0o777;
const MUST: &str = "must be an octal number of up to 0777, for example 0660";

/// Reads permission bits.
///
/// # Errors
/// Half a sentence that follows the text.
pub fn mode(text: &str) -> Result<u32, String> {
    // `from_str_radix` alone would take a sign.
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| digits && *mode <= MAX_MODE);
    mode.ok_or_else(|| MUST.to_owned())
}

/// Permission bits as they are written.
pub fn mode_text(mode: u32) -> String {
    format!("{mode:04o}")
}

impl AccessWords {
    /// Takes one of its keys of a file, whose last word says which it is.
    ///
    /// # Errors
    /// A sentence.
    pub fn take(&mut self, key: &str, value: &DeValue<'_>) -> Result<(), String> {
        if key.ends_with("_mode") {
            let DeValue::String(text) = value else {
                return Err(format!("{key}: must be an octal number as a text, for example '0660'"));
            };
            self.mode = Some(mode(text).map_err(|why| format!("{key}={text}: {why}"))?);
            return Ok(());
        }
        let who = match value {
            DeValue::String(text) if !text.is_empty() => text.to_string(),
            DeValue::Integer(number) if number.radix() == 10 => number.as_str().to_owned(),
            _ => return Err(format!("{key}: must be a name as a text, or a number")),
        };
        let place = if key.ends_with("_user") { &mut self.user } else { &mut self.group };
        *place = Some(who);
        Ok(())
    }

    /// What these say, and of the rest what `others` say.
    #[must_use]
    pub fn or(self, others: Self) -> Self {
        Self {
            mode: self.mode.or(others.mode),
            user: self.user.or(others.user),
            group: self.group.or(others.group),
        }
    }

    /// The keys that say so, behind `prefix_`.
    pub fn keys(&self, prefix: &str) -> Vec<(String, String)> {
        let parts =
            [("mode", self.mode.map(mode_text)), ("user", self.user.clone()), ("group", self.group.clone())];
        let said = parts.into_iter().filter_map(|(part, value)| Some((format!("{prefix}_{part}"), value?)));
        said.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal() {
        assert_eq!((mode("0660"), mode("600"), mode("777")), (Ok(0o660), Ok(0o600), Ok(0o777)));
        for text in ["", "0800", "1777", "+660", "rw", "0x1", "-1", "99999999999999"] {
            assert_eq!(mode(text), Err(MUST.to_owned()), "{text}");
        }
    }
}
