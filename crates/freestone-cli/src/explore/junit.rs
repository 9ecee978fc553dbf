//! The result as `JUnit` XML, for continuous integration.

use std::fmt::Write as _;

use freestone_explore::Report;

/// Returns the XML document. `details` returns the text of a failure by its index.
pub fn document(report: &Report, log: &str, details: &dyn Fn(usize) -> String) -> String {
    let failures = report.failures.len();
    let tests = failures + report.flaky.len() + 1;
    let seconds = report.time.as_secs_f64();
    let mut xml = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let counts =
        format!("tests=\"{tests}\" failures=\"{failures}\" errors=\"0\" skipped=\"{}\"", report.flaky.len());
    // Writing to a string cannot fail, so the results of `write!` are ignored.
    let _ = writeln!(xml, "<testsuites {counts} time=\"{seconds:.3}\">");
    let _ = writeln!(
        xml,
        "  <testsuite name=\"freestone explore {}\" {counts} time=\"{seconds:.3}\">",
        escape(log)
    );
    let name = format!("{} states, {} of which fail", report.states, report.failing_states);
    let _ = writeln!(xml, "    <testcase classname=\"explore\" name=\"{name}\" time=\"{seconds:.3}\"/>");
    for (index, failure) in report.failures.iter().enumerate() {
        let time = failure.verdict.time.as_secs_f64();
        let id = escape(&failure.id.to_string());
        let _ = writeln!(xml, "    <testcase classname=\"explore\" name=\"state {id}\" time=\"{time:.3}\">");
        let end = escape(&failure.verdict.end);
        let _ = writeln!(xml, "      <failure message=\"{end}\">{}</failure>", escape(&details(index)));
        let _ = writeln!(xml, "    </testcase>");
    }
    for flaky in &report.flaky {
        let id = escape(&flaky.id.to_string());
        let _ = writeln!(xml, "    <testcase classname=\"explore\" name=\"state {id}\">");
        let why =
            format!("flaky: the check failed once ({}), and passed when it was repeated", flaky.verdict.end);
        let _ = writeln!(xml, "      <skipped message=\"{}\"/>", escape(&why));
        let _ = writeln!(xml, "    </testcase>");
    }
    xml.push_str("  </testsuite>\n</testsuites>\n");
    xml
}

/// Escapes text for content and attributes. Control characters, which XML does not allow, become U+FFFD. Line breaks
/// stay.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\n' | '\t' => escaped.push(c),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::escape;

    #[test]
    fn escape_leaves_no_markup_and_no_control_characters() {
        assert_eq!(
            escape("a<b>&\"c\"\n\u{1b}[1m\0\r\u{ffff}"),
            "a&lt;b&gt;&amp;&quot;c&quot;\n\u{fffd}[1m\u{fffd}\u{fffd}\u{fffd}"
        );
    }
}
