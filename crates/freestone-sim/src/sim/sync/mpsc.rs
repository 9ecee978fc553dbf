//! Channels, with the interface of `std::sync::mpsc`.

use std::sync::Arc;
pub use std::sync::mpsc::{RecvError, RecvTimeoutError, SendError, TryRecvError, TrySendError};
use std::time::Duration;

use super::{key_of, schedule};
use crate::sim::time::Instant;

/// What those are found by who wait for something to come, and for room.
#[derive(Debug, Default)]
struct Keys {
    came: u8,
    went: u8,
}

impl Keys {
    fn came(&self) -> usize {
        key_of(&self.came)
    }
    fn went(&self) -> usize {
        key_of(&self.went)
    }
}

/// As `std::sync::mpsc::Sender`.
#[derive(Debug)]
pub struct Sender<T> {
    inner: Option<std::sync::mpsc::Sender<T>>,
    keys: Arc<Keys>,
}

/// As `std::sync::mpsc::SyncSender`.
#[derive(Debug)]
pub struct SyncSender<T> {
    inner: Option<std::sync::mpsc::SyncSender<T>>,
    keys: Arc<Keys>,
}

/// As `std::sync::mpsc::Receiver`.
#[derive(Debug)]
pub struct Receiver<T> {
    inner: Option<std::sync::mpsc::Receiver<T>>,
    keys: Arc<Keys>,
}

/// As `std::sync::mpsc::channel`.
pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let (tx, rx) = std::sync::mpsc::channel();
    let keys = Arc::<Keys>::default();
    (Sender { inner: Some(tx), keys: Arc::clone(&keys) }, Receiver { inner: Some(rx), keys })
}

/// As `std::sync::mpsc::sync_channel`.
pub fn sync_channel<T>(bound: usize) -> (SyncSender<T>, Receiver<T>) {
    let (tx, rx) = std::sync::mpsc::sync_channel(bound);
    let keys = Arc::<Keys>::default();
    (SyncSender { inner: Some(tx), keys: Arc::clone(&keys) }, Receiver { inner: Some(rx), keys })
}

const THERE: &str = "it is there until it is dropped";

impl<T> Sender<T> {
    /// Sends.
    ///
    /// # Errors
    /// Nobody can receive any more.
    pub fn send(&self, value: T) -> Result<(), SendError<T>> {
        schedule::point();
        self.inner.as_ref().expect(THERE).send(value)?;
        schedule::wake(self.keys.came(), true);
        Ok(())
    }
}

impl<T> SyncSender<T> {
    /// Sends; waits for room.
    ///
    /// # Errors
    /// Nobody can receive any more.
    pub fn send(&self, mut value: T) -> Result<(), SendError<T>> {
        let inner = self.inner.as_ref().expect(THERE);
        if schedule::me().is_none() {
            return inner.send(value);
        }
        schedule::point();
        loop {
            match inner.try_send(value) {
                Ok(()) => {
                    schedule::wake(self.keys.came(), true);
                    return Ok(());
                }
                Err(TrySendError::Disconnected(value)) => return Err(SendError(value)),
                Err(TrySendError::Full(again)) => value = again,
            }
            schedule::block(self.keys.went(), None);
        }
    }

    /// Sends where there is room.
    ///
    /// # Errors
    /// There is none, or nobody can receive any more.
    pub fn try_send(&self, value: T) -> Result<(), TrySendError<T>> {
        schedule::point();
        self.inner.as_ref().expect(THERE).try_send(value)?;
        schedule::wake(self.keys.came(), true);
        Ok(())
    }
}

impl<T> Receiver<T> {
    fn there(&self) -> &std::sync::mpsc::Receiver<T> {
        self.inner.as_ref().expect(THERE)
    }

    /// Takes what is there.
    ///
    /// # Errors
    /// Nothing is, or nobody can send any more.
    pub fn try_recv(&self) -> Result<T, TryRecvError> {
        schedule::point();
        let value = self.there().try_recv()?;
        schedule::wake(self.keys.went(), true);
        Ok(value)
    }

    /// Waits for something.
    ///
    /// # Errors
    /// Nobody can send any more.
    pub fn recv(&self) -> Result<T, RecvError> {
        if schedule::me().is_none() {
            return self.there().recv();
        }
        loop {
            match self.try_recv() {
                Ok(value) => return Ok(value),
                Err(TryRecvError::Disconnected) => return Err(RecvError),
                Err(TryRecvError::Empty) => schedule::block(self.keys.came(), None),
            };
        }
    }

    /// Waits for something, at most so long.
    ///
    /// # Errors
    /// Nothing came, or nobody can send any more.
    pub fn recv_timeout(&self, most: Duration) -> Result<T, RecvTimeoutError> {
        if schedule::me().is_none() {
            return self.there().recv_timeout(most);
        }
        let until = Instant::now() + most;
        loop {
            match self.try_recv() {
                Ok(value) => return Ok(value),
                Err(TryRecvError::Disconnected) => return Err(RecvTimeoutError::Disconnected),
                Err(TryRecvError::Empty) => {}
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(RecvTimeoutError::Timeout);
            }
            schedule::block(self.keys.came(), Some(left));
        }
    }

    /// What comes, until nobody can send any more.
    pub fn iter(&self) -> impl Iterator<Item = T> + '_ {
        std::iter::from_fn(|| self.recv().ok())
    }

    /// What is there.
    pub fn try_iter(&self) -> impl Iterator<Item = T> + '_ {
        std::iter::from_fn(|| self.try_recv().ok())
    }
}

/// What comes, until nobody can send any more.
#[derive(Debug)]
pub struct IntoIter<T>(Receiver<T>);

impl<T> Iterator for IntoIter<T> {
    type Item = T;
    fn next(&mut self) -> Option<T> {
        self.0.recv().ok()
    }
}

impl<T> IntoIterator for Receiver<T> {
    type Item = T;
    type IntoIter = IntoIter<T>;
    fn into_iter(self) -> IntoIter<T> {
        IntoIter(self)
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), keys: Arc::clone(&self.keys) }
    }
}

impl<T> Clone for SyncSender<T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), keys: Arc::clone(&self.keys) }
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.inner = None;
        schedule::wake(self.keys.came(), true);
    }
}

impl<T> Drop for SyncSender<T> {
    fn drop(&mut self) {
        self.inner = None;
        schedule::wake(self.keys.came(), true);
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        // What was not received is dropped with it, and may hold senders of other channels.
        self.inner = None;
        schedule::wake(self.keys.went(), true);
    }
}
