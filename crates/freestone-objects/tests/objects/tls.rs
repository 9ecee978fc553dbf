//! Tests of TLS with a trusted authority, with an unknown authority, and with a server without TLS.
//!
//! The files in `tls/` were created with `openssl` and are valid for a hundred years: an authority, whose key
//! was deleted, and a certificate for `localhost` and `127.0.0.1`, whose key is public.

use std::env;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::process::Command;
use std::sync::Arc;
use std::thread;

use freestone_store::objects::{Fault, WriteCondition};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::{Store, soon};

const CHILD: &str = "FREESTONE_TLS_TEST";

/// Starts a server that sends one HTTP response over TLS on each connection.
fn serve() -> SocketAddr {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/objects/tls/");
    let certificate = CertificateDer::from_pem_file(format!("{dir}server.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(format!("{dir}key.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = Arc::new(config.with_no_client_auth().with_single_cert(vec![certificate], key).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut stream = StreamOwned::new(ServerConnection::new(config.clone()).unwrap(), stream);
            let answer =
                b"HTTP/1.1 200 OK\r\nETag: \"1\"\r\nLast-Modified: Thu, 01 Jan 1970 00:00:00 GMT\r\n\
                           Connection: close\r\nContent-Length: 2\r\n\r\nhi";
            if stream.read(&mut [0; 8192]).is_ok() {
                let _ = stream.write_all(answer);
                stream.conn.send_close_notify();
                let _ = stream.flush();
            }
        }
    });
    address
}

fn store(address: SocketAddr) -> Store {
    Store::with(|options| options.endpoint = Some(format!("https://{address}")))
}

#[test]
fn unknown_authority_is_refused() {
    let store = store(serve());
    for fault in [
        store.objects.get("x", None, 2, soon()).unwrap_err(),
        store.objects.put("x", b"", WriteCondition::Always, soon()).unwrap_err(),
    ] {
        assert!(matches!(&fault, Fault::Other(said) if said.contains("certificate")), "{fault:?}");
    }
}

/// The TLS library reads `SSL_CERT_FILE` once per process, so the test runs itself in a child process.
#[test]
fn authority_in_ssl_cert_file_is_trusted() {
    if env::var_os(CHILD).is_some() {
        let store = store(serve());
        assert_eq!(store.objects.get("x", None, 2, soon()).unwrap().bytes, b"hi");
        return;
    }
    let authority = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/objects/tls/authority.pem");
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", "tls::authority_in_ssl_cert_file_is_trusted"]);
    let output = child.env(CHILD, "1").env("SSL_CERT_FILE", authority).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn server_without_tls_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let fault = store(address).objects.get("x", None, 1, soon()).unwrap_err();
    assert!(matches!(fault, Fault::Other(_)), "{fault:?}");
}
