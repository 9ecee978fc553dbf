//! The NBD server: sends the bytes of the script, and checks the bytes of the client.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc;

use freestone_nbd_proto::{OPTION_MAGIC, REQUEST_MAGIC, command, option};

use super::facts::{self, Facts, number};
use super::replies;
use super::requests::{Answer, SentRequest};
use super::script::{Script, sound_handshake};
use super::{WAIT, sound_byte};

const HEADER_BYTES: usize = 28;

struct Peer(UnixStream);

impl Peer {
    fn accept(listener: &UnixListener) -> Self {
        let (stream, _) = listener.accept().expect("the client connects");
        stream.set_read_timeout(Some(WAIT)).expect("a socket");
        stream.set_write_timeout(Some(WAIT)).expect("a socket");
        Self(stream)
    }

    /// Sends bytes. Errors are ignored, as the client may have disconnected.
    fn send(&mut self, bytes: &[u8]) {
        let _ = self.0.write_all(bytes);
    }

    fn receive(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact(&mut bytes).expect("the client sends");
        bytes
    }

    /// Shuts down the server's side of the connection, and receives until the client disconnects.
    fn end(mut self) {
        let _ = self.0.shutdown(Shutdown::Write);
        let mut rest = Vec::new();
        if let Err(error) = self.0.read_to_end(&mut rest) {
            assert!(error.kind() == std::io::ErrorKind::ConnectionReset, "the client goes: {error}");
        }
    }

    /// Receives the client's side of the handshake, and asserts that it is the expected one.
    fn check_handshake(&mut self, facts: &Facts) {
        assert_eq!(number(&self.receive(4)), u64::from(facts.client_flags));
        for expected in &facts.options {
            assert_eq!(number(&self.receive(8)), OPTION_MAGIC);
            assert_eq!(number(&self.receive(4)), u64::from(*expected));
            let len = number(&self.receive(4)) as usize;
            let data = self.receive(len);
            let export = b"\0\0\0\x01x";
            let wanted = match *expected {
                option::STRUCTURED_REPLY => Vec::new(),
                option::SET_META_CONTEXT => [&export[..], b"\0\0\0\x01\0\0\0\x0fbase:allocation"].concat(),
                option::GO => [&export[..], b"\0\x01\0\x03"].concat(),
                _ => b"x".to_vec(),
            };
            assert_eq!(data, wanted, "option {expected}");
        }
    }

    /// Receives the given requests in any order, each once. Returns the requests with their cookies.
    fn receive_requests(&mut self, requests: &[SentRequest]) -> Vec<(SentRequest, u64)> {
        let mut cookies = vec![None; requests.len()];
        for _ in requests {
            let header = self.receive(HEADER_BYTES);
            assert_eq!(number(&header[..4]), u64::from(REQUEST_MAGIC));
            let (flags, command) = (number(&header[4..6]), number(&header[6..8]) as u16);
            let (cookie, offset) = (number(&header[8..16]), number(&header[16..24]));
            let len = number(&header[24..]) as u32;
            // Only write zeroes requests have a flag, which is NO_HOLE.
            assert_eq!(flags, if command == command::WRITE_ZEROES { 2 } else { 0 });
            let matches = |request: &SentRequest| {
                (request.command, request.offset, request.len) == (command, offset, len)
            };
            let found = requests.iter().position(matches).expect("one of the requests");
            let payload = self.receive(requests[found].payload().len());
            assert!(payload == requests[found].payload(), "the data of a write");
            assert_eq!(cookies[found].replace(cookie), None, "a request is sent once");
        }
        requests.iter().cloned().zip(cookies.into_iter().flatten()).collect()
    }

    /// Sends a correct reply to each request.
    fn send_sound_replies(&mut self, requests: &[(SentRequest, u64)]) {
        for (request, cookie) in requests {
            let (kind, payload): (u16, Vec<u8>) = match request.command {
                command::READ => {
                    let data =
                        (request.offset..request.offset + u64::from(request.len)).map(sound_byte).collect();
                    (1, [request.offset.to_be_bytes().to_vec(), data].concat())
                }
                command::BLOCK_STATUS => (5, [7, request.len, 3].map(u32::to_be_bytes).concat()),
                _ => (0, Vec::new()),
            };
            let head = [1, kind].map(u16::to_be_bytes).concat();
            let magic = 0x668e_33ef_u32.to_be_bytes();
            let len = (payload.len() as u32).to_be_bytes();
            self.send(&[&magic[..], &head, &cookie.to_be_bytes(), &len, &payload].concat());
        }
    }
}

/// Serves a client with the replies of the script. Sends the expected answer to each request to `answers_to`.
pub fn serve(listener: UnixListener, script: &Script, answers_to: &mpsc::Sender<Vec<Answer>>) {
    let mut peer = Peer::accept(&listener);
    peer.send(&script.handshake);
    let Some(facts) = &script.facts else { return peer.end() };
    peer.check_handshake(facts);
    if script.requests.is_empty() {
        return peer.end();
    }
    let requests = peer.receive_requests(&script.requests);
    let bytes = script.replies(&requests);
    let answers = replies::read(facts, &requests, &bytes);
    let recovers = script.recovers(&answers);
    if !recovers {
        // The client must not be able to reconnect, so that its open requests stay open.
        drop(listener);
        peer.send(&bytes);
        peer.end();
        let _ = answers_to.send(answers);
        return;
    }
    peer.send(&bytes);
    peer.end();
    let open: Vec<SentRequest> = script
        .requests
        .iter()
        .zip(&answers)
        .filter(|(_, answer)| **answer == Answer::None)
        .map(|(request, _)| request.clone())
        .collect();
    let _ = answers_to.send(answers);
    let mut peer = Peer::accept(&listener);
    let bytes = sound_handshake(facts);
    peer.send(&bytes);
    peer.check_handshake(&facts::read(&bytes).expect("a sound handshake"));
    let requests = peer.receive_requests(&open);
    peer.send_sound_replies(&requests);
    // The connection ends at the latest when the check drops the device.
    peer.end();
}
