//! Opening: what is refused, and where settings come from.

use super::*;

fn refused(url: &str, options: &Options, env: &[(&str, &str)]) -> OpenError {
    let env = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
    open_in(url, options, &env).err().expect("it is opened")
}

#[test]
fn urls_that_name_no_store_are_refused() {
    let none = Options::default();
    for (url, said) in [
        ("disks", "disks: the URL of a store begins with s3://, gs://, az://, http:// or https://"),
        ("ftp://disks", "ftp: the URL of a store begins with s3://, gs://, az://, http:// or https://"),
        ("s3://", ": no bucket is called so: 3 to 63 letters, digits, dots and dashes"),
        ("gs://a b", "a b: no bucket is called so: 3 to 63 letters, digits, dots and dashes"),
        (
            "az://disks//x",
            "az://disks//x: the path has empty parts, parts of dots, or characters that a path has not",
        ),
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
fn credentials_that_are_half_there_are_refused_without_them() {
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
fn the_url_is_shown_as_it_was_given() {
    let env = |name: &str| name.starts_with("AWS_").then(|| "x".to_owned()).filter(|_| name.contains("_KEY"));
    let options = Options { endpoint: Some("http://127.0.0.1:1".to_owned()), ..Options::default() };
    assert_eq!(open_in("s3://disks/a/b/", &options, &env).unwrap().url(), "s3://disks/a/b");
    assert_eq!(open_in("http://host:80/a/", &Options::default(), &env).unwrap().url(), "http://host/a");
}
