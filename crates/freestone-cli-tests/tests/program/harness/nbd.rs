//! An NBD client that sends single requests and reads single replies.

use std::io::{ErrorKind, Read, Result as IoResult, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use freestone_testkit::nbd::wire::{FLUSH, READ, WRITE, WRITE_ZEROES, request};
use freestone_testkit::nbd::{Chunk, Reply, handshake};

use super::server::Serve;

/// Connects to an export by `NBD_OPT_EXPORT_NAME`, as the oldest clients do. Returns the size of the export in bytes.
pub fn connect_nbd<S: Read + Write>(stream: &mut S, name: &str) -> u64 {
    try_connect_nbd(stream, name).unwrap()
}

/// Like [`connect_nbd`]. Fails if the server closes the connection, as it does if the export does not exist.
pub fn try_connect_nbd<S: Read + Write>(stream: &mut S, name: &str) -> IoResult<u64> {
    let entered = handshake::enter(stream, name);
    assert!(!entered.as_ref().is_err_and(|error| error.kind() == ErrorKind::InvalidData), "{entered:?}");
    Ok(entered?.0)
}

/// Returns the bytes of a request, followed by its payload.
pub fn nbd_request(flags: u16, command: u16, cookie: u64, offset: u64, len: u32, payload: &[u8]) -> Vec<u8> {
    [&request(flags, command, cookie, offset, len), payload].concat()
}

/// An NBD connection that has selected an export and uses simple replies.
pub struct Raw {
    stream: UnixStream,
    cookie: u64,
    /// Size of the export, in bytes.
    pub size: u64,
}

/// Error: the server closed the connection before a reply.
#[derive(Debug, PartialEq)]
pub struct Ended;

impl Raw {
    pub fn connect(serve: &Serve, name: &str) -> Self {
        Self::connect_at(&serve.path("nbd"), name)
    }

    /// Connects to the export `name` at a given socket.
    pub fn connect_at(socket: &Path, name: &str) -> Self {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let size = connect_nbd(&mut stream, name);
        Self { stream, cookie: 0, size }
    }

    /// Sends a request without waiting for the reply. Returns the cookie of the request.
    pub fn send(&mut self, flags: u16, command: u16, offset: u64, len: u32, data: &[u8]) -> u64 {
        self.cookie += 1;
        let bytes = nbd_request(flags, command, self.cookie, offset, len, data);
        // Errors are ignored: if the connection has ended, reading the reply fails.
        let _ = self.stream.write_all(&bytes);
        self.cookie
    }

    /// Returns the cookie and the NBD error number (0 for success) of the next reply.
    pub fn reply(&mut self) -> Result<(u64, u32), Ended> {
        match Reply::receive(&mut self.stream) {
            Ok(Reply { chunk: Chunk::Simple { cookie, error }, .. }) => Ok((cookie, error)),
            Ok(other) => panic!("not a simple reply: {other:?}"),
            Err(error) => {
                let ends = !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::InvalidData);
                assert!(ends, "no answer in a minute, or no reply: {error}");
                Err(Ended)
            }
        }
    }

    fn run(&mut self, flags: u16, command: u16, offset: u64, len: u32, data: &[u8]) -> Result<u32, Ended> {
        let cookie = self.send(flags, command, offset, len, data);
        let (answered, error) = self.reply()?;
        assert_eq!(answered, cookie);
        Ok(error)
    }

    /// Writes data. Returns the NBD error number, 0 for success.
    pub fn write(&mut self, flags: u16, offset: u64, data: &[u8]) -> u32 {
        self.try_write(flags, offset, data).unwrap()
    }

    pub fn try_write(&mut self, flags: u16, offset: u64, data: &[u8]) -> Result<u32, Ended> {
        self.run(flags, WRITE, offset, u32::try_from(data.len()).unwrap(), data)
    }

    /// Sends a write without waiting for the reply. Returns the cookie of the write.
    pub fn send_write(&mut self, offset: u64, data: &[u8]) -> u64 {
        self.send(0, WRITE, offset, u32::try_from(data.len()).unwrap(), data)
    }

    pub fn flush(&mut self) -> u32 {
        self.try_flush().unwrap()
    }

    pub fn try_flush(&mut self) -> Result<u32, Ended> {
        self.run(0, FLUSH, 0, 0, &[])
    }

    /// Sends a write zeroes request. Returns the NBD error number, 0 for success.
    pub fn zero(&mut self, offset: u64, len: u32) -> u32 {
        self.run(0, WRITE_ZEROES, offset, len, &[]).unwrap()
    }

    pub fn read(&mut self, offset: u64, len: u32) -> Result<Vec<u8>, u32> {
        match self.run(0, READ, offset, len, &[]).unwrap() {
            0 => {
                let mut data = vec![0; len as usize];
                self.stream.read_exact(&mut data).unwrap();
                Ok(data)
            }
            error => Err(error),
        }
    }
}
