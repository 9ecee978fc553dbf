//! A server with TLS, and clients that connect to the server.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use freestone_core::device::Device;
use freestone_nbd::{
    Address, Credentials, ExportOptions, Limits, Server, TlsFiles, TlsMode, Visibility, Workers,
};
use freestone_testkit::certificates::{Authority, Usage};
use freestone_testkit::nbd::handshake;
use freestone_testkit::nbd::prelude::{Client, Headers};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, SupportedProtocolVersion};

use super::{PATIENCE, connect};

/// A server with TLS at a Unix socket, and the authority that signed the server's certificate.
pub struct Secure {
    pub server: Server,
    pub address: Address,
    pub ours: Authority,
    pub directory: tempfile::TempDir,
}

impl Secure {
    pub fn new(mode: TlsMode) -> Self {
        Self::with(mode, Limits::default(), true)
    }

    /// Creates a server with TLS. If `verify` is true, clients need a certificate of the server's authority.
    pub fn with(mode: TlsMode, limits: Limits, verify: bool) -> Self {
        Self::over(Server::with_workers(limits, &Workers::new(2)), mode, verify)
    }

    fn over(server: Server, mode: TlsMode, verify: bool) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let ours = Authority::new(directory.path().join("tls"));
        ours.sign("server", "localhost", Usage::Server);
        ours.sign("alice", "alice.example", Usage::Client);
        server.enable_tls(mode, Credentials::load(&files(&ours, verify)).unwrap());
        let address = server.listen(&Address::Unix(directory.path().join("nbd.sock"))).unwrap();
        Self { server, address, ours, directory }
    }

    pub fn publish(&self, name: &str, device: &Arc<impl Device + 'static>, clients: Visibility) {
        let options =
            ExportOptions { default: name == "disk", visible_to: clients, ..ExportOptions::default() };
        let device: Arc<dyn Device> = device.clone();
        self.server.publish(&self.address, name, device, options).unwrap();
    }

    /// Returns a client without TLS, after the NBD greeting.
    pub fn clear(&self) -> Client {
        let mut client = connect(&self.address);
        client.greet(3);
        client
    }

    pub fn socket(&self) -> UnixStream {
        let Address::Unix(path) = &self.address else { unreachable!("a Unix address") };
        let socket = UnixStream::connect(path).unwrap();
        socket.set_read_timeout(PATIENCE).unwrap();
        socket
    }

    /// Returns a client with TLS and the certificate of "alice", after the NBD greeting.
    pub fn client(&self) -> Client {
        self.client_as(Some("alice"), rustls::ALL_VERSIONS)
    }

    /// Returns a client with TLS that presents the certificate of `who`, or no certificate.
    pub fn client_as(&self, who: Option<&str>, versions: &[&'static SupportedProtocolVersion]) -> Client {
        Client::over(self.stream(&self.ours, who, versions))
    }

    /// Returns a connection on which the server has acknowledged `OPT_STARTTLS`, before the TLS handshake.
    pub fn upgraded(&self) -> UnixStream {
        let mut socket = self.socket();
        handshake::greet(&mut socket, 3).unwrap();
        handshake::starttls(&mut socket).unwrap();
        socket
    }

    /// Returns a TLS stream that presents the certificate which the authority `of` signed for `who`. The TLS
    /// handshake takes place with the first read or write.
    pub fn stream(
        &self,
        of: &Authority,
        who: Option<&str>,
        versions: &[&'static SupportedProtocolVersion],
    ) -> StreamOwned<ClientConnection, UnixStream> {
        StreamOwned::new(connection(&self.ours, of, who, versions), self.upgraded())
    }

    /// Checks that no connection is open, and that the server still serves a new client.
    pub fn assert_sound(&self) {
        super::eventually(|| self.server.stats().connections == 0);
        self.assert_serves();
        super::eventually(|| self.server.stats().connections == 0);
    }

    /// Checks that the server serves a new client with TLS.
    pub fn assert_serves(&self) {
        let mut client = self.client();
        client.agree(Headers::Structured);
        client.go("disk");
        assert_eq!(client.read(0, 512).unwrap().len(), 512);
        client.disconnect();
    }
}

pub fn files(ours: &Authority, verify: bool) -> TlsFiles {
    TlsFiles {
        cert: ours.file("server-cert.pem"),
        key: ours.file("server-key.pem"),
        client_ca: verify.then(|| ours.file("ca-cert.pem")),
        client_crl: None,
    }
}

/// Returns the client side of a TLS connection, before the handshake.
pub fn connection(
    trusts: &Authority,
    of: &Authority,
    who: Option<&str>,
    versions: &[&'static SupportedProtocolVersion],
) -> ClientConnection {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(trusts.file("ca-cert.pem")).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots);
    let config = match who {
        None => config.with_no_client_auth(),
        Some(who) => {
            let chain = vec![CertificateDer::from_pem_file(of.file(&format!("{who}-cert.pem"))).unwrap()];
            let key = PrivateKeyDer::from_pem_file(of.file(&format!("{who}-key.pem"))).unwrap();
            config.with_client_auth_cert(chain, key).unwrap()
        }
    };
    let server = ServerName::try_from("localhost").unwrap();
    ClientConnection::new(Arc::new(config), server).unwrap()
}

/// Checks that the connection ends and that the server sends no plaintext, whatever the client sent before.
pub fn assert_ends(socket: &mut (impl Read + Write)) {
    let mut rest = [0; 4096];
    loop {
        match socket.read(&mut rest) {
            Ok(0) => return,
            Ok(n) => assert!(!rest[..n].windows(8).any(|bytes| bytes == b"IHAVEOPT"), "plaintext was sent"),
            Err(error) => {
                use std::io::ErrorKind::{ConnectionReset, InvalidData, UnexpectedEof};
                assert!(matches!(error.kind(), ConnectionReset | InvalidData | UnexpectedEof), "{error}");
                return;
            }
        }
    }
}
