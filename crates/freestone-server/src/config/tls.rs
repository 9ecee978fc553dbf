//! TLS settings of the NBD server: the keys `tls`, `tls_cert`, `tls_key`, `tls_client_ca`,
//! `tls_client_crl` and `allow_plaintext`.

use std::path::{Path, PathBuf};

use freestone_spec::path_text;
use toml::de::DeValue;

/// TLS mode of an NBD server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerTlsMode {
    /// The server does not offer TLS.
    Off,
    /// The server offers TLS. Devices with `tls_clients` require it.
    On,
    /// The server requires TLS.
    Require,
}

impl ServerTlsMode {
    /// Parses the value of `tls`: `off`, `on` or `require`.
    ///
    /// # Errors
    /// Returns the reason, which the caller puts after `KEY=TEXT: `.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "on" => Ok(Self::On),
            "require" => Ok(Self::Require),
            _ => Err("must be off, on or require".into()),
        }
    }

    /// Returns the mode as the value of `tls`.
    pub fn text(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
            Self::Require => "require",
        }
    }
}

/// TLS settings of an NBD server. Values that are `None` have their defaults.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct TlsWords {
    /// TLS mode of the server.
    pub tls: Option<ServerTlsMode>,
    /// Path of the file with the server's certificate.
    pub cert: Option<PathBuf>,
    /// Path of the file with the private key of the certificate.
    pub key: Option<PathBuf>,
    /// Path of the file with the certificate authorities of client certificates.
    pub client_ca: Option<PathBuf>,
    /// Path of the file with the list of revoked client certificates.
    pub client_crl: Option<PathBuf>,
    /// True if clients on other machines may connect without TLS.
    pub allow_plaintext: Option<bool>,
}

impl TlsWords {
    /// Sets the value of a key of the configuration file.
    ///
    /// # Errors
    /// Returns a message that names the key.
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
            "tls" => {
                self.tls = Some(ServerTlsMode::parse(text).map_err(|why| format!("{key}={text}: {why}"))?);
            }
            "tls_cert" => self.cert = Some(PathBuf::from(&**text)),
            "tls_key" => self.key = Some(PathBuf::from(&**text)),
            "tls_client_ca" => self.client_ca = Some(PathBuf::from(&**text)),
            _ => self.client_crl = Some(PathBuf::from(&**text)),
        }
        Ok(())
    }

    /// Returns these values. Values that are not set are taken from `others`.
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

    /// Returns each key with its value as text, or `None` if the value is not set.
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

    /// Replaces relative paths by absolute ones that start at the directory `base`.
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
