//! Requests of a script to the devices of the server, each repeated while a short failure lasts.

use std::ops::Range;
use std::os::unix::net::UnixStream;

use freestone_testkit::Rng;

use super::{FAILURES_MAX, Life, PATIENCE};
use crate::oracle::{Fill, Kind as Writing, Outcome, fill};
use crate::program::calls::model::{Presence, SECTOR};
use crate::program::server;
use crate::program::transport::nbd_client::NbdClient;
use crate::program::transport::protocol::{self, ConnectionError};

const READ_BYTES: u64 = 256 << 10;

impl Life<'_> {
    fn wire(&mut self, name: &str) -> Result<&mut NbdClient, ConnectionError> {
        if !self.wires.contains_key(name) {
            let stream = UnixStream::connect(self.run_dir.dir.join(server::NBD))?;
            if !self.is_failure_short() {
                stream.set_read_timeout(Some(PATIENCE))?;
            }
            let wire = NbdClient::over(stream, name, &mut Rng::new(1))?;
            self.wires.insert(name.to_owned(), wire);
        }
        Ok(self.wires.get_mut(name).expect("it was put there"))
    }

    /// Sends one request and waits for its reply. Returns the error number (0 for success) and the data of a read.
    fn request(
        &mut self,
        name: &str,
        command: u16,
        at: u64,
        len: u32,
        data: &[u8],
    ) -> Result<(u32, Vec<u8>), ConnectionError> {
        self.server.step(format!("{name}: command {command}, {len} bytes at {at}"));
        let wire = self.wire(name)?;
        wire.send(0, command, at, len, data)?;
        let reply = wire.reply()?;
        Ok((reply.error, reply.data))
    }

    /// Sends a request, and repeats it while a short failure lasts. Returns the data of a read, or `None` if the
    /// request failed.
    fn request_again(&mut self, name: &str, command: u16, at: u64, len: u32, data: &[u8]) -> Option<Vec<u8>> {
        let text = format!("{name}: command {command}, {len} bytes at {at}");
        for attempt in 0..=FAILURES_MAX {
            if self.server.has_ended() {
                return None;
            }
            let hits = self.server.hits();
            let last = match self.request(name, command, at, len, data) {
                Ok((0, data)) => return Some(data),
                Ok((error, _)) => format!("{text}: fails with error {error}"),
                Err(ConnectionError::Protocol(why)) => {
                    self.wires.remove(name);
                    self.add_finding(format!("{text}: {why}"));
                    return None;
                }
                Err(ConnectionError::Refused(_, why)) => format!("{text}: is refused: {why}"),
                Err(ConnectionError::Ended(why)) => {
                    self.wires.remove(name);
                    format!("{text}: connection lost: {why}")
                }
            };
            if self.server.hits() == 0 {
                self.add_finding(format!("{last}, although no call has failed"));
                return None;
            }
            if !self.is_failure_short() {
                return None;
            }
            // A call may have failed just before the first attempt, so only a repeated failure is a finding.
            let may_last = self.model.disk(name).is_fragile || command == protocol::FLUSH && self.may_last();
            if attempt > 0 && self.server.hits() == hits && !may_last {
                self.add_finding(format!("{last}, repeatedly and although no call fails"));
                return None;
            }
        }
        None
    }

    fn is_usable(&mut self, name: &str) -> bool {
        let disk = self.model.disk(name);
        disk.presence == Presence::Yes && disk.is_visible
    }

    /// Writes sectors with a fill pattern. Returns true on success.
    pub fn write(&mut self, name: &str, sectors: Range<u64>, filled: Fill) -> bool {
        self.write_id(name, sectors, filled).is_some()
    }

    /// Writes sectors with a fill pattern. Returns the id and the range of the write on success.
    pub fn write_id(&mut self, name: &str, sectors: Range<u64>, filled: Fill) -> Option<(u64, Range<u64>)> {
        if !self.is_usable(name) || self.server.has_ended() {
            return None;
        }
        let id = self.model.write_id(filled);
        let mut data = vec![0; ((sectors.end - sectors.start) * SECTOR) as usize];
        fill(id, sectors.start, &mut data);
        let token = self.model.disk(name).oracle.begin_write(id, sectors.clone(), Writing::Write);
        let at = sectors.start * SECTOR;
        let done = self.request_again(name, protocol::WRITE, at, data.len() as u32, &data).is_some();
        let outcome = if done { Outcome::Done { fua: false } } else { Outcome::Failed };
        self.model.disk(name).oracle.end(token, outcome);
        done.then_some((id, sectors))
    }

    /// Flushes a device. Returns true on success.
    pub fn flush(&mut self, name: &str) -> bool {
        self.is_usable(name) && self.request_again(name, protocol::FLUSH, 0, 0, &[]).is_some()
    }

    /// Reads a whole device and judges the content.
    pub fn read_all(&mut self, name: &str) {
        if !self.is_usable(name) {
            return;
        }
        let bytes = self.model.disk(name).shown * SECTOR;
        let mut at = 0;
        while at < bytes && !self.server.has_ended() {
            let len = READ_BYTES.min(bytes - at);
            let token = self.model.disk(name).oracle.begin_read();
            let data = self.request_again(name, protocol::READ, at, len as u32, &[]);
            let oracle = &mut self.model.disk(name).oracle;
            match data {
                Some(data) => {
                    if let Err(wrong) = oracle.check_read(token, at / SECTOR, &data) {
                        return self.add_finding(format!("LOSS: {wrong}"));
                    }
                }
                None => oracle.abandon(token),
            }
            at += len;
        }
    }
}
