//! Macros for layers, which are devices that pass most requests to a device below.

use super::{Device, Error, Result, Zoned};
pub use crate::{forward_device, forward_zoned};

impl dyn Device + '_ {
    /// Returns the zone operations.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a device without zones.
    pub fn zones(&self) -> Result<&dyn Zoned> {
        self.zoned().ok_or(Error::Unsupported)
    }
}

/// Writes the methods of a layer's `impl Device` that only call the device below:
/// `forward_device!(|layer| layer.below => geometry, extents; prefetch: below, zoned: self, changes: none);`
///
/// The second list names every method of [`Device`] that has a default, because a forgotten method would
/// bypass the layer or hide a feature. `below` calls the device below, `self` returns the layer if the device
/// below has zones, `none` keeps the default, and with `own` the layer writes the method.
#[macro_export]
macro_rules! forward_device {
    (|$layer:ident| $below:expr => $($method:ident),+;
     prefetch: $prefetch:tt, zoned: $zoned:tt, changes: $changes:tt) => {
        $($crate::forward_device!(@$method below, $layer $below);)+
        $crate::forward_device!(@prefetch $prefetch, $layer $below);
        $crate::forward_device!(@zoned $zoned, $layer $below);
        $crate::forward_device!(@changes $changes, $layer $below);
    };
    (@geometry below, $($to:tt)+) => {
        $crate::forward_device!(@fn $($to)+, geometry() -> $crate::device::Geometry);
    };
    (@try_io below, $($to:tt)+) => {
        $crate::forward_device!(@fn $($to)+, try_io(
            request: &$crate::device::Request, buffer: $crate::device::Buffer<'_>
        ) -> $crate::device::Result<$crate::device::TryResult>);
    };
    (@submit below, $($to:tt)+) => {
        $crate::forward_device!(@fn $($to)+, submit(
            request: $crate::device::Request, buffer: $crate::device::IoBuf, done: $crate::device::Completion
        ) -> ());
    };
    (@extents below, $($to:tt)+) => {
        $crate::forward_device!(@fn $($to)+, extents(
            offset: u64, len: u64, row: &mut dyn FnMut($crate::device::Extent) -> bool
        ) -> $crate::device::Result<u64>);
    };
    (@prefetch below, $($to:tt)+) => {
        $crate::forward_device!(@fn $($to)+, prefetch(offset: u64, len: u64) -> ());
    };
    (@zoned below, $($to:tt)+) => {
        $crate::forward_device!(@fn $($to)+, zoned() -> Option<&dyn $crate::device::Zoned>);
    };
    (@zoned self, $layer:ident $below:expr) => {
        #[inline]
        fn zoned(&self) -> Option<&dyn $crate::device::Zoned> {
            let $layer = self;
            $below.zoned().map(|_| self as &dyn $crate::device::Zoned)
        }
    };
    (@changes below, $($to:tt)+) => {
        $crate::forward_device!(@fn $($to)+, changes() -> Option<&dyn $crate::device::Changes>);
    };
    (@$method:ident none, $($to:tt)+) => {};
    (@$method:ident own, $($to:tt)+) => {};
    (@fn $layer:ident $below:expr, $name:ident($($arg:ident: $type:ty),*) -> $out:ty) => {
        #[inline]
        fn $name(&self, $($arg: $type),*) -> $out {
            let $layer = self;
            $below.$name($($arg),*)
        }
    };
}

/// Writes the methods of a layer's `impl Zoned` that only call the zones of the device below:
/// `forward_zoned!(|layer| layer.below => report, zone_op, reset_all);`
#[macro_export]
macro_rules! forward_zoned {
    (|$layer:ident| $below:expr => $($method:ident),+) => {
        $($crate::forward_zoned!(@$method $layer $below);)+
    };
    (@report $layer:ident $below:expr) => {
        fn report(
            &self,
            offset: u64,
            row: &mut dyn FnMut($crate::device::Zone) -> bool,
        ) -> $crate::device::Result<()> {
            let $layer = self;
            $below.zones()?.report(offset, row)
        }
    };
    (@zone_op $layer:ident $below:expr) => {
        fn zone_op(&self, op: $crate::device::zoned::ZoneOp, offset: u64) -> $crate::device::Result<()> {
            let $layer = self;
            $below.zones()?.zone_op(op, offset)
        }
    };
    (@reset_all $layer:ident $below:expr) => {
        fn reset_all(&self) -> $crate::device::Result<()> {
            let $layer = self;
            $below.zones()?.reset_all()
        }
    };
}
