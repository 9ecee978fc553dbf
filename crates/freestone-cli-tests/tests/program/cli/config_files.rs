//! Configuration files that declare a whole server: check, serve, apply and dump.

use super::sockets_in;
use crate::harness::prelude::*;

const FILE: &str = "
nbd = 'unix:nbd'
control = 'control'

[[device]]
name = 'data'
kind = 'ram'
disksize = '64M'
export = [{ nbd = 'unix:alone', read_only = true }, { vhost_user = 'unix:machine' }]

[[device]]
name = 'golden'
kind = 'file'
path = 'golden.img'
readonly = true
publish = false

[[device]]
name = 'job-%n'
kind = 'fork'
base = 'golden'
count = 2
export = { nbd = 'unix:job-%n.sock' }

[[device]]
name = 'drive'
kind = 'null'
size = '64M'
memory_backed = true
zoned = true
zone_size = '4M'
badblocks = '+8-15'
";

fn directory() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("golden.img"), vec![0; 1 << 20]).unwrap();
    fs::write(dir.path().join("f.toml"), FILE).unwrap();
    dir
}

#[test]
fn config_check_opens_nothing_and_names_lines() {
    let dir = directory();
    let at = dir.path();
    fs::remove_file(at.join("golden.img")).unwrap();
    let check = |text: &str| {
        fs::write(at.join("g.toml"), text).unwrap();
        refused(at, 2, &["serve", "--config", "g.toml", "--check"])
    };
    let (code, out, _) = finish(freestone(at).args(["serve", "--config", "f.toml", "--check"]));
    assert_eq!((code, out.as_str()), (0, "5 devices: the configuration is valid\n"));
    for (from, to, message) in [
        (
            "base = 'golden'",
            "base = 'goldn'",
            "line 18: job-0: base=goldn: there is no such device before it",
        ),
        (
            "disksize = '64M'",
            "disksize = '64'",
            "line 8: data: disksize=64: give a unit; 64M? (K, M, G and T are known, 1024-based)",
        ),
        (
            "unix:machine",
            "tcp:[::1]:1",
            "line 9: data: export: vhost_user: tcp:[::1]:1: a virtual machine shares its memory: it must be unix:PATH",
        ),
        ("'golden'\nkind", "'data'\nkind", "line 11: data: two devices of that name"),
    ] {
        assert_eq!(check(&FILE.replacen(from, to, 1)), format!("g.toml: {message}"));
    }
    // `serve --check` created no files.
    let left: Vec<_> = fs::read_dir(at).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn dump_recreates_the_same_server() {
    let serve = Serve::start_in(directory(), &["--config", "f.toml"], false);
    assert!(serve.startup_output.contains("\ndata: vhost-user:"), "{}", serve.startup_output);
    for verb in [
        &["set", "data", "mem_limit=48M", "disksize=128M"][..],
        &["set", "job-1", "disksize=2M"],
        &["set", "drive", "zone_offline=8M", "badblocks=-8-9"],
        &["create", "hidden=ram,disksize=1M"],
        &["snapshot", "data", "data-1"],
        &["unpublish", "drive"],
    ] {
        serve.text(verb);
    }
    let dumped = serve.text(&["dump"]);
    let table: toml::Table = dumped.parse().unwrap();
    let device = |name: &str| {
        let all = table["device"].as_array().unwrap().iter().map(|device| device.as_table().unwrap());
        all.clone().find(|device| device["name"].as_str() == Some(name)).unwrap().clone()
    };
    let text = |name: &str, key: &str| device(name)[key].as_str().unwrap().to_owned();
    assert_eq!((text("data", "mem_limit"), text("data", "disksize")), ("48M".into(), "128M".into()));
    assert_eq!(text("job-1", "size"), "2M");
    assert_eq!((text("drive", "zone_offline"), text("drive", "badblocks")), ("8M".into(), "+10-15".into()));
    assert_eq!(device("drive")["publish"].as_bool(), Some(false));
    assert_eq!(device("data")["export"].as_array().unwrap().len(), 2);
    assert_eq!(text("data-1", "origin"), "data");
    let dir = serve.end();
    fs::write(dir.path().join("d.toml"), &dumped).unwrap();
    let again = Serve::start_in(dir, &["--config", "d.toml"], false);
    assert_eq!(again.text(&["dump"]), dumped);
}

/// Returns the configuration file [`FILE`] with the first occurrence of each text replaced.
fn changed(changes: &[(&str, &str)]) -> String {
    changes.iter().fold(FILE.to_owned(), |text, (from, to)| {
        assert!(text.contains(from), "{from}");
        text.replacen(from, to, 1)
    })
}

#[test]
fn apply_changes_only_devices_of_the_file() {
    let dir = directory();
    let mut command = hearing_hangups(dir.path());
    command.args(["serve", "--config", "f.toml"]);
    let serve = Serve::ready(dir, command);
    let names = |serve: &Serve| {
        let list = serve.json(&["list"]);
        let all = list["devices"].as_array().unwrap().iter();
        all.map(|device| device["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(serve.text(&["apply", "f.toml"]), "nothing changes\n");
    serve.text(&["create", "mine=ram,disksize=1M"]);
    serve.text(&["publish", "data", "--nbd", "unix:mine"]);
    let new =
        "\n[[device]]\nname = 'new'\nkind = 'ram'\ndisksize = '8M'\nexport = { nbd = 'tcp:127.0.0.1:0' }\n";
    let text = changed(&[
        ("disksize = '64M'", "disksize = '64M'\nmem_limit = '32M'"),
        ("unix:machine", "unix:other"),
        ("read_only = true", "read_only = false"),
        ("count = 2", "count = 1"),
        ("publish = false", "publish = true"),
    ]) + new;
    fs::write(serve.path("f.toml"), &text).unwrap();
    let dir = serve.dir.path().display().to_string();
    let wanted = format!(
        "remove job-1\nset data mem_limit=32M\nunpublish data from unix:{dir}/alone\n\
         unpublish data from vhost-user:{dir}/machine\npublish data at unix:{dir}/alone\n\
         publish data at vhost-user:{dir}/other\npublish golden\ncreate new=ram,disksize=8M\n"
    );
    assert_eq!(serve.text(&["apply", "f.toml", "--check"]), wanted);
    assert_eq!(names(&serve), "data golden job-0 job-1 drive mine");
    assert_eq!(serve.text(&["apply", "f.toml"]), wanted);
    assert_eq!(serve.text(&["apply", "f.toml"]), "nothing changes\n");
    assert_eq!(names(&serve), "data golden job-0 drive mine new");
    assert!(serve.path("mine").exists() && serve.path("other").exists() && !serve.path("machine").exists());

    // `apply` reports invalid changes, and then changes nothing.
    let gold = [("name = 'golden'", "name = 'gold'"), ("base = 'golden'", "base = 'gold'")];
    for (status, changes, message) in [
        (
            1,
            &[("disksize = '8M'", "disksize = '8M'\ncomp_algorithm = 'zstd'")][..],
            "line 35: new: comp_algorithm: is not set",
        ),
        (1, &gold, "golden: cannot be removed: job-0 stands on it"),
        (1, &[("nbd = 'unix:nbd'", "nbd = 'unix:home'")], "f.toml: nbd: the server uses unix:"),
        (2, &[("kind = 'null'", "kind = 'nul'")], "line 28: drive: unknown kind \"nul\""),
    ] {
        let less = text.replacen("mem_limit = '32M'", "mem_limit = '1M'", 1);
        let text = changes.iter().fold(less, |text, (from, to)| text.replacen(from, to, 1));
        fs::write(serve.path("f.toml"), text).unwrap();
        let refused = serve.refused(status, &["apply", "f.toml"]);
        assert!(refused.contains(message), "{refused}");
    }
    assert_eq!(serve.json(&["get", "data", "mem_limit"])["mem_limit"], 32 << 20);

    // SIGHUP applies the configuration file that the server was started with, like the verb
    // `apply`.
    fs::write(serve.path("f.toml"), text.replacen("disksize = '8M'", "disksize = '16M'", 1)).unwrap();
    serve.signal(Signal::HUP);
    let grown = || serve.json(&["get", "new", "disksize"])["disksize"] == 16 << 20;
    for _ in 0..1000 {
        if grown() {
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    assert!(grown(), "10 s after the signal");
    assert_eq!(
        serve.text(&["apply", "f.toml", "--prune"]),
        format!("remove mine\nunpublish data from unix:{dir}/mine\n")
    );
    // A device or export that was created by a verb does not belong to the file, even if an earlier
    // `apply` created one of the same name.
    serve.text(&["remove", "new"]);
    serve.text(&["create", "new=ram,disksize=1M"]);
    serve.text(&["unpublish", "data"]);
    serve.text(&["publish", "data", "--nbd", "unix:alone"]);
    let without = text.replacen(new, "", 1).replacen("{ nbd = 'unix:alone', read_only = false }, ", "", 1);
    fs::write(serve.path("f.toml"), without).unwrap();
    let again = format!("publish data\npublish data at vhost-user:{dir}/other\n");
    assert_eq!(serve.text(&["apply", "f.toml"]), again);
    assert!(names(&serve).ends_with(" new") && serve.path("alone").exists());
    serve.end();
}

#[test]
fn config_file_equals_command_line() {
    let dir = tempdir().unwrap();
    let conf = dir.path().join("conf");
    fs::create_dir(&conf).unwrap();
    fs::write(conf.join("disk.img"), vec![0; 1 << 20]).unwrap();
    let write = |text: &str| fs::write(conf.join("freestone.toml"), text).unwrap();
    write(
        "nbd = ['unix:../nbd']\ncontrol = '../control'\n\
         [[device]]\nname = 'r'\nkind = 'ram'\ndisksize = '64M'\nmem_limit = 'none'\n\
         [[device]]\nname = 'f'\nkind = 'file'\npath = 'disk.img'\nreadonly = true\npublish = false\n",
    );
    let config = ["--config", "conf/freestone.toml"];
    let serve = Serve::start_in(dir, &[&config[..], &["n=null,size=1M"]].concat(), false);
    let list = serve.json(&["list"]);
    let names: Vec<_> =
        list["devices"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["r", "f", "n"]);
    assert_eq!(list["devices"][1]["exports"], json!([]));
    assert_eq!(Raw::connect(&serve, "").size, 64 << 20);
    serve.signal(Signal::TERM);
    let (code, dir) = serve.wait();
    assert_eq!((code, sockets_in(dir.path())), (Some(0), 0));

    // `--nbd` replaces the NBD addresses of the configuration file. The other settings of the file
    // apply.
    let serve = Serve::start_in(dir, &[&config[..], &["--nbd", "unix:other"]].concat(), false);
    assert!(serve.path("other").exists() && serve.path("control").exists() && !serve.path("nbd").exists());
    let dir = serve.end();

    let refused = |text: &str| {
        fs::write(dir.path().join("conf/freestone.toml"), text).unwrap();
        refused(dir.path(), 2, &["serve", "--config", "conf/freestone.toml", "n=null,size=1M"])
    };
    let unit = "give a unit; 64M? (K, M, G and T are known, 1024-based)";
    assert_eq!(
        refused("[[device]]\nname = 'r'\nkind = 'ram'\ndisksize = 64\n"),
        format!("conf/freestone.toml: line 4: r: disksize=64: {unit}")
    );
    assert_eq!(
        refused("[[device]]\nname = 'n'\nkind = 'null'\nsize = '1M'\n"),
        "n: two devices of that name",
    );
    assert!(refused("nbd = 'udp:1'\n").starts_with("conf/freestone.toml: nbd: "));
    assert!(refused("nbd = [\n").starts_with("conf/freestone.toml: line "));
    let (code, _, err) = finish(freestone(dir.path()).args(["serve", "--config", "missing.toml"]));
    assert_eq!(code, 1);
    assert!(sentence(&err).starts_with("missing.toml: cannot read the file: "), "{err}");
}
