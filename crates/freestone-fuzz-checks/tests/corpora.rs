//! The checks over their corpora, and over mutations of these.

use freestone_fuzz_checks::corpus::run;
use freestone_fuzz_checks::nbd::Nbd;

#[test]
fn nbd_transmission() {
    let nbd = Nbd::new();
    let judged = run("nbd_transmission", 3000, |input| nbd.transmission(input));
    println!("{judged:?}");
    assert!(judged.taken > 500 && judged.refused > 50, "{judged:?}");
}

#[test]
fn nbd_handshake() {
    let nbd = Nbd::new();
    let judged = run("nbd_handshake", 4000, |input| nbd.handshake(input));
    println!("{judged:?}");
    assert!(judged.taken > 50 && judged.refused > 1000, "{judged:?}");
}
