//! Tests of opening object stores: refused URLs, and sources of options and credentials.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Mutex;

use freestone_store::objects::{CallLimits, Fault, WriteCondition};
use freestone_testkit::s3::Server;

use super::*;

fn refused(url: &str, options: &Options, env: &[(&str, &str)]) -> OpenError {
    let env = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
    open_in(url, options, &env).err().expect("it is opened")
}

#[test]
fn invalid_store_urls_are_refused() {
    let none = Options::default();
    for (url, said) in [
        ("disks", "disks: the URL of a store begins with s3://, gs://, az://, http:// or https://"),
        ("ftp://disks", "ftp: the URL of a store begins with s3://, gs://, az://, http:// or https://"),
        ("s3://", ": invalid bucket name: must be 3 to 63 letters, digits, dots, dashes and underscores"),
        (
            "gs://a b",
            "a b: invalid bucket name: must be 3 to 63 letters, digits, dots, dashes and underscores",
        ),
        ("az://disks//x", "az://disks//x: the path has empty or dot components, or invalid characters"),
        ("http:///x?y", "the URL of a store has no ? and no # in it"),
    ] {
        assert_eq!(refused(url, &none, &[]).to_string(), said, "{url}");
    }
    let region = Options { region: Some("here".to_owned()), ..Options::default() };
    for scheme in ["gs", "az", "http"] {
        let said = format!("a store of {scheme}:// has no option region");
        assert_eq!(refused(&format!("{scheme}://disks"), &region, &[]).to_string(), said);
    }
}

#[test]
fn secrets_in_urls_are_not_shown() {
    for url in [
        "s3://AKIA:geheim@disks/a",
        "gs://geheim@disks",
        "az://a:geheim@disks",
        "http://u:geheim@host/",
        "https://host/a?sig=geheim",
        "s3:geheim@disks",
        "geheim+x://a",
    ] {
        let refused = refused(url, &Options::default(), &[]);
        let said = format!("{refused} {refused:?}");
        assert!(
            !said.contains("geheim@") && !said.contains("=geheim") && !said.contains(":geheim"),
            "{said}"
        );
    }
    let endpoint = Options { endpoint: Some("http://u:geheim@host".to_owned()), ..Options::default() };
    assert_eq!(refused("s3://disks", &endpoint, &[]), OpenError::UserInfo);
}

#[test]
fn incomplete_credentials_are_refused_without_echo() {
    let none = Options::default();
    let half = refused("s3://disks", &none, &[("AWS_SECRET_ACCESS_KEY", "geheim")]);
    assert_eq!(half.to_string(), "the environment: no credentials: it has no aws_access_key_id");
    let broken =
        refused("s3://disks", &none, &[("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "ge\nheim")]);
    assert!(!format!("{broken:?}").contains("heim"), "{broken:?}");
    let nobody = refused("s3://disks", &none, &[("AWS_EC2_METADATA_DISABLED", "true")]);
    assert!(matches!(nobody, OpenError::Credentials(..)));
    let profile = refused("s3://disks", &none, &[("AWS_PROFILE", "other")]);
    assert_eq!(profile.to_string(), "AWS_PROFILE: no credentials: no file has the profile [other]");
    let file = Options { credentials: Some("/nowhere/at/all".into()), ..Options::default() };
    let said = refused("s3://disks", &file, &[]).to_string();
    assert!(said.starts_with("/nowhere/at/all: no credentials: No such file"), "{said}");
}

#[test]
fn store_url_is_kept() {
    let env = |name: &str| name.starts_with("AWS_").then(|| "x".to_owned()).filter(|_| name.contains("_KEY"));
    let options = Options { endpoint: Some("http://127.0.0.1:1".to_owned()), ..Options::default() };
    assert_eq!(open_in("s3://disks/a/b/", &options, &env).unwrap().url(), "s3://disks/a/b");
    assert_eq!(open_in("http://host:80/a/", &Options::default(), &env).unwrap().url(), "http://host/a");
}

/// Writes an object with `env` as the environment, and returns the access key that signed the request.
fn signed_with(server: &Server, options: &Options, env: &[(&str, &str)]) -> Option<&'static str> {
    let endpoint = server.endpoint();
    let env = |name: &str| match env.iter().find(|(n, _)| *n == name) {
        Some((_, value)) => Some((*value).to_owned()),
        None => (name == "AWS_ENDPOINT_URL").then(|| endpoint.clone()),
    };
    let store = open_in("s3://disks", options, &env).unwrap();
    ["AKENV", "AKFILE", "AKOTHER", "AKCONTAINER", "AKCONFIG"].into_iter().find(|key| {
        server.require_key(Some(key));
        store.put("x", b"", WriteCondition::Always, CallLimits::within(Duration::from_secs(10))).is_ok()
    })
}

fn written(path: &Path, text: &str) -> String {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Starts a server that provides `credentials`, and returns the server and the URL of the credentials.
fn giving(credentials: &str) -> (Server, String) {
    let server = Server::start(&["iam"]);
    server.set_object("iam", "credentials", credentials.as_bytes());
    let uri = format!("{}/iam/credentials", server.endpoint());
    (server, uri)
}

#[test]
fn credentials_come_from_first_available_source() {
    let server = Server::start(&["disks"]);
    let dir = tempfile::tempdir().unwrap();
    let key = |profile: &str, key: &str| {
        format!("[{profile}]\naws_access_key_id = {key}\naws_secret_access_key = geheim\n")
    };
    let shared = key("default", "AKFILE") + &key("other", "AKOTHER");
    let shared = written(&dir.path().join("credentials"), &shared);
    let config = written(&dir.path().join("config"), &key("profile config", "AKCONFIG"));
    let json = "{\"AccessKeyId\": \"AKCONTAINER\", \"SecretAccessKey\": \"geheim\", \"Token\": \"t\", \
                \"Expiration\": \"2099-01-01T00:00:00Z\"}";
    let (_giving, uri) = giving(json);
    let token = written(&dir.path().join("token"), "token");
    let environment = [("AWS_ACCESS_KEY_ID", "AKENV"), ("AWS_SECRET_ACCESS_KEY", "geheim")];
    let files = [("AWS_SHARED_CREDENTIALS_FILE", &*shared), ("AWS_CONFIG_FILE", &*config)];
    let container =
        [("AWS_CONTAINER_CREDENTIALS_FULL_URI", &*uri), ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", &*token)];
    let none = Options::default();
    let named = Options { credentials: Some(shared.clone().into()), ..Options::default() };
    let all = [&environment[..], &files, &container].concat();
    assert_eq!(signed_with(&server, &named, &all), Some("AKFILE"));
    assert_eq!(signed_with(&server, &none, &all), Some("AKENV"));
    assert_eq!(signed_with(&server, &none, &all[2..]), Some("AKFILE"));
    for (profile, key) in [("other", "AKOTHER"), ("config", "AKCONFIG")] {
        let env = [&files[..], &[("AWS_PROFILE", profile)]].concat();
        assert_eq!(signed_with(&server, &none, &env), Some(key));
    }
    assert_eq!(signed_with(&server, &none, &container), Some("AKCONTAINER"));
    // Without variables for the paths, the files in the home directory are read.
    fs::create_dir(dir.path().join(".aws")).unwrap();
    fs::rename(&shared, dir.path().join(".aws/credentials")).unwrap();
    assert_eq!(signed_with(&server, &none, &[("HOME", dir.path().to_str().unwrap())]), Some("AKFILE"));
}

#[test]
fn missing_credentials_are_not_missing_objects() {
    let (giving, uri) = giving("");
    giving.create_bucket("iam");
    let env = |name: &str| match name {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI" => Some(uri.clone()),
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE" => Some("/dev/null".to_owned()),
        "AWS_ENDPOINT_URL" => Some("http://127.0.0.1:9".to_owned()),
        _ => None,
    };
    let store = open_in("s3://disks", &Options::default(), &env).unwrap();
    let fault = store.get("x", None, 1, CallLimits::within(Duration::from_secs(10)));
    let said = format!("no credentials: {} answers 404 NoSuchKey", giving.address());
    assert_eq!(fault, Err(Fault::Denied(said)));
}

#[test]
fn failure_of_instance_metadata_names_the_variables() {
    let instance = Server::start(&[]);
    let fault = |metadata: &str| {
        let env = |name: &str| match name {
            "AWS_METADATA_ENDPOINT" => Some(metadata.to_owned()),
            "AWS_ENDPOINT_URL" => Some("http://127.0.0.1:9".to_owned()),
            _ => None,
        };
        let store = open_in("s3://disks", &Options::default(), &env).unwrap();
        store.get("x", None, 1, CallLimits::within(Duration::from_secs(10))).unwrap_err()
    };
    let advice = "and the environment of this process names no credentials; set AWS_ACCESS_KEY_ID and \
                  AWS_SECRET_ACCESS_KEY, or give credentials=FILE. A verb of a server uses the environment of the \
                  server";
    let refused = fault(&instance.endpoint());
    let Fault::Denied(said) = &refused else { panic!("{refused:?}") };
    let start = format!("no credentials: {} answers 40", instance.address());
    assert!(said.starts_with(&start) && said.ends_with(advice), "{said}");
    let unreached = fault("http://127.0.0.1:1");
    let Fault::Transient(said) = &unreached else { panic!("{unreached:?}") };
    assert!(said.starts_with("no credentials: 127.0.0.1:1: ") && said.ends_with(advice), "{said}");
}

/// Credentials must not be sent without TLS over the network, where they could be intercepted.
#[test]
fn remote_credentials_without_tls_are_refused() {
    let server = Server::start(&["disks"]);
    let dir = tempfile::tempdir().unwrap();
    let token = written(&dir.path().join("token"), "geheim");
    let endpoint = server.endpoint();
    let fault = |store: &str, env: &[(&str, &str)]| {
        let env = |name: &str| match env.iter().find(|(n, _)| *n == name) {
            Some((_, value)) => Some((*value).to_owned()),
            None => (name == "AWS_ENDPOINT_URL").then(|| store.to_owned()),
        };
        let store = open_in("s3://disks", &Options::default(), &env).unwrap();
        store.get("x", None, 1, CallLimits::within(Duration::from_secs(10))).unwrap_err()
    };
    let denied = |host: &str| {
        Fault::Denied(format!(
            "no credentials: {host}: credentials need TLS, but the URL begins with http://"
        ))
    };
    let identity = [
        ("AWS_WEB_IDENTITY_TOKEN_FILE", &*token),
        ("AWS_ROLE_ARN", "arn:aws:iam::1:role/r"),
        ("AWS_ENDPOINT_URL_STS", &*endpoint),
    ];
    // The token is not sent, whether the object store uses TLS or not.
    for store in [&*endpoint, "https://127.0.0.1:9"] {
        assert_eq!(fault(store, &identity), denied(&server.address().to_string()), "{store}");
    }
    let container = [
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://elsewhere.invalid/credentials"),
        ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", &*token),
    ];
    let instance = [("AWS_METADATA_ENDPOINT", "http://elsewhere.invalid")];
    for env in [&container[..], &instance] {
        assert_eq!(fault(&endpoint, env), denied("elsewhere.invalid"), "{env:?}");
    }
    assert_eq!(server.traffic().received, 0);
}

#[test]
fn endpoint_comes_from_profile_or_environment() {
    let server = Server::start(&["disks"]);
    let dir = tempfile::tempdir().unwrap();
    let text = format!("[default]\nendpoint_url = {}\nregion = here-1\n", server.endpoint());
    let config = written(&dir.path().join("config"), &text);
    let nowhere = "http://127.0.0.1:9";
    for env in [
        &[("AWS_CONFIG_FILE", &*config)][..],
        &[("AWS_CONFIG_FILE", "/nowhere"), ("AWS_ENDPOINT_URL", &server.endpoint())],
        &[("AWS_ENDPOINT_URL", nowhere), ("AWS_ENDPOINT_URL_S3", &server.endpoint())],
    ] {
        let env = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
        let options = Options { anonymous: true, ..Options::default() };
        let store = open_in("s3://disks", &options, &env).unwrap();
        store.put("x", b"", WriteCondition::Always, CallLimits::within(Duration::from_secs(10))).unwrap();
    }
    let region = Options { region: Some("a/b".to_owned()), ..Options::default() };
    assert_eq!(refused("s3://disks", &region, &[]).to_string(), "a/b: invalid region name");
}

#[test]
fn readable_credentials_file_logs_warning() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("credentials");
    written(&path, "[default]\naws_access_key_id=A\naws_secret_access_key=geheim\n");
    let log = Arc::new(Mutex::new(Vec::new()));
    let opened = |mode| {
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let writer = log.clone();
        let make = move || Writer(writer.clone());
        let subscriber = tracing_subscriber::fmt().with_writer(make).finish();
        let options = Options { credentials: Some(path.clone()), ..Options::default() };
        tracing::subscriber::with_default(subscriber, || open_in("s3://disks", &options, &|_| None).unwrap());
        String::from_utf8(std::mem::take(&mut *log.lock().unwrap())).unwrap()
    };
    assert_eq!(opened(0o600), "");
    let said = opened(0o644);
    assert!(said.contains("others can read") && !said.contains("geheim"), "{said}");
}

struct Writer(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
