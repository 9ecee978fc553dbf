//! TLS of the NBD server: the options that say so, and the files that they name.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::Args;
use freestone_nbd::{Address, Clients, Credentials, Server, TlsFiles, TlsMode};
use freestone_spec::kinds::Spec;
use freestone_spec::tls::{TlsClients, TlsWord, TlsWords};

use crate::control::protocol::Fault;
use crate::error::Usage;
use crate::exposure;

const TLS_HELP: &str = "TLS for NBD: off; on, for clients that want it and devices with tls_clients; require, for \
                        all clients [default: off]";
const CERT_HELP: &str = "The server's certificate, PEM; those between it and the authority behind it. SIGHUP reads the files again";
const CA_HELP: &str = "Clients must show a certificate that one of these authorities has signed, PEM";
const CRL_HELP: &str =
    "Certificates of clients that are revoked: a list of each authority that stands behind clients, PEM";
const PLAINTEXT_HELP: &str = "Listen also where other machines can connect without TLS: who reaches the port reads and \
                              writes";

/// The options.
#[derive(Debug, Default, Args)]
pub struct TlsArgs {
    /// For whom it is.
    #[arg(long, value_name = "MODE", help = TLS_HELP, value_parser = TlsWord::parse)]
    tls: Option<TlsWord>,
    /// The certificate.
    #[arg(long, value_name = "FILE", help = CERT_HELP)]
    tls_cert: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(long, value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// Of clients.
    #[arg(long, value_name = "FILE", help = CA_HELP)]
    tls_client_ca: Option<PathBuf>,
    /// Not of these.
    #[arg(long, value_name = "FILE", help = CRL_HELP)]
    tls_client_crl: Option<PathBuf>,
    /// In clear.
    #[arg(long, help = PLAINTEXT_HELP)]
    allow_plaintext: bool,
}

/// As it was said, and checked without opening a file.
#[derive(Debug, Default, Clone)]
pub struct Tls {
    /// What was said, with absolute paths.
    pub words: TlsWords,
    on: Option<(TlsMode, TlsFiles)>,
}

impl Tls {
    /// What the command line says, and of the rest what the file at that path says.
    pub fn new(args: &TlsArgs, file: Option<(&TlsWords, &Path, &Path)>) -> Result<Self> {
        let TlsArgs { tls, tls_cert, tls_key, tls_client_ca, tls_client_crl, allow_plaintext } = args;
        let here = env::current_dir().context("the working directory cannot be found")?;
        let words = TlsWords {
            tls: *tls,
            cert: tls_cert.clone(),
            key: tls_key.clone(),
            client_ca: tls_client_ca.clone(),
            client_crl: tls_client_crl.clone(),
            allow_plaintext: allow_plaintext.then_some(true),
        };
        let mut words = words.with_base(&here);
        let mut at = String::new();
        if let Some((said, path, base)) = file {
            if words == TlsWords::default() {
                at = format!("{}: ", path.display());
            }
            words = words.or(said.clone().with_base(base));
        }
        let on = words_to_files(&words).map_err(|why| Usage(format!("{at}{why}")))?;
        Ok(Self { words, on })
    }

    /// For whom it is.
    pub fn mode(&self) -> Option<TlsMode> {
        self.on.as_ref().map(|(mode, _)| *mode)
    }

    /// Reads the files and has the server use them.
    pub fn begin(&self, server: &Server) -> Result<(), Usage> {
        if let Some((mode, files)) = &self.on {
            server.secure(*mode, Credentials::load(files).map_err(|why| Usage(why.to_string()))?);
        }
        Ok(())
    }

    /// Reads the files again, for who connects from now on. Without TLS nothing happens.
    ///
    /// # Errors
    /// A sentence; all is as it was.
    pub fn renew(&self, server: &Server) -> Result<(), String> {
        if let Some((_, files)) = &self.on {
            server.renew(Credentials::load(files).map_err(|why| why.to_string())?);
        }
        Ok(())
    }

    /// Refuses a device for clients who would not be known.
    pub fn check_device(&self, spec: &Spec) -> Result<(), Fault> {
        let why = match (&spec.tls_clients, &self.on) {
            (None, _) | (Some(TlsClients::Any), Some(_)) => return Ok(()),
            (Some(_), None) => "this server has no TLS; it is started with --tls on or require",
            (Some(TlsClients::Named(_)), Some((_, files))) if files.client_ca.is_some() => return Ok(()),
            (Some(TlsClients::Named(_)), Some(_)) => {
                "clients of this server show no certificates; it is started with --tls-client-ca"
            }
        };
        Err(Fault::invalid(format!("{}: tls_clients: {why}", spec.name)))
    }

    /// Refuses an address where others than this machine's users come in clear, unless that was
    /// said; then it is told.
    ///
    /// # Errors
    /// A sentence.
    pub fn check_address(&self, address: &Address) -> Result<(), String> {
        if self.is_required() || !exposure::is_open(address) {
            return Ok(());
        }
        if self.words.allow_plaintext == Some(true) {
            exposure::warn(address);
            return Ok(());
        }
        Err(exposure::refusal(address))
    }

    /// Whether nobody comes in clear.
    pub fn is_required(&self) -> bool {
        self.mode() == Some(TlsMode::Require)
    }
}

/// Who sees an export.
pub fn clients_of(spec: &Spec) -> Clients {
    match &spec.tls_clients {
        None => Clients::All,
        Some(TlsClients::Any) => Clients::Secure,
        Some(TlsClients::Named(names)) => Clients::Named(names.clone().into()),
    }
}

fn words_to_files(words: &TlsWords) -> Result<Option<(TlsMode, TlsFiles)>, String> {
    let mode = match words.tls {
        Some(TlsWord::On) => TlsMode::On,
        Some(TlsWord::Require) => TlsMode::Require,
        None | Some(TlsWord::Off) => {
            let said = [
                ("tls_cert", &words.cert),
                ("tls_key", &words.key),
                ("tls_client_ca", &words.client_ca),
                ("tls_client_crl", &words.client_crl),
            ];
            return match said.iter().find(|(_, path)| path.is_some()) {
                // Who turns it off for once does not have to take the files out.
                Some((key, _)) if words.tls.is_none() => {
                    Err(format!("{key}: says nothing without tls: on, or require"))
                }
                _ => Ok(None),
            };
        }
    };
    let (Some(cert), Some(key)) = (words.cert.clone(), words.key.clone()) else {
        let missing = if words.cert.is_none() { "tls_cert" } else { "tls_key" };
        let word = words.tls.map_or("on", TlsWord::text);
        return Err(format!("tls={word}: needs tls_cert and tls_key; {missing} is missing"));
    };
    let (client_ca, client_crl) = (words.client_ca.clone(), words.client_crl.clone());
    if client_ca.is_none() && client_crl.is_some() {
        return Err("tls_client_crl: says nothing without tls_client_ca".to_owned());
    }
    Ok(Some((mode, TlsFiles { cert, key, client_ca, client_crl })))
}
