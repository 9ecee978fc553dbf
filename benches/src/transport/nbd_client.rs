//! NBD client that sends requests one at a time and waits for each reply: fixed newstyle handshake,
//! simple replies.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use freestone_testkit::nbd::handshake;
use freestone_testkit::nbd::wire::{DISC, READ, SIMPLE_REPLY_MAGIC, WRITE, request_header};

/// Time limit for a reply. A server under valgrind is about fifty times slower.
const REPLY_WAIT_MAX: Duration = Duration::from_secs(60);

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
        handshake::enter(&mut stream, name)?;
        Ok(Self { stream, cookie: 0 })
    }

    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.send(READ, offset, into.len(), &[])?;
        self.reply()?;
        Ok(self.stream.read_exact(into)?)
    }

    /// Sends a read without waiting for its reply.
    pub fn send_read(&mut self, offset: u64, len: usize) -> Result<()> {
        self.send(READ, offset, len, &[])
    }

    /// Receives `len` bytes and drops them.
    pub fn receive_and_drop(&mut self, len: usize) -> Result<()> {
        Ok(self.stream.read_exact(&mut vec![0; len])?)
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        self.send(WRITE, offset, data.len(), data)?;
        self.reply()
    }

    /// Disconnects, and waits until the server closes the connection.
    pub fn end(mut self) -> Result<()> {
        self.send(DISC, 0, 0, &[])?;
        ensure!(self.stream.read(&mut [0; 1])? == 0, "the server sent data after the disconnect");
        Ok(())
    }

    /// Sends a request with a single write, so that the server always finds whole requests.
    fn send(&mut self, command: u16, offset: u64, len: usize, data: &[u8]) -> Result<()> {
        self.cookie += 1;
        let mut bytes = Vec::with_capacity(28 + data.len());
        bytes.extend_from_slice(&request_header(0, command, self.cookie, offset, len as u32));
        bytes.extend(data);
        Ok(self.stream.write_all(&bytes)?)
    }

    fn reply(&mut self) -> Result<()> {
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        let expected = [&SIMPLE_REPLY_MAGIC.to_be_bytes()[..], &[0; 4], &self.cookie.to_be_bytes()].concat();
        ensure!(reply[..] == expected, "not the reply to request {}: {reply:?}", self.cookie);
        Ok(())
    }
}
