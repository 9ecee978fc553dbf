//! The examples of the library run, and do what their pages promise.

#[path = "../examples/fork_and_rewind.rs"]
mod fork_and_rewind;
#[path = "../examples/power_cut.rs"]
mod power_cut;

#[test]
fn forks_are_separate_and_rewind_to_the_base() {
    let disks = fork_and_rewind::Disks::new().unwrap();
    let (one, two) = (disks.fork().unwrap(), disks.fork().unwrap());
    let third = |disk| fork_and_rewind::page(disk, 3).unwrap();
    fork_and_rewind::run_job(&one, 101).unwrap();
    assert_eq!((third(&one)[0], third(&two)[0]), (101, 3));
    fork_and_rewind::run_job(&two, 102).unwrap();
    one.rewind().unwrap();
    assert_eq!((third(&one), third(&two)), ([3; 4096], [102; 4096]));
    fork_and_rewind::main().unwrap();
}

#[test]
fn power_cut_loses_only_unflushed_records() {
    for seed in 0..20 {
        assert_eq!(power_cut::records_after_cut(true, seed).unwrap(), 8, "seed {seed}");
    }
    let left: Vec<_> = (0..20).map(|seed| power_cut::records_after_cut(false, seed).unwrap()).collect();
    assert!(left.iter().any(|records| *records < 8), "{left:?}");
    let again: Vec<_> = (0..20).map(|seed| power_cut::records_after_cut(false, seed).unwrap()).collect();
    assert_eq!(left, again);
    power_cut::main().unwrap();
}
