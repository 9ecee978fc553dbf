//! TLS: with an authority that this host knows, with one that it does not know, and with something else.
//!
//! The files in `tls/` were made for this with `openssl`, for a hundred years: an authority, whose key is gone, and a
//! certificate for `localhost` and `127.0.0.1`, whose key is no secret.

use std::env;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::process::Command;
use std::sync::Arc;
use std::thread;

use freestone_store::objects::{Fault, When};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::{Store, soon};

const CHILD: &str = "FREESTONE_TLS_TEST";

/// Answers each connection with one answer of HTTP over TLS, and ends it.
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
fn an_authority_that_nobody_knows_is_refused() {
    let store = store(serve());
    for fault in [
        store.objects.get("x", None, 2, soon()).unwrap_err(),
        store.objects.put("x", b"", When::Always, soon()).unwrap_err(),
    ] {
        assert!(matches!(&fault, Fault::Other(said) if said.contains("certificate")), "{fault:?}");
    }
}

/// The library looks at the variable once in a process, so that the test runs itself in another.
#[test]
fn an_authority_that_is_named_is_believed() {
    if env::var_os(CHILD).is_some() {
        let store = store(serve());
        assert_eq!(store.objects.get("x", None, 2, soon()).unwrap().bytes, b"hi");
        return;
    }
    let authority = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/objects/tls/authority.pem");
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", "tls::an_authority_that_is_named_is_believed"]);
    let output = child.env(CHILD, "1").env("SSL_CERT_FILE", authority).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn what_speaks_no_tls_is_no_store() {
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
