//! Tests of parsing and formatting fault rules, and of the error messages.

use std::time::Duration;

use proptest::option;
use proptest::prelude::*;

use super::super::rules::{Chance, NTH_MAX, Range};
use super::*;

fn parse_error_text(text: &str) -> String {
    match text.parse::<Rules>() {
        Err(error) => error.to_string(),
        Ok(rules) => panic!("{text:?} was read as {rules}"),
    }
}

/// The formatted text of rules is canonical, and parses to the same rules.
#[test]
fn rules_parse_and_format() {
    for (text, written) in [
        ("", ""),
        (" ; ;", ""),
        ("write error=EIO chance=1%", "write error=EIO chance=1%"),
        ("read at=1M+64K delay=20ms", "read delay=20ms at=1M+64K"),
        ("flush lie nth=3;", "flush lie nth=3"),
        ("write torn=4k; write lost chance=1/1000", "write torn=4K; write lost chance=1/1000"),
        ("write misdirected;read stale ;read rot", "write misdirected; read stale; read rot"),
        ("write error=enospc", "write error=ENOSPC"),
        ("all hang at=0+4K times=1", "all hang at=0+4K times=1"),
        ("writes  lie\tafter=7", "writes lie after=7"),
        ("append torn=512 error=EIO rot", "append error=EIO torn=512 rot"),
        ("write misdirected error=EPERM", "write error=EROFS misdirected"),
        ("read stale rot hang", "read stale rot hang"),
        ("read delay=1000us", "read delay=1ms"),
        ("read delay=1500us", "read delay=1500us"),
        ("read delay=3600S", "read delay=3600s"),
        ("read delay=1ns at=1536B+512b", "read delay=1ns at=1536B+512B"),
        ("read hang at=1024K+1025K", "read hang at=1M+1025K"),
        ("read hang chance=0.01", "read hang chance=1%"),
        ("read hang chance=.5", "read hang chance=50%"),
        ("read hang chance=1.0", "read hang chance=100%"),
        ("read hang chance=0.5%", "read hang chance=1/200"),
        ("read hang chance=2/6", "read hang chance=1/3"),
        (
            "reset error=EIO; finish hang; open delay=1s; close error=ETOOMANYREFS; zeroes lost",
            "reset error=EIO; finish hang; open delay=1s; close error=ETOOMANYREFS; zeroes lost",
        ),
        ("all torn=16K", "all torn=16K"),
    ] {
        let rules: Rules = text.parse().unwrap_or_else(|error| panic!("{text:?}: {error}"));
        assert_eq!(rules.to_string(), written, "{text:?}");
        assert_eq!(written.parse::<Rules>().as_ref(), Ok(&rules), "{text:?}");
    }
}

#[test]
fn invalid_rules_report_the_problem() {
    let operations = "there are read write discard zeroes flush append open close finish reset writes all";
    let words = "neither an effect (error= delay= hang torn= lost misdirected lie stale rot) nor a condition (at= chance= nth= times= after=)";
    let errnos = "EIO ENOSPC ENOMEM EROFS EPERM EINVAL EOPNOTSUPP ENOTSUP ESHUTDOWN ETOOMANYREFS EOVERFLOW";
    for (text, problem) in [
        ("wirte error=EIO", format!("\"wirte\" is not an operation; {operations}; write?")),
        ("error=EIO", format!("\"error=EIO\" is not an operation; {operations}")),
        ("Read hang", format!("\"Read\" is not an operation; {operations}; read?")),
        ("write erorr=EIO", format!("\"erorr=EIO\" is {words}; error?")),
        ("write eat", format!("\"eat\" is {words}; at?")),
        ("write xyzzy", format!("\"xyzzy\" is {words}")),
        ("write", "it has no effect; there are error= delay= hang torn= lost misdirected lie stale rot".into()),
        ("write chance=1%", "it has no effect; there are error= delay= hang torn= lost misdirected lie stale rot".into()),
        ("write error", "error needs a value, as in error=EIO".into()),
        ("write torn=", "torn needs a value, as in torn=4K".into()),
        ("write lost=1", "lost takes no value".into()),
        ("read hang=", "hang takes no value".into()),
        ("read hang hang", "hang is given twice".into()),
        ("write torn=4K torn=512", "torn is given twice".into()),
        ("write lost at=0+4K at=4K+4K", "at is given twice".into()),
        ("write error=ETIMEDOUT", format!("error=ETIMEDOUT is not a known error; use one of {errnos}")),
        ("write error=EOI", format!("error=EOI is not a known error; use one of {errnos}; EIO?")),
        ("write torn=8K", "torn=8K is not a unit; there are 512, 4K and 16K".into()),
        ("read torn=4K", "torn is for write, append, not for read".into()),
        ("read lost", "lost is for write, discard, zeroes, append, not for read".into()),
        ("zeroes misdirected", "misdirected is for write, append, not for zeroes".into()),
        ("read lie", "lie is for write, discard, zeroes, flush, append, not for read".into()),
        ("writes stale", "stale is for read, not for writes".into()),
        ("reset rot", "rot is for read, write, append, not for reset".into()),
        ("write torn=4K lost", "torn and lost exclude each other".into()),
        ("write misdirected torn=512", "misdirected and torn exclude each other".into()),
        ("read hang delay=1s", "delay and hang exclude each other".into()),
        ("write lost rot", "lost and rot exclude each other".into()),
        ("write error=EIO lost", "lost has no effect with error=; only torn= and misdirected can be combined with error=".into()),
        ("read error=EIO stale", "stale has no effect with error=; only torn= and misdirected can be combined with error=".into()),
        ("flush lie at=0+4K", "at= does not apply to flush, which has no offset".into()),
        ("read hang at=1M", "at=1M: a range is OFFSET+LENGTH, as in 1M+64K".into()),
        ("read hang at=4096+4K", "at=4096+4K: \"4096\" has no unit; give one of K, M, G, T (1024-based) or B for bytes, as in 4096B or 4096M".into()),
        ("read hang at=0+0", "at=0+0: the length must be more than 0".into()),
        ("read hang at=x+4K", "at=x+4K: \"x\" is not a size; give a whole number with K, M, G, T (1024-based) or B for bytes, as in 64K".into()),
        ("read hang at=1M+1.5K", "at=1M+1.5K: \"1.5K\" is not a size; give a whole number with K, M, G, T (1024-based) or B for bytes, as in 64K".into()),
        ("read hang at=0+99999999T", "at=0+99999999T: the range exceeds the largest device".into()),
        ("read hang at=8388607T+1T", "at=8388607T+1T: the range exceeds the largest device".into()),
        ("read delay=20", "delay=20: \"20\" has no unit; give one of ns, us, ms, s, as in 20ms".into()),
        ("read delay=1.5ms", "delay=1.5ms: \"1.5ms\" is not a time; give a whole number with ns, us, ms or s, as in 20ms".into()),
        ("read delay=0s", "delay=0s: a delay is more than 0 and at most 3600s".into()),
        ("read delay=3601s", "delay=3601s: a delay is more than 0 and at most 3600s".into()),
        ("read hang chance=1", "chance=1: does that mean 1% or 1/1000? Give 1%, 1/1000 or 0.01".into()),
        ("read hang chance=0%", "chance=0%: a chance is more than 0 and at most 1, as in 1%, 1/1000 or 0.01".into()),
        ("read hang chance=101%", "chance=101%: a chance is more than 0 and at most 1, as in 1%, 1/1000 or 0.01".into()),
        ("read hang chance=1/0", "chance=1/0: a chance is more than 0 and at most 1, as in 1%, 1/1000 or 0.01".into()),
        ("read hang chance=+1/2", "chance=+1/2: a chance is more than 0 and at most 1, as in 1%, 1/1000 or 0.01".into()),
        ("read hang chance=.", "chance=.: a chance is more than 0 and at most 1, as in 1%, 1/1000 or 0.01".into()),
        ("read hang chance=0.0000000001", "chance=0.0000000001: at most 9 decimal places".into()),
        ("read hang nth=0", "nth=0: give a whole number from 1 to 16777214".into()),
        ("read hang nth=16777215", "nth=16777215: give a whole number from 1 to 16777214".into()),
        ("read hang times=0", "times=0: give a whole number of at least 1".into()),
        ("read hang after=+1", "after=+1: give a whole number of at least 1".into()),
    ] {
        assert_eq!(parse_error_text(text), format!("fault rule 1 (\"{text}\"): {problem}"));
        // The error contains the number of the rule, not counting empty ones.
        assert_eq!(parse_error_text(&format!("read hang; ; {text}")), format!("fault rule 2 (\"{text}\"): {problem}"));
    }
}

#[test]
fn rule_count_and_quoted_text_are_limited() {
    let many = vec!["read hang"; RULES_MAX];
    assert_eq!(many.join(";").parse::<Rules>().unwrap().iter().count(), RULES_MAX);
    let more = format!("{};read hang", many.join(";"));
    assert_eq!(parse_error_text(&more), "fault rule 65 (\"read hang\"): there are more than 64 rules");
    let long = format!("read {}", "\u{e9}".repeat(100_000));
    let error = parse_error_text(&long);
    assert!(
        error.starts_with(&format!("fault rule 1 (\"read {}...\"): ", "\u{e9}".repeat(75))),
        "{error:.300}"
    );
}

/// Returns a strategy that generates effects which the target allows.
fn effects(target: Target) -> BoxedStrategy<Effects> {
    let write_fault = prop_oneof![
        Just(WriteFault::Torn(512)),
        Just(WriteFault::Torn(4096)),
        Just(WriteFault::Torn(16384)),
        Just(WriteFault::Lost),
        Just(WriteFault::Misdirected)
    ];
    let delay = (1_u64..=3600, prop_oneof![Just(1_u64), Just(1000), Just(1_000_000), Just(1_000_000_000)])
        .prop_map(|(number, unit)| Duration::from_nanos(number * unit));
    let error = prop::sample::select(ERRNOS.to_vec()).prop_map(|(_, error)| error);
    let all = (
        option::of(error),
        option::of(delay),
        any::<bool>(),
        option::of(write_fault),
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
    );
    all.prop_map(|(error, delay, hang, write_fault, lie, stale, rot)| Effects {
        error,
        delay,
        hang,
        write_fault,
        lie,
        stale,
        rot,
    })
    .prop_filter("they do not fit", move |effects| check(&rule(target, *effects)).is_ok())
    .boxed()
}

fn rule(target: Target, effects: Effects) -> Rule {
    Rule { target, effects, range: None, chance: None, nth: None, times: None, after: None }
}

fn any_rule() -> impl Strategy<Value = Rule> {
    let target = prop::sample::select(Target::all().collect::<Vec<_>>());
    let range = (0..1_u64 << 62, 1..1_u64 << 62).prop_map(|(offset, len)| Range { offset, len });
    let chance =
        (1..=u64::MAX, 1..=u64::MAX).prop_filter_map("above 1", |(count, of)| Chance::new(count, of));
    let conditions = (
        option::of(range),
        option::of(chance),
        option::of(1..=NTH_MAX),
        option::of(1..=u64::MAX),
        option::of(1..=u64::MAX),
    );
    (target.prop_flat_map(|target| effects(target).prop_map(move |e| rule(target, e))), conditions).prop_map(
        |(rule, (range, chance, nth, times, after))| Rule {
            range: range.filter(|_| rule.target != Target::One(Operation::Flush)),
            chance,
            nth,
            times,
            after,
            ..rule
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, max_global_rejects: 100_000, max_local_rejects: 1_000_000, ..ProptestConfig::default() })]

    #[test]
fn formatted_rules_parse_to_the_same_rules(rules in prop::collection::vec(any_rule(), 0..5)) {
        let rules = Rules(rules);
        let text = rules.to_string();
        prop_assert_eq!(text.parse::<Rules>(), Ok(rules), "{}", text);
    }

    #[test]
fn parsing_never_panics(text in "[a-z0-9=+.%/;\u{e9} EIOKMGT]{0,60}") {
        let _ = text.parse::<Rules>();
    }
}
