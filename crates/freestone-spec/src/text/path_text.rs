//! Converts paths to UTF-8 text and back. A Linux path is any sequence of bytes, but device
//! specifications, TOML and JSON are UTF-8. A byte that is not part of a UTF-8 character becomes
//! one of the private-use characters U+EF80 to U+EFFF. If a path contains such a character, each of
//! its bytes is converted in the same way. So each path has exactly one text, from which the path
//! can be restored.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize as _, Deserializer, Serializer};

/// Code point of the character for byte 0. Only the characters for bytes from 0x80 on are used.
const FIRST: u32 = 0xEF00;

/// Returns the private-use character that represents a byte.
fn char_of(byte: u8) -> char {
    char::from_u32(FIRST + u32::from(byte)).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// Returns the byte that a private-use character represents, or `None` for other characters.
fn byte_of(c: char) -> Option<u8> {
    u32::from(c).checked_sub(FIRST).and_then(|byte| u8::try_from(byte).ok()).filter(|byte| *byte >= 0x80)
}

/// Converts a path, or another argument of a command line, to text.
pub fn text(path: &Path) -> String {
    let mut text = String::with_capacity(path.as_os_str().len());
    for chunk in path.as_os_str().as_bytes().utf8_chunks() {
        for c in chunk.valid().chars() {
            match byte_of(c) {
                None => text.push(c),
                Some(_) => text.extend(c.encode_utf8(&mut [0; 4]).bytes().map(char_of)),
            }
        }
        text.extend(chunk.invalid().iter().copied().map(char_of));
    }
    text
}

/// Converts a text from [`text()`] back to the path.
pub fn path(text: &str) -> PathBuf {
    if !text.contains(|c| byte_of(c).is_some()) {
        return text.into();
    }
    let mut bytes = Vec::with_capacity(text.len());
    for c in text.chars() {
        match byte_of(c) {
            Some(byte) => bytes.push(byte),
            None => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    OsString::from_vec(bytes).into()
}

/// Serializes a path as text, for `#[serde(with = "path_text")]`.
pub fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&text(path))
}

/// Deserializes a path from text, for `#[serde(with = "path_text")]`.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
    String::deserialize(from).map(|text| path(&text))
}

/// Serialization of a list of paths as texts, for `#[serde(with = "path_text::several")]`.
pub mod several {
    use std::path::PathBuf;

    use serde::{Deserialize as _, Deserializer, Serializer};

    /// Serializes paths as texts.
    pub fn serialize<S: Serializer>(paths: &[PathBuf], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(paths.iter().map(|path| super::text(path)))
    }

    /// Deserializes paths from texts.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<PathBuf>, D::Error> {
        Vec::<String>::deserialize(from).map(|texts| texts.iter().map(|text| super::path(text)).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;
    use std::path::Path;

    use super::{path, text};

    #[test]
    fn every_path_has_one_text() {
        for (bytes, shown) in [
            (&b"/a/disk.img"[..], "/a/disk.img"),
            ("/ü/\u{ef00}".as_bytes(), "/ü/\u{ef00}"),
            (b"/\xff\x80x", "/\u{efff}\u{ef80}x"),
            // A path with a private-use character that represents a byte in texts.
            ("\u{efff}".as_bytes(), "\u{efee}\u{efbf}\u{efbf}"),
            (b"\\xff", "\\xff"),
        ] {
            let expected = Path::new(OsStr::from_bytes(bytes));
            assert_eq!(text(expected), shown);
            assert_eq!(path(shown), expected);
        }
        let all: Vec<u8> = (1..=255).collect();
        let all = Path::new(OsStr::from_bytes(&all));
        assert_eq!(path(&text(all)), all);
    }
}
