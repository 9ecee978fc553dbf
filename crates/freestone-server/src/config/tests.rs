//! Tests of the configuration file: accepted and refused content.

use freestone_spec::entries::Entries;
use freestone_spec::kinds::Spec;

use super::{AccessWords, parse};

#[test]
fn file_with_all_types_parses() {
    let config = parse(
        "nbd = ['unix:/a', 'tcp:127.0.0.1:0']\ncontrol = 'c'\nmax_connections = 65536\nmax_memory_in_flight = '1G'\n\
         socket_mode = '0660'\nsocket_group = 44\ncontrol_user = 'root'\n\
         [[device]]\nname = 'r'\nkind = 'ram'\ndisksize = '1G'\n\
         [[device]]\nname = 'f'\nkind = 'file'\npath = 'x,y'\nreadonly = true\nblocksize = 512\n",
    )
    .unwrap();
    assert_eq!(config.nbd, ["unix:/a", "tcp:127.0.0.1:0"]);
    assert_eq!((config.control, config.max_connections), (Some("c".into()), Some(65_536)));
    assert_eq!(config.max_memory_in_flight, Some(1 << 30));
    let message = |words: &AccessWords, prefix| format!("{:?}", words.keys(prefix));
    assert_eq!(message(&config.sockets, "socket"), r#"[("socket_mode", "0660"), ("socket_group", "44")]"#);
    assert_eq!(message(&config.control_socket, "control"), r#"[("control_user", "root")]"#);
    let devices: Vec<_> = config.devices.iter().map(|device| device.entries.to_string()).collect();
    assert_eq!(devices, ["r=ram,disksize=1G", "f=file,path=x,,y,readonly=yes,blocksize=512"]);
    assert_eq!(parse("nbd = 'unix:/a'").unwrap().nbd, ["unix:/a"]);
}

#[test]
fn count_numbers_names_and_exports() {
    let config = parse(
        "ublk = true\n[[device]]\nname = 'job-%n'\nkind = 'fork'\nbase = 'golden'\nrecord = 'job-%n.log'\ncount = 2\n\
         export = [{ nbd = 'unix:/job-%n', read_only = true, allow = ['uid:1', '::1'] }, { ublk = true, queues = 2 }, { vhost_user = 'unix:v%n' }]\n\
         [[device]]\nname = 'n'\nkind = 'null'\ncount = 1\n[[device.export]]\nnbd = 'tcp:127.0.0.1:0'\n",
    )
    .unwrap();
    assert!(config.ublk);
    let [jobs, null] = &config.devices[..] else { panic!("two devices") };
    let each = jobs.expand();
    assert_eq!(each[1].0.to_string(), "job-1=fork,base=golden,record=job-1.log");
    let [nbd, ublk, machine] = &each[1].1[..] else { panic!("three exports") };
    assert_eq!((nbd.nbd.as_deref(), nbd.read_only), (Some("unix:/job-1"), true));
    assert_eq!(nbd.allow, Some(vec!["uid:1".to_owned(), "::1".to_owned()]));
    assert_eq!((ublk.ublk, ublk.queues, ublk.read_only), (true, Some(2), false));
    assert_eq!((machine.vhost_user.as_deref(), machine.line), (Some("unix:v1"), 8));
    assert_eq!((each.len(), &each[0].0.name[..]), (2, "job-0"));
    let each = null.expand();
    assert_eq!((&each[0].0.name[..], each[0].1[0].nbd.as_deref()), ("n-0", Some("tcp:127.0.0.1:0")));
}

#[test]
fn device_error_names_its_line() {
    let config = parse("\n[[device]]\nname = 'r'\n\nkind = 'ram'\ndisksiez = '1G'\n").unwrap();
    let device = &config.devices[0];
    let error = Spec::from_entries(device.entries.clone()).unwrap_err();
    assert_eq!(device.line_of(&error), 6);
    let missing = Spec::from_entries(Entries::parse("r=ram").unwrap()).unwrap_err();
    assert_eq!(device.line_of(&missing), 2);
}

#[test]
fn refusal_names_line_and_key() {
    for (text, sentence) in [
        (
            "ndb = 'unix:/a'",
            "unknown key \"ndb\"; nbd?; the keys are nbd, allow, ublk, control, control_read_only, state, recoverable, save_every, save_after, save_timeout, socket_mode, socket_user, socket_group, control_mode, control_user, control_group, control_read_only_mode, control_read_only_user, control_read_only_group, tls, tls_cert, tls_key, tls_client_ca, tls_client_crl, allow_plaintext, max_connections, max_memory_in_flight, max_pending_handshakes, handshake_grace, max_connect_rate, handshake_idle_timeout, handshake_timeout, handshake_bytes, metrics, metrics_open, metrics_forks, http, http_open, device",
        ),
        ("http = 1.5", "http: must be a port, or an address as a text, for example '127.0.0.1:9100'"),
        ("http_open = 1", "http_open: must be true or false"),
        ("max_connections = 0", "max_connections=0: must be a number from 1 to 65536"),
        ("max_connections = 65537", "max_connections=65537: must be a number from 1 to 65536"),
        ("max_connections = '9'", "max_connections: must be a number from 1 to 65536, not string"),
        (
            "max_memory_in_flight = '1M'",
            "max_memory_in_flight=1M: must be at least 64M, twice the largest request",
        ),
        ("max_memory_in_flight = 5", "max_memory_in_flight: must be a size as a text, for example '256M'"),
        ("socket_mode = 660", "socket_mode: must be an octal number as a text, for example '0660'"),
        ("control_mode = '680'", "control_mode=680: must be an octal number of up to 0777, for example 0660"),
        ("socket_user = true", "socket_user: must be a name as a text, or a number"),
        ("control_group = ''", "control_group: must be a name as a text, or a number"),
        ("control_read_only = 1", "control_read_only: must be a path as a text"),
        (
            "control_read_only_mode = '0888'",
            "control_read_only_mode=0888: must be an octal number of up to 0777, for example 0660",
        ),
        ("allow = 1", "allow: must be a text or a list of texts"),
        ("allow = ['uid:1', 2]", "allow: must be a text or a list of texts"),
        ("max_pending_handshakes = 0", "max_pending_handshakes=0: must be a number from 1 to 65536"),
        ("max_connect_rate = 0", "max_connect_rate=0: must be a number from 1 to 1000000"),
        ("handshake_grace = '2h'", "handshake_grace=2h: must be 100ms to 1h"),
        ("handshake_idle_timeout = 5", "handshake_idle_timeout: must be a time as a text, for example '10s'"),
        ("handshake_timeout = '99ms'", "handshake_timeout=99ms: must be 100ms to 1h"),
        ("handshake_bytes = '1M'", "handshake_bytes=1M: must be 4K to 64K"),
        ("handshake_bytes = 4096", "handshake_bytes: must be a size as a text, for example '16K'"),
        ("nbd = 1", "nbd: must be a text or a list of texts"),
        ("nbd = [1]", "nbd: must be a text or a list of texts"),
        ("control = true", "control: must be a path as a text"),
        ("[device]\nname='r'", "device: write [[device]], with two brackets"),
        ("[[device]]\nkind='ram'", "device 1: name is missing"),
        ("[[device]]\nname='r'", "device 1: kind is missing"),
        ("[[device]]\nname=1\nkind='ram'", "device 1: name: must be a text"),
        (
            "[[device]]\nname='r'\nkind='ram'\ndisksize=1.5",
            "r: disksize: must be a text, a number or a boolean, not float",
        ),
    ] {
        let message = parse(text).unwrap_err();
        let (line, message) = message.split_once(": ").unwrap();
        assert!(line.starts_with("line "), "{line}");
        assert_eq!(message, sentence, "{text}");
    }
    for (text, message) in [
        (
            "[[device]]\nname='r'\nkind='ram'\n\ncount = 0",
            "line 5: r: count: must be a number from 1 to 65536",
        ),
        ("[[device]]\nname='r-%n'\nkind='ram'", "line 1: r-%n: %n is for count"),
        (
            "[[device]]\nname='r'\nkind='ram'\nexport = [\n{},\n]",
            "line 5: r: export: write { nbd = ADDRESS }, { vhost_user = 'unix:PATH' } or { ublk = true }, and a list of several",
        ),
        (
            "[[device]]\nname='r'\nkind='ram'\n[[device.export]]\nnbd='a'\nreadonly=true",
            "line 6: r: export: unknown key \"readonly\"; read_only?; the keys are nbd, vhost_user, ublk, queues, read_only, allow, iops, bps, iops_burst, bps_burst, max_clients",
        ),
        (
            "[[device]]\nname='r'\nkind='ram'\nexport = { nbd='a', queues=2 }",
            "line 4: r: export: queues: only with ublk",
        ),
        ("\nmax_connections = 0", "line 2: max_connections=0: must be a number from 1 to 65536"),
    ] {
        assert_eq!(parse(text).unwrap_err(), message, "{text}");
    }
    assert!(parse("nbd = 'a'\n\nnbd = 'b'\n").unwrap_err().starts_with("line 3: "));
    assert!(parse("nbd = [").unwrap_err().starts_with("line 1: "));
}
