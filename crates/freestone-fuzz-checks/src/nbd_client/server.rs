//! The server: it says what the script says, and hears what the client has to say.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc;

use freestone_nbd_proto::{OPTION_MAGIC, REQUEST_MAGIC, command, option};

use super::facts::{self, Facts, number};
use super::replies;
use super::requests::{Answer, Asked};
use super::script::{Script, sound_handshake};
use super::{WAIT, sound};

const HEADER_BYTES: usize = 28;

/// One connection.
struct Peer(UnixStream);

impl Peer {
    fn accept(listener: &UnixListener) -> Self {
        let (stream, _) = listener.accept().expect("the client connects");
        stream.set_read_timeout(Some(WAIT)).expect("a socket");
        stream.set_write_timeout(Some(WAIT)).expect("a socket");
        Self(stream)
    }

    /// A client that has gone hears no more.
    fn say(&mut self, bytes: &[u8]) {
        let _ = self.0.write_all(bytes);
    }

    fn hear(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact(&mut bytes).expect("the client asks");
        bytes
    }

    /// The server has said all, and hears until the client goes.
    fn end(mut self) {
        let _ = self.0.shutdown(Shutdown::Write);
        let mut rest = Vec::new();
        if let Err(error) = self.0.read_to_end(&mut rest) {
            assert!(error.kind() == std::io::ErrorKind::ConnectionReset, "the client goes: {error}");
        }
    }

    /// The client's side of a handshake.
    fn hear_handshake(&mut self, facts: &Facts) {
        assert_eq!(number(&self.hear(4)), u64::from(facts.client_flags));
        for expected in &facts.options {
            assert_eq!(number(&self.hear(8)), OPTION_MAGIC);
            assert_eq!(number(&self.hear(4)), u64::from(*expected));
            let len = number(&self.hear(4)) as usize;
            let data = self.hear(len);
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

    /// These requests, each once, with the cookies that they have.
    fn hear_requests(&mut self, asked: &[Asked]) -> Vec<(Asked, u64)> {
        let mut cookies = vec![None; asked.len()];
        for _ in asked {
            let header = self.hear(HEADER_BYTES);
            assert_eq!(number(&header[..4]), u64::from(REQUEST_MAGIC));
            let (flags, command) = (number(&header[4..6]), number(&header[6..8]) as u16);
            let (cookie, offset) = (number(&header[8..16]), number(&header[16..24]));
            let len = number(&header[24..]) as u32;
            // Zeroes are to be memory.
            assert_eq!(flags, if command == command::WRITE_ZEROES { 2 } else { 0 });
            let is_it = |asked: &Asked| (asked.command, asked.offset, asked.len) == (command, offset, len);
            let found = asked.iter().position(is_it).expect("it is one of the requests");
            let payload = self.hear(asked[found].payload().len());
            assert!(payload == asked[found].payload(), "the data of a write");
            assert_eq!(cookies[found].replace(cookie), None, "it is asked once");
        }
        asked.iter().cloned().zip(cookies.into_iter().flatten()).collect()
    }

    /// Answers them as they want to be.
    fn answer_soundly(&mut self, asked: &[(Asked, u64)]) {
        for (asked, cookie) in asked {
            let (kind, payload): (u16, Vec<u8>) = match asked.command {
                command::READ => {
                    let data = (asked.offset..asked.offset + u64::from(asked.len)).map(sound).collect();
                    (1, [asked.offset.to_be_bytes().to_vec(), data].concat())
                }
                command::BLOCK_STATUS => (5, [7, asked.len, 3].map(u32::to_be_bytes).concat()),
                _ => (0, Vec::new()),
            };
            let head = [1, kind].map(u16::to_be_bytes).concat();
            let magic = 0x668e_33ef_u32.to_be_bytes();
            let len = (payload.len() as u32).to_be_bytes();
            self.say(&[&magic[..], &head, &cookie.to_be_bytes(), &len, &payload].concat());
        }
    }
}

/// Serves a client. `tell` hears what each request is answered by the replies of the script.
pub fn serve(listener: UnixListener, script: &Script, tell: &mpsc::Sender<Vec<Answer>>) {
    let mut peer = Peer::accept(&listener);
    peer.say(&script.handshake);
    let Some(facts) = &script.facts else { return peer.end() };
    peer.hear_handshake(facts);
    if script.asked.is_empty() {
        return peer.end();
    }
    let asked = peer.hear_requests(&script.asked);
    let bytes = script.replies(&asked);
    let answers = replies::read(facts, &asked, &bytes);
    let recovers = script.recovers(&answers);
    if !recovers {
        // Nobody is there any more.
        drop(listener);
        peer.say(&bytes);
        peer.end();
        let _ = tell.send(answers);
        return;
    }
    peer.say(&bytes);
    peer.end();
    let open: Vec<Asked> = script
        .asked
        .iter()
        .zip(&answers)
        .filter(|(_, answer)| **answer == Answer::None)
        .map(|(asked, _)| asked.clone())
        .collect();
    let _ = tell.send(answers);
    let mut peer = Peer::accept(&listener);
    let bytes = sound_handshake(facts);
    peer.say(&bytes);
    peer.hear_handshake(&facts::read(&bytes).expect("it is sound"));
    let asked = peer.hear_requests(&open);
    peer.answer_soundly(&asked);
    // What follows is the end of the device, or of this server.
    peer.end();
}
