//! The checks over their corpora, and over mutations of these.

use freestone_fuzz_checks::corpus::run;
use freestone_fuzz_checks::nbd::Nbd;
use freestone_fuzz_checks::nbd_client::NbdClient;
use freestone_fuzz_checks::scratch::Scratch;
use freestone_fuzz_checks::state::States;
use freestone_fuzz_checks::store::Stores;
use freestone_fuzz_checks::vhost_user::VhostUser;
use freestone_fuzz_checks::{power_log, qcow2, rpc, saved, words, zones};
use freestone_testkit::scaled;

#[test]
fn nbd_transmission() {
    let nbd = Nbd::new();
    let judged = run("nbd_transmission", 3000, |input| nbd.transmission(input));
    println!("{judged:?}");
    assert!(judged.taken > scaled(500) && judged.refused > scaled(50), "{judged:?}");
}

#[test]
fn nbd_handshake() {
    let nbd = Nbd::new();
    let judged = run("nbd_handshake", 4000, |input| nbd.handshake(input));
    println!("{judged:?}");
    assert!(judged.taken > scaled(50) && judged.refused > scaled(1000), "{judged:?}");
}

#[test]
fn zone_state() {
    let judged = run("zones", 8000, zones::check);
    println!("{judged:?}");
    assert!(judged.taken > scaled(400) && judged.refused > scaled(1000), "{judged:?}");
}

#[test]
fn states_of_servers() {
    let states = States::new();
    let judged = run("state", 4000, |input| states.check(input));
    println!("{judged:?}");
    assert!(judged.taken > scaled(300) && judged.refused > scaled(300), "{judged:?}");
}

#[test]
fn power_logs() {
    let scratch = Scratch::new();
    let judged = run("power_log", 4000, |input| power_log::check(&scratch, input));
    println!("{judged:?}");
    assert!(judged.taken > scaled(300) && judged.refused > scaled(300), "{judged:?}");
}

#[test]
fn saved_files() {
    let scratch = Scratch::new();
    let judged = run("saved", 3000, |input| saved::check(&scratch, input));
    println!("{judged:?}");
    assert!(judged.taken > scaled(100) && judged.refused > scaled(300), "{judged:?}");
}

#[test]
fn qcow2_images() {
    let scratch = Scratch::new();
    let judged = run("qcow2", 3000, |input| qcow2::check(&scratch, input));
    println!("{judged:?}");
    assert!(judged.taken > scaled(300) && judged.refused > scaled(300), "{judged:?}");
}

#[test]
fn device_words_and_config_files() {
    let judged = run("words", 20_000, words::check);
    println!("{judged:?}");
    assert!(judged.taken > scaled(200) && judged.refused > scaled(500), "{judged:?}");
}

#[test]
fn json_rpc_lines() {
    let judged = run("rpc", 1500, rpc::check);
    println!("{judged:?}");
    assert!(judged.taken > scaled(10) && judged.refused > scaled(300), "{judged:?}");
}

#[test]
fn vhost_user_messages() {
    let vhost_user = VhostUser::new();
    let judged = run("vhost_user_messages", 2500, |input| vhost_user.messages(input));
    println!("{judged:?}");
    assert!(judged.taken > scaled(500) && judged.refused > scaled(500), "{judged:?}");
}

#[test]
fn vhost_user_rings() {
    let vhost_user = VhostUser::new();
    let judged = run("vhost_user_rings", 2500, |input| vhost_user.rings(input));
    println!("{judged:?}");
    assert!(judged.taken > scaled(500) && judged.refused > scaled(300), "{judged:?}");
}

#[test]
fn objects_of_stores() {
    let stores = Stores::new();
    let judged = run("store_objects", 2000, |input| stores.check(input));
    println!("{judged:?}");
    assert!(judged.taken > scaled(300) && judged.refused > scaled(300), "{judged:?}");
}

#[test]
fn replies_to_the_nbd_client() {
    let client = NbdClient::new();
    let judged = run("nbd_replies", 1500, |input| client.check(input));
    println!("{judged:?}");
    assert!(judged.taken > scaled(300) && judged.refused > scaled(300), "{judged:?}");
}
