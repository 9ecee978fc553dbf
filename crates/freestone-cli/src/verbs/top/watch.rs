//! `top` in a terminal: asks, draws, hears keys. However it ends, the terminal is as it was.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::screen::{self, OTHER_LINES};
use super::{Asking, COUNT_MAX, Params, Reply, Sorted};

/// How often it is looked for keys, answers and signals.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Shows the busiest devices until the user has enough.
pub fn watch(asking: Asking, by: Sorted, count: Option<u32>, every: Duration) -> Result<()> {
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&ended)).context("cannot listen to signals")?;
    }
    let terminal = ratatui::try_init().context("the terminal cannot be used; --once gives a table")?;
    let _restored = Restored;
    show(terminal, asking, &Asked { by, count, every }, &ended)
}

/// The terminal is as it was when this goes.
struct Restored;

impl Drop for Restored {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

struct Asked {
    by: Sorted,
    count: Option<u32>,
    every: Duration,
}

/// What a key means.
#[derive(Debug, PartialEq, Eq)]
enum Meant {
    End,
    Sort(Sorted),
    Nothing,
}

fn meant(key: KeyEvent) -> Meant {
    if key.kind == KeyEventKind::Release {
        return Meant::Nothing;
    }
    match key.code {
        KeyCode::Char('c' | 'd') if key.modifiers.contains(KeyModifiers::CONTROL) => Meant::End,
        KeyCode::Char('q') | KeyCode::Esc => Meant::End,
        KeyCode::Char('r') => Meant::Sort(Sorted::Requests),
        KeyCode::Char('b') => Meant::Sort(Sorted::Bytes),
        KeyCode::Char('l') => Meant::Sort(Sorted::Latency),
        _ => Meant::Nothing,
    }
}

fn show(
    mut terminal: ratatui::DefaultTerminal,
    asking: Asking,
    asked: &Asked,
    ended: &AtomicBool,
) -> Result<()> {
    let count = |height: u16| {
        asked.count.unwrap_or_else(|| height.saturating_sub(OTHER_LINES).into()).clamp(1, COUNT_MAX)
    };
    let height = terminal.size().context("the terminal has no size")?.height;
    let mut params = Params { by: asked.by, count: count(height) };
    let (to_asker, wanted) = mpsc::channel();
    let (answers, answered) = mpsc::channel();
    let every = asked.every;
    // A server that does not answer holds up no key. The thread ends with the program at the latest.
    thread::spawn(move || ask_on(asking, params, every, &wanted, &answers));
    let (mut reply, mut trouble, mut changed) = (None, None, true);
    while !ended.load(Ordering::SeqCst) {
        if changed {
            let draw =
                terminal.draw(|frame| screen::draw(frame, reply.as_ref(), params.by, trouble.as_deref()));
            draw.context("cannot draw")?;
        }
        changed = false;
        let before = params;
        if has_event()? {
            match event::read().context("cannot hear keys")? {
                Event::Key(key) => match meant(key) {
                    Meant::End => return Ok(()),
                    Meant::Sort(by) => params.by = by,
                    Meant::Nothing => {}
                },
                Event::Resize(_, height) => {
                    params.count = count(height);
                    changed = true;
                }
                _ => {}
            }
        }
        if params != before {
            // Where the asker has ended it has said why.
            let _ = to_asker.send(params);
            changed = true;
        }
        if let Ok(answer) = answered.try_recv() {
            match answer {
                Ok(told) => (reply, trouble) = (Some(told), None),
                // A server that has ended does not come back at the end of this connection.
                Err(error) if reply.is_none() => return Err(error),
                Err(error) => trouble = Some(format!("{error:#}")),
            }
            changed = true;
        }
    }
    Ok(())
}

/// A signal is no error: it is seen in the next round.
fn has_event() -> Result<bool> {
    match event::poll(LOOK_EVERY) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
        polled => polled.context("cannot hear keys"),
    }
}

/// Asks again and again, and at once when something else is wanted.
fn ask_on(
    mut asking: Asking,
    mut params: Params,
    every: Duration,
    wanted: &Receiver<Params>,
    answers: &Sender<Result<Reply>>,
) {
    loop {
        let answer = asking.ask(params).and_then(|answer| {
            serde_json::from_str(answer.get()).context("top: the server's answer is not understood")
        });
        let failed = answer.is_err();
        if answers.send(answer).is_err() || failed {
            return;
        }
        match wanted.recv_timeout(every) {
            Ok(other) => params = wanted.try_iter().last().unwrap_or(other),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_mean_what_the_last_line_says() {
        let plain = |code| meant(KeyEvent::new(code, KeyModifiers::NONE));
        assert_eq!(plain(KeyCode::Char('q')), Meant::End);
        assert_eq!(plain(KeyCode::Esc), Meant::End);
        assert_eq!(plain(KeyCode::Char('b')), Meant::Sort(Sorted::Bytes));
        assert_eq!(plain(KeyCode::Char('l')), Meant::Sort(Sorted::Latency));
        assert_eq!(plain(KeyCode::Char('r')), Meant::Sort(Sorted::Requests));
        assert_eq!(plain(KeyCode::Char('c')), Meant::Nothing);
        assert_eq!(meant(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), Meant::End);
    }
}
