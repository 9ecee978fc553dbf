//! Tests of TLS: qemu-nbd and nbdkit with generated certificates, and refused configurations.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use freestone_core::device::{Blocking as _, Device as _, Flags};
use freestone_nbd_client::{Config, Nbd, TlsFiles};
use freestone_nbd_proto::{option, reply};
use freestone_testkit::certificates::{Authority, Usage};
use freestone_testkit::process::KillOnDrop;
use freestone_testkit::tools::is_listening;

use crate::fake::{DEFAULT_EXPORT, Fake};

/// Starts qemu-nbd with TLS at a Unix socket. Clients must present a certificate.
fn qemu_nbd(dir: &Path, tls: &Path) -> KillOnDrop {
    let image = dir.join("disk.img");
    fs::write(&image, vec![5; 1 << 20]).unwrap();
    let socket = dir.join("qemu");
    let mut command = Command::new(freestone_testkit::tools::find("qemu-nbd"));
    let object = format!("tls-creds-x509,id=tls,dir={},endpoint=server,verify-peer=yes", tls.display());
    command.args(["--persistent", "--shared=0", "-f", "raw", "--object", &object, "--tls-creds", "tls"]);
    command.arg("--export-name=disk").arg("--socket").arg(&socket).arg(&image);
    KillOnDrop::start(&mut command, || is_listening(&socket))
}

fn config(dir: &Path, scheme: &str, socket: &str, tls: TlsFiles) -> Config {
    let uri = format!("{scheme}+unix:///disk?socket={}", dir.join(socket).display());
    let timeout = Duration::from_secs(1);
    Config { name: "test".into(), tls, timeout, ..Config::new(uri.parse().unwrap()) }
}

fn why(config: &Config) -> String {
    let error = Nbd::open(config).expect_err("it cannot be used").to_string();
    println!("{error}");
    error
}

#[test]
fn qemu_nbd_certificates_are_verified() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let ours = Authority::new(dir.join("ours"));
    ours.sign("server", "localhost", Usage::Server);
    ours.sign("client", "anybody", Usage::Client);
    let other = Authority::new(dir.join("other"));
    other.sign("client", "anybody", Usage::Client);
    let _server = qemu_nbd(dir, ours.dir());
    let tls = TlsFiles {
        ca: Some(ours.file("ca-cert.pem")),
        cert: Some(ours.file("client-cert.pem")),
        key: Some(ours.file("client-key.pem")),
        hostname: None,
    };
    let device = Nbd::open(&config(dir, "nbds", "qemu", tls.clone())).unwrap();
    let mut data = vec![0; 300 << 10];
    device.read_at(4096, &mut data).unwrap();
    assert!(data.iter().all(|byte| *byte == 5));
    data.fill(9);
    device.write_at(512 << 10, &data, Flags::FUA).unwrap();
    let mut found = vec![0; data.len()];
    device.read_at(512 << 10, &mut found).unwrap();
    assert!(found == data && device.flush() == Ok(()));
    assert!(device.extents(0, 1 << 20, &mut |_| true).unwrap() > 0);
    // The server's certificate is for another host name.
    let elsewhere = TlsFiles { hostname: Some("example.org".into()), ..tls.clone() };
    assert!(why(&config(dir, "nbds", "qemu", elsewhere)).contains("certificate not valid for name"));
    // The client does not trust the server's CA.
    let stranger = TlsFiles { ca: Some(other.file("ca-cert.pem")), ..tls.clone() };
    assert!(why(&config(dir, "nbds", "qemu", stranger)).contains("certificate"));
    // The server does not trust the client's certificate, or the client has none.
    let (cert, key) = (Some(other.file("client-cert.pem")), Some(other.file("client-key.pem")));
    why(&config(dir, "nbds", "qemu", TlsFiles { cert, key, ..tls.clone() }));
    why(&config(dir, "nbds", "qemu", TlsFiles { cert: None, key: None, ..tls.clone() }));
    // The server refuses a client without TLS.
    assert!(why(&config(dir, "nbd", "qemu", TlsFiles::default())).contains("only with TLS"));
    // TLS files that do not exist, contain no certificate, or do not match are refused.
    let none = TlsFiles { ca: Some(dir.join("none")), ..tls.clone() };
    assert!(why(&config(dir, "nbds", "qemu", none)).starts_with("tls_ca="));
    let image = TlsFiles { ca: Some(dir.join("disk.img")), ..tls.clone() };
    assert!(why(&config(dir, "nbds", "qemu", image)).contains("contains no certificate"));
    let mixed = TlsFiles { key: Some(other.file("client-key.pem")), ..tls };
    assert!(why(&config(dir, "nbds", "qemu", mixed)).starts_with("tls_cert="));
}

#[test]
fn nbdkit_over_tcp_with_tls() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let ours = Authority::new(dir.join("ours"));
    ours.sign("server", "127.0.0.1", Usage::Server);
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut command = Command::new(freestone_testkit::tools::find("nbdkit"));
    command.args(["-f", "-P"]).arg(dir.join("pid")).args(["-i", "127.0.0.1", "-p", &free.to_string()]);
    command.arg("--tls=require").arg(format!("--tls-certificates={}", ours.dir().display()));
    command.args(["memory", "8M"]);
    let _server = KillOnDrop::start(&mut command, || dir.join("pid").exists());
    let tls = TlsFiles { ca: Some(ours.file("ca-cert.pem")), ..TlsFiles::default() };
    let uri = format!("nbds://127.0.0.1:{free}/").parse().unwrap();
    let device = Nbd::open(&Config { tls, ..Config::new(uri) }).unwrap();
    let data: Vec<u8> = (0..5_000_000_u32 / 512 * 512).map(|n| (n / 7) as u8).collect();
    device.write_at(1024, &data, Flags::empty()).unwrap();
    let mut found = vec![0; data.len()];
    device.read_at(1024, &mut found).unwrap();
    assert!(found == data);
}

#[test]
fn tls_cannot_be_bypassed() {
    let tls = TlsFiles { ca: None, ..TlsFiles::default() };
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new(dir.path().join("ours"));
    let tls = TlsFiles { ca: Some(ours.file("ca-cert.pem")), ..tls };
    let with_tls = |fake: &Fake| {
        let mut config = fake.config();
        (config.uri.tls, config.tls) = (true, tls.clone());
        why(&config)
    };
    // The server does not support TLS.
    let fake = Fake::new(|_, peer| peer.welcome(DEFAULT_EXPORT));
    assert!(with_tls(&fake).contains("it does not support TLS"));
    let fake = Fake::new(|_, peer| peer.greet(0));
    assert!(with_tls(&fake).contains("it does not support TLS"));
    // After acknowledging STARTTLS, the server continues in plain text, as a man in the middle
    // could.
    let fake = Fake::new(|_, peer| {
        peer.greet(3)?;
        assert_eq!(peer.option()?.0, option::STARTTLS);
        peer.reply(option::STARTTLS, reply::ACK, &[])?;
        peer.reply(option::STRUCTURED_REPLY, reply::ACK, &[])?;
        peer.export(1 << 20, 1)?;
        peer.reply(option::GO, reply::ACK, &[])?;
        peer.drain()
    });
    assert!(with_tls(&fake).contains("TLS"));
    // The server sends another reply before its reply to STARTTLS.
    let fake = Fake::new(|_, peer| {
        peer.greet(3)?;
        peer.option()?;
        peer.export(1 << 20, 1)
    });
    assert!(with_tls(&fake).contains("does not match the option"));
    // The server's reply to STARTTLS contains data.
    let fake = Fake::new(|_, peer| {
        peer.greet(3)?;
        peer.option()?;
        peer.reply(option::STARTTLS, reply::ACK, b"x")
    });
    assert!(with_tls(&fake).contains("does not match the option"));
}
