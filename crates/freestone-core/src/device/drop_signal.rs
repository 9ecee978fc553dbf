//! Waiting for the end of a device's drop, in which a device records a clean close.

use std::sync::{Arc, Weak};

/// Last field of a device whose drop others wait for.
///
/// A [`Weak`] reference to the device cannot show the end of the drop: its strong count is 0 as soon as the
/// drop begins. Fields are dropped in the order of their declaration, after the [`Drop`] of the device.
#[derive(Debug, Default)]
pub struct DropSignal(Arc<()>);

/// Observer of a [`DropSignal`].
#[derive(Debug, Clone)]
pub struct DropObserver(Weak<()>);

impl DropSignal {
    /// Returns an observer, which does not keep the device alive.
    pub fn observer(&self) -> DropObserver {
        DropObserver(Arc::downgrade(&self.0))
    }
}

impl DropObserver {
    /// Returns true if the device and all fields before its [`DropSignal`] have been dropped.
    pub fn is_dropped(&self) -> bool {
        self.0.strong_count() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_is_dropped_after_the_end_of_its_drop() {
        struct Device {
            field: Field,
            signal: DropSignal,
        }
        struct Field(Option<DropObserver>);
        impl Drop for Device {
            fn drop(&mut self) {
                assert!(!self.signal.observer().is_dropped());
                self.field.0 = Some(self.signal.observer());
            }
        }
        impl Drop for Field {
            fn drop(&mut self) {
                assert!(!self.0.as_ref().unwrap().is_dropped());
            }
        }
        let device = Device { field: Field(None), signal: DropSignal::default() };
        let observer = device.signal.observer();
        drop(device);
        assert!(observer.is_dropped());
    }
}
