//! What failed steps printed that tells why: the gate prints it once more at its end, as what it
//! prints in all is longer than some keep.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _, pipe};
use std::os::fd::{AsFd as _, OwnedFd};
use std::thread::{self, JoinHandle};

use anyhow::{Context as _, Result};
use rustix::stdio;

/// Lines of one step that are printed once more, at most.
const MOST: usize = 250;
/// The end of what it printed is always among them.
const END: usize = 12;
/// The first line of what tells of a failure, by its beginning, and the lines after it that do.
const BEGINNINGS: [(&str, usize); 3] = [("error", 12), ("xtask: ", 3), ("WARNING: ThreadSanitizer", 45)];
/// The same, by a part of it: of `AddressSanitizer` and `LeakSanitizer`.
const REPORT: (&str, usize) = ("ERROR: ", 45);
/// The lines of a panic after its first.
const PANIC: usize = 8;
/// Ends what is listened to: a process that a test left behind may keep the pipe open.
const LAST: &[u8] = b"\x04";

/// Listens to all that this process and its children print, and passes it on.
pub struct Listening {
    /// Where it was printed to before.
    out: OwnedFd,
    err: OwnedFd,
    lines: JoinHandle<Vec<String>>,
}

impl Listening {
    /// From now on.
    pub fn start() -> Result<Self> {
        let (reader, writer) = pipe().context("cannot make a pipe")?;
        let out = stdio::stdout().try_clone_to_owned().context("cannot keep stdout")?;
        let err = stdio::stderr().try_clone_to_owned().context("cannot keep stderr")?;
        let mut onward = File::from(out.try_clone().context("cannot keep stdout")?);
        let lines = thread::spawn(move || {
            let mut lines = Vec::new();
            for line in BufReader::new(reader).split(b'\n') {
                let Some(mut line) = line.ok().filter(|line| line != LAST) else { break };
                lines.push(String::from_utf8_lossy(&line).into_owned());
                line.push(b'\n');
                // Who reads us has gone: the steps go on.
                drop(onward.write_all(&line));
            }
            lines
        });
        stdio::dup2_stdout(writer.as_fd()).context("cannot replace stdout")?;
        stdio::dup2_stderr(writer.as_fd()).context("cannot replace stderr")?;
        Ok(Self { out, err, lines })
    }

    /// All that was printed.
    pub fn end(self) -> Result<Vec<String>> {
        let mut stdout = std::io::stdout();
        stdout.write_all(&[b"\n", LAST, b"\n"].concat()).and_then(|()| stdout.flush())?;
        stdio::dup2_stdout(self.out.as_fd()).context("cannot restore stdout")?;
        stdio::dup2_stderr(self.err.as_fd()).context("cannot restore stderr")?;
        Ok(self.lines.join().unwrap_or_default())
    }
}

/// What of a failed step's lines tells why it failed.
pub fn excerpt(lines: &[String]) -> Vec<&str> {
    let mut told = BTreeSet::new();
    let mut failed = Vec::new();
    let mut is_list = false;
    for (at, line) in lines.iter().enumerate() {
        // libtest's list of what failed, with what each printed.
        is_list |= line == "failures:";
        if is_list {
            told.insert(at);
            failed.extend(line.strip_prefix("    ").filter(|name| !name.contains(' ')));
        }
        is_list &= !line.starts_with("test result: ");
        let beginning = BEGINNINGS.iter().find(|(beginning, _)| line.starts_with(beginning));
        let part = Some(&REPORT).filter(|(part, _)| line.contains(part) && line.contains("Sanitizer"));
        if let Some((_, after)) = beginning.or(part) {
            told.extend(at..=at + after);
        }
    }
    // Where tests print at once, a panic is the failed one's if it is of its thread.
    for (at, line) in lines.iter().enumerate() {
        let thread = line.strip_prefix("thread '").and_then(|rest| rest.split('\'').next());
        if line.contains(" panicked at ") && thread.is_some_and(|thread| failed.contains(&thread)) {
            told.extend(at..=at + PANIC);
        }
    }
    let end = lines.len().saturating_sub(END);
    let mut told: Vec<usize> = told.into_iter().take_while(|&at| at < end).collect();
    told.truncate(MOST - END);
    let mut excerpt = Vec::new();
    let mut next = 0;
    for at in told.into_iter().chain(end..lines.len()) {
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
    use super::{MOST, excerpt};

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn what_failed_is_told_and_the_end() {
        let passed = "test a ... ok\n".repeat(40);
        let text = format!(
            "{passed}thread 'b::c' (7) panicked at src/x.rs:1:2:\nleft is not right\n{passed}\
             thread 'd' (8) panicked at src/y.rs:1:2:\nas it should\n{passed}\
             failures:\n\nfailures:\n    b::c\n\ntest result: FAILED. 1 passed\n{passed}the end"
        );
        let all = lines(&text);
        let told = excerpt(&all);
        for line in ["left is not right", "    b::c", "the end"] {
            assert!(told.contains(&line), "{line}: {told:?}");
        }
        assert!(!told.contains(&"as it should") && told.len() < 50, "{told:?}");
    }

    #[test]
    fn what_a_compiler_says_is_told_but_no_more_than_one_reads() {
        let mut text = "error[E0432]: unresolved import\n --> x.rs\n".to_owned();
        text += &"Compiling\n".repeat(100);
        assert!(excerpt(&lines(&text)).contains(&" --> x.rs"));
        let all = lines(&"error: again\n".repeat(2 * MOST));
        assert!(excerpt(&all).len() <= MOST + 1);
    }
}
