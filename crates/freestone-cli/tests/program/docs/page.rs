//! Parses the commands in a page of Markdown.

/// A command, and the output that is shown below it.
#[derive(Debug)]
pub struct Shown {
    pub command: String,
    pub output: Vec<String>,
}

/// The text below one heading.
#[derive(Debug, Default)]
pub struct Section {
    pub title: String,
    pub shown: Vec<Shown>,
    /// Fenced blocks that are files, not commands.
    pub blocks: Vec<String>,
}

/// Returns the sections that have commands. Commands follow `$ ` in indented blocks and in
/// `console` blocks. A command continues in the next line after a `\` and until its loop ends.
pub fn sections(page: &str) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    // Set in a fenced block; true if the block has commands.
    let mut fence = None;
    // Lines after a command in its block are its output.
    let mut in_block = false;
    for line in page.lines() {
        if let Some(language) = line.strip_prefix("```") {
            fence = if fence.is_none() { Some(language == "console") } else { None };
            in_block = false;
            if fence == Some(false)
                && let Some(section) = sections.last_mut()
            {
                section.blocks.push(String::new());
            }
            continue;
        }
        if fence.is_none() && line.starts_with('#') {
            let title = line.trim_start_matches('#').trim().to_owned();
            sections.push(Section { title, ..Section::default() });
            in_block = false;
            continue;
        }
        let Some(section) = sections.last_mut() else { continue };
        let line = match (fence, line.strip_prefix("    ")) {
            (Some(true), _) => line,
            (Some(false), _) => {
                let block = section.blocks.last_mut().expect("begun with its fence");
                *block += line;
                block.push('\n');
                continue;
            }
            (None, Some(line)) => line,
            (None, None) => {
                in_block &= line.is_empty();
                continue;
            }
        };
        if let Some(command) = line.strip_prefix("$ ") {
            section.shown.push(Shown { command: command.to_owned(), output: Vec::new() });
            in_block = true;
        } else if let Some(last) = section.shown.last_mut().filter(|_| in_block) {
            if last.output.is_empty() && is_continued(&last.command) {
                last.command.push('\n');
                last.command += line;
            } else if !line.trim().is_empty() {
                last.output.push(line.to_owned());
            }
        }
    }
    sections.retain(|section| !section.shown.is_empty());
    sections
}

fn is_continued(command: &str) -> bool {
    let words = |word: &str| command.split_whitespace().filter(|&w| w.trim_end_matches(';') == word).count();
    command.ends_with('\\') || words("do") > words("done")
}
