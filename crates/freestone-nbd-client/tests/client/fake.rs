//! A server that says what a test has it say.

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

/// Valid, with flush, FUA, trim, write zeroes.
pub const FLAGS: u16 = 1 | 4 | 8 | 32 | 64;
pub const SIZE: u64 = 1 << 20;

/// One connection, from the server's side. What fails here ends it, as a client that leaves does.
pub struct Peer(pub UnixStream);

pub type Talks<T> = Result<T, std::io::Error>;

/// A request, with the data of a write.
#[derive(Debug)]
pub struct Asked {
    pub command: u16,
    pub flags: CommandFlags,
    pub cookie: u64,
    pub offset: u64,
    pub len: u32,
    pub data: Vec<u8>,
}

/// What the export is said to be.
#[derive(Debug, Clone, Copy)]
pub struct Told {
    pub size: u64,
    pub flags: u16,
    pub blocks: Option<(u32, u32, u32)>,
    pub structured: bool,
    pub context: bool,
    /// Knows `GO`.
    pub go: bool,
}

pub const TOLD: Told =
    Told { size: SIZE, flags: FLAGS, blocks: None, structured: true, context: true, go: true };

impl Peer {
    pub fn send(&mut self, parts: &[&[u8]]) -> Talks<()> {
        self.0.write_all(&parts.concat())
    }

    fn bytes<const N: usize>(&mut self) -> Talks<[u8; N]> {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    pub fn greet(&mut self, flags: u16) -> Talks<()> {
        self.send(&[&INIT_MAGIC.to_be_bytes(), &OPTION_MAGIC.to_be_bytes(), &flags.to_be_bytes()])?;
        self.bytes::<4>().map(drop)
    }

    /// Hears what the client says, until it leaves.
    pub fn until_the_end(&mut self) -> Talks<()> {
        std::io::copy(&mut self.0, &mut std::io::sink()).map(drop)
    }

    /// The next option and its data.
    pub fn option(&mut self) -> Talks<(u32, Vec<u8>)> {
        assert_eq!(u64::from_be_bytes(self.bytes()?), OPTION_MAGIC);
        let kind = u32::from_be_bytes(self.bytes()?);
        let mut data = vec![0; u32::from_be_bytes(self.bytes()?) as usize];
        self.0.read_exact(&mut data)?;
        Ok((kind, data))
    }

    pub fn reply(&mut self, option: u32, kind: u32, data: &[u8]) -> Talks<()> {
        self.send(&[
            &OPTION_REPLY_MAGIC.to_be_bytes(),
            &option.to_be_bytes(),
            &kind.to_be_bytes(),
            &(data.len() as u32).to_be_bytes(),
            data,
        ])
    }

    pub fn export(&mut self, size: u64, flags: u16) -> Talks<()> {
        let data = [&info::EXPORT.to_be_bytes()[..], &size.to_be_bytes(), &flags.to_be_bytes()].concat();
        self.reply(option::GO, reply::INFO, &data)
    }

    pub fn blocks(&mut self, (minimum, preferred, maximum): (u32, u32, u32)) -> Talks<()> {
        let mut data = info::BLOCK_SIZE.to_be_bytes().to_vec();
        for size in [minimum, preferred, maximum] {
            data.extend(size.to_be_bytes());
        }
        self.reply(option::GO, reply::INFO, &data)
    }

    /// A handshake in which all is well.
    pub fn welcome(&mut self, told: Told) -> Talks<()> {
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

    pub fn asked(&mut self) -> Talks<Asked> {
        let header = self.bytes::<{ size_of::<RequestHeader>() }>()?;
        let header = RequestHeader::read_from_bytes(&header).unwrap();
        let mut data = Vec::new();
        if header.command.get() == freestone_nbd_proto::command::WRITE {
            data = vec![0; header.len.get() as usize];
            self.0.read_exact(&mut data)?;
        }
        Ok(Asked {
            command: header.command.get(),
            flags: CommandFlags::from_bits_retain(header.flags.get()),
            cookie: header.cookie.get(),
            offset: header.offset.get(),
            len: header.len.get(),
            data,
        })
    }

    pub fn simple(&mut self, cookie: u64, error: u32, data: &[u8]) -> Talks<()> {
        self.send(&[&SIMPLE_REPLY_MAGIC.to_be_bytes(), &error.to_be_bytes(), &cookie.to_be_bytes(), data])
    }

    pub fn chunk(&mut self, cookie: u64, kind: u16, done: bool, payload: &[&[u8]]) -> Talks<()> {
        let payload = payload.concat();
        self.head(cookie, kind, done, payload.len() as u32)?;
        self.send(&[&payload])
    }

    /// The head of a chunk alone.
    pub fn head(&mut self, cookie: u64, kind: u16, done: bool, len: u32) -> Talks<()> {
        self.send(&[
            &STRUCTURED_REPLY_MAGIC.to_be_bytes(),
            &u16::from(done).to_be_bytes(),
            &kind.to_be_bytes(),
            &cookie.to_be_bytes(),
            &len.to_be_bytes(),
        ])
    }

    pub fn data(&mut self, cookie: u64, done: bool, offset: u64, data: &[u8]) -> Talks<()> {
        self.chunk(cookie, chunk::OFFSET_DATA, done, &[&offset.to_be_bytes(), data])
    }

    pub fn hole(&mut self, cookie: u64, done: bool, offset: u64, len: u32) -> Talks<()> {
        self.chunk(cookie, chunk::OFFSET_HOLE, done, &[&offset.to_be_bytes(), &len.to_be_bytes()])
    }

    pub fn error(&mut self, cookie: u64, done: bool, errno: u32, text: &[u8]) -> Talks<()> {
        let len = (text.len() as u16).to_be_bytes();
        self.chunk(cookie, chunk::ERROR, done, &[&errno.to_be_bytes(), &len, text])
    }
}

type Script = dyn Fn(usize, &mut Peer) -> Talks<()> + Send + Sync;

/// A server that follows a script for each connection, which is told its number.
pub struct Fake {
    dir: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    connections: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl Fake {
    pub fn new(script: impl Fn(usize, &mut Peer) -> Talks<()> + Send + Sync + 'static) -> Self {
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
                        // A client that leaves ends it.
                        let _ = script(number, &mut Peer(stream.unwrap()));
                    });
                }
            }
        });
        Self { dir, stop, connections, thread: Some(thread) }
    }

    /// With one export after a handshake in which all is well.
    pub fn serving(
        told: Told,
        answer: impl Fn(&mut Peer, &Asked) -> Talks<()> + Send + Sync + 'static,
    ) -> Self {
        Self::new(move |_, peer| {
            peer.welcome(told)?;
            loop {
                let asked = peer.asked()?;
                answer(peer, &asked)?;
            }
        })
    }

    pub fn config(&self) -> Config {
        let path = self.dir.path().join("s");
        let uri: Uri = format!("nbd+unix:///x?socket={}", path.display()).parse().unwrap();
        let timeout = Duration::from_secs(1);
        Config { name: "test".into(), timeout, connections: 1, ..Config::new(uri) }
    }

    /// How many have come.
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
