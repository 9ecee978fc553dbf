//! An NBD server that runs a script for each connection.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use freestone_nbd_client::{Config, Uri};
use freestone_nbd_proto::{
    CommandFlags, INIT_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, RequestHeader, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC, chunk, info, option, reply,
};
use zerocopy::FromBytes as _;

/// Transmission flags `HAS_FLAGS`, `SEND_FLUSH`, `SEND_FUA`, `SEND_TRIM` and `SEND_WRITE_ZEROES`.
pub const FLAGS: u16 = 1 | 4 | 8 | 32 | 64;
pub const SIZE: u64 = 1 << 20;

/// The server's side of one connection. An I/O error ends the script, for example if the client
/// disconnects.
pub struct Peer(pub UnixStream);

pub type PeerResult<T> = Result<T, std::io::Error>;

/// A request of the client, with the data of a write.
#[derive(Debug)]
pub struct ClientRequest {
    pub command: u16,
    pub flags: CommandFlags,
    pub cookie: u64,
    pub offset: u64,
    pub len: u32,
    pub data: Vec<u8>,
}

/// Properties of the export that the server reports.
#[derive(Debug, Clone, Copy)]
pub struct ExportSpec {
    pub size: u64,
    pub flags: u16,
    pub blocks: Option<(u32, u32, u32)>,
    pub structured: bool,
    pub context: bool,
    /// True if the server supports the option `GO`.
    pub go: bool,
}

pub const DEFAULT_EXPORT: ExportSpec =
    ExportSpec { size: SIZE, flags: FLAGS, blocks: None, structured: true, context: true, go: true };

impl Peer {
    pub fn send(&mut self, parts: &[&[u8]]) -> PeerResult<()> {
        self.0.write_all(&parts.concat())
    }

    fn bytes<const N: usize>(&mut self) -> PeerResult<[u8; N]> {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    pub fn greet(&mut self, flags: u16) -> PeerResult<()> {
        self.send(&[&INIT_MAGIC.to_be_bytes(), &OPTION_MAGIC.to_be_bytes(), &flags.to_be_bytes()])?;
        self.bytes::<4>().map(drop)
    }

    /// Reads and ignores everything until the client disconnects.
    pub fn drain(&mut self) -> PeerResult<()> {
        std::io::copy(&mut self.0, &mut std::io::sink()).map(drop)
    }

    /// Reads the next option and its data.
    pub fn option(&mut self) -> PeerResult<(u32, Vec<u8>)> {
        assert_eq!(u64::from_be_bytes(self.bytes()?), OPTION_MAGIC);
        let kind = u32::from_be_bytes(self.bytes()?);
        let mut data = vec![0; u32::from_be_bytes(self.bytes()?) as usize];
        self.0.read_exact(&mut data)?;
        Ok((kind, data))
    }

    pub fn reply(&mut self, option: u32, kind: u32, data: &[u8]) -> PeerResult<()> {
        self.send(&[
            &OPTION_REPLY_MAGIC.to_be_bytes(),
            &option.to_be_bytes(),
            &kind.to_be_bytes(),
            &(data.len() as u32).to_be_bytes(),
            data,
        ])
    }

    pub fn export(&mut self, size: u64, flags: u16) -> PeerResult<()> {
        let data = [&info::EXPORT.to_be_bytes()[..], &size.to_be_bytes(), &flags.to_be_bytes()].concat();
        self.reply(option::GO, reply::INFO, &data)
    }

    pub fn blocks(&mut self, (minimum, preferred, maximum): (u32, u32, u32)) -> PeerResult<()> {
        let mut data = info::BLOCK_SIZE.to_be_bytes().to_vec();
        for size in [minimum, preferred, maximum] {
            data.extend(size.to_be_bytes());
        }
        self.reply(option::GO, reply::INFO, &data)
    }

    /// Performs a valid handshake and reports the export `told`.
    pub fn welcome(&mut self, told: ExportSpec) -> PeerResult<()> {
        self.greet(3)?;
        loop {
            let (kind, _) = self.option()?;
            match kind {
                option::STRUCTURED_REPLY if told.structured => self.reply(kind, reply::ACK, &[])?,
                option::SET_META_CONTEXT if told.context => {
                    let data = [&7_u32.to_be_bytes()[..], b"base:allocation"].concat();
                    self.reply(kind, reply::META_CONTEXT, &data)?;
                    self.reply(kind, reply::ACK, &[])?;
                }
                option::GO if told.go => {
                    self.export(told.size, told.flags)?;
                    if let Some(blocks) = told.blocks {
                        self.blocks(blocks)?;
                    }
                    return self.reply(kind, reply::ACK, &[]);
                }
                option::EXPORT_NAME => {
                    return self.send(&[&told.size.to_be_bytes(), &told.flags.to_be_bytes()]);
                }
                _ => self.reply(kind, reply::ERR_UNSUP, b"not here")?,
            }
        }
    }

    pub fn request(&mut self) -> PeerResult<ClientRequest> {
        let header = self.bytes::<{ size_of::<RequestHeader>() }>()?;
        let header = RequestHeader::read_from_bytes(&header).unwrap();
        let mut data = Vec::new();
        if header.command.get() == freestone_nbd_proto::command::WRITE {
            data = vec![0; header.len.get() as usize];
            self.0.read_exact(&mut data)?;
        }
        Ok(ClientRequest {
            command: header.command.get(),
            flags: CommandFlags::from_bits_retain(header.flags.get()),
            cookie: header.cookie.get(),
            offset: header.offset.get(),
            len: header.len.get(),
            data,
        })
    }

    pub fn simple(&mut self, cookie: u64, error: u32, data: &[u8]) -> PeerResult<()> {
        self.send(&[&SIMPLE_REPLY_MAGIC.to_be_bytes(), &error.to_be_bytes(), &cookie.to_be_bytes(), data])
    }

    pub fn chunk(&mut self, cookie: u64, kind: u16, done: bool, payload: &[&[u8]]) -> PeerResult<()> {
        let payload = payload.concat();
        self.head(cookie, kind, done, payload.len() as u32)?;
        self.send(&[&payload])
    }

    /// Sends the header of a chunk without the payload.
    pub fn head(&mut self, cookie: u64, kind: u16, done: bool, len: u32) -> PeerResult<()> {
        self.send(&[
            &STRUCTURED_REPLY_MAGIC.to_be_bytes(),
            &u16::from(done).to_be_bytes(),
            &kind.to_be_bytes(),
            &cookie.to_be_bytes(),
            &len.to_be_bytes(),
        ])
    }

    pub fn data(&mut self, cookie: u64, done: bool, offset: u64, data: &[u8]) -> PeerResult<()> {
        self.chunk(cookie, chunk::OFFSET_DATA, done, &[&offset.to_be_bytes(), data])
    }

    pub fn hole(&mut self, cookie: u64, done: bool, offset: u64, len: u32) -> PeerResult<()> {
        self.chunk(cookie, chunk::OFFSET_HOLE, done, &[&offset.to_be_bytes(), &len.to_be_bytes()])
    }

    pub fn error(&mut self, cookie: u64, done: bool, errno: u32, text: &[u8]) -> PeerResult<()> {
        let len = (text.len() as u16).to_be_bytes();
        self.chunk(cookie, chunk::ERROR, done, &[&errno.to_be_bytes(), &len, text])
    }
}

type Script = dyn Fn(usize, &mut Peer) -> PeerResult<()> + Send + Sync;

/// A server that runs a script for each connection. The script receives the number of the
/// connection, from 0 on.
pub struct Fake {
    dir: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    connections: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl Fake {
    pub fn new(script: impl Fn(usize, &mut Peer) -> PeerResult<()> + Send + Sync + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let (stop, connections) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let thread = std::thread::spawn({
            let (stop, connections) = (Arc::clone(&stop), Arc::clone(&connections));
            let script: Arc<Script> = Arc::new(script);
            move || {
                for stream in listener.incoming() {
                    if stop.load(Ordering::SeqCst) {
                        return;
                    }
                    let number = connections.fetch_add(1, Ordering::SeqCst);
                    let script = Arc::clone(&script);
                    std::thread::spawn(move || {
                        // An error means that the client disconnected.
                        let _ = script(number, &mut Peer(stream.unwrap()));
                    });
                }
            }
        });
        Self { dir, stop, connections, thread: Some(thread) }
    }

    /// Returns a server that performs a valid handshake and calls `answer` for each request.
    pub fn serving(
        told: ExportSpec,
        answer: impl Fn(&mut Peer, &ClientRequest) -> PeerResult<()> + Send + Sync + 'static,
    ) -> Self {
        Self::new(move |_, peer| {
            peer.welcome(told)?;
            loop {
                let request = peer.request()?;
                answer(peer, &request)?;
            }
        })
    }

    pub fn config(&self) -> Config {
        let path = self.dir.path().join("s");
        let uri: Uri = format!("nbd+unix:///x?socket={}", path.display()).parse().unwrap();
        let timeout = Duration::from_secs(1);
        Config { name: "test".into(), timeout, connections: 1, ..Config::new(uri) }
    }

    /// Returns the number of connections accepted so far.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = UnixStream::connect(self.dir.path().join("s"));
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}
