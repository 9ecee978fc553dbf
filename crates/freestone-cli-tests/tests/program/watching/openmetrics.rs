//! A strict parser of the `OpenMetrics` text format, as used for metrics.

use std::collections::{BTreeMap, BTreeSet};

/// Label values of a sample by label name.
pub type Labels = BTreeMap<String, String>;

/// A parsed exposition: the text that a scrape of the metrics returns.
#[derive(Debug, Default)]
pub struct Exposition {
    /// Type of each metric family, such as `counter`, by name.
    pub families: BTreeMap<String, String>,
    /// Samples in the order of the text: name, labels and value.
    pub samples: Vec<(String, Labels, f64)>,
}

impl Exposition {
    /// Returns the value of the sample with this name and exactly these labels, or `None` if it
    /// does not exist.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let wanted: Labels = labels.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        self.samples.iter().find(|(known, of, _)| known == name && *of == wanted).map(|(_, _, value)| *value)
    }

    /// Returns the different values that a label has in the samples with this name.
    pub fn values_of(&self, name: &str, label: &str) -> BTreeSet<String> {
        let of = self.samples.iter().filter(|(known, ..)| known == name);
        of.filter_map(|(_, labels, _)| labels.get(label).cloned()).collect()
    }
}

/// Returns the suffixes that sample names have in metric families of the type `kind`.
fn suffixes(kind: &str) -> Result<&'static [&'static str], String> {
    Ok(match kind {
        "counter" => &["_total"],
        "gauge" => &[""],
        "histogram" => &["_bucket", "_count", "_sum"],
        "info" => &["_info"],
        _ => return Err(format!("no type: {kind}")),
    })
}

/// The metric family whose samples are being parsed.
struct Family {
    name: String,
    kind: &'static [&'static str],
    is_histogram: bool,
    is_counter: bool,
}

/// Parses an exposition. Returns a message for any violation of the format.
pub fn parse(text: &str) -> Result<Exposition, String> {
    let body = text.strip_suffix("# EOF\n").ok_or("it does not end with # EOF")?;
    let mut found = Exposition::default();
    let mut helped = None;
    let mut family: Option<Family> = None;
    let mut known = BTreeSet::new();
    for line in body.split_terminator('\n') {
        let wrong = |why: &str| format!("{why}: {line:?}");
        if line.is_empty() || line.contains('\r') {
            return Err(wrong("an empty line, or a return"));
        }
        if let Some(rest) = line.strip_prefix("# ") {
            let mut words = rest.splitn(3, ' ');
            let (what, name, value) = (words.next(), words.next().unwrap_or_default(), words.next());
            let value = value.ok_or(wrong("no value"))?;
            check_name(name).map_err(|why| wrong(&why))?;
            match what {
                Some("HELP") => {
                    if helped.replace(name.to_owned()).is_some() {
                        return Err(wrong("help without a type behind it"));
                    }
                }
                Some("TYPE") => {
                    if helped.take().as_deref() != Some(name) {
                        return Err(wrong("a type without help before it"));
                    }
                    if found.families.insert(name.to_owned(), value.to_owned()).is_some() {
                        return Err(wrong("twice"));
                    }
                    let kind = suffixes(value)?;
                    let (is_histogram, is_counter) = (value == "histogram", value == "counter");
                    family = Some(Family { name: name.to_owned(), kind, is_histogram, is_counter });
                }
                _ => return Err(wrong("neither help nor type")),
            }
            continue;
        }
        if helped.is_some() {
            return Err(wrong("help without a type"));
        }
        let family = family.as_ref().ok_or(wrong("no family"))?;
        let (name, labels, value) = parse_sample(line).map_err(|why| wrong(&why))?;
        let suffix = name.strip_prefix(family.name.as_str()).ok_or(wrong("of another family"))?;
        if !family.kind.contains(&suffix) {
            return Err(wrong("a suffix that its type does not have"));
        }
        if (family.is_counter || family.is_histogram) && !(value >= 0.0 && value.is_finite()) {
            return Err(wrong("less than nothing"));
        }
        if labels.contains_key("le") != (suffix == "_bucket") {
            return Err(wrong("le belongs to buckets"));
        }
        if !known.insert((name.clone(), labels.clone())) {
            return Err(wrong("the same sample twice"));
        }
        found.samples.push((name, labels, value));
    }
    if helped.is_some() {
        return Err("help at the end".into());
    }
    for name in found.families.iter().filter(|(_, kind)| *kind == "histogram").map(|(name, _)| name) {
        check_histogram(&found, name)?;
    }
    Ok(found)
}

fn check_name(name: &str) -> Result<(), String> {
    let mut bytes = name.bytes();
    let first = bytes.next().is_some_and(|byte| byte.is_ascii_lowercase());
    // Stricter than the `OpenMetrics` specification: capitals and colons are not allowed.
    let rest = bytes.all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
    if first && rest { Ok(()) } else { Err(format!("no name: {name:?}")) }
}

/// Parses a sample line `name{label="value",...} value`.
fn parse_sample(line: &str) -> Result<(String, Labels, f64), String> {
    let end = line.find(['{', ' ']).ok_or("no value")?;
    let (name, mut rest) = line.split_at(end);
    check_name(name)?;
    let mut labels = Labels::new();
    if let Some(within) = rest.strip_prefix('{') {
        rest = within;
        loop {
            let (label, behind) = rest.split_once("=\"").ok_or("no label")?;
            check_name(label)?;
            let (value, behind) = parse_quoted(behind)?;
            if labels.insert(label.to_owned(), value).is_some() {
                return Err("a label twice".into());
            }
            match (behind.strip_prefix(','), behind.strip_prefix('}')) {
                (Some(next), _) => rest = next,
                (_, Some(last)) => {
                    rest = last;
                    break;
                }
                _ => return Err("no end of the labels".into()),
            }
        }
    }
    let number = rest.strip_prefix(' ').ok_or("no blank before the value")?;
    let is_number = number.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
    let value = number.parse().ok().filter(|_| is_number).ok_or("no number")?;
    Ok((name.to_owned(), labels, value))
}

/// Parses a label value up to its closing quote. Returns the value without escapes, and the rest of
/// the line.
fn parse_quoted(text: &str) -> Result<(String, &str), String> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return Ok((value, &text[at + 1..])),
            '\\' => value.push(match chars.next() {
                Some((_, 'n')) => '\n',
                Some((_, same @ ('"' | '\\'))) => same,
                _ => return Err("no such escape".into()),
            }),
            _ => value.push(char),
        }
    }
    Err("no end of a value".into())
}

/// Checks that the buckets of the histogram `name` grow up to its count, for each set of labels.
fn check_histogram(found: &Exposition, name: &str) -> Result<(), String> {
    let mut of = BTreeMap::<Labels, Vec<(f64, f64)>>::new();
    for (sample, labels, value) in &found.samples {
        if *sample == format!("{name}_bucket") {
            let mut labels = labels.clone();
            let le = labels.remove("le").expect("it was checked");
            let le = if le == "+Inf" { f64::INFINITY } else { le.parse().map_err(|_| format!("le={le}"))? };
            of.entry(labels).or_default().push((le, *value));
        }
    }
    let samples = |suffix: &str| {
        let wanted = format!("{name}{suffix}");
        found.samples.iter().filter(|(sample, ..)| *sample == wanted).count()
    };
    if samples("_count") != of.len() || samples("_sum") != of.len() {
        return Err(format!("{name}: buckets, counts and sums are not of the same"));
    }
    for (labels, buckets) in of {
        let label_list: Vec<_> = labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        let grows = buckets.windows(2).all(|two| two[0].0 < two[1].0 && two[0].1 <= two[1].1);
        let last = buckets.last().expect("there is one");
        let count = found.value(&format!("{name}_count"), &label_list);
        if !grows || !last.0.is_infinite() || Some(last.1) != count {
            return Err(format!("{name} {labels:?}: {buckets:?}, count {count:?}"));
        }
    }
    Ok(())
}

#[test]
fn parser_rejects_invalid_text() {
    let good = "# HELP a A\n# TYPE a counter\na_total{x=\"1\\\"\\n\\\\\"} 3\n# HELP h H\n# TYPE h histogram\n\
                h_sum 1.5\nh_count 2\nh_bucket{le=\"0.1\"} 1\nh_bucket{le=\"+Inf\"} 2\n# EOF\n";
    let found = parse(good).unwrap();
    assert_eq!(found.value("a_total", &[("x", "1\"\n\\")]), Some(3.0));
    for (from, to) in [
        ("# EOF\n", ""),
        ("# HELP a A\n", ""),
        ("# TYPE a counter\n", ""),
        ("a_total", "a"),
        ("a_total", "b_total"),
        (" 3\n", " 3 \n"),
        (" 3\n", " -3\n"),
        (" 3\n", " x\n"),
        (" 3\n", " 3\n\n"),
        ("\\n", "\\x"),
        ("h_count 2", "h_count 3"),
        ("h_count 2\n", ""),
        ("\"} 1\n", "\"} 3\n"),
        ("+Inf", "0.2"),
        ("h_sum 1.5\n", "h_sum 1.5\nh_sum 1.5\n"),
        ("counter\n", "counted\n"),
    ] {
        let bad = good.replacen(from, to, 1);
        assert_ne!(bad, good, "{from:?}");
        assert!(parse(&bad).is_err(), "{from:?} as {to:?}");
    }
}
