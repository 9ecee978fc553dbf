//! TLS of the NBD server: options and certificate files.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::Args;
use freestone_control::protocol::RpcError;
use freestone_nbd::{Address, Credentials, Server, TlsFiles, TlsMode, Visibility};
use freestone_spec::kinds::Spec;
use freestone_spec::tls::TlsClients;

use crate::config::tls::{ServerTlsMode, TlsWords};
use crate::settings::exposure;
use crate::usage::Usage;

const TLS_HELP: &str = "TLS for NBD: off; on (for clients that ask for it, and for devices with tls_clients); require (for \
    all clients) [default: off]";
const CERT_HELP: &str =
    "Certificate of the server and its intermediate certificates, PEM; SIGHUP reloads all files of --tls";
const CA_HELP: &str = "Require client certificates signed by one of these authorities, PEM";
const CRL_HELP: &str = "Revocation lists for client certificates, one for each authority, PEM";
const PLAINTEXT_HELP: &str =
    "Accept connections from other machines without TLS; anybody who reaches the port can read and write";

/// Options for TLS.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "TLS")]
pub struct TlsArgs {
    /// TLS mode.
    #[arg(long, value_name = "MODE", help = TLS_HELP, value_parser = ServerTlsMode::parse)]
    tls: Option<ServerTlsMode>,
    /// Certificate of the server.
    #[arg(long, value_name = "FILE", help = CERT_HELP)]
    tls_cert: Option<PathBuf>,
    /// Private key of the server, PEM
    #[arg(long, value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// Authorities of client certificates.
    #[arg(long, value_name = "FILE", help = CA_HELP)]
    tls_client_ca: Option<PathBuf>,
    /// Revocation lists of client certificates.
    #[arg(long, value_name = "FILE", help = CRL_HELP)]
    tls_client_crl: Option<PathBuf>,
    /// Permits connections of other machines without TLS.
    #[arg(long, help = PLAINTEXT_HELP)]
    allow_plaintext: bool,
}

/// TLS settings, checked without opening a file.
#[derive(Debug, Default, Clone)]
pub struct Tls {
    /// Settings as given in the options and the configuration file, with absolute paths.
    pub words: TlsWords,
    /// TLS mode and certificate files, or `None` without TLS.
    on: Option<(TlsMode, TlsFiles)>,
}

impl Tls {
    /// Combines the options with the keys of the configuration file. The tuple contains settings and path of the file,
    /// and the directory of its relative paths.
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

    /// Returns the TLS mode, or `None` without TLS.
    pub fn mode(&self) -> Option<TlsMode> {
        self.on.as_ref().map(|(mode, _)| *mode)
    }

    /// Reads the certificate files and enables TLS in the NBD server.
    pub fn begin(&self, server: &Server) -> Result<(), Usage> {
        if let Some((mode, files)) = &self.on {
            server.enable_tls(*mode, Credentials::load(files).map_err(|why| Usage(why.to_string()))?);
        }
        Ok(())
    }

    /// Reads the certificate files again, for new connections. Does nothing without TLS.
    ///
    /// # Errors
    /// Returns the message if a file is invalid. The server then keeps using the previous files.
    pub fn renew(&self, server: &Server) -> Result<(), String> {
        if let Some((_, files)) = &self.on {
            server.renew_credentials(Credentials::load(files).map_err(|why| why.to_string())?);
        }
        Ok(())
    }

    /// Fails for a device with `tls_clients` if the server cannot identify clients.
    pub fn check_device(&self, spec: &Spec) -> Result<(), RpcError> {
        let why = match (&spec.tls_clients, &self.on) {
            (None, _) | (Some(TlsClients::Any), Some(_)) => return Ok(()),
            (Some(_), None) => "this server has no TLS; start it with --tls on or require",
            (Some(TlsClients::Named(_)), Some((_, files))) if files.client_ca.is_some() => return Ok(()),
            (Some(TlsClients::Named(_)), Some(_)) => {
                "this server does not request client certificates; start it with --tls-client-ca"
            }
        };
        refuse!(invalid, "{}: tls_clients: {why}", spec.name)
    }

    /// Fails for an address where other machines could connect without TLS. With `--allow-plaintext`, only logs a
    /// warning.
    ///
    /// # Errors
    /// Returns the message for such an address.
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

    /// Returns true if TLS is required of all clients.
    pub fn is_required(&self) -> bool {
        self.mode() == Some(TlsMode::Required)
    }
}

/// Returns which clients may see and use the exports of the device, from its key `tls_clients`.
pub fn clients_of(spec: &Spec) -> Visibility {
    match &spec.tls_clients {
        None => Visibility::All,
        Some(TlsClients::Any) => Visibility::Tls,
        Some(TlsClients::Named(names)) => Visibility::Certificates(names.clone().into()),
    }
}

fn words_to_files(words: &TlsWords) -> Result<Option<(TlsMode, TlsFiles)>, String> {
    let mode = match words.tls {
        Some(ServerTlsMode::On) => TlsMode::Optional,
        Some(ServerTlsMode::Require) => TlsMode::Required,
        None | Some(ServerTlsMode::Off) => {
            let said = [
                ("tls_cert", &words.cert),
                ("tls_key", &words.key),
                ("tls_client_ca", &words.client_ca),
                ("tls_client_crl", &words.client_crl),
            ];
            return match said.iter().find(|(_, path)| path.is_some()) {
                // With an explicit `tls=off`, the files may remain configured.
                Some((key, _)) if words.tls.is_none() => Err(format!("{key}: needs tls=on or tls=require")),
                _ => Ok(None),
            };
        }
    };
    let (Some(cert), Some(key)) = (words.cert.clone(), words.key.clone()) else {
        let missing = if words.cert.is_none() { "tls_cert" } else { "tls_key" };
        let word = words.tls.map_or("on", ServerTlsMode::text);
        return Err(format!("tls={word}: needs tls_cert and tls_key; {missing} is missing"));
    };
    let (client_ca, client_crl) = (words.client_ca.clone(), words.client_crl.clone());
    if client_ca.is_none() && client_crl.is_some() {
        return Err("tls_client_crl: needs tls_client_ca".to_owned());
    }
    Ok(Some((mode, TlsFiles { cert, key, client_ca, client_crl })))
}
