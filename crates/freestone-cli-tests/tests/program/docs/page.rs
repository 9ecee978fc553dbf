//! Parses a Markdown page for the commands that it shows and their output.

/// A command, and the lines of output that the page shows below it.
#[derive(Debug)]
pub struct Shown {
    pub command: String,
    pub output: Vec<String>,
}

/// The commands and files in the text below one heading.
#[derive(Debug, Default)]
pub struct Section {
    pub title: String,
    pub shown: Vec<Shown>,
    /// Content of the fenced blocks that are files, not commands.
    pub blocks: Vec<String>,
}

/// Returns the sections of a page that have commands. Commands follow `$ ` in indented blocks and
/// in `console` blocks. A command continues in the next line after a `\` and until its loop ends.
pub fn sections(page: &str) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    // `Some` inside a fenced block: true if the block contains commands, false if it is a file.
    let mut fence = None;
    // True after a command in a block: the following lines are its output.
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

/// Joins all sections of a page into one, with the title of the page.
pub fn join(page: &str, sections: Vec<Section>) -> Vec<Section> {
    let title = page.lines().next().unwrap_or_default().trim_start_matches('#').trim().to_owned();
    let mut whole = Section { title, ..Section::default() };
    for section in sections {
        whole.shown.extend(section.shown);
        whole.blocks.extend(section.blocks);
    }
    if whole.shown.is_empty() { Vec::new() } else { vec![whole] }
}

fn is_continued(command: &str) -> bool {
    let words = |word: &str| command.split_whitespace().filter(|&w| w.trim_end_matches(';') == word).count();
    command.ends_with('\\') || words("do") > words("done")
}
