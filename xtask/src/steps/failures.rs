//! Selects the lines of a failed step's output that explain the failure. The gate repeats these lines at its end,
//! because some systems keep only the last part of a long log.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _, pipe};
use std::os::fd::{AsFd as _, OwnedFd};
use std::thread::{self, JoinHandle};

use anyhow::{Context as _, Result};
use rustix::stdio;

/// Maximum number of lines that are repeated for a failed step.
const EXCERPT_LINES_MAX: usize = 250;
/// Number of last lines that every excerpt contains.
const LAST_LINES: usize = 12;
/// Beginnings of lines that report a failure, and the number of lines after each that belong to the report.
const REPORT_PREFIXES: [(&str, usize); 3] = [("error", 12), ("xtask: ", 3), ("WARNING: ThreadSanitizer", 45)];
/// Marker within a report line of `AddressSanitizer` and `LeakSanitizer`, and the number of lines after it.
const SANITIZER_REPORT: (&str, usize) = ("ERROR: ", 45);
/// Number of lines of a panic message after the first line.
const PANIC_LINES: usize = 8;
/// Line that ends the capture. A process left behind by a test may keep the pipe open, so the end of the pipe cannot
/// end it.
const END_MARK: &[u8] = b"\x04";

/// Captures the output of this process and its children, and passes it on.
pub struct OutputCapture {
    out: OwnedFd,
    err: OwnedFd,
    lines: JoinHandle<Vec<String>>,
}

impl OutputCapture {
    pub fn start() -> Result<Self> {
        let (reader, writer) = pipe().context("cannot make a pipe")?;
        let out = stdio::stdout().try_clone_to_owned().context("cannot keep stdout")?;
        let err = stdio::stderr().try_clone_to_owned().context("cannot keep stderr")?;
        let mut onward = File::from(out.try_clone().context("cannot keep stdout")?);
        let lines = thread::spawn(move || {
            let mut lines = Vec::new();
            for line in BufReader::new(reader).split(b'\n') {
                let Some(mut line) = line.ok().filter(|line| line != END_MARK) else { break };
                lines.push(String::from_utf8_lossy(&line).into_owned());
                line.push(b'\n');
                // Nobody may read the output of this process any more; the steps continue.
                drop(onward.write_all(&line));
            }
            lines
        });
        stdio::dup2_stdout(writer.as_fd()).context("cannot replace stdout")?;
        stdio::dup2_stderr(writer.as_fd()).context("cannot replace stderr")?;
        Ok(Self { out, err, lines })
    }

    /// Restores stdout and stderr and returns the captured lines.
    pub fn end(self) -> Result<Vec<String>> {
        let mut stdout = std::io::stdout();
        stdout.write_all(&[b"\n", END_MARK, b"\n"].concat()).and_then(|()| stdout.flush())?;
        stdio::dup2_stdout(self.out.as_fd()).context("cannot restore stdout")?;
        stdio::dup2_stderr(self.err.as_fd()).context("cannot restore stderr")?;
        Ok(self.lines.join().unwrap_or_default())
    }
}

/// Returns the lines that explain why a step failed, and its last lines.
pub fn excerpt(lines: &[String]) -> Vec<&str> {
    let mut selected = BTreeSet::new();
    let mut failed = Vec::new();
    let mut is_list = false;
    for (at, line) in lines.iter().enumerate() {
        // libtest's list of failed tests, with the output of each test.
        is_list |= line == "failures:";
        if is_list {
            selected.insert(at);
            failed.extend(line.strip_prefix("    ").filter(|name| !name.contains(' ')));
        }
        is_list &= !line.starts_with("test result: ");
        let beginning = REPORT_PREFIXES.iter().find(|(beginning, _)| line.starts_with(beginning));
        let part =
            Some(&SANITIZER_REPORT).filter(|(part, _)| line.contains(part) && line.contains("Sanitizer"));
        if let Some((_, after)) = beginning.or(part) {
            selected.extend(at..=at + after);
        }
    }
    // Output of parallel tests is mixed: a panic belongs to a failed test if the thread has the test's name.
    for (at, line) in lines.iter().enumerate() {
        let thread = line.strip_prefix("thread '").and_then(|rest| rest.split('\'').next());
        if line.contains(" panicked at ") && thread.is_some_and(|thread| failed.contains(&thread)) {
            selected.extend(at..=at + PANIC_LINES);
        }
    }
    let end = lines.len().saturating_sub(LAST_LINES);
    let mut selected: Vec<usize> = selected.into_iter().take_while(|&at| at < end).collect();
    selected.truncate(EXCERPT_LINES_MAX - LAST_LINES);
    let mut excerpt = Vec::new();
    let mut next = 0;
    for at in selected.into_iter().chain(end..lines.len()) {
        if at > next {
            excerpt.push("[...]");
        }
        excerpt.push(lines[at].as_str());
        next = at + 1;
    }
    excerpt
}

#[cfg(test)]
mod tests {
    use super::{EXCERPT_LINES_MAX, excerpt};

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn excerpt_has_failed_tests_and_the_end() {
        let passed = "test a ... ok\n".repeat(40);
        let text = format!(
            "{passed}thread 'b::c' (7) panicked at src/x.rs:1:2:\nleft is not right\n{passed}\
             thread 'd' (8) panicked at src/y.rs:1:2:\nas it should\n{passed}\
             failures:\n\nfailures:\n    b::c\n\ntest result: FAILED. 1 passed\n{passed}the end"
        );
        let all = lines(&text);
        let selected = excerpt(&all);
        for line in ["left is not right", "    b::c", "the end"] {
            assert!(selected.contains(&line), "{line}: {selected:?}");
        }
        assert!(!selected.contains(&"as it should") && selected.len() < 50, "{selected:?}");
    }

    #[test]
    fn excerpt_has_compiler_errors_and_is_bounded() {
        let mut text = "error[E0432]: unresolved import\n --> x.rs\n".to_owned();
        text += &"Compiling\n".repeat(100);
        assert!(excerpt(&lines(&text)).contains(&" --> x.rs"));
        let all = lines(&"error: again\n".repeat(2 * EXCERPT_LINES_MAX));
        assert!(excerpt(&all).len() <= EXCERPT_LINES_MAX + 1);
    }
}
