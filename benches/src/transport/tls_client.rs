//! NBD client with TLS (rustls) that keeps requests in flight: fixed newstyle handshake, simple
//! replies, the default export. The client is the same for all measured servers.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use freestone_testkit::Rng;
use freestone_testkit::nbd::handshake;
use freestone_testkit::nbd::wire::{CLIENT_FLAGS, READ, SIMPLE_REPLY_MAGIC, WRITE, request_header};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use super::fio_nbd::Direction;

const REPLY_WAIT_MAX: Duration = Duration::from_secs(30);
const REPLY_BYTES: usize = 16;
/// Size of the receive buffers, for TLS records and for decrypted data.
const RECEIVE_BYTES: usize = 256 << 10;

#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub direction: Direction,
    pub block_bytes: usize,
    pub depth: usize,
    pub time: Duration,
    pub seed: u64,
}

pub struct Client {
    tls: ClientConnection,
    socket: UnixStream,
    /// Received TLS records.
    sealed: BufReader<UnixStream>,
    size: u64,
}

impl Client {
    /// Connects, and verifies the server with the CA certificate in the directory `tls`.
    pub fn connect(socket: &Path, tls: &Path) -> Result<Self> {
        let mut socket = UnixStream::connect(socket)?;
        socket.set_read_timeout(Some(REPLY_WAIT_MAX))?;
        socket.set_write_timeout(Some(REPLY_WAIT_MAX))?;
        handshake::greet(&mut socket, CLIENT_FLAGS)?;
        handshake::starttls(&mut socket)?;
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(tls.join("ca-cert.pem"))?)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let mut tls = ClientConnection::new(Arc::new(config), ServerName::try_from("localhost")?)?;
        let mut stream = rustls::Stream::new(&mut tls, &mut socket);
        let (size, _) = handshake::export_name(&mut stream, "", true)?;
        let sealed = BufReader::with_capacity(RECEIVE_BYTES, socket.try_clone()?);
        Ok(Self { tls, socket, sealed, size })
    }

    /// Returns the name of the negotiated cipher suite, for the report.
    pub fn cipher(&self) -> String {
        let suite = self.tls.negotiated_cipher_suite();
        suite.map_or_else(String::new, |suite| format!("{:?}", suite.suite()))
    }

    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let n = self.tls.writer().write(rest)?;
            rest = &rest[n..];
            while self.tls.wants_write() {
                self.tls.write_tls(&mut self.socket)?;
            }
        }
        Ok(())
    }

    /// Receives and decrypts at least one byte. Returns the number of bytes in `into`.
    fn receive(&mut self, into: &mut [u8]) -> Result<usize> {
        loop {
            match self.tls.reader().read(into) {
                Ok(0) => anyhow::bail!("the server closed the connection"),
                Ok(n) => return Ok(n),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
            if self.sealed.buffer().is_empty() {
                ensure!(!self.sealed.fill_buf()?.is_empty(), "the server closed the connection");
            }
            let mut records = self.sealed.buffer();
            let before = records.len();
            self.tls.read_tls(&mut records)?;
            let taken = before - records.len();
            self.sealed.consume(taken);
            self.tls.process_new_packets()?;
            while self.tls.wants_write() {
                self.tls.write_tls(&mut self.socket)?;
            }
        }
    }

    /// Keeps requests in flight for the time of the load. Returns the number of completed requests
    /// and the duration.
    pub fn run(&mut self, load: Load) -> Result<(u64, Duration)> {
        let Load { direction, block_bytes, depth, time, seed } = load;
        let blocks = self.size / block_bytes as u64;
        ensure!(blocks > 0, "the export is smaller than a request");
        let mut rng = Rng::new(seed);
        let data: Vec<u8> = (0..block_bytes).map(|_| rng.word() as u8).collect();
        let (command, payload) = match direction {
            Direction::Read => (READ, &[][..]),
            Direction::Write => (WRITE, &data[..]),
        };
        let reply_bytes = REPLY_BYTES + if direction == Direction::Read { block_bytes } else { 0 };
        let mut received = vec![0; RECEIVE_BYTES.max(reply_bytes)];
        let (mut buffered, mut completed, mut submitted) = (0, 0_u64, 0_u64);
        let start = Instant::now();
        let mut due = depth as u64;
        loop {
            let mut bytes = Vec::with_capacity(due as usize * (28 + payload.len()));
            for _ in 0..due {
                submitted += 1;
                let offset = rng.below(blocks) * block_bytes as u64;
                bytes.extend_from_slice(&request_header(0, command, submitted, offset, block_bytes as u32));
                bytes.extend(payload);
            }
            self.send(&bytes)?;
            if completed == submitted {
                return Ok((completed, start.elapsed()));
            }
            buffered += self.receive(&mut received[buffered..])?;
            let whole = buffered / reply_bytes;
            for reply in received[..whole * reply_bytes].chunks_exact(reply_bytes) {
                let is_good = reply[..4] == SIMPLE_REPLY_MAGIC.to_be_bytes() && reply[4..8] == [0; 4];
                ensure!(is_good, "not a successful reply: {:?}", &reply[..REPLY_BYTES]);
            }
            received.copy_within(whole * reply_bytes..buffered, 0);
            buffered -= whole * reply_bytes;
            completed += whole as u64;
            due = if start.elapsed() < time { whole as u64 } else { 0 };
        }
    }
}
