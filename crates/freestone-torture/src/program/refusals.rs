//! The errors that a verb may answer with here, and why. Verbs run side by side and choose their
//! devices at random, so most of what stands in another one's way is allowed; what a disk or memory
//! has to do with is not.

/// Any verb on a device that another one removes meanwhile, or that waits for another one for too
/// long.
const ALWAYS: [(&str, &str); 2] = [
    ("ENODEV", "another verb removed it meanwhile"),
    ("EBUSY", "devices stand on it, clients are connected, or another verb runs there"),
];

const BY_VERB: [(&str, &str, &str); 28] = [
    ("create", "EEXIST", "the name is taken"),
    ("fork", "EEXIST", "the name is taken"),
    ("fork", "EINVAL", "the base is not one, or smaller than asked for"),
    ("fork", "EOPNOTSUPP", "the device is no base"),
    ("snapshot", "EEXIST", "the name is taken"),
    ("snapshot", "EINVAL", "the origin has unflushed writes apart, or is being merged into"),
    ("snapshot", "ETIMEDOUT", "writes that are under way do not end on a slow machine"),
    ("restore", "EEXIST", "the name is taken"),
    ("restore", "ENODEV", "the base of a fork was removed"),
    ("rewind", "EOPNOTSUPP", "only forks are rewound"),
    ("rewind", "EINVAL", "it is recorded"),
    ("reset", "EOPNOTSUPP", "only ram, null and forks are reset"),
    ("reset", "EROFS", "a snapshot does not change"),
    ("set", "EINVAL", "smaller than it is, or a guarantee that does not fit"),
    ("set", "EOPNOTSUPP", "a device without that attribute"),
    ("merge", "EINVAL", "the snapshot overflowed or is invalid"),
    ("merge", "EIO", "its store is small or its disk fails"),
    ("merge", "EOPNOTSUPP", "a snapshot in memory is not merged"),
    ("merge", "ETIMEDOUT", "writes that are under way do not end on a slow machine"),
    ("writeback", "ENODEV", "no backing device"),
    ("writeback", "ERANGE", "a page that it does not have"),
    ("writeback", "EOPNOTSUPP", "only what is in memory is written back"),
    ("recompress", "EINVAL", "no algorithm at that priority"),
    ("unpublish", "EINVAL", "not published"),
    ("publish", "EEXIST", "published there already"),
    ("pull", "EEXIST", "the name is taken"),
    ("trace", "EINVAL", "nothing was read of it yet"),
    ("delta.save", "EOPNOTSUPP", "no fork of a file"),
];

/// Why this error may be the answer; `None` where it may not.
pub fn reason(verb: &str, errno: &str) -> Option<&'static str> {
    let always = ALWAYS.iter().find(|(name, _)| *name == errno).map(|(_, why)| *why);
    always
        .or_else(|| BY_VERB.iter().find(|(name, of, _)| *name == verb && *of == errno).map(|(.., why)| *why))
}
