use std::io::Write as _;

use super::*;

const ANY: ReplaceCheck = ReplaceCheck::Any;

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|row| row.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Begins a file with a temporary name, as on file systems without `O_TMPFILE`.
fn begin_named(target: &ReplaceTarget) -> TemporaryFile {
    let (file, name) = TemporaryName::new(&target.dir, SAVE_PREFIX, |path| File::create_new(path)).unwrap();
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
    let dir = target.open_dir().unwrap();
    TemporaryFile { file, name: Some(name), prefix: SAVE_PREFIX, dir }
}

#[test]
fn put_creates_and_replaces_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    for named in [false, true] {
        let _ = fs::remove_file(&path);
        for content in ["first", "second"] {
            let target = ReplaceTarget::new(&path).unwrap();
            let temporary = if named { begin_named(&target) } else { target.begin(SAVE_PREFIX).unwrap() };
            temporary.as_file().write_all(content.as_bytes()).unwrap();
            assert_eq!(find_stale_files(&path), [] as [PathBuf; 0], "the file is in use");
            target.put(temporary, ANY).unwrap().into_result().unwrap();
            assert_eq!((fs::read_to_string(&path).unwrap().as_str(), names(dir.path()).len()), (content, 1));
        }
    }
}

#[test]
fn concurrent_replacements_wait_for_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    fs::write(&path, "old").unwrap();
    std::thread::scope(|scope| {
        for content in ["first", "second"] {
            let path = &path;
            scope.spawn(move || {
                for _ in 0..100 {
                    let target = ReplaceTarget::new(path).unwrap();
                    let temporary = target.begin(SAVE_PREFIX).unwrap();
                    temporary.as_file().write_all(content.as_bytes()).unwrap();
                    target.put(temporary, ANY).unwrap().into_result().unwrap();
                }
            });
        }
    });
    assert!(["first", "second"].contains(&fs::read_to_string(&path).unwrap().as_str()));
    assert_eq!(names(dir.path()), ["x"]);
}

#[test]
fn put_checks_file_created_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    for named in [false, true] {
        let target = ReplaceTarget::new(&path).unwrap();
        let temporary = if named { begin_named(&target) } else { target.begin(SAVE_PREFIX).unwrap() };
        fs::write(&path, "precious").unwrap();
        let put = target.put(temporary, ReplacePolicy::SameKind.check_for("thing", |head| head == b"thing"));
        assert_eq!(put.unwrap_err().to_string(), "the file exists and is not a thing");
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
        assert_eq!(names(dir.path()), ["x"]);
        fs::remove_file(&path).unwrap();
    }
}

/// Makes each step of [`ReplaceTarget::put`] fail before and after the step takes effect.
#[test]
#[cfg(debug_assertions)]
fn put_step_failure_reports_what_is_in_place() {
    use crate::fail_points::Fault;

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    for (call, is_done) in [
        (Call::SyncFile, false),
        (Call::Place, false),
        (Call::Place, true),
        (Call::SyncDir, false),
        (Call::SyncDir, true),
    ] {
        for (named, old) in [(false, false), (true, false), (false, true), (true, true)] {
            let _ = fs::remove_file(&path);
            if old {
                fs::write(&path, "old").unwrap();
            }
            let target = ReplaceTarget::new(&path).unwrap();
            let temporary = if named { begin_named(&target) } else { target.begin(SAVE_PREFIX).unwrap() };
            temporary.as_file().write_all(b"new").unwrap();
            fail_points::inject(Some(Fault { call, after: 0, times: 1, errno: Errno::IO, is_done }));
            let put = target.put(temporary, ANY);
            fail_points::inject(None);
            let shown = format!("{call:?}, done: {is_done}, named: {named}, old: {old}");
            let found = fs::read_to_string(&path).unwrap_or_default();
            match (call, is_done) {
                (Call::Place, true) => assert!(matches!(put, Ok(Durability::Durable)), "{shown}"),
                (Call::SyncDir, _) => assert!(matches!(put, Ok(Durability::Unknown(_))), "{shown}"),
                _ => {
                    assert_eq!(put.unwrap_err().raw_os_error(), Some(5), "{shown}");
                    assert_eq!(found, if old { "old" } else { "" }, "{shown}");
                    continue;
                }
            }
            assert_eq!((found.as_str(), names(dir.path()).len()), ("new", 1), "{shown}");
        }
    }
}

#[test]
fn put_new_names_complete_and_locked_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    for named in [false, true] {
        let target = ReplaceTarget::new(&path).unwrap();
        let begin = || if named { begin_named(&target) } else { target.begin(NEW_PREFIX).unwrap() };
        let (first, second) = (begin(), begin());
        first.as_file().write_all(b"first").unwrap();
        assert!(!path.exists());
        let created = first.created_file(&target).unwrap();
        let kept = target.put_new(first).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "first");
        assert!(!is_unlocked(&path), "the lock is kept");
        let refused = target.put_new(second).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(names(dir.path()), ["x"]);
        drop(kept);
        // `CreatedFile::remove` does not remove another file at the path.
        fs::rename(&path, dir.path().join("y")).unwrap();
        fs::write(&path, "another's").unwrap();
        created.remove();
        assert!(path.exists());
        fs::rename(dir.path().join("y"), &path).unwrap();
        created.remove();
        assert!(!path.exists());
    }
}

#[test]
fn stale_files_of_crash_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    let left = dir.path().join(".freestone-save-abc.tmp");
    fs::write(&left, "half").unwrap();
    fs::write(dir.path().join(".freestone-save-abc"), "another's").unwrap();
    assert_eq!(find_stale_files(&path), [left]);
}
