//! Handshakes and records with a rustls client, and with invalid data.

use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_testkit::Rng;
use freestone_testkit::certificates::{Authority, Usage};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, SupportedProtocolVersion};

use super::opener::TlsClosed;
use super::settings::{Credentials, TlsFiles};
use super::start::{StartError, TlsConnection, start};
use crate::limits::MAX_HANDSHAKE_BYTES;
use crate::stream::receive::Timeouts;

struct Pair {
    _dir: tempfile::TempDir,
    authority: Authority,
    credentials: Credentials,
}

impl Pair {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::new(dir.path().join("tls"));
        authority.sign("server", "localhost", Usage::Server);
        let files = TlsFiles {
            cert: authority.file("server-cert.pem"),
            key: authority.file("server-key.pem"),
            client_ca: None,
            client_crl: None,
        };
        Self { credentials: Credentials::load(&files).unwrap(), authority, _dir: dir }
    }

    fn client(&self, version: &'static SupportedProtocolVersion) -> ClientConnection {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.authority.file("ca-cert.pem")).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[version])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        ClientConnection::new(Arc::new(config), ServerName::try_from("localhost").unwrap()).unwrap()
    }

    fn start(&self, socket: &UnixStream) -> Result<TlsConnection, StartError> {
        let deadline = Instant::now() + Duration::from_secs(20);
        let timeouts = Timeouts { idle: Duration::from_millis(200), deadline };
        start(self.credentials.config(), socket.as_fd(), timeouts, MAX_HANDSHAKE_BYTES)
    }

    /// Returns both ends after the handshake. The client has sent "early".
    fn both(
        &self,
        version: &'static SupportedProtocolVersion,
    ) -> (TlsConnection, UnixStream, StreamOwned<ClientConnection, UnixStream>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut stream = StreamOwned::new(self.client(version), theirs);
        let client = std::thread::spawn(move || {
            stream.write_all(b"early").unwrap();
            stream
        });
        let started = self.start(&ours).map_err(|_| "no handshake").unwrap();
        (started, ours, client.join().unwrap())
    }
}

#[test]
fn data_behind_handshake_is_kept() {
    let pair = Pair::new();
    for version in [&rustls::version::TLS13, &rustls::version::TLS12] {
        let (mut started, ours, mut stream) = pair.both(version);
        let mut said = started.early.clone();
        stream.write_all(b" and late").unwrap();
        while said.len() < 14 {
            if !started.opener.is_ready() {
                started.opener.receive(ours.as_fd(), RecvFlags::empty(), usize::MAX).unwrap();
            }
            let mut out = [0; 4];
            let n = started.opener.take(&mut out).unwrap();
            said.extend(&out[..n]);
        }
        assert_eq!(said, b"early and late");
        // The close alert is recognized.
        stream.conn.send_close_notify();
        stream.flush().unwrap();
        started.opener.receive(ours.as_fd(), RecvFlags::empty(), usize::MAX).unwrap();
        assert_eq!(started.opener.take(&mut [0; 4]), Err(TlsClosed));
        started.sealer.close(ours.as_fd());
        assert_eq!(stream.read(&mut [0; 4]).unwrap(), 0);
    }
}

#[test]
fn key_is_updated_before_record_limit() {
    let pair = Pair::new();
    let (mut started, ours, mut stream) = pair.both(&rustls::version::TLS13);
    started.sealer.records_max = 3;
    let data: Vec<u8> = (0..900_000_u32).map(|n| (n / 11) as u8).collect();
    let wanted = data.clone();
    let reader = std::thread::spawn(move || {
        let mut got = vec![0; wanted.len()];
        stream.read_exact(&mut got).unwrap();
        assert!(got == wanted);
    });
    started.sealer.send(ours.as_fd(), data.chunks(100_001)).unwrap();
    reader.join().unwrap();
    // TLS 1.2 cannot update keys.
    let (mut started, ours, stream) = pair.both(&rustls::version::TLS12);
    started.sealer.records_max = 3;
    let sent = started.sealer.send(ours.as_fd(), data[..100_000].chunks(16_384));
    assert_eq!(sent, Err(Errno::PROTO));
    drop(stream);
}

#[test]
fn handshake_with_random_bytes_fails() {
    let pair = Pair::new();
    let mut hello = Vec::new();
    pair.client(&rustls::version::TLS13).write_tls(&mut hello).unwrap();
    let mut rng = Rng::new(20);
    for round in 0..600_usize {
        let mut bytes = hello.clone();
        match round % 3 {
            0 => bytes.truncate(round * 7 % hello.len()),
            1 => {
                for _ in 0..=round % 4 {
                    let at = rng.below(bytes.len() as u64) as usize;
                    bytes[at] = rng.word() as u8;
                }
            }
            _ => {
                bytes = vec![0; 1 + rng.below(600) as usize];
                rng.fill(&mut bytes);
                if round % 2 == 0 {
                    bytes.splice(..0, [22, 3, 1, 0, 40]);
                }
            }
        }
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&bytes).unwrap();
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(pair.start(&ours).is_err(), "{round}");
    }
}

#[test]
fn records_with_random_bytes_fail() {
    let pair = Pair::new();
    let mut rng = Rng::new(21);
    for round in 0..120 {
        let version = if round % 2 == 0 { &rustls::version::TLS13 } else { &rustls::version::TLS12 };
        let (mut started, ours, stream) = pair.both(version);
        let mut early = started.early.len();
        while early < 5 {
            if !started.opener.is_ready() {
                started.opener.receive(ours.as_fd(), RecvFlags::empty(), usize::MAX).unwrap();
            }
            early += started.opener.take(&mut [0; 64]).unwrap();
        }
        let mut bytes = vec![0; 1 + rng.below(40_000) as usize];
        rng.fill(&mut bytes);
        if round % 3 > 0 {
            bytes.splice(..0, [[22, 23, 21][round % 3], 3, 3, (round % 70) as u8, round as u8]);
        }
        (&stream.sock).write_all(&bytes).unwrap();
        stream.sock.shutdown(std::net::Shutdown::Write).unwrap();
        loop {
            if started.opener.is_ready() {
                let Ok(n) = started.opener.take(&mut [0; 64]) else { break };
                assert_eq!(n, 0, "random bytes were decrypted");
            } else if started.opener.receive(ours.as_fd(), RecvFlags::empty(), usize::MAX).unwrap() == 0 {
                break;
            }
        }
    }
}
