//! Paths as texts. A path of Linux is any bytes, the text of a device, a file of TOML and JSON are
//! UTF-8: a byte that is no part of a character stands there as one of the characters from U+EF80
//! to U+EFFF, which are nobody's. A path that has these characters itself is written in the same
//! way, byte by byte, so that every path has one text, and gets back from it what it was.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize as _, Deserializer, Serializer};

/// The character of byte 0.
const FIRST: u32 = 0xEF00;

/// Stands for a byte.
fn of_byte(byte: u8) -> char {
    char::from_u32(FIRST + u32::from(byte)).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The byte that a character stands for.
fn byte_of(c: char) -> Option<u8> {
    u32::from(c).checked_sub(FIRST).and_then(|byte| u8::try_from(byte).ok()).filter(|byte| *byte >= 0x80)
}

/// The text of a path, or of anything that a command line has.
pub fn text(path: &Path) -> String {
    let mut text = String::with_capacity(path.as_os_str().len());
    for chunk in path.as_os_str().as_bytes().utf8_chunks() {
        for c in chunk.valid().chars() {
            match byte_of(c) {
                None => text.push(c),
                Some(_) => text.extend(c.encode_utf8(&mut [0; 4]).bytes().map(of_byte)),
            }
        }
        text.extend(chunk.invalid().iter().copied().map(of_byte));
    }
    text
}

/// The path of a text.
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

/// For serde: `#[serde(with = "path_text")]`.
pub fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&text(path))
}

/// For serde, the way back.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
    String::deserialize(from).map(|text| path(&text))
}

/// The same for several: `#[serde(with = "path_text::several")]`.
pub mod several {
    use std::path::PathBuf;

    use serde::{Deserialize as _, Deserializer, Serializer};

    /// Writes them.
    pub fn serialize<S: Serializer>(paths: &[PathBuf], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(paths.iter().map(|path| super::text(path)))
    }

    /// Reads them.
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
    fn every_path_has_a_text_of_its_own() {
        for (bytes, shown) in [
            (&b"/a/disk.img"[..], "/a/disk.img"),
            ("/ü/\u{ef00}".as_bytes(), "/ü/\u{ef00}"),
            (b"/\xff\x80x", "/\u{efff}\u{ef80}x"),
            // The character that stands for a byte, where it is meant itself.
            ("\u{efff}".as_bytes(), "\u{efee}\u{efbf}\u{efbf}"),
            (b"\\xff", "\\xff"),
        ] {
            let there = Path::new(OsStr::from_bytes(bytes));
            assert_eq!(text(there), shown);
            assert_eq!(path(shown), there);
        }
        let all: Vec<u8> = (1..=255).collect();
        let all = Path::new(OsStr::from_bytes(&all));
        assert_eq!(path(&text(all)), all);
    }
}
