//! Conversion of errors of `object_store` into [`Fault`].

use std::error::Error as StdError;

use freestone_store::objects::{Fault, WriteCondition};
use object_store::Error;

use crate::text::plain;
use crate::wire::{Peer, WireError};

/// Operation on an object store that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Get,
    Head,
    List,
    Delete,
    Put(Condition),
}

/// Condition of a write, like [`WriteCondition`] but without the version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    Always,
    Absent,
    Unchanged,
}

impl From<WriteCondition<'_>> for Condition {
    fn from(condition: WriteCondition<'_>) -> Self {
        match condition {
            WriteCondition::Always => Self::Always,
            WriteCondition::Absent => Self::Absent,
            WriteCondition::Unchanged(_) => Self::Unchanged,
        }
    }
}

/// Returns true if the object store refused a read because the range begins at or after the end of the
/// object.
pub fn is_range_past_end(error: &Error) -> bool {
    matches!(wire(error), Some(WireError::Refused { peer: Peer::Store, status: 416, .. }))
}

/// Converts an error of `operation` into a fault. `place` names the bucket in messages.
pub fn fault(error: &Error, operation: Operation, place: &str) -> Fault {
    match wire(error) {
        Some(WireError::Refused { peer: Peer::Store, host, status, code }) => {
            response_fault(operation, place, &describe_response(host, *status, code), *status, code)
        }
        Some(WireError::Refused { peer: Peer::Credentials, host, status, code }) => {
            let said = plain(&format!("no credentials: {}", describe_response(host, *status, code)));
            if is_busy(*status) { Fault::Transient(said) } else { Fault::Denied(said) }
        }
        Some(WireError::Broken(said)) => Fault::Transient(plain(said)),
        Some(WireError::Tls(said)) => Fault::Other(plain(said)),
        Some(wire @ WireError::NoCredentials { cause, .. }) => {
            let is_retryable = match &**cause {
                WireError::Refused { status, .. } => is_busy(*status),
                cause => matches!(cause, WireError::Broken(_)),
            };
            let said = plain(&format!("no credentials: {wire}"));
            if is_retryable { Fault::Transient(said) } else { Fault::Denied(said) }
        }
        Some(wire @ WireError::PlainCredentials(_)) => {
            Fault::Denied(plain(&format!("no credentials: {wire}")))
        }
        Some(wire @ WireError::NoRanges(_)) => Fault::Unsupported(plain(&wire.to_string())),
        None => local_fault(error, operation, place),
    }
}

/// Response of an object store that refuses a conditional write.
#[derive(Debug)]
pub struct Refusal {
    pub message: String,
    /// True if the write conflicted with another operation (status 409). The condition may hold nevertheless.
    pub is_conflict: bool,
}

/// Describes the response to a write that failed with [`Fault::Condition`].
pub fn refusal(error: &Error) -> Refusal {
    match wire(error) {
        Some(WireError::Refused { host, status, code, .. }) => {
            Refusal { message: describe_response(host, *status, code), is_conflict: *status == 409 }
        }
        _ => Refusal { message: plain(&innermost(error)), is_conflict: false },
    }
}

fn describe_response(host: &str, status: u16, code: &str) -> String {
    plain(format!("{host} answers {status} {code}").trim_end())
}

fn is_busy(status: u16) -> bool {
    matches!(status, 408 | 425 | 429) || (status >= 500 && status != 501 && status != 505)
}

fn response_fault(operation: Operation, place: &str, said: &str, status: u16, code: &str) -> Fault {
    let no_bucket = || Fault::Other(plain(&format!("{place} is not there")));
    let is_conditional = matches!(operation, Operation::Put(Condition::Absent | Condition::Unchanged));
    match (status, code) {
        (404, "NoSuchBucket" | "ContainerNotFound") => no_bucket(),
        (404 | 410, _) => match operation {
            Operation::Put(Condition::Unchanged) => Fault::Condition,
            Operation::Put(_) | Operation::List => no_bucket(),
            Operation::Get | Operation::Head | Operation::Delete => Fault::NotFound,
        },
        (304 | 409 | 412, _) if is_conditional => Fault::Condition,
        // A conflict with another operation on the object; a retry may succeed. Ceph 16 responds with status
        // 500 to most writers that lose a race with `If-Match`, which is retried, too, and then gets the
        // right status.
        (409, _) => Fault::Transient(said.to_owned()),
        (401 | 403, _) | (400, "ExpiredToken" | "InvalidToken" | "TokenRefreshRequired") => {
            Fault::Denied(said.to_owned())
        }
        // The request was corrupted or cut off on the way to the object store.
        (400, "BadDigest" | "IncompleteBody" | "RequestTimeout" | "XAmzContentSHA256Mismatch") => {
            Fault::Transient(said.to_owned())
        }
        (405 | 501, _) => Fault::Unsupported(said.to_owned()),
        (300..=399, _) => Fault::Other(plain(&format!("{said}: the place of {place} is another"))),
        _ if is_busy(status) => Fault::Transient(said.to_owned()),
        _ => Fault::Other(said.to_owned()),
    }
}

/// Converts errors that are not caused by the network or by an error response.
fn local_fault(error: &Error, operation: Operation, place: &str) -> Fault {
    let said = plain(&format!("{place}: {}", innermost(error)));
    match error {
        Error::NotImplemented { .. } | Error::NotSupported { .. } => Fault::Unsupported(said),
        Error::NotFound { .. } => Fault::NotFound,
        Error::InvalidPath { .. } => Fault::Other(said),
        // The response could not be parsed. The response to a retry may be valid.
        _ if operation == Operation::List => Fault::Transient(said),
        _ => Fault::Other(said),
    }
}

/// Returns an error followed by its sources, from the outermost to the innermost.
fn chain<'a>(error: &'a (dyn StdError + 'static)) -> Vec<&'a (dyn StdError + 'static)> {
    let mut chain = vec![error];
    let mut error = error;
    while let Some(source) = error.source() {
        chain.push(source);
        error = source;
    }
    chain
}

fn wire(error: &Error) -> Option<&WireError> {
    chain(error).into_iter().find_map(|error| error.downcast_ref())
}

fn innermost(error: &Error) -> String {
    chain(error).last().map(ToString::to_string).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault_of(operation: Operation, status: u16, code: &str) -> Fault {
        let host = "h:1".to_owned();
        let wire = WireError::Refused { peer: Peer::Store, host, status, code: code.to_owned() };
        fault(&Error::Generic { store: "S3", source: Box::new(wire) }, operation, "the bucket b")
    }

    #[test]
    fn response_status_maps_to_fault() {
        let (absent, unchanged) = (Operation::Put(Condition::Absent), Operation::Put(Condition::Unchanged));
        let always = Operation::Put(Condition::Always);
        let said = |said: &str| said.to_owned();
        let no_bucket = Fault::Other(said("the bucket b is not there"));
        for (operation, status, code, fault) in [
            (Operation::Get, 404, "NoSuchKey", Fault::NotFound),
            (Operation::Get, 404, "NoSuchBucket", no_bucket.clone()),
            (Operation::Head, 404, "Not Found", Fault::NotFound),
            (Operation::List, 404, "Not Found", no_bucket.clone()),
            (always, 404, "Not Found", no_bucket),
            (unchanged, 404, "NoSuchKey", Fault::Condition),
            (absent, 412, "PreconditionFailed", Fault::Condition),
            (unchanged, 409, "ConditionalRequestConflict", Fault::Condition),
            (always, 409, "OperationAborted", Fault::Transient(said("h:1 answers 409 OperationAborted"))),
            (Operation::Get, 403, "AccessDenied", Fault::Denied(said("h:1 answers 403 AccessDenied"))),
            (Operation::Get, 401, "", Fault::Denied(said("h:1 answers 401"))),
            (Operation::Get, 429, "", Fault::Transient(said("h:1 answers 429"))),
            (always, 503, "SlowDown", Fault::Transient(said("h:1 answers 503 SlowDown"))),
            (always, 507, "Full", Fault::Transient(said("h:1 answers 507 Full"))),
            (absent, 501, "NotImplemented", Fault::Unsupported(said("h:1 answers 501 NotImplemented"))),
            (Operation::Get, 400, "InvalidRequest", Fault::Other(said("h:1 answers 400 InvalidRequest"))),
        ] {
            assert_eq!(fault_of(operation, status, code), fault, "{operation:?} {status} {code}");
        }
        assert!(matches!(fault_of(Operation::Get, 301, "PermanentRedirect"), Fault::Other(_)));
    }

    #[test]
    fn credential_service_404_is_not_missing_object() {
        let refused = |status| {
            let (host, code) = ("169.254.169.254".to_owned(), "Not Found".to_owned());
            let wire = WireError::Refused { peer: Peer::Credentials, host, status, code };
            fault(&Error::Generic { store: "S3", source: Box::new(wire) }, Operation::Get, "the bucket b")
        };
        assert!(matches!(refused(404), Fault::Denied(_)));
        assert!(matches!(refused(500), Fault::Transient(_)));
    }

    #[test]
    fn advice_keeps_kind_of_fault() {
        let refused = |status| {
            let (host, code) = ("169.254.169.254".to_owned(), String::new());
            WireError::Refused { peer: Peer::Credentials, host, status, code }
        };
        let broken = WireError::Broken("169.254.169.254: no connection in time".to_owned());
        for (cause, is_retryable) in [(refused(403), false), (refused(503), true), (broken, true)] {
            let wire = WireError::NoCredentials { cause: Box::new(cause), advice: "set KEY" };
            let source = Box::new(wire);
            let fault = fault(&Error::Generic { store: "S3", source }, Operation::Get, "the bucket b");
            assert_eq!(fault.is_retryable(), is_retryable, "{fault:?}");
            assert!(fault.to_string().contains("169.254.169.254"), "{fault}");
            assert!(fault.to_string().ends_with("uses the environment of the server"), "{fault}");
        }
    }
}
