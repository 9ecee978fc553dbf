//! The names in a client's certificate: DNS names, URIs, and common names.

use rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

/// Maximum number of names taken from one certificate.
const MAX_NAMES: usize = 64;
/// DER tags of the parts of a distinguished name, and of the string types that are valid UTF-8.
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OBJECT_IDENTIFIER: u8 = 0x06;
const UTF8_STRING: u8 = 0x0c;
const PRINTABLE_STRING: u8 = 0x13;
const IA5_STRING: u8 = 0x16;
/// `id-at-commonName`, 2.5.4.3.
const COMMON_NAME: [u8; 3] = [0x55, 0x04, 0x03];

/// Returns the names in a verified certificate, at most [`MAX_NAMES`], without duplicates.
pub fn names_of(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok(parsed) = EndEntityCert::try_from(certificate) else { return Vec::new() };
    let dns = parsed.valid_dns_names().chain(parsed.valid_uri_names()).map(str::to_owned);
    let mut names: Vec<String> = dns.chain(common_names(parsed.subject())).take(MAX_NAMES).collect();
    let mut seen = Vec::new();
    names.retain(|name| {
        let is_new = !seen.contains(name);
        seen.push(name.clone());
        is_new
    });
    names
}

/// Returns the common names of a subject. `subject` is the content of the DER sequence: sets of pairs of type
/// and value.
fn common_names(mut subject: &[u8]) -> Vec<String> {
    let mut names = Vec::new();
    while let Some((SET, mut pairs)) = element(&mut subject) {
        while let Some((SEQUENCE, mut pair)) = element(&mut pairs) {
            let (Some((OBJECT_IDENTIFIER, kind)), Some((tag, text))) =
                (element(&mut pair), element(&mut pair))
            else {
                continue;
            };
            if kind == COMMON_NAME
                && matches!(tag, UTF8_STRING | PRINTABLE_STRING | IA5_STRING)
                && let Ok(name) = std::str::from_utf8(text)
                && !name.is_empty()
                && !name.chars().any(char::is_control)
            {
                names.push(name.to_owned());
            }
        }
    }
    names
}

/// Splits off the next DER element. Returns its tag and content, or None if the bytes are not a valid
/// element.
fn element<'a>(bytes: &mut &'a [u8]) -> Option<(u8, &'a [u8])> {
    let [tag, first, rest @ ..] = *bytes else { return None };
    let (len, rest) = match first {
        0..=0x7f => (usize::from(*first), rest),
        0x81 => (usize::from(*rest.first()?), &rest[1..]),
        0x82 => (usize::from(u16::from_be_bytes(*rest.first_chunk()?)), &rest[2..]),
        // No element of a name is longer than 65535 bytes.
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(len)?;
    *bytes = rest;
    Some((*tag, content))
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};

    use super::*;

    fn certificate(change: impl FnOnce(&mut CertificateParams)) -> CertificateDer<'static> {
        let mut params =
            CertificateParams::new(vec!["a.example".to_owned(), "b.example".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::OrganizationName, "others");
        change(&mut params);
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn certificate_names_have_no_duplicates() {
        let found = names_of(&certificate(|params| {
            params.distinguished_name.push(DnType::CommonName, "A host of \u{fc}s");
            params.subject_alt_names.push(SanType::URI("spiffe://x/y".try_into().unwrap()));
        }));
        assert_eq!(found, ["a.example", "b.example", "spiffe://x/y", "A host of \u{fc}s"]);
        let found =
            names_of(&certificate(|params| params.distinguished_name.push(DnType::CommonName, "b.example")));
        assert_eq!(found, ["a.example", "b.example"]);
        // A long name needs a two-byte length.
        let long = "n".repeat(300);
        let found =
            names_of(&certificate(|params| params.distinguished_name.push(DnType::CommonName, &long[..])));
        assert!(found.contains(&long));
    }

    #[test]
    fn common_name_with_nul_is_ignored() {
        let found =
            names_of(&certificate(|params| params.distinguished_name.push(DnType::CommonName, "a\0b")));
        assert_eq!(found, ["a.example", "b.example"]);
    }

    #[test]
    fn common_names_of_damaged_der_do_not_panic() {
        let good = certificate(|params| params.distinguished_name.push(DnType::CommonName, "name"));
        let subject = EndEntityCert::try_from(&good).unwrap().subject().to_vec();
        assert_eq!(common_names(&subject), ["name"]);
        for end in 0..subject.len() {
            common_names(&subject[..end]);
            for value in [0, 0x7f, 0x80, 0x81, 0x82, 0x84, 0xff] {
                let mut bytes = subject.clone();
                bytes[end] = value;
                common_names(&bytes);
            }
        }
    }
}
