//! What an error of `object_store` means for who asked.

use std::error::Error as StdError;

use freestone_store::objects::{Fault, When};
use object_store::Error;

use crate::text::plain;
use crate::wire::{Whose, Wire};

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    Get,
    Head,
    List,
    Delete,
    Put(Condition),
}

/// When an object is written, without the version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    Always,
    Absent,
    Unchanged,
}

impl From<When<'_>> for Condition {
    fn from(when: When<'_>) -> Self {
        match when {
            When::Always => Self::Always,
            When::Absent => Self::Absent,
            When::Unchanged(_) => Self::Unchanged,
        }
    }
}

/// A part was asked for that lies behind the end of the object.
pub fn is_behind_the_end(error: &Error) -> bool {
    matches!(wire(error), Some(Wire::Refused { whose: Whose::Store, status: 416, .. }))
}

/// `place` is what people call the bucket.
pub fn fault(error: &Error, asked: Asked, place: &str) -> Fault {
    match wire(error) {
        Some(Wire::Refused { whose: Whose::Store, host, status, code }) => {
            refused(asked, place, &said(host, *status, code), *status, code)
        }
        Some(Wire::Refused { whose: Whose::Credentials, host, status, code }) => {
            let said = plain(&format!("no credentials: {}", said(host, *status, code)));
            if is_busy(*status) { Fault::Transient(said) } else { Fault::Denied(said) }
        }
        Some(Wire::Broken(said)) => Fault::Transient(plain(said)),
        Some(Wire::Tls(said)) => Fault::Other(plain(said)),
        Some(wire @ Wire::NoTls(_)) => Fault::Denied(plain(&format!("no credentials: {wire}"))),
        Some(wire @ Wire::NoParts(_)) => Fault::Unsupported(plain(&wire.to_string())),
        None => unsent(error, asked, place),
    }
}

/// The answer of a store that refuses a condition.
#[derive(Debug)]
pub struct Refusal {
    pub said: String,
    /// Another operation was under way; the condition may hold.
    pub is_conflict: bool,
}

/// Returns the answer to a write that failed with [`Fault::Condition`].
pub fn refusal(error: &Error) -> Refusal {
    match wire(error) {
        Some(Wire::Refused { host, status, code, .. }) => {
            Refusal { said: said(host, *status, code), is_conflict: *status == 409 }
        }
        _ => Refusal { said: plain(&innermost(error)), is_conflict: false },
    }
}

fn said(host: &str, status: u16, code: &str) -> String {
    plain(format!("{host} answers {status} {code}").trim_end())
}

fn is_busy(status: u16) -> bool {
    matches!(status, 408 | 425 | 429) || (status >= 500 && status != 501 && status != 505)
}

fn refused(asked: Asked, place: &str, said: &str, status: u16, code: &str) -> Fault {
    let no_bucket = || Fault::Other(plain(&format!("{place} is not there")));
    let is_conditional = matches!(asked, Asked::Put(Condition::Absent | Condition::Unchanged));
    match (status, code) {
        (404, "NoSuchBucket" | "ContainerNotFound") => no_bucket(),
        (404 | 410, _) => match asked {
            Asked::Put(Condition::Unchanged) => Fault::Condition,
            Asked::Put(_) | Asked::List => no_bucket(),
            Asked::Get | Asked::Head | Asked::Delete => Fault::NotFound,
        },
        (304 | 409 | 412, _) if is_conditional => Fault::Condition,
        // Another operation on the same object is under way. Ceph 16 says 500 to most of those that race with
        // `If-Match` and lose: who tries again is told the truth.
        (409, _) => Fault::Transient(said.to_owned()),
        (401 | 403, _) | (400, "ExpiredToken" | "InvalidToken" | "TokenRefreshRequired") => {
            Fault::Denied(said.to_owned())
        }
        // What arrived is not what was sent.
        (400, "BadDigest" | "IncompleteBody" | "RequestTimeout" | "XAmzContentSHA256Mismatch") => {
            Fault::Transient(said.to_owned())
        }
        (405 | 501, _) => Fault::Unsupported(said.to_owned()),
        (300..=399, _) => Fault::Other(plain(&format!("{said}: the place of {place} is another"))),
        _ if is_busy(status) => Fault::Transient(said.to_owned()),
        _ => Fault::Other(said.to_owned()),
    }
}

/// Errors that do not come from the network.
fn unsent(error: &Error, asked: Asked, place: &str) -> Fault {
    let said = plain(&format!("{place}: {}", innermost(error)));
    match error {
        Error::NotImplemented { .. } | Error::NotSupported { .. } => Fault::Unsupported(said),
        Error::NotFound { .. } => Fault::NotFound,
        Error::InvalidPath { .. } => Fault::Other(said),
        // An answer that could not be read; it may be another one next time.
        _ if asked == Asked::List => Fault::Transient(said),
        _ => Fault::Other(said),
    }
}

/// An error and what it comes from, outermost first.
fn chain<'a>(error: &'a (dyn StdError + 'static)) -> Vec<&'a (dyn StdError + 'static)> {
    let mut chain = vec![error];
    let mut error = error;
    while let Some(source) = error.source() {
        chain.push(source);
        error = source;
    }
    chain
}

fn wire(error: &Error) -> Option<&Wire> {
    chain(error).into_iter().find_map(|error| error.downcast_ref())
}

fn innermost(error: &Error) -> String {
    chain(error).last().map(ToString::to_string).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(asked: Asked, status: u16, code: &str) -> Fault {
        let host = "h:1".to_owned();
        let wire = Wire::Refused { whose: Whose::Store, host, status, code: code.to_owned() };
        fault(&Error::Generic { store: "S3", source: Box::new(wire) }, asked, "the bucket b")
    }

    #[test]
    fn each_answer_has_its_meaning() {
        let (absent, unchanged) = (Asked::Put(Condition::Absent), Asked::Put(Condition::Unchanged));
        let always = Asked::Put(Condition::Always);
        let said = |said: &str| said.to_owned();
        let no_bucket = Fault::Other(said("the bucket b is not there"));
        for (asked, status, code, fault) in [
            (Asked::Get, 404, "NoSuchKey", Fault::NotFound),
            (Asked::Get, 404, "NoSuchBucket", no_bucket.clone()),
            (Asked::Head, 404, "Not Found", Fault::NotFound),
            (Asked::List, 404, "Not Found", no_bucket.clone()),
            (always, 404, "Not Found", no_bucket),
            (unchanged, 404, "NoSuchKey", Fault::Condition),
            (absent, 412, "PreconditionFailed", Fault::Condition),
            (unchanged, 409, "ConditionalRequestConflict", Fault::Condition),
            (always, 409, "OperationAborted", Fault::Transient(said("h:1 answers 409 OperationAborted"))),
            (Asked::Get, 403, "AccessDenied", Fault::Denied(said("h:1 answers 403 AccessDenied"))),
            (Asked::Get, 401, "", Fault::Denied(said("h:1 answers 401"))),
            (Asked::Get, 429, "", Fault::Transient(said("h:1 answers 429"))),
            (always, 503, "SlowDown", Fault::Transient(said("h:1 answers 503 SlowDown"))),
            (always, 507, "Full", Fault::Transient(said("h:1 answers 507 Full"))),
            (absent, 501, "NotImplemented", Fault::Unsupported(said("h:1 answers 501 NotImplemented"))),
            (Asked::Get, 400, "InvalidRequest", Fault::Other(said("h:1 answers 400 InvalidRequest"))),
        ] {
            assert_eq!(of(asked, status, code), fault, "{asked:?} {status} {code}");
        }
        assert!(matches!(of(Asked::Get, 301, "PermanentRedirect"), Fault::Other(_)));
    }

    #[test]
    fn no_credentials_are_not_a_missing_object() {
        let refused = |status| {
            let (host, code) = ("169.254.169.254".to_owned(), "Not Found".to_owned());
            let wire = Wire::Refused { whose: Whose::Credentials, host, status, code };
            fault(&Error::Generic { store: "S3", source: Box::new(wire) }, Asked::Get, "the bucket b")
        };
        assert!(matches!(refused(404), Fault::Denied(_)));
        assert!(matches!(refused(500), Fault::Transient(_)));
    }
}
