//! Runs the checks over their corpora and over mutations of them.

use freestone_fuzz_checks::corpus::run;
use freestone_fuzz_checks::nbd::Nbd;
use freestone_fuzz_checks::nbd_client::NbdClient;
use freestone_fuzz_checks::scratch::Scratch;
use freestone_fuzz_checks::state::States;
use freestone_fuzz_checks::store::Stores;
use freestone_fuzz_checks::vhost_user::VhostUser;
use freestone_fuzz_checks::{lz4_pages, power_log, qcow2, rpc, saved, words, zones};
use freestone_testkit::scaled;

#[test]
fn nbd_transmission() {
    let nbd = Nbd::new();
    let counts = run("nbd_transmission", 3000, |input| nbd.transmission(input));
    println!("{counts:?}");
    assert!(counts.accepted > scaled(500) && counts.refused > scaled(50), "{counts:?}");
}

#[test]
fn nbd_handshake() {
    let nbd = Nbd::new();
    let counts = run("nbd_handshake", 4000, |input| nbd.handshake(input));
    println!("{counts:?}");
    assert!(counts.accepted > scaled(50) && counts.refused > scaled(1000), "{counts:?}");
}

#[test]
fn pages_of_lz4() {
    let counts = run("lz4_pages", 8000, lz4_pages::check);
    println!("{counts:?}");
    assert!(counts.accepted > scaled(4000) && counts.refused > scaled(20), "{counts:?}");
}

#[test]
fn zone_state() {
    let counts = run("zones", 8000, zones::check);
    println!("{counts:?}");
    assert!(counts.accepted > scaled(400) && counts.refused > scaled(1000), "{counts:?}");
}

#[test]
fn state_files() {
    let states = States::new();
    let counts = run("state", 4000, |input| states.check(input));
    println!("{counts:?}");
    assert!(counts.accepted > scaled(300) && counts.refused > scaled(300), "{counts:?}");
}

#[test]
fn power_logs() {
    let scratch = Scratch::new();
    let counts = run("power_log", 4000, |input| power_log::check(&scratch, input));
    println!("{counts:?}");
    assert!(counts.accepted > scaled(300) && counts.refused > scaled(300), "{counts:?}");
}

#[test]
fn saved_files() {
    let scratch = Scratch::new();
    let counts = run("saved", 3000, |input| saved::check(&scratch, input));
    println!("{counts:?}");
    assert!(counts.accepted > scaled(100) && counts.refused > scaled(300), "{counts:?}");
}

#[test]
fn qcow2_images() {
    let scratch = Scratch::new();
    let counts = run("qcow2", 3000, |input| qcow2::check(&scratch, input));
    println!("{counts:?}");
    assert!(counts.accepted > scaled(300) && counts.refused > scaled(300), "{counts:?}");
}

#[test]
fn device_words_and_config_files() {
    let counts = run("words", 20_000, words::check);
    println!("{counts:?}");
    assert!(counts.accepted > scaled(200) && counts.refused > scaled(500), "{counts:?}");
}

#[test]
fn json_rpc_lines() {
    let counts = run("rpc", 1500, rpc::check);
    println!("{counts:?}");
    assert!(counts.accepted > scaled(10) && counts.refused > scaled(300), "{counts:?}");
}

#[test]
fn vhost_user_messages() {
    let vhost_user = VhostUser::new();
    let counts = run("vhost_user_messages", 2500, |input| vhost_user.messages(input));
    println!("{counts:?}");
    assert!(counts.accepted > scaled(500) && counts.refused > scaled(500), "{counts:?}");
}

#[test]
fn vhost_user_rings() {
    let vhost_user = VhostUser::new();
    let counts = run("vhost_user_rings", 2500, |input| vhost_user.rings(input));
    println!("{counts:?}");
    assert!(counts.accepted > scaled(500) && counts.refused > scaled(300), "{counts:?}");
}

#[test]
fn store_objects() {
    let stores = Stores::new();
    let counts = run("store_objects", 2000, |input| stores.check(input));
    println!("{counts:?}");
    assert!(counts.accepted > scaled(300) && counts.refused > scaled(300), "{counts:?}");
}

#[test]
fn nbd_replies() {
    let client = NbdClient::new();
    let counts = run("nbd_replies", 1500, |input| client.check(input));
    println!("{counts:?}");
    assert!(counts.accepted > scaled(300) && counts.refused > scaled(300), "{counts:?}");
}
