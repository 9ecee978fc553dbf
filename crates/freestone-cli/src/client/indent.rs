//! Indentation of JSON text for the terminal.

use std::iter;

/// Returns JSON indented as by `serde_json`, with one value per line. The text is converted without parsing
/// it to a tree of values, because a response may be tens of megabytes.
pub fn indented(json: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(json.len() * 2);
    let (mut depth, mut in_text, mut escaped) = (0, false, false);
    let line = |out: &mut Vec<u8>, depth: usize| {
        out.push(b'\n');
        out.extend(iter::repeat_n(b' ', 2 * depth));
    };
    for byte in json.bytes() {
        if in_text {
            out.push(byte);
            in_text = escaped || byte != b'"';
            escaped = !escaped && byte == b'\\';
            continue;
        }
        match byte {
            b' ' | b'\t' | b'\r' | b'\n' => continue,
            b'}' | b']' => {
                depth = usize::saturating_sub(depth, 1);
                if !matches!(out.last(), Some(b'{' | b'[')) {
                    line(&mut out, depth);
                }
            }
            _ if matches!(out.last(), Some(b'{' | b'[')) => line(&mut out, depth),
            _ => {}
        }
        out.push(byte);
        match byte {
            b'{' | b'[' => depth += 1,
            b',' => line(&mut out, depth),
            b':' => out.push(b' '),
            b'"' => in_text = true,
            _ => {}
        }
    }
    out.push(b'\n');
    out
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json, to_string_pretty};

    use super::indented;

    #[test]
    fn indented_equals_serde_json_pretty() {
        for value in [
            json!(null),
            json!([]),
            json!({}),
            json!({"a": [1, -2.5, true], "b": {}, "c": [], "d": {"e": [[], [{}], {"f": null}]}}),
            json!(["{", "}", "a,b:c", "\"", "\\", "\\\"", "[\\", "\u{1}\n", "ß"]),
        ] {
            let value: Value = value;
            let expected = to_string_pretty(&value).unwrap() + "\n";
            assert_eq!(String::from_utf8(indented(&value.to_string())).unwrap(), expected);
            assert_eq!(String::from_utf8(indented(&expected)).unwrap(), expected);
        }
    }
}
