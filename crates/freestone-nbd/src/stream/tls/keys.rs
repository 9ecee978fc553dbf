//! The keys of a TLS connection, and their update.

use std::cell::{Cell, RefCell};

use rustls::crypto::cipher::{AeadKey, Iv, MessageDecrypter, MessageEncrypter};
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use rustls::{ConnectionTrafficSecrets, Error, SupportedCipherSuite};

/// Keys of both directions, used only by the connection's thread. TLS 1.3 can update them.
pub struct Keys {
    kernel: RefCell<KernelConnection<ServerConnectionData>>,
    /// Set if the client requested an update of the server's key.
    update_requested: Cell<bool>,
}

impl Keys {
    /// Creates the keys from a finished handshake.
    pub fn new(kernel: KernelConnection<ServerConnectionData>) -> Self {
        Self { kernel: RefCell::new(kernel), update_requested: Cell::new(false) }
    }

    fn suite(&self) -> SupportedCipherSuite {
        self.kernel.borrow().negotiated_cipher_suite()
    }

    /// Returns the maximum number of records encrypted with one key.
    pub fn records_max(&self) -> u64 {
        let suite = self.suite();
        let common = match &suite {
            SupportedCipherSuite::Tls13(suite) => &suite.common,
            SupportedCipherSuite::Tls12(suite) => &suite.common,
        };
        common.confidentiality_limit
    }

    /// Returns true if keys can be updated, which needs TLS 1.3.
    pub fn can_change(&self) -> bool {
        matches!(self.suite(), SupportedCipherSuite::Tls13(_))
    }

    /// Records that the client has updated its key and requests the same from the server.
    pub fn request_update(&self) {
        self.update_requested.set(true);
    }

    /// Returns true if the client requested a key update since the last call.
    #[inline]
    pub fn take_update_request(&self) -> bool {
        self.update_requested.replace(false)
    }

    /// Creates the encrypter for these secrets.
    pub fn encrypter(&self, secrets: ConnectionTrafficSecrets) -> Result<Box<dyn MessageEncrypter>, Error> {
        let (key, iv) = parts(secrets)?;
        Ok(match self.suite() {
            SupportedCipherSuite::Tls13(suite) => suite.aead_alg.encrypter(key, iv),
            SupportedCipherSuite::Tls12(suite) => {
                let (fixed, explicit) = iv.as_ref().split_at(suite.aead_alg.key_block_shape().fixed_iv_len);
                suite.aead_alg.encrypter(key, fixed, explicit)
            }
        })
    }

    /// Creates the decrypter for these secrets.
    pub fn decrypter(&self, secrets: ConnectionTrafficSecrets) -> Result<Box<dyn MessageDecrypter>, Error> {
        let (key, iv) = parts(secrets)?;
        Ok(match self.suite() {
            SupportedCipherSuite::Tls13(suite) => suite.aead_alg.decrypter(key, iv),
            SupportedCipherSuite::Tls12(suite) => {
                let fixed = suite.aead_alg.key_block_shape().fixed_iv_len;
                suite.aead_alg.decrypter(key, &iv.as_ref()[..fixed])
            }
        })
    }

    /// Updates the key for received data. Returns the new decrypter and its first record number.
    pub fn next_decrypter(&self) -> Result<(u64, Box<dyn MessageDecrypter>), Error> {
        let (number, secrets) = self.kernel.borrow_mut().update_rx_secret()?;
        Ok((number, self.decrypter(secrets)?))
    }

    /// Updates the key for sent data. Returns the new encrypter and its first record number. The caller must
    /// send the update message with the old key first.
    pub fn next_encrypter(&self) -> Result<(u64, Box<dyn MessageEncrypter>), Error> {
        let (number, secrets) = self.kernel.borrow_mut().update_tx_secret()?;
        Ok((number, self.encrypter(secrets)?))
    }
}

fn parts(secrets: ConnectionTrafficSecrets) -> Result<(AeadKey, Iv), Error> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => Ok((key, iv)),
        _ => Err(Error::General("unknown cipher".into())),
    }
}
