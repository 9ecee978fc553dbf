//! The keys of a connection, and how they are exchanged for new ones.

use std::cell::{Cell, RefCell};

use rustls::crypto::cipher::{AeadKey, Iv, MessageDecrypter, MessageEncrypter};
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use rustls::{ConnectionTrafficSecrets, Error, SupportedCipherSuite};

/// Keys of both directions. TLS 1.3 can exchange them; the thread of the connection has both.
pub struct Keys {
    kernel: RefCell<KernelConnection<ServerConnectionData>>,
    /// The client wants new ones in the other direction, too.
    answer_due: Cell<bool>,
}

impl Keys {
    /// Those of a finished handshake.
    pub fn new(kernel: KernelConnection<ServerConnectionData>) -> Self {
        Self { kernel: RefCell::new(kernel), answer_due: Cell::new(false) }
    }

    fn suite(&self) -> SupportedCipherSuite {
        self.kernel.borrow().negotiated_cipher_suite()
    }

    /// So many records may be sealed with one key.
    pub fn records_max(&self) -> u64 {
        let suite = self.suite();
        let common = match &suite {
            SupportedCipherSuite::Tls13(suite) => &suite.common,
            SupportedCipherSuite::Tls12(suite) => &suite.common,
        };
        common.confidentiality_limit
    }

    /// Whether keys can be exchanged at all.
    pub fn can_change(&self) -> bool {
        matches!(self.suite(), SupportedCipherSuite::Tls13(_))
    }

    /// The client has exchanged its key, and asks for as much from us.
    pub fn ask_for_answer(&self) {
        self.answer_due.set(true);
    }

    /// Whether it asked; told once.
    #[inline]
    pub fn take_answer_due(&self) -> bool {
        self.answer_due.replace(false)
    }

    /// What seals with these secrets.
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

    /// What opens with these secrets.
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

    /// The next key of what the client sends.
    pub fn next_decrypter(&self) -> Result<(u64, Box<dyn MessageDecrypter>), Error> {
        let (number, secrets) = self.kernel.borrow_mut().update_rx_secret()?;
        Ok((number, self.decrypter(secrets)?))
    }

    /// The next key of what we send; the client is to be told before with the old one.
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
        _ => Err(Error::General("a cipher that is not known here".into())),
    }
}
