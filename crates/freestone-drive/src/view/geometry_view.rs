//! View of a device with a different block size, discard granularity or request limit.

use std::sync::Arc;

use freestone_core::device::{
    Buffer, Completion, Device, Geometry, IoBuf, Op, Request, Result, TryResult, forward_device,
};

/// View of a device with the same content but a different geometry. The logical block must not be
/// smaller than that of the device under this layer.
pub struct GeometryView {
    inner: Arc<dyn Device>,
    geometry: Geometry,
}

impl GeometryView {
    /// Wraps `inner`. `change` receives the geometry of `inner` and changes it to that of the view.
    pub fn new(inner: Arc<dyn Device>, change: impl FnOnce(&mut Geometry)) -> Self {
        let mut geometry = inner.geometry();
        change(&mut geometry);
        Self { inner, geometry }
    }

    /// Returns true for a discard that must succeed without effect, because the view does not
    /// support discards.
    fn is_ignored(&self, request: &Request) -> bool {
        request.op == Op::Discard && self.geometry.discard_granularity == 0
    }
}

impl Device for GeometryView {
    forward_device!(|view| view.inner => extents; prefetch: below, zoned: none, changes: none);

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry)?;
        if self.is_ignored(request) { Ok(TryResult::Done) } else { self.inner.try_io(request, buffer) }
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        match request.check(&self.geometry) {
            Err(error) => done.complete(Err(error), buffer),
            Ok(()) if self.is_ignored(&request) => done.complete(Ok(()), buffer),
            Ok(()) => self.inner.submit(request, buffer, done),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use freestone_core::device::{Blocking as _, Device, Error, Flags};
    use freestone_ram::ram::{Config, Ram};

    use super::GeometryView;

    #[test]
    fn shaped_enforces_its_own_geometry() {
        let ram = Ram::new(Config { disksize: 1 << 20, ..Config::default() }).unwrap();
        let device = GeometryView::new(Arc::new(ram), |geometry| {
            geometry.logical_block = 4096;
            geometry.discard_granularity = 0;
        });
        assert_eq!(device.write_at(512, &[1; 512], Flags::empty()), Err(Error::Misaligned));
        device.write_at(4096, &[1; 4096], Flags::empty()).unwrap();
        device.discard(4096, 4096).unwrap();
        let mut page = [0; 4096];
        device.read_at(4096, &mut page).unwrap();
        assert_eq!((page[0], device.geometry().size), (1, 1 << 20));
    }
}
