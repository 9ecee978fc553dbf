//! Simulated channels, with the interface of `std::sync::mpsc`.

use std::sync::Arc;
pub use std::sync::mpsc::{RecvError, RecvTimeoutError, SendError, TryRecvError, TrySendError};
use std::time::Duration;

use super::{key_of, schedule};
use crate::sim::time::Instant;

/// Fields whose addresses are keys: `sent` for tasks that wait for a value, `received` for tasks
/// that wait for space.
#[derive(Debug, Default)]
struct Keys {
    sent: u8,
    received: u8,
}

impl Keys {
    fn sent(&self) -> usize {
        key_of(&self.sent)
    }
    fn received(&self) -> usize {
        key_of(&self.received)
    }
}

/// Simulated `std::sync::mpsc::Sender`.
#[derive(Debug)]
pub struct Sender<T> {
    inner: Option<std::sync::mpsc::Sender<T>>,
    keys: Arc<Keys>,
}

/// Simulated `std::sync::mpsc::SyncSender`.
#[derive(Debug)]
pub struct SyncSender<T> {
    inner: Option<std::sync::mpsc::SyncSender<T>>,
    keys: Arc<Keys>,
}

/// Simulated `std::sync::mpsc::Receiver`.
#[derive(Debug)]
pub struct Receiver<T> {
    inner: Option<std::sync::mpsc::Receiver<T>>,
    keys: Arc<Keys>,
}

/// Simulated `std::sync::mpsc::channel`.
pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let (tx, rx) = std::sync::mpsc::channel();
    let keys = Arc::<Keys>::default();
    (Sender { inner: Some(tx), keys: Arc::clone(&keys) }, Receiver { inner: Some(rx), keys })
}

/// Simulated `std::sync::mpsc::sync_channel`.
pub fn sync_channel<T>(bound: usize) -> (SyncSender<T>, Receiver<T>) {
    let (tx, rx) = std::sync::mpsc::sync_channel(bound);
    let keys = Arc::<Keys>::default();
    (SyncSender { inner: Some(tx), keys: Arc::clone(&keys) }, Receiver { inner: Some(rx), keys })
}

const PRESENT: &str = "present until dropped";

impl<T> Sender<T> {
    /// Sends a value. Never blocks.
    ///
    /// # Errors
    /// Fails if the receiver was dropped.
    pub fn send(&self, value: T) -> Result<(), SendError<T>> {
        schedule::pass_point();
        self.inner.as_ref().expect(PRESENT).send(value)?;
        schedule::wake(self.keys.sent(), true);
        Ok(())
    }
}

impl<T> SyncSender<T> {
    /// Sends a value; waits while the channel is full.
    ///
    /// # Errors
    /// Fails if the receiver was dropped.
    pub fn send(&self, mut value: T) -> Result<(), SendError<T>> {
        let inner = self.inner.as_ref().expect(PRESENT);
        if schedule::current_task().is_none() {
            return inner.send(value);
        }
        schedule::pass_point();
        loop {
            match inner.try_send(value) {
                Ok(()) => {
                    schedule::wake(self.keys.sent(), true);
                    return Ok(());
                }
                Err(TrySendError::Disconnected(value)) => return Err(SendError(value)),
                Err(TrySendError::Full(rejected)) => value = rejected,
            }
            schedule::block(self.keys.received(), None);
        }
    }

    /// Sends a value if the channel has space.
    ///
    /// # Errors
    /// Fails if the channel is full, or if the receiver was dropped.
    pub fn try_send(&self, value: T) -> Result<(), TrySendError<T>> {
        schedule::pass_point();
        self.inner.as_ref().expect(PRESENT).try_send(value)?;
        schedule::wake(self.keys.sent(), true);
        Ok(())
    }
}

impl<T> Receiver<T> {
    fn inner(&self) -> &std::sync::mpsc::Receiver<T> {
        self.inner.as_ref().expect(PRESENT)
    }

    /// Receives a value if one is available, without waiting.
    ///
    /// # Errors
    /// Fails if the channel is empty, with or without remaining senders.
    pub fn try_recv(&self) -> Result<T, TryRecvError> {
        schedule::pass_point();
        let value = self.inner().try_recv()?;
        schedule::wake(self.keys.received(), true);
        Ok(value)
    }

    /// Waits for a value and returns it.
    ///
    /// # Errors
    /// Fails if the channel is empty and all senders were dropped.
    pub fn recv(&self) -> Result<T, RecvError> {
        if schedule::current_task().is_none() {
            return self.inner().recv();
        }
        loop {
            match self.try_recv() {
                Ok(value) => return Ok(value),
                Err(TryRecvError::Disconnected) => return Err(RecvError),
                Err(TryRecvError::Empty) => schedule::block(self.keys.sent(), None),
            };
        }
    }

    /// Waits for a value, at most for `most`.
    ///
    /// # Errors
    /// Fails on timeout, or if the channel is empty and all senders were dropped.
    pub fn recv_timeout(&self, most: Duration) -> Result<T, RecvTimeoutError> {
        if schedule::current_task().is_none() {
            return self.inner().recv_timeout(most);
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
            schedule::block(self.keys.sent(), Some(left));
        }
    }

    /// Returns an iterator over received values, which waits for each and ends when all senders are
    /// dropped.
    pub fn iter(&self) -> impl Iterator<Item = T> + '_ {
        std::iter::from_fn(|| self.recv().ok())
    }

    /// Returns an iterator over the values that are available without waiting.
    pub fn try_iter(&self) -> impl Iterator<Item = T> + '_ {
        std::iter::from_fn(|| self.try_recv().ok())
    }
}

/// Iterator over received values, which waits for each and ends when all senders are dropped.
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
        schedule::wake(self.keys.sent(), true);
    }
}

impl<T> Drop for SyncSender<T> {
    fn drop(&mut self) {
        self.inner = None;
        schedule::wake(self.keys.sent(), true);
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        // Drop the values that were not received before the wake-up, as they may contain senders of
        // other channels.
        self.inner = None;
        schedule::wake(self.keys.received(), true);
    }
}
