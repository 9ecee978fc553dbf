//! Fault rules: changes at run time, random failures repeated by their seed, and hanging requests.

use crate::harness::prelude::*;

/// Writes 200 pages. Returns the page numbers of the writes that failed with EIO.
fn failures(serve: &Serve, name: &str) -> Vec<u64> {
    let mut client = Raw::connect(serve, name);
    (0..200).filter(|n| client.write(0, n * 4096, &[1; 4096]) == EIO).collect()
}

#[test]
fn fault_rules_change_while_clients_are_connected() {
    let serve = Serve::start(&["r=ram,disksize=16M,faults=none", "plain=ram,disksize=1M"]);
    let mut client = Raw::connect(&serve, "r");
    assert_eq!(client.write(0, 0, &[1; 4096]), 0);
    let set = serve.text(&["set", "r", "faults=write error=ENOSPC at=1M+4K; read error=EIO nth=2", "seed=5"]);
    assert_eq!(set, "faults=write error=ENOSPC at=1M+4K; read error=EIO nth=2\nseed=5\n");
    assert_eq!((client.write(0, 0, &[1; 4096]), client.write(0, 1 << 20, &[1; 4096])), (0, 28));
    assert_eq!((client.read(0, 4096), client.read(0, 4096)), (Ok(vec![1; 4096]), Err(EIO)));
    let message = fails(tool("qemu-io").args(["-f", "raw", "-c", "write 1M 4k"]).arg(uri(&serve, "r")));
    assert!(message.contains("No space left"), "{message}");
    let stat = serve.json(&["stat", "r"]);
    assert_eq!(stat["faults"]["rules"][0]["fired"], 2, "{stat}");
    assert!(serve.text(&["stat", "r"]).contains("read error=EIO nth=2: matched 2, fired 1\n"));
    assert_eq!(serve.text(&["set", "r", "faults=none"]), "faults=none\n");
    ok(tool("qemu-io").args(["-f", "raw", "-c", "write 1M 4k"]).arg(uri(&serve, "r")));

    let refused = serve.refused(2, &["set", "r", "faults=write eror=EIO"]);
    assert!(refused.starts_with("r: faults=write eror=EIO: fault rule 1 "), "{refused}");
    let without = serve.refused(1, &["set", "plain", "faults=none"]);
    let later = "the device was created without faults; create it with faults=none to set them later";
    assert_eq!(without, format!("plain: faults=none: {later}"));
}

#[test]
fn fault_seed_repeats_and_a_random_one_is_reported() {
    let rules = "write error=EIO chance=20%";
    let serve = Serve::start(&[
        &format!("a=ram,disksize=1M,faults={rules},seed=7"),
        &format!("b=null,size=1M,faults={rules},seed=7"),
        &format!("c=null,size=1M,faults={rules},seed=8"),
        &format!("d=null,size=1M,faults={rules}"),
    ]);
    let a = failures(&serve, "a");
    assert!((15..70).contains(&a.len()), "{a:?}");
    assert_eq!(failures(&serve, "b"), a);
    assert_ne!(failures(&serve, "c"), a);
    let seed_lines: Vec<&str> = serve.startup_output.lines().filter(|line| line.contains("seed")).collect();
    let [line] = seed_lines[..] else { panic!("{seed_lines:?}") };
    let seed = line.strip_prefix("d: faults with seed=").unwrap_or_else(|| panic!("{line}"));
    let d = failures(&serve, "d");
    // Setting the seed restarts its pseudorandom sequence, so the same writes fail again.
    serve.text(&["set", "d", &format!("seed={seed}")]);
    assert_eq!(failures(&serve, "d"), d);
    let made = serve.json(&["create", &format!("e=null,size=1M,faults={rules}")]);
    assert!(made["seed"].is_u64(), "{made}");
    assert!(serve.json(&["create", &format!("f=null,size=1M,faults={rules},seed=1")]).get("seed").is_none());
}

#[test]
fn hung_requests_are_released() {
    let serve = Serve::start(&["n=null,size=1M,faults=write hang times=2"]);
    let hung = || serve.json(&["stat", "n"])["faults"]["hanging"].clone();
    let mut client = Raw::connect(&serve, "n");
    let first = client.send_write(0, &[1; 4096]);
    let second = client.send_write(4096, &[1; 4096]);
    // The rule applies twice (`times=2`), so later requests do not hang.
    let third = client.send_write(8192, &[1; 4096]);
    assert_eq!(client.reply().unwrap(), (third, 0));
    while hung() != 2 {
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(serve.text(&["release", "n"]), "n: 2 requests released\n");
    let mut answers = [client.reply().unwrap(), client.reply().unwrap()];
    answers.sort_unstable();
    assert_eq!(answers, [(first, 0), (second, 0)]);
    assert_eq!((hung(), serve.json(&["release", "n"])["released"].clone()), (json!(0), json!(0)));

    // A device with a hanging request can be removed.
    serve.text(&["set", "n", "faults=read hang"]);
    client.send(0, 0, 0, 4096, &[]);
    while hung() != 1 {
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(serve.json(&["remove", "n", "--force"])["connections_ended"], 1);
}
