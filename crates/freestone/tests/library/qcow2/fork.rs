//! A minimal fork for the tests of deltas: a model device that records which of its blocks were
//! changed.

use std::sync::Mutex;

use freestone::device::{
    Blocking as _, Buffer, Change, Changes, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Op,
    Request, Result, TryResult,
};
use freestone_testkit::Model;

/// A device that first shows a base and zeroes beyond its end, with a flag for each changed block.
pub struct Fork {
    model: Model,
    own: Mutex<Vec<bool>>,
    block: u64,
}

impl Fork {
    pub fn new(base: &[u8], size: usize, block: u32) -> Self {
        let model = Model::new(size, block);
        let len = base.len().min(size) / block as usize * block as usize;
        model.write_at(0, &base[..len], Flags::empty()).unwrap();
        let block = u64::from(block);
        Self { model, own: Mutex::new(vec![false; size / block as usize]), block }
    }

    pub fn content(&self) -> Vec<u8> {
        let mut content = vec![0; self.model.geometry().size as usize];
        self.model.read_at(0, &mut content).unwrap();
        content
    }

    pub fn own(&self) -> Vec<bool> {
        self.own.lock().unwrap().clone()
    }

    fn note(&self, request: &Request) {
        if !matches!(request.op, Op::Read | Op::Flush) && request.check(&self.geometry()).is_ok() {
            let first = (request.offset / self.block) as usize;
            self.own.lock().unwrap()[first..first + (request.len / self.block) as usize].fill(true);
        }
    }
}

impl Device for Fork {
    fn geometry(&self) -> Geometry {
        self.model.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        self.note(request);
        self.model.try_io(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.note(&request);
        self.model.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.model.extents(offset, len, row)
    }

    fn changes(&self) -> Option<&dyn Changes> {
        Some(self)
    }
}

impl Changes for Fork {
    fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> Result<u64> {
        let end = offset.checked_add(len).filter(|&end| len > 0 && end <= self.geometry().size);
        let end = end.ok_or(Error::OutOfRange)?;
        let own = self.own();
        let mut at = offset;
        // Reports one row for each block, and stops after 1000 rows, so that callers must continue.
        for _ in 0..1000 {
            let next = (at / self.block + 1).saturating_mul(self.block).min(end);
            let change = Change { offset: at, len: next - at, own: own[(at / self.block) as usize] };
            at = next;
            if !row(change) || at == end {
                break;
            }
        }
        Ok(at - offset)
    }
}
