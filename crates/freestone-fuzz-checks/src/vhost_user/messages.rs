//! Arbitrary messages of a vhost-user frontend, with files. Properties:
//!
//! * The session ends when the frontend disconnects, and nothing panics.
//! * The replies are those that the reference parser of the messages expects, one each, in order. A message that is
//!   refused without a reply, and an invalid message, end the session.
//! * No file and no mapping stays open, and no memory of the budget stays in use.
//! * The device is served to a valid frontend that connects next.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use freestone::device::Device;
use freestone_testkit::Manner;

use super::VhostUser;
use super::device::{Disk, DiskConfig, SIZE, disk};
use super::driver::{self, Driver};
use super::files::{Files, assert_last};
use super::reference::{Message, Reference, Verdict, messages};
use super::requests::well_behaved;
use super::script::Script;
use super::wire::{ALWAYS, HEADER_BYTES, receive_until_close, send, u32s};

impl VhostUser {
    /// Checks one input. Returns true if there was at least one message and the server accepted all messages.
    ///
    /// # Panics
    /// Panics if a property does not hold.
    pub fn messages(&self, input: &[u8]) -> bool {
        let Some(script) = Script::new(input) else { return false };
        let config =
            DiskConfig { manner: Manner::Inline, zoned: script.zoned, bad: None, forgets: false, seed: 0 };
        let disk = Arc::new(disk(config));
        let accepted = self.run_session(&script, &disk);
        if script.another {
            self.well_behaved(&disk, script.read_only);
        }
        self.assert_sound();
        accepted
    }

    fn run_session(&self, script: &Script, disk: &Arc<Disk>) -> bool {
        let files = Files::new();
        let (ours, theirs) = UnixStream::pair().expect("a descriptor is left");
        let (mut bytes, mut with) = (Vec::new(), Vec::new());
        for part in &script.parts {
            let handed: Vec<_> = part.files.iter().map(|kind| files.get(*kind)).collect();
            let sent = send(&ours, &part.bytes, &handed);
            if sent > 0 {
                with.push((bytes.len(), part.files.clone()));
            }
            bytes.extend_from_slice(&part.bytes[..sent]);
            if sent < part.bytes.len() {
                // The rest of the messages is dropped, as if the frontend had disconnected.
                break;
            }
        }
        let device = || Arc::clone(&disk.device) as Arc<dyn Device>;
        if script.is_deaf {
            drop(ours);
            self.serve(device(), script.read_only, theirs.into());
            files.assert_closed();
            return false;
        }
        ours.shutdown(std::net::Shutdown::Write).expect("a socket");
        self.serve(device(), script.read_only, theirs.into());
        let (received, got) = receive_until_close(&ours);
        for file in got {
            assert_last(file);
        }
        files.assert_closed();
        let messages = messages(&bytes, &with);
        let accepted: usize = messages.iter().map(|message| HEADER_BYTES + message.body.len()).sum();
        let mut received = ReplyReader(&received);
        let completed = check_replies(script, &messages, &mut received);
        assert!(received.0.is_empty(), "an answer to nothing: {:?}", received.0);
        completed && accepted == bytes.len() && !messages.is_empty()
    }

    /// Runs a valid frontend, which reads from the device.
    fn well_behaved(&self, disk: &Arc<Disk>, read_only: bool) {
        let (ours, theirs) = UnixStream::pair().expect("a descriptor is left");
        std::thread::scope(|scope| {
            let device = Arc::clone(&disk.device) as Arc<dyn Device>;
            scope.spawn(|| self.serve(device, read_only, theirs.into()));
            let config = driver::QueueConfig {
                size: 4,
                features: ALWAYS,
                base: 0,
                used: 0,
                two_regions: false,
                has_inflight: false,
                inherited: None,
                notified: true,
                kicks_if_requested: true,
            };
            well_behaved(&mut Driver::new(ours, config, Arc::clone(disk)));
        });
    }
}

/// Replies of the server that are not checked yet.
struct ReplyReader<'a>(&'a [u8]);

impl<'a> ReplyReader<'a> {
    /// Returns the next reply, which must be to `request`; None if no reply is left.
    fn answer(&mut self, request: u32) -> Option<&'a [u8]> {
        if self.0.is_empty() {
            return None;
        }
        let (header, rest) = self.0.split_at_checked(HEADER_BYTES).expect("a whole header");
        let size = u32::from_ne_bytes([header[8], header[9], header[10], header[11]]);
        assert_eq!(header, u32s(&[request, 5, size]), "the header of an answer to {request}");
        let (body, rest) = rest.split_at_checked(size as usize).expect("a whole answer");
        self.0 = rest;
        Some(body)
    }
}

/// Checks the replies. Returns true if the session accepted all messages.
fn check_replies(script: &Script, messages: &[Message], received: &mut ReplyReader<'_>) -> bool {
    let mut reference = Reference::new(script.read_only, script.zoned);
    // True after a message without a reply that the server may have refused, which ends the session.
    let mut may_have_ended = false;
    for message in messages {
        let wants_answer = message.wants_answer() && reference.acks;
        let verdict = reference.verdict(message);
        let statuses: &[u64] = match verdict {
            Verdict::Done => &[0],
            Verdict::Refused => &[1],
            Verdict::Either => &[0, 1],
            _ => &[],
        };
        if !statuses.is_empty() && !wants_answer {
            if verdict == Verdict::Refused {
                return false;
            }
            may_have_ended |= verdict == Verdict::Either;
            continue;
        }
        let Some(body) = received.answer(message.request) else {
            assert!(may_have_ended, "{message:?} is not answered");
            return false;
        };
        match &verdict {
            Verdict::Number(number) => assert_eq!(body, number.to_ne_bytes(), "{message:?}"),
            Verdict::Base(queue) => {
                assert_eq!(body.len(), 8, "{message:?}");
                assert_eq!(body[..4], queue.to_ne_bytes(), "{message:?}");
                assert_eq!(u32::from_ne_bytes([body[4], body[5], body[6], body[7]]) >> 16, 0, "{message:?}");
            }
            Verdict::Config(front, size) => {
                assert_eq!(body.len(), front.len() + size, "{message:?}");
                assert_eq!(body[..front.len()], front[..], "{message:?}");
                if front[..4] == [0; 4] && *size >= 8 {
                    assert_eq!(body[12..20], (SIZE / 512).to_le_bytes(), "{message:?}");
                }
            }
            Verdict::Area(size) => {
                assert_eq!(body.len(), *size, "{message:?}");
                assert_eq!(body[16..20], message.body[16..20], "{message:?}");
            }
            _ => {
                let status = u64::from_ne_bytes(body.try_into().expect("a status has eight bytes"));
                assert!(statuses.contains(&status), "{message:?} is answered {status}");
            }
        }
    }
    !may_have_ended
}
