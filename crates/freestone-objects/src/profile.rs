//! The credentials and config files of Amazon's tools, with `key = value` lines in sections.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use freestone_core::sync::Mutex;
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;

/// Name of the profile that is used if `AWS_PROFILE` is not set.
pub const DEFAULT: &str = "default";
/// Interval between reads of a credentials file, which other tools may replace.
const FRESH_FOR: Duration = Duration::from_secs(30);
/// Maximum number of bytes read from a credentials or config file; the rest is ignored.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Values of a profile by key, in lower case.
pub type Section = BTreeMap<String, String>;

/// Returns the section of `profile` in the text of a file, or an empty section if the profile is missing. The
/// last value of a key is used. Nested settings, on indented lines, are skipped.
pub fn section(text: &str, profile: &str) -> Section {
    let mut section = Section::new();
    let mut is_ours = false;
    for line in text.lines() {
        if line.starts_with(char::is_whitespace) || line.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = line.trim_end().strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            let name = name.trim();
            is_ours = name.strip_prefix("profile ").map_or(name, str::trim) == profile;
        } else if let Some((key, value)) = line.split_once('=').filter(|_| is_ours) {
            let value = value.split(" #").next().unwrap_or_default().trim();
            section.insert(key.trim().to_ascii_lowercase(), value.to_owned());
        }
    }
    section
}

/// Reads the section of a profile from a file. Error messages do not contain the path, which callers add.
pub fn read(path: &Path, profile: &str) -> Result<Section, String> {
    let mut text = String::new();
    let file = File::open(path).map_err(|e| e.to_string())?;
    // The original error would quote the position in the text of the file.
    file.take(FILE_BYTES_MAX)
        .read_to_string(&mut text)
        .map_err(|_| "it cannot be read as text".to_owned())?;
    Ok(section(&text, profile))
}

/// Checks key id, secret key and session token, and combines them into a credential. Error messages do not
/// contain their values.
pub fn credential(
    key: Option<&str>,
    secret: Option<&str>,
    token: Option<&str>,
) -> Result<AwsCredential, String> {
    let word = |value: Option<&str>, name: &str| match value.filter(|value| !value.is_empty()) {
        None => Err(format!("it has no {name}")),
        Some(value) if value.bytes().all(|b| b.is_ascii_graphic()) => Ok(value.to_owned()),
        Some(_) => Err(format!("its {name} has invalid characters")),
    };
    let token = token.filter(|token| !token.is_empty());
    Ok(AwsCredential {
        key_id: word(key, "aws_access_key_id")?,
        secret_key: word(secret, "aws_secret_access_key")?,
        token: token.map(|token| word(Some(token), "aws_session_token")).transpose()?,
    })
}

fn section_credential(section: &Section) -> Result<AwsCredential, String> {
    let value = |key: &str| section.get(key).map(String::as_str);
    credential(value("aws_access_key_id"), value("aws_secret_access_key"), value("aws_session_token"))
}

/// Credentials from a file, which is read again after [`FRESH_FOR`].
#[derive(Debug)]
pub struct FileCredentials {
    path: PathBuf,
    profile: String,
    /// Latest valid credentials, and the time of the last attempt to read the file. Locked while the file is
    /// read.
    last: Mutex<(Arc<AwsCredential>, Instant)>,
}

impl FileCredentials {
    pub fn open(path: &Path, profile: &str) -> Result<Self, String> {
        let credential = read(path, profile).and_then(|section| match section_credential(&section) {
            Err(_) if section.is_empty() => Err(format!("it has no profile [{profile}]")),
            credential => credential,
        })?;
        if fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & 0o044 != 0) {
            tracing::warn!("{}: others can read these credentials; chmod 600 it", path.display());
        }
        let last = Mutex::new((Arc::new(credential), Instant::now()));
        Ok(Self { path: path.to_owned(), profile: profile.to_owned(), last })
    }

    fn current(&self, fresh_for: Duration) -> Arc<AwsCredential> {
        let mut last = self.last.lock();
        if last.1.elapsed() >= fresh_for {
            last.1 = Instant::now();
            match read(&self.path, &self.profile).and_then(|section| section_credential(&section)) {
                Ok(credential) if credential != *last.0 => last.0 = Arc::new(credential),
                Ok(_) => {}
                Err(why) => tracing::warn!("{}: {why}; what it had before is used", self.path.display()),
            }
        }
        last.0.clone()
    }
}

#[async_trait]
impl CredentialProvider for FileCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        Ok(self.current(FRESH_FOR))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# a comment\n[default]\naws_access_key_id = AKDEF\naws_secret_access_key=geheim = 1\n\
                        region = here # not there\ns3 =\n  region = nested\n[profile other]\n\
                        AWS_ACCESS_KEY_ID = AKOTHER\naws_secret_access_key = s\naws_session_token = t\n[third]\n";

    #[test]
    fn profile_section_is_found() {
        let default = section(TEXT, "default");
        assert_eq!(default["aws_secret_access_key"], "geheim = 1");
        assert_eq!(default["region"], "here");
        section_credential(&default).unwrap_err();
        let other = section_credential(&section(TEXT, "other")).unwrap();
        assert_eq!((other.key_id.as_str(), other.token.as_deref()), ("AKOTHER", Some("t")));
        assert_eq!(
            section_credential(&section(TEXT, "third")),
            Err("it has no aws_access_key_id".to_owned())
        );
        assert!(section(TEXT, "fourth").is_empty());
    }

    #[test]
    fn credential_error_does_not_contain_secret() {
        for (key, secret, token) in [
            ("geheim\u{7f}", "a", None),
            ("a", "geheim\n", None),
            ("a", "geheim", Some("gehe im")),
            ("", "geheim", None),
        ] {
            let why = credential(Some(key), Some(secret), token).unwrap_err();
            assert!(!why.contains("gehe"), "{why}");
        }
    }

    #[test]
    fn changed_credentials_file_is_reloaded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("credentials");
        let write = |key: &str| {
            fs::write(
                &path,
                format!("[default]\naws_access_key_id={key}\naws_secret_access_key=secret-{key}\n"),
            )
            .unwrap();
        };
        assert!(FileCredentials::open(&path, DEFAULT).unwrap_err().contains("No such file"));
        write("A1");
        assert_eq!(FileCredentials::open(&path, "x").unwrap_err(), "it has no profile [x]");
        let file = FileCredentials::open(&path, DEFAULT).unwrap();
        assert!(!format!("{file:?}").contains("secret-A1"), "{file:?}");
        write("A2");
        assert_eq!(file.current(FRESH_FOR).key_id, "A1");
        assert_eq!(file.current(Duration::ZERO).key_id, "A2");
        fs::write(&path, "[default]\n").unwrap();
        assert_eq!(file.current(Duration::ZERO).key_id, "A2");
    }
}
