//! Why something was not done with a store.

use thiserror::Error as ThisError;

use crate::format::chunk::STORED_BYTES_MAX;
use crate::format::domain::Refused;
use crate::objects::Fault;
use freestone_core::device;

/// What is done with a store answers.
pub type Result<T> = std::result::Result<T, Error>;

/// Each is half a sentence or a whole one, for people.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum Error {
    /// What the store answered for an object.
    #[error("{key}: {fault}")]
    Object {
        /// The key of the object.
        key: String,
        /// What it answered.
        fault: Fault,
    },
    /// Nothing was pushed there yet.
    #[error("{0}: there is no store of images; freestone push begins one")]
    NoStore(String),
    /// It cannot be opened so.
    #[error("{0}: {1}")]
    Refused(String, Refused),
    /// An object is not what its name says, also after other tries.
    #[error("{0}: is damaged: {1}")]
    Damaged(String, String),
    /// There is no such tag.
    #[error("there is no tag {0} in it")]
    NoTag(String),
    /// A prune found no tag, so it cannot know what is in use.
    #[error(
        "{0}: there is no tag, so nothing was deleted. If tags/ is missing, restore it. If all tags were \
         removed on purpose, push an image and prune again, or delete the whole store"
    )]
    NoTags(String),
    /// Objects were deleted later than a push waits for.
    #[error(
        "{0}: this host slept, or the store hung, while this was deleted; if a push has written it again \
         meanwhile, repeat that push with --full"
    )]
    DeletedLate(String),
    /// A tag was set later than a prune waits for.
    #[error(
        "tag {0} was set, but too late, as this host slept or the store hung: a prune may have deleted parts \
         of the image; repeat the push with --full"
    )]
    SetLate(String),
    /// Of two pushes at one time the other came first.
    #[error("tag {0} was changed by another push meanwhile; nothing of this one is visible")]
    TagMoved(String),
    /// What describes the image is larger than is allowed.
    #[error("the image is too large or too scattered: what describes it would not be read again")]
    TooLarge,
    /// A push that takes so long that what it wrote first may be deleted.
    #[error(
        "took longer than half of the grace of the store ({0:?}); push again: what is there is not sent twice"
    )]
    TooSlow(std::time::Duration),
    /// What it stands on may be deleted at any time.
    #[error("{0} is referred to by no tag any more, and may be deleted; push all of it, with --full")]
    ParentGoes(String),
    /// What it reuses was deleted meanwhile.
    #[error("{0} was deleted from the store meanwhile; push again")]
    Pruned(String),
    /// A trace of an image that nobody read.
    #[error("nothing was read of it yet")]
    Unread,
    /// The device that is pushed failed.
    #[error("reading the device: {0}")]
    Device(#[from] device::Error),
    /// What was written to locally failed.
    #[error("{0}")]
    Local(String),
    /// It was ended.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// Returns true if there is no such object.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Object { fault: Fault::NotFound, .. })
    }

    /// What a store answered for an object.
    pub fn of(key: &str, fault: Fault) -> Self {
        match fault {
            Fault::Cancelled => Self::Cancelled,
            fault => Self::Object { key: key.to_owned(), fault },
        }
    }
}

const _: () = assert!(STORED_BYTES_MAX < 1 << 20);
