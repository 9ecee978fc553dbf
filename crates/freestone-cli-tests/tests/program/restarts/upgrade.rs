//! Servers whose program is replaced while clients are connected (`freestone upgrade`).

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use super::kept::row;
use super::{GOLDEN, image, serve};
use crate::harness::prelude::*;

const PAGE: usize = 4096;

/// Writes a script that starts this program with `more` arguments, except for the check before the upgrade.
fn program_with(dir: &Path, name: &str, more: &str) -> PathBuf {
    let path = dir.join(name);
    let program = program();
    let text = format!(
        "#!/bin/sh\nfor word; do last=$word; done\n\
        [ \"$last\" = --check ] && exec {program} \"$@\"\nexec {program} \"$@\" {more}\n"
    );
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    path
}

/// Writes and reads one page after the other until `ends` is set, several requests at a time. Returns the number of pages.
fn work(mut client: Raw, ends: &AtomicBool) -> u64 {
    let mut written = 0_u64;
    while !ends.load(SeqCst) {
        for number in written..written + 4 {
            let offset = number % 256 * PAGE as u64;
            client.send_write(offset, &[number as u8; PAGE]);
        }
        for _ in 0..4 {
            assert_eq!(client.reply().unwrap().1, 0);
        }
        written += 4;
        let offset = (written - 1) % 256 * PAGE as u64;
        assert_eq!(client.read(offset, PAGE as u32).unwrap(), [(written - 1) as u8; PAGE]);
    }
    written
}

#[test]
fn upgrade_keeps_connections_and_content() {
    let server = serve(
        image(8 << 20),
        &["--recoverable", GOLDEN, "disk=ram,disksize=16M", "plain=file,path=p,size=2M"],
    );
    server.text(&["snapshot", "disk", "monday"]);
    server.text(&["fork", "golden", "job", "--nbd", "unix:job.sock"]);
    let net = server.text(&["fork", "golden", "net", "--nbd", "tcp:127.0.0.1:0"]);
    let net = net.split_whitespace().last().unwrap();
    qemu_io(&uri(&server, "disk"), &["write -P 1 8M 1M"]);
    let job = server.path("job.sock");
    let pid = server.pid();
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        let clients = ["disk", "plain"].map(|name| Raw::connect(&server, name));
        let clients = clients.into_iter().chain([Raw::connect_at(&job, "job")]);
        let workers: Vec<_> = clients.map(|client| scope.spawn(|| work(client, &ends))).collect();
        let mut idle = Raw::connect(&server, "golden");
        for round in 1..=3 {
            let outcome = server.json(&["upgrade"]);
            assert_eq!((&outcome["upgrades"], &outcome["last"]["error"]), (&json!(round), &Value::Null));
            assert_eq!(outcome["last"]["connections"], 4, "{outcome}");
            assert_eq!(idle.read(0, PAGE as u32).unwrap(), [7; PAGE]);
            assert_eq!(row(&server, "disk")["adopted"], true);
            server.text(&["fork", "monday", &format!("new-{round}")]);
        }
        ends.store(true, SeqCst);
        for worker in workers {
            assert!(worker.join().unwrap() > 0);
        }
    });
    assert_eq!(server.pid(), pid);
    qemu_io(&uri(&server, "disk"), &["read -P 1 8M 1M"]);
    // The port that was chosen is kept.
    qemu_io(net, &["read -P 7 0 1M"]);
    // The state is the one of an orderly start.
    let server = serve(server.kill(), &["--recoverable"]);
    qemu_io(&uri(&server, "disk"), &["read -P 1 8M 1M"]);
    assert_eq!(row(&server, "new-3")["adopted"], true);
    drop(server.end());
}

#[test]
fn program_that_cannot_start_leaves_the_former_one() {
    let server = serve(image(8 << 20), &["--recoverable", GOLDEN, "disk=ram,disksize=16M"]);
    let mut client = Raw::connect(&server, "disk");
    assert_eq!(client.write(0, 0, &[3; PAGE]), 0);
    let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = busy.local_addr().unwrap().to_string();
    let wrong_option = program_with(&server.path("."), "option", "--no-such-option");
    let control = server.path("control").display().to_string();
    let wrong_setting = program_with(&server.path("."), "setting", &format!("--control-read-only {control}"));
    let late = program_with(&server.path("."), "late", &format!("--metrics {at}"));
    let why = server.refused(1, &["upgrade", late.to_str().unwrap()]);
    assert!(why.contains("the former program continues") && why.contains(&at), "{why}");
    let why = server.refused(1, &["upgrade", wrong_setting.to_str().unwrap()]);
    assert!(why.contains("is already the path of the control socket"), "{why}");
    assert_eq!(client.read(0, PAGE as u32).unwrap(), [3; PAGE]);
    assert_eq!(client.write(0, 0, &[4; PAGE]), 0);
    // Programs that cannot take over are not executed at all.
    for (program, reason) in [
        ("/bin/true", "it is another program, or too old"),
        ("/no/such/program", "No such file or directory"),
    ] {
        let why = server.refused(1, &["upgrade", program]);
        assert!(why.contains("cannot take over") && why.contains(reason), "{why}");
    }
    assert_eq!(client.flush(), 0);
    assert_eq!(server.json(&["upgrade"])["last"]["error"], Value::Null);
    assert_eq!(client.read(0, PAGE as u32).unwrap(), [4; PAGE]);
    // The command line is not understood any more, which ends the process like a kill.
    server.run_verb(&["upgrade", wrong_option.to_str().unwrap()]);
    let (_, dir) = server.wait();
    let server = serve(dir, &["--recoverable"]);
    qemu_io(&uri(&server, "disk"), &["read -P 4 0 4k"]);
    drop(server.end());
}

#[test]
fn upgrade_names_what_it_would_lose() {
    let server =
        serve(image(8 << 20), &[GOLDEN, "disk=ram,disksize=16M", "lost=ram,disksize=1M,on_data_loss=empty"]);
    let why = server.refused(1, &["upgrade"]);
    assert!(why.contains("disk, lost: the content would be lost") && why.contains("--force"), "{why}");
    // A client that stayed connected would find another disk.
    let [mut kept, mut lost] = ["golden", "lost"].map(|name| Raw::connect(&server, name));
    server.text(&["upgrade", "--force"]);
    assert_eq!((kept.try_flush(), lost.try_flush()), (Ok(0), Err(Ended)));
    assert_eq!(row(&server, "disk")["withheld"], true);
    drop(server.end());
    let server = Serve::start(&["disk=ram,disksize=1M"]);
    assert!(server.refused(1, &["upgrade"]).contains("it has no state directory"));
    if rustix::process::geteuid().is_root() {
        let dir = tempfile::tempdir().unwrap();
        let server = serve(dir, &["disk=file,path=disk,size=1M", "--control-mode", "0666"]);
        let control = server.path("control");
        let mut other_user = unprivileged(server.dir.path());
        let (_, _, why) = finish(other_user.args(["upgrade", "/bin/true", "--control"]).arg(control));
        assert!(why.contains("only root and the user of the server may name a program"), "{why}");
    }
}
