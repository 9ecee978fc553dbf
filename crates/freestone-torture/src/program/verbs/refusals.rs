//! Lists the errors with which each verb may fail, and why. Concurrent verbs choose their devices
//! at random, so most conflicts between them are allowed. Errors of disks or memory are not.

/// Errors allowed for any verb: another verb removes the device meanwhile, or uses it for too long.
const ALWAYS: [(&str, &str); 2] = [
    ("ENODEV", "another verb removed it meanwhile"),
    ("EBUSY", "devices lie on it, clients are connected, or another verb uses it"),
];

const BY_VERB: [(&str, &str, &str); 28] = [
    ("create", "EEXIST", "the name is taken"),
    ("fork", "EEXIST", "the name is taken"),
    ("fork", "EINVAL", "the device cannot be a base, or the requested size is smaller than the base"),
    ("fork", "EOPNOTSUPP", "the device is not a base"),
    ("snapshot", "EEXIST", "the name is taken"),
    ("snapshot", "EINVAL", "the origin has a volatile cache, or a merge is running"),
    ("snapshot", "ETIMEDOUT", "writes in flight do not complete in time on a slow machine"),
    ("restore", "EEXIST", "the name is taken"),
    ("restore", "ENODEV", "the base of a fork was removed"),
    ("rewind", "EOPNOTSUPP", "only forks can be rewound"),
    ("rewind", "EINVAL", "the device is recorded"),
    ("reset", "EOPNOTSUPP", "only ram, null and forks can be reset"),
    ("reset", "EROFS", "a snapshot does not change"),
    ("set", "EINVAL", "smaller than the current size, or a guarantee that does not fit"),
    ("set", "EOPNOTSUPP", "the device does not have that attribute"),
    ("merge", "EINVAL", "the snapshot overflowed or is invalid"),
    ("merge", "EIO", "its COW device is small or its disk fails"),
    ("merge", "EOPNOTSUPP", "a snapshot in memory cannot be merged"),
    ("merge", "ETIMEDOUT", "writes in flight do not complete in time on a slow machine"),
    ("writeback", "ENODEV", "no backing device"),
    ("writeback", "ERANGE", "a page beyond the device"),
    ("writeback", "EOPNOTSUPP", "only RAM disks and forks have pages to write back"),
    ("recompress", "EINVAL", "no algorithm at that priority"),
    ("unpublish", "EINVAL", "not published"),
    ("publish", "EEXIST", "already published there"),
    ("pull", "EEXIST", "the name is taken"),
    ("trace", "EINVAL", "nothing was read from it yet"),
    ("delta.save", "EOPNOTSUPP", "not a fork of a file"),
];

/// Returns the accepted reason for a failure of the verb with this errno, or `None` if it may not
/// fail so.
pub fn reason(verb: &str, errno: &str) -> Option<&'static str> {
    let always = ALWAYS.iter().find(|(name, _)| *name == errno).map(|(_, why)| *why);
    always
        .or_else(|| BY_VERB.iter().find(|(name, of, _)| *name == verb && *of == errno).map(|(.., why)| *why))
}
