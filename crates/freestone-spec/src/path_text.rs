//! Paths as UTF-8 text. A Linux path is any sequence of bytes, but device words, TOML and JSON are
//! UTF-8. A byte that is not part of a character is written as one of the private-use characters
//! U+EF80 to U+EFFF. These characters in a path are written in the same way, byte by byte, so that
//! each path has exactly one text, and the text gives the path back.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize as _, Deserializer, Serializer};

/// Character that would stand for byte 0.
const FIRST: u32 = 0xEF00;

/// Returns the character that stands for a byte.
fn char_of(byte: u8) -> char {
    char::from_u32(FIRST + u32::from(byte)).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// Returns the byte that a character stands for.
fn byte_of(c: char) -> Option<u8> {
    u32::from(c).checked_sub(FIRST).and_then(|byte| u8::try_from(byte).ok()).filter(|byte| *byte >= 0x80)
}

/// Returns the text of a path, or of another argument of a command line.
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

/// Returns the path of a text.
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

/// Serializes a path, for `#[serde(with = "path_text")]`.
pub fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&text(path))
}

/// Deserializes a path, for `#[serde(with = "path_text")]`.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
    String::deserialize(from).map(|text| path(&text))
}

/// The same for a list of paths: `#[serde(with = "path_text::several")]`.
pub mod several {
    use std::path::PathBuf;

    use serde::{Deserialize as _, Deserializer, Serializer};

    /// Serializes paths.
    pub fn serialize<S: Serializer>(paths: &[PathBuf], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(paths.iter().map(|path| super::text(path)))
    }

    /// Deserializes paths.
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
            // A path with a character that stands for a byte.
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
