//! Allow lists (`--allow`): users, groups and networks whose clients may connect.

use std::fs::Permissions;
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::os::unix::fs::PermissionsExt as _;

use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

use crate::harness::prelude::*;

/// Number of the user `nobody`, used as another user than the server's.
const NOBODY: u32 = 65534;
const GROUP: u32 = 65432;

fn me() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Returns a temporary directory in which all users may open sockets.
fn open_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    dir
}

/// Returns true if nbdinfo at the socket receives the size of the disk. A refused client receives
/// nothing.
fn is_served(mut client: Command, socket: &Path) -> bool {
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let (code, out, err) = finish(client.args(["--size", &uri]));
    assert!(code == 0 || out.is_empty(), "{out}{err}");
    code == 0
}

/// Returns an nbdinfo command that runs as the user of the tests.
fn own_client() -> Command {
    Command::new(freestone_testkit::tools::find("nbdinfo"))
}

/// Returns an nbdinfo command that runs as another user, with a supplementary group.
fn other_client(group: u32) -> Command {
    let mut command = Command::new(freestone_testkit::tools::find("setpriv"));
    let [user, group] = [NOBODY, group].map(|number| number.to_string());
    command.args(["--reuid", &user, "--regid", &user, "--groups", &group, "--", "nbdinfo"]);
    command
}

/// Connects from the IP address `source`. Returns the bytes that the server sends at once; empty if
/// the client is refused.
fn receive_from(source: Ipv4Addr, port: u16) -> Vec<u8> {
    let stream = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&stream, &SocketAddrV4::new(source, 0)).unwrap();
    connect(&stream, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port)).unwrap();
    let mut stream = TcpStream::from(stream);
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut greeting = [0; 18];
    match stream.read_exact(&mut greeting) {
        Ok(()) => greeting.to_vec(),
        Err(error) => {
            assert_ne!(error.kind(), std::io::ErrorKind::WouldBlock, "it was left waiting");
            Vec::new()
        }
    }
}

fn port_of(serve: &Serve, name: &str) -> u16 {
    let exports = serve.json(&["stat", name])["exports"].clone();
    let address = exports
        .as_array()
        .unwrap()
        .iter()
        .find_map(|export| export["address"].as_str()?.strip_prefix("tcp:"));
    address.unwrap().rsplit_once(':').unwrap().1.parse().unwrap()
}

#[test]
fn allow_list_matches_users_and_groups() {
    let me = format!("uid:{}", me());
    let mut command = freestone(Path::new("/"));
    let dir = open_dir();
    command.current_dir(dir.path()).args([
        "serve",
        "n=null,size=1M",
        "--nbd",
        "unix:nbd",
        "--control",
        "control",
    ]);
    command.args(["--socket-mode", "0666", "--allow", &me]);
    command.stderr(fs::File::create(dir.path().join("log")).unwrap());
    let serve = Serve::ready(dir, command);
    let nbd = serve.path("nbd");
    assert!(is_served(own_client(), &nbd));
    let group = format!("10.0.0.0/8,gid:{GROUP}");
    serve.text(&["publish", "n", "--nbd", "unix:of-group", "--allow", &group]);
    serve.text(&["publish", "n", "--nbd", "unix:of-all"]);
    let of_group = serve.path("of-group");
    assert!(!is_served(own_client(), &of_group));
    let mut denied = 1;
    if me == "uid:0" {
        assert!(!is_served(other_client(GROUP), &nbd), "another user");
        assert!(!is_served(other_client(GROUP + 1), &of_group));
        denied += 2;
        assert!(is_served(other_client(GROUP), &of_group), "by a further group");
        assert!(is_served(other_client(GROUP), &serve.path("of-all")), "where there is no list");
    }
    let stat = serve.json(&["stat"]);
    assert_eq!(stat["server"]["allow"], json!([me]));
    assert_eq!(stat["server"]["denied"], denied);
    let exports = &stat["devices"][0]["exports"];
    let lists: Vec<_> = exports.as_array().unwrap().iter().map(|export| export["allow"].clone()).collect();
    assert_eq!(lists, [json!([me]), json!(["10.0.0.0/8", format!("gid:{GROUP}")]), json!(null)]);
    // The log has one line for all refused clients, however many there are.
    let denied = "peer not in the allow list: pid ";
    let log = serve.log_with(denied);
    assert_eq!(log.matches(denied).count(), 1, "{log}");
}

#[test]
fn allow_list_matches_networks() {
    let list = ["n=null,size=1M", "--nbd", "tcp:127.0.0.1:0", "--allow", "127.0.0.1", "--control", "control"];
    let serve = Serve::start_in(open_dir(), &list, false);
    let port = port_of(&serve, "n");
    let other = Ipv4Addr::new(127, 0, 0, 2);
    assert!(receive_from(Ipv4Addr::LOCALHOST, port).starts_with(b"NBDMAGIC"));
    assert_eq!(receive_from(other, port), b"");
    serve.text(&["publish", "n", "--nbd", "tcp:127.0.0.1:0", "--allow", "127.0.0.0/8,uid:0"]);
    let exports = serve.json(&["stat", "n"])["exports"].clone();
    let address = exports[1]["address"].as_str().unwrap();
    let second = address.rsplit_once(':').unwrap().1.parse().unwrap();
    assert!(receive_from(other, second).starts_with(b"NBDMAGIC"));
    assert_eq!(serve.json(&["stat"])["server"]["denied"], 1);
}

#[test]
fn allow_list_matches_user_of_virtual_machine() {
    /// Sends `GET_FEATURES`, as each vhost-user frontend does first. Returns true if the server
    /// replies.
    fn has_reply(socket: &Path) -> bool {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let request = [1_u32, 1, 0].map(u32::to_le_bytes).concat();
        // The server may have closed the connection before the request is sent.
        let _ = stream.write_all(&request);
        stream.read_exact(&mut [0; 20]).is_ok()
    }
    let serve = Serve::start(&["n=null,size=1M", "m=null,size=1M"]);
    let (me, other) = (format!("uid:{}", me()), format!("uid:{}", me() + 1));
    serve.text(&["publish", "n", "--vhost-user", "unix:ours", "--allow", &me]);
    serve.text(&["publish", "m", "--vhost-user", "unix:others", "--allow", &other]);
    assert!(has_reply(&serve.path("ours")));
    // Refused connections do not occupy a connection slot: after any number of refusals the export
    // stays usable.
    for _ in 0..40 {
        assert!(!has_reply(&serve.path("others")));
    }
    let stat = serve.json(&["stat", "m"]);
    assert_eq!(stat["exports"][1]["allow"], json!([other]));
    assert_eq!(serve.json(&["stat"])["server"]["denied"], 40);
    assert!(has_reply(&serve.path("ours")));
}

#[test]
fn allow_list_applies_to_a_whole_address() {
    let serve = Serve::start(&["golden=null,size=1M", "n=null,size=1M"]);
    let (me, other) = (format!("uid:{}", me()), format!("uid:{}", me() + 1));
    serve.text(&["publish", "golden", "--nbd", "unix:a", "--allow", &me]);
    serve.text(&["publish", "n", "--nbd", "unix:a"]);
    assert_eq!(serve.json(&["stat", "n"])["exports"][1]["allow"], json!([me]));
    let message = serve.refused(1, &["publish", "n", "--nbd", "unix:nbd", "--allow", &me]);
    let nbd = serve.path("nbd");
    let all = format!("every client may connect there, for all its exports, and not {me}");
    assert_eq!(message, format!("n: unix:{}: {all}", nbd.display()));
    serve.text(&["unpublish", "n"]);
    let message = serve.refused(1, &["publish", "n", "--nbd", "unix:a", "--allow", &other]);
    assert!(
        message.ends_with(&format!("{me} may connect there, for all its exports, and not {other}")),
        "{message}"
    );
    serve.text(&["publish", "n", "--nbd", "unix:a", "--allow", &format!("{me},{me}")]);
    // The socket of a fork has an allow list as well.
    serve.text(&["create", "image=file,path=image,size=1M,readonly=no"]);
    serve.text(&["snapshot", "image", "image-1"]);
    serve.text(&["fork", "image-1", "job-%n", "--count", "2", "--nbd", "unix:job-%n", "--allow", &me]);
    let mut stream = UnixStream::connect(serve.path("job-1")).unwrap();
    assert_eq!(connect_nbd(&mut stream, "job-1"), 1 << 20);
    let again = ["fork", "image-1", "job-0", "--nbd", "unix:job-0", "--if-absent", "--allow"];
    serve.text(&[&again[..], &[&me]].concat());
    let message = serve.refused(1, &[&again[..], &[&other]].concat());
    assert!(message.ends_with(&format!("and not {other}")), "{message}");
}

#[test]
fn allow_lists_are_kept_and_changed_by_apply() {
    let dir = open_dir();
    let (me, other) = (format!("uid:{}", me()), format!("uid:{}", me() + 1));
    let file = |home: &str, list: &str, more: &str| {
        format!(
            "nbd = 'unix:nbd'\ncontrol = 'control'\nstate = 'state'\n{home}\n[[device]]\nname = 'n'\nkind = 'null'\n\
             size = '1M'\nexport = [{{ nbd = 'unix:a'{list} }}, {{ vhost_user = 'unix:v'{list} }}]\n{more}"
        )
    };
    let config = dir.path().join("f.toml");
    let to = |who: &str| format!(", allow = ['{who}']");
    fs::write(&config, file(&format!("allow = '{other}'"), &to(&other), "")).unwrap();
    let serve = Serve::start_in(dir, &["--config", "f.toml"], false);
    let opens = |name: &str| is_served(own_client(), &serve.path(name));
    assert!(!opens("nbd") && !opens("a"));
    assert_eq!(serve.text(&["apply", "f.toml"]), "nothing changes\n");
    let dumped = serve.text(&["dump"]);
    assert_eq!(dumped.matches(&format!("allow = [\"{other}\"]")).count(), 3, "{dumped}");

    // Connected clients stay connected when the list changes; new clients are checked against the
    // new list.
    fs::write(&config, file(&format!("allow = '{me}'"), &to(&me), "")).unwrap();
    let (a, v) = (serve.path("a"), serve.path("v"));
    let changes = format!(
        "allow {me} at the addresses of the server\nallow {me} at unix:{}\nallow {me} at vhost-user:{}\n",
        a.display(),
        v.display()
    );
    assert_eq!(serve.text(&["apply", "f.toml", "--check"]), changes);
    assert!(!opens("a"));
    assert_eq!(serve.text(&["apply", "f.toml"]), changes);
    assert!(opens("nbd") && opens("a"));
    let mut there = UnixStream::connect(&a).unwrap();
    connect_nbd(&mut there, "n");
    fs::write(&config, file("", &to(&other), "")).unwrap();
    serve.text(&["apply", "f.toml"]);
    assert!(opens("nbd") && !opens("a"), "what a file does not say of the server stays");
    assert_eq!(serve.json(&["stat", "n"])["exports"][1]["connections"], 1);
    drop(there);

    // A configuration file with a second device at the address `a`, whose list changes.
    let more = |list: &str| {
        format!("[[device]]\nname = 'm'\nkind = 'null'\nsize = '1M'\nexport = {{ nbd = 'unix:a'{list} }}\n")
    };
    fs::write(&config, file("", &to(&other), &more(&to(&me)))).unwrap();
    let message = serve.refused(2, &["apply", "f.toml"]);
    assert!(
        message.ends_with(&format!(
            "must be the same for all exports at unix:{}, and n has another list",
            a.display()
        )),
        "{message}"
    );
    fs::write(&config, file("", &to(&me), &more(&to(&me)))).unwrap();
    serve.text(&["apply", "f.toml"]);
    assert!(opens("a"));
    // The new list also applies to a device that the verb `publish` added to an address of the
    // file.
    serve.text(&["create", "hand=null,size=1M"]);
    serve.text(&["publish", "hand", "--nbd", "unix:a"]);
    fs::write(&config, file("", &to(&other), &more(&to(&other)))).unwrap();
    serve.text(&["apply", "f.toml"]);
    assert!(!opens("a"));

    // The state directory keeps the lists of published addresses over a crash. The address `nbd` of
    // the command line stays open to the user of the tests.
    let dir = serve.kill();
    let again =
        Serve::start_in(dir, &["--state", "state", "--nbd", "unix:nbd", "--control", "control"], false);
    for name in ["n", "m", "hand"] {
        let at = again.path("a");
        let export = again.json(&["stat", name])["exports"].clone();
        let here = export
            .as_array()
            .unwrap()
            .iter()
            .find(|export| export["address"] == format!("unix:{}", at.display()));
        assert_eq!(here.unwrap()["allow"], json!([other]), "{name}");
    }
    assert!(!is_served(own_client(), &again.path("a")) && is_served(own_client(), &again.path("nbd")));
    // If a file no longer has a list for an address, `apply` removes the list that the file had
    // set.
    fs::write(again.path("f.toml"), file("", "", &more(""))).unwrap();
    let changes = again.text(&["apply", "f.toml"]);
    assert!(changes.contains("allow every client at unix:"), "{changes}");
    assert!(is_served(own_client(), &again.path("a")));
}

#[test]
fn apply_keeps_allow_list_of_command_line() {
    let dir = open_dir();
    let (me, other) = (format!("uid:{}", me()), format!("uid:{}", me() + 1));
    let device = "[[device]]\nname = 'n'\nkind = 'null'\nsize = '1M'\n";
    fs::write(
        dir.path().join("f.toml"),
        format!("nbd = 'unix:nbd'\ncontrol = 'control'\nallow = '{me}'\n{device}"),
    )
    .unwrap();
    let serve = Serve::start_in(dir, &["--config", "f.toml", "--allow", &other], false);
    assert!(!is_served(own_client(), &serve.path("nbd")));
    let message = serve.refused(1, &["apply", "f.toml"]);
    assert_eq!(
        message,
        format!(
            "{}: allow: --allow of the server ({other}) takes precedence",
            serve.path("f.toml").display()
        )
    );
    assert!(!is_served(own_client(), &serve.path("nbd")));
}

#[test]
fn invalid_allow_list_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    for (args, message) in [
        (
            &["--allow", "10.0.0.1/8"][..],
            "--allow: 10.0.0.1/8: the address has bits set behind the prefix length; use 10.0.0.0/8",
        ),
        (&["--allow", "uid:no-such-user"], "--allow: uid:no-such-user: there is no such user"),
        (
            &["--allow", "10.0.0.0/8", "--nbd", "unix:/n"],
            "--allow: unix:/n: 10.0.0.0/8 has no uid: or gid: entry, and networks do not apply to Unix sockets",
        ),
        (
            &["--allow", "10.0.0.0/8"],
            "--allow: unix:nbd.sock: 10.0.0.0/8 has no uid: or gid: entry, and networks do not apply to Unix sockets",
        ),
        (
            &["--allow", "uid:0", "--nbd", "tcp:127.0.0.1:0"],
            "--allow: tcp:127.0.0.1:0: uid:0 has no network that can reach this address",
        ),
        (
            &["--allow", "uid:0,::1", "--nbd", "unix:/n", "--nbd", "tcp:127.0.0.1:0"],
            "--allow: tcp:127.0.0.1:0: ::1,uid:0 has no network that can reach this address",
        ),
        (&["--allow", "uid:0", "--single"], "--allow: cannot be used with --single"),
    ] {
        assert_eq!(refused(at, 2, &[&["serve", "--check"][..], args].concat()), message);
    }
    let device = "[[device]]\nname = 'n'\nkind = 'null'\nsize = '1M'\n";
    for (export, message) in [
        (
            "{ nbd = 'unix:/a', allow = [] }",
            "export: allow: the list is empty, so no client could connect; omit it to admit every client",
        ),
        (
            "{ nbd = 'unix:/a', allow = 'all' }",
            "export: allow: all: must be a network (10.0.0.0/8, fe80::/10), an address (192.168.1.5, ::1), uid:USER or gid:GROUP",
        ),
        (
            "{ vhost_user = 'unix:/a', allow = '::1' }",
            "export: allow: vhost-user:/a: ::1 has no uid: or gid: entry, and networks do not apply to Unix sockets",
        ),
        ("{ ublk = true, allow = 'uid:1' }", "export: allow: not with ublk"),
    ] {
        fs::write(at.join("f.toml"), format!("{device}export = [{export}]\n")).unwrap();
        let sentence = refused(at, 2, &["serve", "--check", "--config", "f.toml"]);
        assert!(sentence.ends_with(&format!(": {message}")), "{sentence}");
    }
    let home = format!(
        "nbd = 'unix:/a'\nallow = 'uid:2'\n{device}export = {{ nbd = 'unix:/a', allow = 'uid:1' }}\n"
    );
    fs::write(at.join("f.toml"), home).unwrap();
    let sentence = refused(at, 2, &["serve", "--check", "--config", "f.toml"]);
    assert_eq!(
        sentence,
        "f.toml: line 3: n: export: allow: unix:/a is an address of the server; set its list with --allow"
    );
    let serve = Serve::start(&["n=null,size=1M"]);
    let message = serve.refused(2, &["publish", "n", "--nbd", "unix:a", "--allow", "::1"]);
    assert!(message.starts_with("n: publish: allow: unix:"), "{message}");
    assert_eq!(
        serve.refused(2, &["publish", "n", "--allow", "uid:1"]),
        "n: publish: allow: an address is missing"
    );
    let message = serve.refused(2, &["publish", "n", "--nbd", "unix:a", "--ublk", "--allow", "uid:1"]);
    assert_eq!(
        message,
        "n: publish: allow: does not apply to a block device, whose file mode controls access"
    );
    assert_eq!(serve.json(&["stat", "n"])["exports"].as_array().unwrap().len(), 1);
}
