//! Errors of operations on an image store.

use thiserror::Error as ThisError;

use crate::format::chunk::STORED_BYTES_MAX;
use crate::format::domain::DomainError;
use crate::objects::Fault;
use freestone_core::device;

/// Result of operations on an image store.
pub type Result<T> = std::result::Result<T, Error>;

/// Errors of operations on an image store. Some texts are complete, others need the name of the store before
/// them.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum Error {
    /// The store failed a request for an object.
    #[error("{key}: {fault}")]
    Object {
        /// The key of the object.
        key: String,
        /// Fault that the store reported.
        fault: Fault,
    },
    /// No image store was created at this URL yet.
    #[error("{0}: there is no store of images; freestone push begins one")]
    NoStore(String),
    /// The store at this URL cannot be opened, for example with this key or this version.
    #[error("{0}: {1}")]
    Refused(String, DomainError),
    /// The object with this key is invalid or does not match its name, even after retries. The second text is
    /// the reason.
    #[error("{0}: is damaged: {1}")]
    Damaged(String, String),
    /// The tag with this name does not exist.
    #[error("there is no tag {0} in it")]
    NoTag(String),
    /// A prune found no tag, so the objects in use are unknown.
    #[error(
        "{0}: there is no tag, so nothing was deleted. If tags/ is missing, restore it. If all tags were \
         removed on purpose, push an image and prune again, or delete the whole store"
    )]
    NoTags(String),
    /// Retention rules would remove all tags that they apply to. The fields are the URL of the store and the
    /// number of tags.
    #[error(
        "{0}: the rules keep none of the {1} tags that they apply to, so none was removed; add --keep-last 1, \
         or remove tags with freestone images --untag"
    )]
    KeepsNone(String, usize),
    /// Objects with these keys may have been deleted after a push rewrote them or checked that they exist.
    #[error(
        "{0}: this host slept, or the store hung, while this was deleted; if a push has written it again \
         meanwhile, repeat that push with --full"
    )]
    DeletedLate(String),
    /// A push set a tag when its manifest may already have been older than the grace period.
    #[error(
        "tag {0} was set, but too late, as this host slept or the store hung: a prune may have deleted parts \
         of the image; repeat the push with --full"
    )]
    SetLate(String),
    /// Another push set this tag first.
    #[error("tag {0} was changed by another push meanwhile; nothing of this one is visible")]
    TagMoved(String),
    /// A push set this tag during its removal.
    #[error(
        "tag {0} was set by a push meanwhile, and is kept; remove it again if that image is meant as well"
    )]
    TagSet(String),
    /// A manifest or another description exceeds the size limit, or encryption failed.
    #[error("the image is too large or too fragmented: its maps or manifest exceed the size limit")]
    TooLarge,
    /// A push took so long that a prune may delete its first objects.
    #[error(
        "took longer than half of the grace of the store ({0:?}); push again: chunks in the store \
         are not sent again"
    )]
    TooSlow(std::time::Duration),
    /// A prune may delete the parent image, whose manifest has this key, at any time.
    #[error("no tag refers to {0} any more, so a prune may delete it; push the whole device with --full")]
    ParentExpiring(String),
    /// A prune deleted an object that the push needs.
    #[error("{0} was deleted from the store meanwhile; push again")]
    ObjectPruned(String),
    /// A trace cannot be saved because the image was not read yet.
    #[error("nothing was read of it yet")]
    NothingRead,
    /// Reading the pushed device failed.
    #[error("reading the device: {0}")]
    Device(#[from] device::Error),
    /// An operation on this host failed or was refused. The text is the reason.
    #[error("{0}")]
    Local(String),
    /// The operation was cancelled.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// Returns true if the error is that an object does not exist.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Object { fault: Fault::NotFound, .. })
    }

    /// Converts a fault that the object store reported for the object `key`.
    pub fn of(key: &str, fault: Fault) -> Self {
        match fault {
            Fault::Cancelled => Self::Cancelled,
            fault => Self::Object { key: key.to_owned(), fault },
        }
    }
}

const _: () = assert!(STORED_BYTES_MAX < 1 << 20);
