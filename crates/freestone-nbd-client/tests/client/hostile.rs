//! Tests with broken or malicious servers: the client returns errors in time, and never panics.

use std::time::{Duration, Instant};

use freestone_core::device::{Blocking as _, Device as _, Error, Extent, ExtentKind, Flags, Op, Request};
use freestone_nbd_client::{Nbd, SetupError};
use freestone_nbd_proto::{chunk, command, errno, option, reply};
use freestone_testkit::Rng;

use crate::fake::{ClientRequest, DEFAULT_EXPORT, ExportSpec, FLAGS, Fake, Peer, PeerResult, SIZE};

const OLD: ExportSpec = ExportSpec { structured: false, context: false, ..DEFAULT_EXPORT };

fn why(fake: &Fake) -> String {
    let begun = Instant::now();
    let error = Nbd::open(&fake.config()).expect_err("the server is broken");
    assert!(begun.elapsed() < Duration::from_secs(8));
    assert!(matches!(error, SetupError::Link { .. }), "{error}");
    error.to_string()
}

#[test]
fn invalid_handshakes_are_refused() {
    type Case = (&'static str, fn(&mut Peer) -> PeerResult<()>);
    let cases: [Case; 21] = [
        ("closed the connection", |_| Ok(())),
        ("greeting is not that of an NBD server", |peer| peer.send(&[b"SSH-2.0-OpenSSH_9.6\r\n......"])),
        ("oldstyle", |peer| peer.send(&[b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53", &[0; 200]])),
        ("second magic number", |peer| peer.send(&[b"NBDMAGICNBDMAGIC", &[0; 4]])),
        ("magic number of a reply", |peer| {
            peer.greet(3)?;
            peer.option()?;
            peer.send(&[&[0; 20]])
        }),
        ("does not match the option", |peer| {
            peer.greet(3)?;
            peer.option()?;
            peer.reply(option::LIST, reply::ACK, &[])
        }),
        ("longer than 64 KiB", |peer| {
            peer.greet(3)?;
            peer.option()?;
            peer.send(&[&freestone_nbd_proto::OPTION_REPLY_MAGIC.to_be_bytes(), &[0, 0, 0, 8, 0, 0, 0, 1]])?;
            peer.send(&[&u32::MAX.to_be_bytes()])
        }),
        ("context that was not requested", |peer| {
            peer.greet(3)?;
            peer.option()?;
            peer.reply(option::STRUCTURED_REPLY, reply::ACK, &[])?;
            peer.option()?;
            peer.reply(option::SET_META_CONTEXT, reply::META_CONTEXT, b"\0\0\0\x01qemu:dirty")
        }),
        ("wrong length", |peer| {
            peer.greet(3)?;
            peer.option()?;
            peer.reply(option::STRUCTURED_REPLY, reply::ACK, &[])?;
            peer.option()?;
            peer.reply(option::SET_META_CONTEXT, reply::META_CONTEXT, b"\0\0")
        }),
        ("do not end", |peer| {
            peer.welcome_to(option::GO)?;
            loop {
                peer.export(SIZE, FLAGS)?;
            }
        }),
        ("did not send the size", |peer| {
            peer.welcome_to(option::GO)?;
            peer.reply(option::GO, reply::ACK, &[])
        }),
        ("wrong length", |peer| {
            peer.welcome_to(option::GO)?;
            peer.reply(option::GO, reply::INFO, &[0, 0, 1])
        }),
        ("wrong length", |peer| {
            peer.welcome_to(option::GO)?;
            peer.reply(option::GO, reply::INFO, &[0])
        }),
        ("the export does not exist (\"nope[31m\")", |peer| {
            peer.welcome_to(option::GO)?;
            peer.reply(option::GO, reply::ERR_UNKNOWN, b"nope\x1b[31m\n")
        }),
        ("only with TLS", |peer| {
            peer.welcome_to(option::GO)?;
            peer.reply(option::GO, reply::ERR_TLS_REQD, &[])
        }),
        ("shutting down", |peer| {
            peer.welcome_to(option::GO)?;
            peer.reply(option::GO, reply::ERR_SHUTDOWN, &[])
        }),
        ("is empty", |peer| peer.welcome(ExportSpec { size: 0, ..DEFAULT_EXPORT })),
        ("2^63", |peer| peer.welcome(ExportSpec { size: 1 << 63, ..DEFAULT_EXPORT })),
        ("not a multiple of its minimum block", |peer| {
            peer.welcome(ExportSpec { size: 1000, blocks: Some((512, 512, 4096)), ..DEFAULT_EXPORT })
        }),
        ("not a power of two", |peer| peer.welcome(ExportSpec { blocks: Some((0, 0, 0)), ..DEFAULT_EXPORT })),
        ("flags of the export", |peer| peer.welcome(ExportSpec { flags: 0, ..DEFAULT_EXPORT })),
    ];
    std::thread::scope(|scope| {
        for (part, script) in cases {
            scope.spawn(move || {
                let told = why(&Fake::new(move |_, peer| script(peer)));
                assert!(told.contains(part), "{part}: {told}");
            });
        }
    });
}

impl Peer {
    /// Refuses all options of the client up to `wanted`, and sends no reply to `wanted`.
    fn welcome_to(&mut self, wanted: u32) -> PeerResult<()> {
        self.greet(3)?;
        loop {
            let (kind, _) = self.option()?;
            if kind == wanted {
                return Ok(());
            }
            self.reply(kind, reply::ERR_UNSUP, &[])?;
        }
    }
}

#[test]
#[ignore = "slow lane"]
fn silent_handshake_times_out() {
    let fake = Fake::new(|_, peer| {
        peer.greet(3)?;
        loop {
            peer.option()?;
        }
    });
    let begun = Instant::now();
    let error = Nbd::open(&fake.config()).unwrap_err().to_string();
    assert!(error.contains("did not answer within 10s"), "{error}");
    assert!((9..60).contains(&begun.elapsed().as_secs()));
}

/// Checks that a read of 8192 bytes at 4096 fails soon after the timeout, although the client
/// reconnects repeatedly.
fn fails(told: ExportSpec, name: &str, answer: fn(&mut Peer, &ClientRequest) -> PeerResult<()>) {
    let fake = Fake::serving(told, answer);
    let device = Nbd::open(&fake.config()).unwrap();
    let begun = Instant::now();
    let mut data = vec![0; 8192];
    assert_eq!(device.read_at(4096, &mut data), Err(Error::Media), "{name}");
    assert!(begun.elapsed() < Duration::from_secs(6), "{name}: {:?}", begun.elapsed());
    assert!(fake.connections() > 1, "{name}: it did not hang up");
    assert!(device.last_error().unwrap().contains("protocol"), "{name}: {:?}", device.last_error());
}

#[test]
fn invalid_replies_end_the_connection() {
    type Case = (&'static str, fn(&mut Peer, &ClientRequest) -> PeerResult<()>);
    let with_chunks: [Case; 22] = [
        ("no magic", |p, _| p.send(&[&[0; 64]])),
        ("a simple reply to a read", |p, a| p.simple(a.cookie, 0, &[0; 8192])),
        ("another cookie", |p, a| p.data(a.cookie + 1, true, 4096, &[0; 8192])),
        ("a cookie of another place", |p, a| p.data(a.cookie | 255, true, 4096, &[0; 8192])),
        ("before", |p, a| p.data(a.cookie, true, 4095, &[0; 8192])),
        ("behind", |p, a| p.data(a.cookie, true, 4097, &[0; 8192])),
        ("far away", |p, a| p.data(a.cookie, true, u64::MAX, &[0; 8192])),
        ("too long", |p, a| p.data(a.cookie, true, 4096, &[0; 8193])),
        ("endless", |p, a| {
            p.head(a.cookie, chunk::OFFSET_DATA, true, u32::MAX).and_then(|()| p.send(&[&[0; 9000]]))
        }),
        ("no data", |p, a| p.data(a.cookie, true, 4096, &[])),
        ("half a place", |p, a| p.chunk(a.cookie, chunk::OFFSET_DATA, true, &[&[0; 4]])),
        ("nothing of it", |p, a| p.chunk(a.cookie, chunk::NONE, true, &[])),
        ("half of it", |p, a| p.data(a.cookie, true, 4096, &[0; 4096])),
        ("a gap", |p, a| {
            p.data(a.cookie, false, 4096, &[0; 4096])?;
            p.hole(a.cookie, true, 8704, 3584)
        }),
        ("twice", |p, a| {
            p.data(a.cookie, false, 4096, &[0; 8192])?;
            p.data(a.cookie, true, 8192, &[0; 512])
        }),
        ("a hole over data", |p, a| {
            p.data(a.cookie, false, 4096, &[0; 4096])?;
            p.hole(a.cookie, true, 8191, 4097)
        }),
        ("a hole of nothing", |p, a| p.hole(a.cookie, true, 4096, 0)),
        ("a hole beyond", |p, a| p.hole(a.cookie, true, 4096, u32::MAX)),
        ("block status", |p, a| p.chunk(a.cookie, chunk::BLOCK_STATUS, true, &[&[0; 12]])),
        ("an unknown chunk", |p, a| p.chunk(a.cookie, 77, true, &[&[0; 12]])),
        ("an error without a number", |p, a| p.chunk(a.cookie, chunk::ERROR, true, &[&[0, 0]])),
        ("an error that is longer than it can be", |p, a| p.head(a.cookie, chunk::ERROR, true, 1 << 20)),
    ];
    let more: [Case; 4] = [
        ("an error with the number of none", |p, a| p.error(a.cookie, true, 0, b"")),
        ("an error whose text is not there", |p, a| {
            p.chunk(a.cookie, chunk::ERROR, true, &[&5_u32.to_be_bytes(), &9_u16.to_be_bytes()])
        }),
        ("data without a place", |p, a| {
            p.data(a.cookie, false, 4096, &[0; 8192])?;
            p.chunk(a.cookie, chunk::OFFSET_DATA, true, &[&[0; 7]])
        }),
        ("an empty chunk in the middle", |p, a| p.chunk(a.cookie, chunk::NONE, false, &[])),
    ];
    let without: [Case; 3] = [
        ("chunks that were not agreed on", |p, a| p.data(a.cookie, true, 4096, &[0; 8192])),
        ("another cookie", |p, a| p.simple(a.cookie + 256, 0, &[0; 8192])),
        ("more than was asked", |p, a| p.simple(a.cookie, 0, &[0; 16384])),
    ];
    std::thread::scope(|scope| {
        for (name, answer) in with_chunks.into_iter().chain(more) {
            scope.spawn(move || fails(DEFAULT_EXPORT, name, answer));
        }
        for (name, answer) in without.into_iter().take(2) {
            scope.spawn(move || fails(OLD, name, answer));
        }
        // The read succeeds, and the client disconnects because the bytes after the data are not a
        // valid reply.
        scope.spawn(move || {
            let fake = Fake::serving(OLD, without[2].1);
            let device = Nbd::open(&fake.config()).unwrap();
            assert_eq!(device.read_at(4096, &mut [0; 8192]), Ok(()));
            crate::harness::eventually("it hung up", || fake.connections() > 1);
        });
    });
}

/// The connection is lost within a block status reply: the client repeats the query, and drops the
/// first chunk.
#[test]
fn partial_block_status_is_dropped() {
    let fake = Fake::new(|number, peer| {
        peer.welcome(DEFAULT_EXPORT)?;
        let request = peer.request()?;
        let rows = [&7_u32.to_be_bytes()[..], &request.len.to_be_bytes(), &3_u32.to_be_bytes()];
        peer.chunk(request.cookie, chunk::BLOCK_STATUS, number > 0, &rows)?;
        if number > 0 { peer.drain() } else { Ok(()) }
    });
    let device = Nbd::open(&fake.config()).unwrap();
    assert_eq!(device.extents(0, SIZE, &mut |_| true), Ok(SIZE));
    assert_eq!(fake.connections(), 2);
}

/// The server flips one bit of each reply, and truncates some replies.
#[test]
fn damaged_reply_gives_data_or_error() {
    std::thread::scope(|scope| {
        for seed in 0..48 {
            scope.spawn(move || {
                let fake = Fake::serving(DEFAULT_EXPORT, move |peer, request| {
                    let mut rng = Rng::new(seed);
                    let mut answer = Vec::new();
                    for (kind, last, payload) in [
                        (chunk::OFFSET_DATA, 0_u16, [&request.offset.to_be_bytes()[..], &[1; 512]].concat()),
                        (
                            chunk::OFFSET_HOLE,
                            1,
                            [&(request.offset + 512).to_be_bytes()[..], &512_u32.to_be_bytes()].concat(),
                        ),
                    ] {
                        answer.extend(freestone_nbd_proto::STRUCTURED_REPLY_MAGIC.to_be_bytes());
                        answer.extend(last.to_be_bytes());
                        answer.extend(kind.to_be_bytes());
                        answer.extend(request.cookie.to_be_bytes());
                        answer.extend((payload.len() as u32).to_be_bytes());
                        answer.extend(payload);
                    }
                    // Damages only the chunk headers, which the client validates.
                    let at = [rng.below(28), 540 + rng.below(32)][rng.below(2) as usize] as usize;
                    answer[at] ^= 1 << rng.below(8);
                    if rng.chance(20) {
                        answer.truncate(at);
                    }
                    peer.send(&[&answer])
                });
                let device = Nbd::open(&fake.config()).unwrap();
                let mut data = [9; 1024];
                let begun = Instant::now();
                match device.read_at(2048, &mut data) {
                    // The damaged flag bit has no meaning.
                    Ok(()) => assert!(data[..512] == [1; 512] && data[512..] == [0; 512], "{seed}"),
                    Err(error) => assert_eq!(error, Error::Media, "{seed}"),
                }
                assert!(begun.elapsed() < Duration::from_secs(8), "{seed}");
            });
        }
    });
}

#[test]
fn request_without_reply_times_out() {
    let fake = Fake::serving(DEFAULT_EXPORT, |peer, request| {
        // The server replies to all requests except reads.
        if request.command == command::READ { Ok(()) } else { peer.chunk(request.cookie, 0, true, &[]) }
    });
    let device = Nbd::open(&fake.config()).unwrap();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while begun.elapsed() < Duration::from_millis(2500) {
                // Writes keep the connection busy. Writes that are cut off with the connection are
                // sent again.
                assert_eq!(device.write_at(65536, &[1; 512], Flags::empty()), Ok(()));
            }
        });
        assert_eq!(device.read_at(0, &mut [0; 512]), Err(Error::Media));
        assert!(begun.elapsed() < Duration::from_secs(6), "{:?}", begun.elapsed());
    });
}

#[test]
fn chunks_and_holes_in_any_order_are_merged() {
    let fake = Fake::serving(DEFAULT_EXPORT, |peer, request| {
        assert_eq!((request.offset, request.len), (4096, 8192));
        peer.hole(request.cookie, false, 8192, 1024)?;
        peer.data(request.cookie, false, 9216, &[3; 3072])?;
        peer.data(request.cookie, false, 4096, &[1; 100])?;
        peer.data(request.cookie, false, 4196, &[2; 3996])?;
        peer.chunk(request.cookie, chunk::NONE, true, &[])
    });
    let device = Nbd::open(&fake.config()).unwrap();
    let mut data = vec![9; 8192];
    device.read_at(4096, &mut data).unwrap();
    let expected = [vec![1; 100], vec![2; 3996], vec![0; 1024], vec![3; 3072]].concat();
    assert!(data == expected);
    assert_eq!(fake.connections(), 1);
}

#[test]
fn server_errors_are_mapped_and_connection_stays() {
    let fake = Fake::serving(DEFAULT_EXPORT, |peer, request| {
        let number = request.offset as u32 / 512;
        if request.command == command::READ {
            // The reply has data before the error, and the longest possible error text.
            peer.data(request.cookie, false, request.offset, &[1; 256])?;
        }
        peer.error(request.cookie, false, number, &vec![b'x'; u16::MAX as usize])?;
        peer.chunk(request.cookie, chunk::NONE, true, &[])
    });
    let device = Nbd::open(&fake.config()).unwrap();
    for (number, read, write) in [
        (errno::PERM, Error::Media, Error::ReadOnly),
        (errno::IO, Error::Media, Error::Media),
        (errno::NOMEM, Error::Media, Error::Media),
        (errno::INVAL, Error::Media, Error::Media),
        (errno::NOSPC, Error::NoSpace, Error::NoSpace),
        (errno::OVERFLOW, Error::Media, Error::Media),
        (errno::NOTSUP, Error::Unsupported, Error::Unsupported),
        (77, Error::Media, Error::Media),
    ] {
        let at = u64::from(number) * 512;
        assert_eq!(device.read_at(at, &mut [0; 512]), Err(read), "{number}");
        assert_eq!(device.write_at(at, &[0; 512], Flags::empty()), Err(write), "{number}");
        assert_eq!(device.discard(at, 512), Err(write), "{number}");
    }
    assert_eq!(fake.connections(), 1);
}

#[test]
fn requests_are_resent_after_server_shutdown() {
    let fake = Fake::new(|number, peer| {
        peer.welcome(DEFAULT_EXPORT)?;
        loop {
            let request = peer.request()?;
            if number < 2 {
                peer.error(request.cookie, true, errno::SHUTDOWN, b"going")?;
            } else {
                peer.data(request.cookie, true, request.offset, &[5; 512])?;
            }
        }
    });
    let device = Nbd::open(&fake.config()).unwrap();
    let mut data = [0; 512];
    assert_eq!(device.read_at(0, &mut data), Ok(()));
    assert_eq!((data[0], fake.connections(), device.reconnects()), (5, 3, 2));
}

#[test]
fn old_handshakes_are_supported() {
    // Servers without structured replies, some also without `GO`, and one with the padding of the
    // oldest servers.
    for (told, padded) in
        [(OLD, false), (ExportSpec { go: false, ..OLD }, false), (ExportSpec { go: false, ..OLD }, true)]
    {
        let fake = Fake::new(move |_, peer| {
            if padded {
                // The server does not offer the fixed newstyle handshake.
                peer.greet(0)?;
                assert_eq!(peer.option()?, (option::EXPORT_NAME, b"x".to_vec()));
                peer.send(&[&told.size.to_be_bytes(), &told.flags.to_be_bytes(), &[0; 124]])?;
            } else {
                peer.welcome(told)?;
            }
            loop {
                let request = peer.request()?;
                let data =
                    if request.command == command::READ { vec![6; request.len as usize] } else { vec![] };
                peer.simple(request.cookie, 0, &data)?;
            }
        });
        let device = Nbd::open(&fake.config()).unwrap();
        let mut data = vec![0; 100 * 1024];
        device.read_at(512, &mut data).unwrap();
        assert!(data.iter().all(|byte| *byte == 6));
        device.write_at(0, &data, Flags::FUA).unwrap();
        device.flush().unwrap();
        device.write_zeroes(0, 4096, Flags::empty()).unwrap();
        let mut rows = Vec::new();
        assert_eq!(device.extents(0, SIZE, &mut |row| (rows.push(row), true).1), Ok(SIZE));
        assert_eq!(rows, [Extent { offset: 0, len: SIZE, kind: ExtentKind::Data }]);
    }
}

#[test]
fn invalid_block_status_fails_query() {
    type Case = (&'static str, u32, &'static [(u32, u32)]);
    let cases: [Case; 4] = [
        ("nothing", 7, &[]),
        ("of no length", 7, &[(512, 0), (0, 0)]),
        ("more than was asked", 7, &[(1 << 20, 0), (512, 0)]),
        ("another context", 8, &[(512, 0)]),
    ];
    std::thread::scope(|scope| {
        for (name, id, rows) in cases {
            scope.spawn(move || {
                let fake =
                    Fake::serving(DEFAULT_EXPORT, move |peer, request| status(peer, request, id, rows));
                let device = Nbd::open(&fake.config()).unwrap();
                assert_eq!(device.extents(0, SIZE, &mut |_| true), Err(Error::Media), "{name}");
            });
        }
    });
    let fake = Fake::serving(DEFAULT_EXPORT, |peer, request| {
        status(peer, request, 7, &[(4096, 3), (4096, 2), (1 << 30, 0)])
    });
    let device = Nbd::open(&fake.config()).unwrap();
    let mut kinds = Vec::new();
    assert_eq!(device.extents(0, SIZE, &mut |row| (kinds.push((row.len, row.kind)), true).1), Ok(SIZE));
    let rest = SIZE - 8192;
    assert_eq!(kinds, [(4096, ExtentKind::Hole), (4096, ExtentKind::Zero), (rest, ExtentKind::Data)]);
}

fn status(peer: &mut Peer, request: &ClientRequest, id: u32, rows: &[(u32, u32)]) -> PeerResult<()> {
    assert_eq!(request.command, command::BLOCK_STATUS);
    let mut bytes = id.to_be_bytes().to_vec();
    for (len, flags) in rows {
        bytes.extend(len.to_be_bytes());
        bytes.extend(flags.to_be_bytes());
    }
    peer.chunk(request.cookie, chunk::BLOCK_STATUS, true, &[&bytes])
}

#[test]
fn export_ending_within_block_is_fully_accessible() {
    let told = ExportSpec { size: 1000, blocks: Some((1, 4096, 1 << 20)), ..DEFAULT_EXPORT };
    let fake = Fake::serving(told, |peer, request| {
        assert_eq!(request.offset + u64::from(request.len), 1000);
        if request.command == command::READ {
            peer.data(request.cookie, true, request.offset, &vec![4; request.len as usize])
        } else {
            assert_eq!(request.data, vec![8; request.len as usize]);
            peer.chunk(request.cookie, chunk::NONE, true, &[])
        }
    });
    let device = Nbd::open(&fake.config()).unwrap();
    assert_eq!((device.geometry().size, device.geometry().padding), (1024, 24));
    let mut data = [1; 512];
    device.read_at(512, &mut data).unwrap();
    assert!(data[..488] == [4; 488] && data[488..] == [0; 24]);
    device.write_at(0, &[8; 1024], Flags::empty()).unwrap();
    assert_eq!(device.run(Request::new(Op::Read, 0, 0)), Err(Error::Misaligned));
}
