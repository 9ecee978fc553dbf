//! `top` on a terminal: polls the server, draws the devices, and handles keys.
//!
//! A separate thread polls, so that keys work while the server does not respond. The terminal is restored
//! when `watch` returns or panics.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;
use std::{io, thread};

use anyhow::{Context as _, Result};
use crossterm::cursor::{Hide, Show};
use crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use crossterm::execute;
use crossterm::terminal::{self, EnterAlternateScreen, LeaveAlternateScreen};
use freestone_server::verbs::status::top::{COUNT_MAX, Params, Reply, Sorted};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::TopClient;
use super::screen::{self, OTHER_LINES};

/// Interval at which the display checks for keys, responses and signals.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Shows the busiest devices until a key or a signal ends the program.
pub fn watch(client: TopClient, by: Sorted, count: Option<u32>, every: Duration) -> Result<()> {
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&ended)).context("cannot listen to signals")?;
    }
    let _terminal = RawTerminal::enter().context("the terminal cannot be used; --once gives a table")?;
    show(client, &WatchOptions { by, count, every }, &ended)
}

/// The terminal in raw mode, on its alternate screen. Dropping this value restores the terminal, also after a panic.
struct RawTerminal;

impl RawTerminal {
    fn enter() -> io::Result<Self> {
        terminal::enable_raw_mode()?;
        let terminal = Self;
        execute!(io::stdout(), EnterAlternateScreen, Hide)?;
        Ok(terminal)
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // Fails if the terminal is gone, which cannot be reported any more.
        let _ = execute!(io::stdout(), Show, LeaveAlternateScreen);
        let _ = terminal::disable_raw_mode();
    }
}

/// Options from the command line.
struct WatchOptions {
    by: Sorted,
    count: Option<u32>,
    every: Duration,
}

/// Action that a key triggers.
#[derive(Debug, PartialEq, Eq)]
enum KeyAction {
    End,
    Sort(Sorted),
    Nothing,
}

fn key_action(key: KeyEvent) -> KeyAction {
    if key.kind == KeyEventKind::Release {
        return KeyAction::Nothing;
    }
    match key.code {
        KeyCode::Char('c' | 'd') if key.modifiers.contains(KeyModifiers::CONTROL) => KeyAction::End,
        KeyCode::Char('q') | KeyCode::Esc => KeyAction::End,
        KeyCode::Char('r') => KeyAction::Sort(Sorted::Requests),
        KeyCode::Char('b') => KeyAction::Sort(Sorted::Bytes),
        KeyCode::Char('l') => KeyAction::Sort(Sorted::Latency),
        _ => KeyAction::Nothing,
    }
}

fn show(client: TopClient, options: &WatchOptions, ended: &AtomicBool) -> Result<()> {
    let count = |height: u16| {
        options.count.unwrap_or_else(|| height.saturating_sub(OTHER_LINES).into()).clamp(1, COUNT_MAX)
    };
    let mut size = terminal::size().context("the terminal has no size")?;
    let mut params = Params { by: options.by, count: count(size.1) };
    let (new_params, params_changes) = mpsc::channel();
    let (replies, received) = mpsc::channel();
    let every = options.every;
    // The polling thread is not joined; it ends with the process at the latest.
    thread::spawn(move || poll_server(client, params, every, &params_changes, &replies));
    let (mut reply, mut error, mut changed) = (None, None, true);
    while !ended.load(Ordering::SeqCst) {
        if changed {
            let drawn = screen::draw(&mut io::stdout(), size, reply.as_ref(), params.by, error.as_deref());
            drawn.context("cannot draw")?;
        }
        changed = false;
        let before = params;
        if has_event()? {
            match event::read().context("cannot hear keys")? {
                Event::Key(key) => match key_action(key) {
                    KeyAction::End => return Ok(()),
                    KeyAction::Sort(by) => params.by = by,
                    KeyAction::Nothing => {}
                },
                Event::Resize(width, height) => {
                    size = (width, height);
                    params.count = count(height);
                    changed = true;
                }
                _ => {}
            }
        }
        if params != before {
            // If the polling thread has ended, it has sent an error, which is received below.
            let _ = new_params.send(params);
            changed = true;
        }
        if let Ok(outcome) = received.try_recv() {
            match outcome {
                Ok(new) => (reply, error) = (Some(new), None),
                Err(failure) if reply.is_none() => return Err(failure),
                // The last result stays on the screen. The client does not connect again.
                Err(failure) => error = Some(format!("{failure:#}")),
            }
            changed = true;
        }
    }
    Ok(())
}

/// Waits for a terminal event for at most [`POLL_INTERVAL`]. Returns false if there is none. A signal is not
/// an error, because the caller checks for signals afterwards.
fn has_event() -> Result<bool> {
    match event::poll(POLL_INTERVAL) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
        polled => polled.context("cannot hear keys"),
    }
}

/// Polls the server at the interval `every`, and at once if the parameters change. Ends at the first error,
/// which it sends.
fn poll_server(
    mut client: TopClient,
    mut params: Params,
    every: Duration,
    params_changes: &Receiver<Params>,
    replies: &Sender<Result<Reply>>,
) {
    loop {
        let reply = client.call(params).and_then(|answer| {
            serde_json::from_str(answer.get()).context("top: the server's answer is not understood")
        });
        let failed = reply.is_err();
        if replies.send(reply).is_err() || failed {
            return;
        }
        match params_changes.recv_timeout(every) {
            Ok(new) => params = params_changes.try_iter().last().unwrap_or(new),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_actions_match_the_key_line() {
        let plain = |code| key_action(KeyEvent::new(code, KeyModifiers::NONE));
        assert_eq!(plain(KeyCode::Char('q')), KeyAction::End);
        assert_eq!(plain(KeyCode::Esc), KeyAction::End);
        assert_eq!(plain(KeyCode::Char('b')), KeyAction::Sort(Sorted::Bytes));
        assert_eq!(plain(KeyCode::Char('l')), KeyAction::Sort(Sorted::Latency));
        assert_eq!(plain(KeyCode::Char('r')), KeyAction::Sort(Sorted::Requests));
        assert_eq!(plain(KeyCode::Char('c')), KeyAction::Nothing);
        assert_eq!(key_action(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), KeyAction::End);
    }
}
