//! A failing run is made short, and written down as a test.

use crate::ops::Op;

/// Drops ops as long as the run fails without them: first long pieces, then shorter ones, then
/// single ops, until none can go.
pub fn shrink<T: Clone>(ops: &[T], mut fails: impl FnMut(&[T]) -> bool) -> Vec<T> {
    let mut left = ops.to_vec();
    let mut piece = left.len().div_ceil(2).max(1);
    loop {
        let before = left.len();
        // From the end: what comes after the failure goes first.
        let mut end = left.len();
        while end > 0 {
            let start = end.saturating_sub(piece);
            let mut without = left.clone();
            without.drain(start..end);
            if fails(&without) {
                left = without;
            }
            end = start;
        }
        match piece {
            1 if left.len() == before => return left,
            1 => {}
            _ => piece = piece.div_ceil(2),
        }
    }
}

/// The run as a test. `message` says how it failed.
pub fn as_test(name: &str, ops: &[Op], message: &str) -> String {
    let told: String = message.lines().flat_map(|line| ["/// ", line, "\n"]).collect();
    let list: Vec<String> = ops.iter().map(|op| serde_json::to_string(op).expect("plain values")).collect();
    let list = list.join(",\n        ");
    format!(
        r##"{told}#[test]
fn {name}() {{
    let ops = r#"[
        {list}
    ]"#;
    let ops: Vec<Op> = serde_json::from_str(ops).unwrap();
    run(None, &ops, Judge::default()).unwrap_or_else(|failure| panic!("{{failure}}"));
}}
"##
    )
}

#[cfg(test)]
mod tests {
    use super::{as_test, shrink};
    use crate::ops::{Op, draw};

    #[test]
    fn what_a_failure_needs_is_left() {
        let ops = draw(3, 200);
        let needed = [&ops[17], &ops[93], &ops[94], &ops[180]];
        let mut tries = 0;
        let short = shrink(&ops, |ops| {
            tries += 1;
            let mut needed = needed.iter();
            let mut next = needed.next();
            for op in ops {
                if next.is_some_and(|next| op == *next) {
                    next = needed.next();
                }
            }
            next.is_none()
        });
        assert_eq!(short.iter().collect::<Vec<_>>(), needed);
        assert!(tries < 150, "{tries} tries");
        assert!(shrink(&ops, |_| true).is_empty());
    }

    #[test]
    fn a_run_is_written_as_a_test() {
        let ops = [Op::Await, Op::Check(3), Op::Heal(None)];
        let text = as_test("a_run", &ops, "op 2: wrong\nand more");
        assert!(text.starts_with("/// op 2: wrong\n/// and more\n#[test]\nfn a_run() {\n"));
        let list = text.split_once("r#\"").unwrap().1.split_once("\"#").unwrap().0;
        assert_eq!(serde_json::from_str::<Vec<Op>>(list).unwrap(), ops);
    }
}
