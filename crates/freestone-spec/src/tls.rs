//! TLS setting of a device: the key `tls_clients`.

/// Maximum number of client names in the value of `tls_clients`.
const MAX_NAMES: usize = 64;
/// Maximum length of a name in `tls_clients`, in bytes. The same as the limit for names read from
/// certificates.
const MAX_NAME_BYTES: usize = 1024;
/// Value of `tls_clients` that allows all clients with TLS.
const ANY: &str = "any";

/// NBD clients that may use a device: the value of `tls_clients`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TlsClients {
    /// All clients with TLS.
    Any,
    /// Clients whose certificate contains one of these names.
    Named(Vec<String>),
}

impl TlsClients {
    /// Parses the value of `tls_clients`: `any`, or names separated by `+`.
    ///
    /// # Errors
    /// Returns the reason, which the caller puts after `KEY=TEXT: `.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text == ANY {
            return Ok(Self::Any);
        }
        let names: Vec<String> = text.split('+').map(str::to_owned).collect();
        let is_name = |name: &String| {
            (1..=MAX_NAME_BYTES).contains(&name.len())
                && name.trim() == name
                && !name.contains(|c: char| c.is_control())
        };
        if names.len() > MAX_NAMES || !names.iter().all(is_name) {
            return Err("must be any, or names in the certificates of clients: NAME or NAME+NAME".into());
        }
        Ok(Self::Named(names))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tls_clients_parse_any_or_names() {
        let named = |names: &[&str]| TlsClients::Named(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!(TlsClients::parse("any"), Ok(TlsClients::Any));
        assert_eq!(TlsClients::parse("vm 1+spiffe://a/b+*.x"), Ok(named(&["vm 1", "spiffe://a/b", "*.x"])));
        for text in ["", "+", "a+", "a++b", " a", "a\tb", &"x".repeat(1025), &["x"; 65].join("+")] {
            assert!(TlsClients::parse(text).is_err(), "{text}");
        }
    }
}
