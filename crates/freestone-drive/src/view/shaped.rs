//! View of a device with another block size, discard granularity or request limit.

use std::sync::Arc;

use freestone_core::device::{
    Buffer, Completion, Device, Extent, Geometry, IoBuf, Op, Request, Result, Tried,
};

/// Device with the size and content of another, and its own geometry. The logical block must not be
/// smaller than that of the device below.
pub struct Shaped {
    inner: Arc<dyn Device>,
    geometry: Geometry,
}

impl Shaped {
    /// Wraps `inner`, whose geometry `change` adapts.
    pub fn new(inner: Arc<dyn Device>, change: impl FnOnce(&mut Geometry)) -> Self {
        let mut geometry = inner.geometry();
        change(&mut geometry);
        Self { inner, geometry }
    }

    /// Returns true for a discard if the view offers none. Such discards succeed without effect.
    fn is_ignored(&self, request: &Request) -> bool {
        request.op == Op::Discard && self.geometry.discard_granularity == 0
    }
}

impl Device for Shaped {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        request.check(&self.geometry)?;
        if self.is_ignored(request) { Ok(Tried::Done) } else { self.inner.try_io(request, buffer) }
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        match request.check(&self.geometry) {
            Err(error) => done.complete(Err(error), buffer),
            Ok(()) if self.is_ignored(&request) => done.complete(Ok(()), buffer),
            Ok(()) => self.inner.submit(request, buffer, done),
        }
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.inner.extents(offset, len, row)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.inner.prefetch(offset, len);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use freestone_core::device::{Blocking as _, Device, Error, Flags};
    use freestone_ram::ram::{Config, Ram};

    use super::Shaped;

    #[test]
    fn shaped_enforces_its_own_geometry() {
        let ram = Ram::new(Config { disksize: 1 << 20, ..Config::default() }).unwrap();
        let device = Shaped::new(Arc::new(ram), |geometry| {
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
