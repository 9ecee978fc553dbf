//! Read-only view of another device.

use std::sync::Arc;

use freestone_core::device::{
    Buffer, Completion, Device, Geometry, IoBuf, Request, Result, TryResult, forward_device,
};

/// View of a device that rejects writes and discards, and reports itself as read-only.
pub struct ReadOnly(pub Arc<dyn Device>);

impl Device for ReadOnly {
    forward_device!(|view| view.0 => extents; prefetch: below, zoned: none, changes: below);

    fn geometry(&self) -> Geometry {
        Geometry { read_only: true, ..self.0.geometry() }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry())?;
        self.0.try_io(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        match request.check(&self.geometry()) {
            Ok(()) => self.0.submit(request, buffer, done),
            Err(error) => done.complete(Err(error), buffer),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use freestone_core::device::{Blocking as _, Error, Flags};
    use freestone_ram::ram::{Config, Ram};

    use super::ReadOnly;

    #[test]
    fn read_only_rejects_writes_and_passes_reads() {
        let ram = Ram::new(Config { disksize: 8192, ..Config::default() }).unwrap();
        ram.write_at(4096, &[7; 4096], Flags::empty()).unwrap();
        let device = ReadOnly(Arc::new(ram.clone()));
        let mut page = [0; 4096];
        device.read_at(4096, &mut page).unwrap();
        assert_eq!(page, [7; 4096]);
        assert_eq!(device.write_at(0, &page, Flags::empty()), Err(Error::ReadOnly));
        assert_eq!(device.discard(4096, 4096), Err(Error::ReadOnly));
        device.flush().unwrap();
        ram.read_at(4096, &mut page).unwrap();
        assert_eq!(page, [7; 4096]);
    }
}
