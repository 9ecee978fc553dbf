//! Files of kept devices that are truncated, damaged or of a newer version.

use super::*;

/// Creates a directory with a whole file and two increments. Returns the content of the disk at
/// each save.
fn three_saves(path: &Path) -> Vec<Vec<u8>> {
    let ram = family().ram(MIB).unwrap();
    let mut random = Random(11);
    let mut keep = Keep::open(path).unwrap();
    (0..3)
        .map(|round| {
            for page in (round..250).step_by(1 + 3 * round as usize) {
                ram.write_at(page * PAGE, &random.page(), Flags::empty()).unwrap();
            }
            save(&mut keep, &[("a", &ram)]);
            content(&ram)
        })
        .collect()
}

/// Restores the device, and returns its pages; `None` for a page that cannot be read.
pub fn shown(path: &Path, damaged: DamagePolicy) -> Result<Vec<Option<Vec<u8>>>, KeepError> {
    let family = family();
    let mut keep = Keep::open_with(path, BaseCheck::default(), damaged)?;
    let (devices, mut loading) = keep.restore(&family, &[], &never)?;
    let ram = &devices[0].1;
    let pages = || -> Vec<Option<Vec<u8>>> {
        let page = |page: u64| {
            let mut bytes = vec![0; PAGE_BYTES];
            match ram.read_at(page * PAGE, &mut bytes) {
                Ok(()) => Some(bytes),
                Err(error) => {
                    assert_eq!(error, Error::Media);
                    None
                }
            }
        };
        (0..ram.geometry().size / PAGE).map(page).collect()
    };
    let before = pages();
    let loaded = loading.run(&never, &mut |_, _| {});
    let after = pages();
    assert!(before == after, "loading changes nothing");
    let failed = after.iter().filter(|page| page.is_none()).count() as u64;
    assert_eq!(loaded, if failed == 0 { LoadOutcome::Complete } else { LoadOutcome::Incomplete(failed) });
    Ok(after)
}

fn is(pages: &[Option<Vec<u8>>], content: &[u8]) -> bool {
    pages.iter().zip(content.chunks(PAGE_BYTES)).all(|(page, content)| page.as_deref() == Some(content))
}

pub fn write_all(path: &Path, files: &BTreeMap<String, Vec<u8>>) {
    let _ = fs::remove_dir_all(path);
    fs::create_dir(path).unwrap();
    for (name, bytes) in files {
        fs::write(path.join(name), bytes).unwrap();
    }
}

/// Returns the positions of the blocks in a file.
pub fn blocks(path: &Path) -> Vec<u64> {
    let mut reader = saved::reader::Reader::open_any(path).unwrap();
    let mut at = vec![reader.at()];
    while reader.next().unwrap().is_some() {
        at.push(reader.at());
    }
    at
}

#[test]
fn truncated_save_restores_previous_one() {
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (dir.path().join("kept"), dir.path().join("cut"));
    let contents = three_saves(&path);
    let all = files(&path);
    let names: Vec<_> = all.keys().cloned().collect();
    assert_eq!(names, ["0000000001-0001.part", "0000000001-0002.part", "0000000001.whole"]);
    assert!(is(&shown(&path, DamagePolicy::Refuse).unwrap(), &contents[2]));
    // After a crash, a file system may have a file name whose content is incomplete.
    for (name, present) in [(&names[1], 2), (&names[0], 1), (&names[2], 0)] {
        let len = all[name].len() as u64;
        let cuts = blocks(&path.join(name)).into_iter().chain([0, 1, 20, 64, 70, len - 80]);
        let cuts = cuts.flat_map(|at| [at, at + 1, at + 39, at + 41, at + 100]).filter(|&at| at < len);
        // A quick run tests every fourth cut, which still covers all five distances.
        for cut in cuts.step_by(effort(4, 1)) {
            let mut left = all.clone();
            left.get_mut(name).unwrap().truncate(cut as usize);
            // At the time of the truncated file, later files do not exist yet.
            left.retain(|other, _| {
                other == name || other.ends_with("whole") || (present == 2 && *other == names[0])
            });
            write_all(&other, &left);
            match (present, shown(&other, DamagePolicy::Refuse)) {
                (0, shown) => assert!(matches!(shown, Err(KeepError::Read(_))), "{cut}"),
                (_, Ok(pages)) => assert!(is(&pages, &contents[present - 1]), "{name} {cut}"),
                // A file cut within the header (64 bytes) does not identify its chain, so opening
                // may fail.
                (_, Err(error)) => assert!(matches!(error, KeepError::Read(_)) && cut < 64, "{cut}: {error}"),
            }
            if present > 0 {
                let keep = Keep::open_with(&other, BaseCheck::default(), DamagePolicy::UseOlder).unwrap();
                assert_eq!(keep.contents().unwrap().unusable_files, 1, "{name} {cut}");
            }
        }
    }
}

/// A crash at any step of a save must leave a directory with the old or the new content.
#[test]
fn crash_during_whole_save_or_merge_keeps_chain() {
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (dir.path().join("kept"), dir.path().join("crashed"));
    let contents = three_saves(&path);
    let before = files(&path);
    let mut keep = Keep::open(&path).unwrap();
    keep.merge(&never, &mut |_, _| {}).unwrap();
    drop(keep);
    let merged = files(&path);
    let (name, bytes) = merged.iter().next().unwrap();
    assert_eq!((merged.len(), &**name), (1, "0000000002.whole"));
    // The new file first has a temporary name, and then its final name. After that the old files
    // are removed, newest first.
    let mut steps = vec![before.clone()];
    for cut in [0, 100, bytes.len() / 2, bytes.len()] {
        let mut step = before.clone();
        step.insert(".freestone-save-abc.tmp".into(), bytes[..cut].to_vec());
        steps.push(step);
    }
    let mut step = before.clone();
    step.insert(name.clone(), bytes.clone());
    steps.push(step.clone());
    for gone in ["0000000001-0002.part", "0000000001-0001.part", "0000000001.whole"] {
        step.remove(gone);
        steps.push(step.clone());
    }
    for (number, step) in steps.iter().enumerate() {
        write_all(&other, step);
        assert!(is(&shown(&other, DamagePolicy::Refuse).unwrap(), &contents[2]), "step {number}");
        let left = files(&other);
        assert!(!left.keys().any(|name| name.ends_with("tmp")), "what was not finished is gone");
        assert!(left.len() == 1 || left == before, "step {number}: and what was replaced");
    }
}

#[test]
fn flipped_bit_never_returns_wrong_data() {
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (dir.path().join("kept"), dir.path().join("flipped"));
    let contents = three_saves(&path);
    let all = files(&path);
    let (mut refused, mut partly, mut cut) = (0, 0, 0);
    for (name, bytes) in &all {
        let dense = |at: usize| at < 300 || at + 112 > bytes.len();
        // A stride of 7 covers every bit number and every field, as 7 and 8 have no common divisor.
        let (stride, sparse) = effort((7, 16_001), (1, 4001));
        for at in (0..bytes.len()).filter(|at| (dense(*at) && at % stride == 0) || at % sparse == 0) {
            let mut flipped = all.clone();
            flipped.get_mut(name).unwrap()[at] ^= 1 << (at % 8);
            write_all(&other, &flipped);
            match shown(&other, DamagePolicy::Refuse) {
                Err(KeepError::Read(_)) => refused += 1,
                Err(error) => panic!("{error}"),
                Ok(pages) => {
                    let right = |content: &[u8]| {
                        let pages = pages.iter().zip(content.chunks(PAGE_BYTES));
                        pages
                            .into_iter()
                            .all(|(page, content)| page.as_ref().is_none_or(|page| page == content))
                    };
                    // Damage at the end of the newest file is treated as an incomplete save.
                    let last = name.contains("0002");
                    cut += u32::from(!right(&contents[2]));
                    assert!(right(&contents[2]) || last && right(&contents[1]), "{name} {at}");
                    partly += u32::from(pages.contains(&None));
                }
            }
        }
    }
    assert!(refused > effort(70, 500) && partly > 20 && cut > 0, "{refused} {partly} {cut}");
}

#[test]
fn damaged_page_can_be_rewritten_and_saved() {
    let dir = tempfile::tempdir().unwrap();
    let contents = three_saves(dir.path());
    let name = dir.path().join("0000000001.whole");
    let mut bytes = fs::read(&name).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    fs::write(&name, &bytes).unwrap();
    let (mut keep, devices, mut loading) = restored(dir.path(), &family(), &[]);
    assert!(matches!(loading.run(&never, &mut |_, _| {}), LoadOutcome::Incomplete(_)));
    assert!(matches!(keep.merge(&never, &mut |_, _| {}), Err(KeepError::Read(_))));
    let other = dir.path().join("other");
    let failed = saved::save(&borrowed(&devices), &other, BaseCheck::default(), &mut |_, _| {});
    let lost = matches!(failed, Err(SaveError::Page { error: Error::Media, .. }));
    assert!(lost, "a page that is lost is not saved as nothing: {failed:?}");
    let ram = &devices[0].1;
    ram.write_at(0, &contents[2], Flags::empty()).unwrap();
    assert_eq!(save(&mut keep, &borrowed(&devices)).kind, SaveKind::Whole);
    drop((keep, devices, loading));
    assert!(is(&shown(dir.path(), DamagePolicy::Refuse).unwrap(), &contents[2]));
}

#[test]
fn newer_format_version_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kept");
    three_saves(&path);
    for name in files(&path).keys() {
        let original = fs::read(path.join(name)).unwrap();
        let mut newer = original.clone();
        newer[16] = 5;
        fs::write(path.join(name), &newer).unwrap();
        for damaged in [DamagePolicy::Refuse, DamagePolicy::UseOlder] {
            let error = Keep::open_with(&path, BaseCheck::default(), damaged).err().unwrap();
            assert!(matches!(error, KeepError::Read(RestoreError::Newer { version: 5, .. })), "{error}");
        }
        assert_eq!(files(&path).len(), 3);
        fs::write(path.join(name), &original).unwrap();
    }
    // An increment alone cannot be restored.
    let part = path.join("0000000001-0001.part");
    let error = crate::save::restore(&part, &family(), &[], &mut |_, _| {}).err().unwrap();
    assert!(matches!(error, RestoreError::Increment(_)), "{error}");
}

#[test]
fn swapped_or_missing_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (dir.path().join("kept"), dir.path().join("other"));
    three_saves(&path);
    let mut swapped = files(&path);
    let (one, two) = ("0000000001-0001.part".to_owned(), "0000000001-0002.part".to_owned());
    let second = swapped.insert(one, swapped[&two].clone()).unwrap();
    swapped.insert(two.clone(), second);
    write_all(&other, &swapped);
    assert!(matches!(Keep::open(&other), Err(KeepError::Read(RestoreError::Damaged { .. }))));
    let keep = Keep::open_with(&other, BaseCheck::default(), DamagePolicy::UseOlder).unwrap();
    assert_eq!(keep.contents().unwrap().unusable_files, 2);
    drop(keep);
    // A file in the middle of the chain is missing.
    let mut missing = files(&path);
    missing.remove("0000000001-0001.part");
    write_all(&other, &missing);
    assert!(Keep::open(&other).is_err());
}
