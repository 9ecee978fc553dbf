//! Client certificates: names, authorities, revocation, and credentials renewed while the server runs.

use std::io::{Read, Write};

use freestone_nbd::{Credentials, Limits, TlsFiles, TlsMode, Visibility};
use freestone_testkit::certificates::{Authority, Usage};
use rustls::version::{TLS12, TLS13};

use super::serving;
use crate::common::prelude::*;
use crate::common::secure::{Secure, files};

fn listed(client: &mut Client) -> Vec<String> {
    let mut replies = client.option(LIST, &[]);
    assert_eq!(replies.pop().unwrap().kind, ACK);
    let name = |data: &[u8]| String::from_utf8(data[4..].to_vec()).unwrap();
    replies.iter().inspect(|reply| assert_eq!(reply.kind, SERVER)).map(|reply| name(&reply.data)).collect()
}

#[test]
fn export_access_follows_certificate_names() {
    let secure = Secure::new(TlsMode::Optional);
    let ours = &secure.ours;
    ours.sign("bob", "bob.example", Usage::Client);
    let device = MemDevice::new(1 << 20);
    let named =
        |names: &[&str]| Visibility::Certificates(names.iter().map(|name| (*name).to_owned()).collect());
    secure.publish("disk", &device, Visibility::All);
    secure.publish("for-tls", &device, Visibility::Tls);
    secure.publish("for-alice", &device, named(&["alice"]));
    secure.publish("for-bob", &device, named(&["nobody", "bob.example"]));
    let seen = |client: &mut Client, names: &[&str]| {
        assert_eq!(listed(client), names);
        for name in ["disk", "for-tls", "for-alice", "for-bob", "for-nobody"] {
            let is_there = client.outcome(OPT_INFO, &info_data(name, &[])) == ACK;
            assert_eq!(is_there, names.contains(&name), "{name}");
            let contexts = client.outcome(LIST_META_CONTEXT, &context_data(name, &[]));
            assert_eq!(contexts == ACK, names.contains(&name), "{name}");
        }
        let others = ["for-alice", "for-bob"].into_iter().filter(|name| !names.contains(name));
        others.map(|name| client.outcome(GO, &info_data(name, &[]))).collect::<Vec<_>>()
    };
    let mut clear = secure.clear();
    clear.agree(Headers::Structured);
    assert_eq!(seen(&mut clear, &["disk"]), [ERR_TLS_REQD, ERR_TLS_REQD]);
    assert_eq!(clear.outcome(GO, &info_data("for-tls", &[])), ERR_TLS_REQD);
    clear.send(&option(EXPORT_NAME, b"for-tls"));
    clear.assert_closed();
    let mut alice = secure.client();
    alice.agree(Headers::Structured);
    assert_eq!(seen(&mut alice, &["disk", "for-tls", "for-alice"]), [ERR_UNKNOWN]);
    alice.go("for-alice");
    let mut bob = secure.client_as(Some("bob"), rustls::ALL_VERSIONS);
    bob.agree(Headers::Structured);
    assert_eq!(seen(&mut bob, &["disk", "for-tls", "for-bob"]), [ERR_UNKNOWN]);
    bob.send(&option(EXPORT_NAME, b"for-alice"));
    bob.assert_closed();
    alice.read(0, 512).unwrap();
    alice.disconnect();
    secure.assert_sound();
}

#[test]
fn untrusted_certificate_is_refused() {
    let (secure, _device) = serving(TlsMode::Required);
    let others = Authority::new(secure.directory.path().join("others"));
    others.sign("alice", "alice.example", Usage::Client);
    secure.ours.sign("past", "past.example", Usage::ExpiredClient);
    for versions in [&[&TLS12][..], &[&TLS13]] {
        for (of, who) in [
            (&others, Some("alice")),
            (&secure.ours, Some("past")),
            // A server certificate is not valid for clients.
            (&secure.ours, Some("server")),
            (&secure.ours, None),
        ] {
            let mut stream = secure.stream(of, who, versions);
            // With TLS 1.3 the client learns of the refusal only after its first data.
            let _ = stream.write_all(&option(GO, &info_data("disk", &[])));
            let error =
                std::io::Read::read(&mut stream, &mut [0; 1]).expect_err("the certificate must be refused");
            assert!(error.to_string().contains("received fatal alert"), "{who:?}: {error}");
        }
    }
    secure.assert_sound();
    // Without a client CA, clients need no certificate.
    let open = Secure::with(TlsMode::Required, Limits::default(), false);
    open.publish("disk", &MemDevice::new(1 << 20), Visibility::Tls);
    for who in [None, Some("alice")] {
        let mut client = open.client_as(who, rustls::ALL_VERSIONS);
        client.go("disk");
        client.disconnect();
    }
}

#[test]
fn revoked_certificate_is_refused() {
    let (secure, _device) = serving(TlsMode::Required);
    let ours = &secure.ours;
    ours.sign("bob", "bob.example", Usage::Client);
    let others = Authority::new(secure.directory.path().join("others"));
    others.revoke("crl.pem", &[], 2100);
    let comes = |who| {
        let mut stream = secure.stream(ours, Some(who), rustls::ALL_VERSIONS);
        let _ = stream.write_all(&option(GO, &info_data("disk", &[])));
        stream.read(&mut [0; 1]).is_ok()
    };
    let with = |list| {
        let files = TlsFiles { client_crl: Some(list), ..files(ours, true) };
        Credentials::load(&files).map(|credentials| secure.server.renew_credentials(credentials))
    };
    ours.revoke("crl.pem", &["bob", "nobody"], 2100);
    with(ours.file("crl.pem")).unwrap();
    assert!(comes("alice") && !comes("bob"));
    ours.revoke("crl.pem", &[], 2100);
    with(ours.file("crl.pem")).unwrap();
    assert!(comes("alice") && comes("bob"));
    // With an expired revocation list, or a list of another authority, no client certificate is trusted.
    ours.revoke("old.pem", &["bob"], 2002);
    for list in [ours.file("old.pem"), others.file("crl.pem")] {
        with(list.clone()).unwrap();
        assert!(!comes("alice") && !comes("bob"), "{}", list.display());
    }
    for (list, why) in [("ca-cert.pem", "contains no certificate revocation list"), ("none.pem", "")] {
        let error = with(ours.file(list)).unwrap_err().to_string();
        assert!(error.starts_with("tls_client_crl=") && error.contains(why), "{error}");
    }
    with(ours.file("crl.pem")).unwrap();
    secure.assert_sound();
}

#[test]
fn renewed_credentials_apply_to_new_connections() {
    let (secure, _device) = serving(TlsMode::Required);
    let mut before = secure.client();
    before.agree(Headers::Structured);
    before.go("disk");
    let next = Authority::new(secure.directory.path().join("next"));
    next.sign("server", "localhost", Usage::Server);
    next.sign("alice", "alice.example", Usage::Client);
    // Loading a certificate and a key that do not match fails, and the server keeps its credentials.
    let mut mixed = files(&next, true);
    mixed.key = secure.ours.file("server-key.pem");
    let error = Credentials::load(&mixed).unwrap_err().to_string();
    assert!(error.starts_with("tls_cert=") && error.contains("with tls_key"), "{error}");
    mixed.key = next.dir().join("none");
    assert!(Credentials::load(&mixed).unwrap_err().to_string().starts_with("tls_key="));
    secure.assert_serves();
    secure.server.renew_credentials(Credentials::load(&files(&next, true)).unwrap());
    before.read(0, 512).unwrap();
    let renewed = Secure { ours: next, ..secure };
    let mut after = renewed.client();
    after.go("disk");
    after.read(0, 512).unwrap();
    before.read(0, 512).unwrap();
    before.disconnect();
    after.disconnect();
}
