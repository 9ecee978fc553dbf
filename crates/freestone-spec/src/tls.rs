//! TLS of NBD, as it is written: `tls`, `tls_cert`, `tls_key`, `tls_client_ca`, `tls_client_crl` and
//! `allow_plaintext` of a server, `tls_clients` of a device.

use std::path::{Path, PathBuf};

use toml::de::DeValue;

use crate::path_text;

/// Most names of one device.
const MAX_NAMES: usize = 64;
/// Longest name in bytes, as long as one in a certificate may be read.
const MAX_NAME_BYTES: usize = 1024;
/// Whoever comes by TLS.
const ANY: &str = "any";

/// Which clients see a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TlsClients {
    /// Those that come by TLS.
    Any,
    /// Those whose certificate has one of these names.
    Named(Vec<String>),
}

impl TlsClients {
    /// Reads `any`, or names with `+` between them.
    ///
    /// # Errors
    /// Half a sentence that follows the text.
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

/// For whom TLS is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsWord {
    /// For nobody.
    Off,
    /// For who wants it, and for devices that need it.
    On,
    /// For all.
    Require,
}

impl TlsWord {
    /// Reads one of the three words.
    ///
    /// # Errors
    /// Half a sentence that follows the text.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "on" => Ok(Self::On),
            "require" => Ok(Self::Require),
            _ => Err("must be off, on or require".into()),
        }
    }

    /// As it is written.
    pub fn text(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
            Self::Require => "require",
        }
    }
}

/// What was said of TLS for a server.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct TlsWords {
    /// For whom it is.
    pub tls: Option<TlsWord>,
    /// The server's certificate.
    pub cert: Option<PathBuf>,
    /// Its key.
    pub key: Option<PathBuf>,
    /// Who stands behind the certificates of clients.
    pub client_ca: Option<PathBuf>,
    /// Which of these are trusted no more.
    pub client_crl: Option<PathBuf>,
    /// Others than this machine's users may come in clear.
    pub allow_plaintext: Option<bool>,
}

impl TlsWords {
    /// Takes one of its keys of a file.
    ///
    /// # Errors
    /// A sentence.
    pub fn take(&mut self, key: &str, value: &DeValue<'_>) -> Result<(), String> {
        if key == "allow_plaintext" {
            let DeValue::Boolean(yes) = value else { return Err(format!("{key}: must be true or false")) };
            self.allow_plaintext = Some(*yes);
            return Ok(());
        }
        let DeValue::String(text) = value else {
            return Err(match key {
                "tls" => "tls: must be 'off', 'on' or 'require'".to_owned(),
                _ => format!("{key}: must be a path as a text"),
            });
        };
        match key {
            "tls" => self.tls = Some(TlsWord::parse(text).map_err(|why| format!("{key}={text}: {why}"))?),
            "tls_cert" => self.cert = Some(PathBuf::from(&**text)),
            "tls_key" => self.key = Some(PathBuf::from(&**text)),
            "tls_client_ca" => self.client_ca = Some(PathBuf::from(&**text)),
            _ => self.client_crl = Some(PathBuf::from(&**text)),
        }
        Ok(())
    }

    /// What these say, and of the rest what `others` say.
    #[must_use]
    pub fn or(self, others: Self) -> Self {
        Self {
            tls: self.tls.or(others.tls),
            cert: self.cert.or(others.cert),
            key: self.key.or(others.key),
            client_ca: self.client_ca.or(others.client_ca),
            client_crl: self.client_crl.or(others.client_crl),
            allow_plaintext: self.allow_plaintext.or(others.allow_plaintext),
        }
    }

    /// The keys with what was said of each, as text.
    pub fn texts(&self) -> [(&'static str, Option<String>); 6] {
        let path = |path: &Option<PathBuf>| path.as_deref().map(path_text::text);
        let yes = |yes| if yes { "yes" } else { "no" }.to_owned();
        [
            ("tls", self.tls.map(|word| word.text().to_owned())),
            ("tls_cert", path(&self.cert)),
            ("tls_key", path(&self.key)),
            ("tls_client_ca", path(&self.client_ca)),
            ("tls_client_crl", path(&self.client_crl)),
            ("allow_plaintext", self.allow_plaintext.map(yes)),
        ]
    }

    /// The same with paths that start at `base`.
    #[must_use]
    pub fn with_base(self, base: &Path) -> Self {
        let at = |path: Option<PathBuf>| path.map(|path| base.join(path));
        Self {
            cert: at(self.cert),
            key: at(self.key),
            client_ca: at(self.client_ca),
            client_crl: at(self.client_crl),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_of_a_device() {
        let named = |names: &[&str]| TlsClients::Named(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!(TlsClients::parse("any"), Ok(TlsClients::Any));
        assert_eq!(TlsClients::parse("vm 1+spiffe://a/b+*.x"), Ok(named(&["vm 1", "spiffe://a/b", "*.x"])));
        for text in ["", "+", "a+", "a++b", " a", "a\tb", &"x".repeat(1025), &["x"; 65].join("+")] {
            assert!(TlsClients::parse(text).is_err(), "{text}");
        }
    }
}
