//! NBD client that sends requests one at a time and waits for each reply: fixed newstyle handshake,
//! simple replies.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};

/// Time limit for a reply. A server under valgrind is about fifty times slower.
const REPLY_WAIT_MAX: Duration = Duration::from_secs(60);
/// First bytes that the server sends: the magic numbers of the newstyle handshake.
const GREETING: [u8; 16] = *b"NBDMAGICIHAVEOPT";
/// Handshake flags of server and client: fixed newstyle, no padding.
const HANDSHAKE_FLAGS: u16 = 3;
const OPTION_EXPORT_NAME: u32 = 1;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const CMD_READ: u16 = 0;
const CMD_WRITE: u16 = 1;
const CMD_DISC: u16 = 2;

pub struct Client {
    stream: UnixStream,
    cookie: u64,
}

impl Client {
    pub fn connect(socket: &Path) -> Result<Self> {
        Self::connect_to(socket, "")
    }

    pub fn connect_to(socket: &Path, name: &str) -> Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(REPLY_WAIT_MAX))?;
        stream.set_write_timeout(Some(REPLY_WAIT_MAX))?;
        let mut hello = [0; 18];
        stream.read_exact(&mut hello)?;
        ensure!(hello[..16] == GREETING, "not an NBD server: {hello:?}");
        let flags = u16::from_be_bytes([hello[16], hello[17]]);
        ensure!(flags & HANDSHAKE_FLAGS == HANDSHAKE_FLAGS, "handshake flags {flags:#x}");
        let mut option = u32::from(HANDSHAKE_FLAGS).to_be_bytes().to_vec();
        option.extend(b"IHAVEOPT");
        option.extend(OPTION_EXPORT_NAME.to_be_bytes());
        option.extend((name.len() as u32).to_be_bytes());
        option.extend(name.as_bytes());
        stream.write_all(&option)?;
        // Skip size and flags of the export.
        stream.read_exact(&mut [0; 10])?;
        Ok(Self { stream, cookie: 0 })
    }

    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.send(CMD_READ, offset, into.len(), &[])?;
        self.reply()?;
        Ok(self.stream.read_exact(into)?)
    }

    /// Sends a read without waiting for its reply.
    pub fn send_read(&mut self, offset: u64, len: usize) -> Result<()> {
        self.send(CMD_READ, offset, len, &[])
    }

    /// Receives `len` bytes and drops them.
    pub fn receive_and_drop(&mut self, len: usize) -> Result<()> {
        Ok(self.stream.read_exact(&mut vec![0; len])?)
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        self.send(CMD_WRITE, offset, data.len(), data)?;
        self.reply()
    }

    /// Disconnects, and waits until the server closes the connection.
    pub fn end(mut self) -> Result<()> {
        self.send(CMD_DISC, 0, 0, &[])?;
        ensure!(self.stream.read(&mut [0; 1])? == 0, "the server sent data after the disconnect");
        Ok(())
    }

    /// Sends a request with a single write, so that the server always finds whole requests.
    fn send(&mut self, command: u16, offset: u64, len: usize, data: &[u8]) -> Result<()> {
        self.cookie += 1;
        let mut bytes = Vec::with_capacity(28 + data.len());
        bytes.extend(REQUEST_MAGIC.to_be_bytes());
        bytes.extend(0_u16.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(self.cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend((len as u32).to_be_bytes());
        bytes.extend(data);
        Ok(self.stream.write_all(&bytes)?)
    }

    fn reply(&mut self) -> Result<()> {
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        let expected = [&REPLY_MAGIC.to_be_bytes()[..], &[0; 4], &self.cookie.to_be_bytes()].concat();
        ensure!(reply[..] == expected, "not the reply to request {}: {reply:?}", self.cookie);
        Ok(())
    }
}
