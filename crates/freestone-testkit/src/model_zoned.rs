//! The simplest zoned device: bytes and zones under one mutex. All requests complete on the
//! caller's thread.

use freestone_core::device::zoned::{
    AppendCompletion, Zone, ZoneCondition, ZoneGeometry, ZoneOp, ZoneType, Zoned,
};
use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Flags, Geometry, IoBuf, Op, Request, Result,
    TryResult,
};
use freestone_core::sync::Mutex;

const LOGICAL_BLOCK: u32 = 4096;

/// Configuration of a [`ModelZoned`]. Sizes are in bytes and multiples of 4096.
#[derive(Debug, Clone, Copy)]
pub struct ZonedConfig {
    /// Size of each zone in bytes.
    pub zone_size: u64,
    /// Number of bytes that can be written in a sequential zone.
    pub zone_capacity: u64,
    /// Number of zones, conventional and sequential.
    pub nr_zones: u32,
    /// Number of conventional zones, which come first.
    pub conventional: u32,
    /// Maximum number of open zones, as in [`ZoneGeometry`].
    pub max_open: u32,
    /// Maximum number of active zones, as in [`ZoneGeometry`].
    pub max_active: u32,
}

/// A zoned device in memory, the reference for other zoned devices.
#[derive(Debug)]
pub struct ModelZoned {
    config: ZonedConfig,
    state: Mutex<ZonesState>,
}

#[derive(Debug)]
struct ZonesState {
    bytes: Vec<u8>,
    zones: Vec<Zone>,
}

impl ModelZoned {
    /// Returns a device whose zones are all empty.
    ///
    /// # Panics
    /// Panics if the configuration is invalid, for example if the capacity exceeds the zone size.
    pub fn new(config: ZonedConfig) -> Self {
        let block = u64::from(LOGICAL_BLOCK);
        assert!(config.zone_size.is_multiple_of(block) && config.zone_capacity.is_multiple_of(block));
        assert!((block..=config.zone_size).contains(&config.zone_capacity));
        assert!(config.conventional <= config.nr_zones && config.nr_zones > 0);
        let zones = (0..config.nr_zones).map(|i| {
            let start = u64::from(i) * config.zone_size;
            if i < config.conventional {
                Zone {
                    start,
                    len: config.zone_size,
                    capacity: config.zone_size,
                    write_pointer: start + config.zone_size,
                    kind: ZoneType::Conventional,
                    condition: ZoneCondition::NotWritePointer,
                }
            } else {
                Zone {
                    start,
                    len: config.zone_size,
                    capacity: config.zone_capacity,
                    write_pointer: start,
                    kind: ZoneType::SequentialRequired,
                    condition: ZoneCondition::Empty,
                }
            }
        });
        let size = config.zone_size * u64::from(config.nr_zones);
        let state = ZonesState { bytes: vec![0; size as usize], zones: zones.collect() };
        Self { config, state: Mutex::new(state) }
    }

    /// Returns the index of the zone that starts at `offset`, or [`Error::Misaligned`] if no zone
    /// starts there.
    fn zone_at(&self, offset: u64) -> Result<usize> {
        let index = offset / self.config.zone_size;
        if !offset.is_multiple_of(self.config.zone_size) || index >= u64::from(self.config.nr_zones) {
            return Err(Error::Misaligned);
        }
        Ok(index as usize)
    }

    fn write(&self, offset: u64, len: u64, data: Option<&[u8]>) -> Result<()> {
        let mut state = self.state.lock();
        let index = (offset / self.config.zone_size) as usize;
        let zone = state.zones[index];
        if offset + len > zone.start + zone.len {
            return Err(Error::ZoneBoundary);
        }
        if zone.kind == ZoneType::SequentialRequired {
            if zone.condition == ZoneCondition::Full {
                return Err(Error::ZoneCondition);
            }
            if offset != zone.write_pointer || offset + len > zone.start + zone.capacity {
                return Err(Error::ZoneWritePointer);
            }
            if zone.condition != ZoneCondition::ExplicitOpen {
                state.reserve_open(&self.config, index)?;
                state.zones[index].condition = ZoneCondition::ImplicitOpen;
            }
            state.zones[index].write_pointer += len;
            if offset + len == zone.start + zone.capacity {
                state.zones[index].condition = ZoneCondition::Full;
                state.zones[index].write_pointer = zone.start + zone.len;
            }
        }
        let range = &mut state.bytes[offset as usize..(offset + len) as usize];
        match data {
            Some(data) => range.copy_from_slice(data),
            None => range.fill(0),
        }
        Ok(())
    }
}

impl ZonesState {
    fn count(&self, conditions: &[ZoneCondition]) -> u32 {
        self.zones.iter().filter(|zone| conditions.contains(&zone.condition)).count() as u32
    }

    /// Ensures that the zone `index` can become open. If the limit of open zones is reached, closes
    /// an implicitly open one.
    fn reserve_open(&mut self, config: &ZonedConfig, index: usize) -> Result<()> {
        use ZoneCondition::{Closed, Empty, ExplicitOpen, ImplicitOpen};
        let condition = self.zones[index].condition;
        if matches!(condition, ImplicitOpen | ExplicitOpen) {
            return Ok(());
        }
        let active = self.count(&[ImplicitOpen, ExplicitOpen, Closed]);
        if condition == Empty && config.max_active > 0 && active >= config.max_active {
            return Err(Error::ZoneTooManyActive);
        }
        if config.max_open > 0 && self.count(&[ImplicitOpen, ExplicitOpen]) >= config.max_open {
            let victim = self.zones.iter_mut().find(|zone| zone.condition == ImplicitOpen);
            // An implicitly open zone has data, so it becomes closed, not empty.
            victim.ok_or(Error::ZoneTooManyOpen)?.condition = Closed;
        }
        Ok(())
    }

    fn reset(&mut self, index: usize) {
        let zone = &mut self.zones[index];
        if zone.kind == ZoneType::SequentialRequired {
            zone.condition = ZoneCondition::Empty;
            zone.write_pointer = zone.start;
            self.bytes[zone.start as usize..(zone.start + zone.len) as usize].fill(0);
        }
    }
}

impl Device for ModelZoned {
    fn geometry(&self) -> Geometry {
        let c = &self.config;
        Geometry {
            size: c.zone_size * u64::from(c.nr_zones),
            logical_block: LOGICAL_BLOCK,
            physical_block: LOGICAL_BLOCK,
            io_min: LOGICAL_BLOCK,
            io_opt: LOGICAL_BLOCK,
            discard_granularity: 0,
            fast_zeroes: false,
            volatile_cache: false,
            padding: 0,
            volatile_media: true,
            rotational: false,
            max_request: 0,
            read_only: false,
            ignores_data: false,
            zones: Some(ZoneGeometry {
                zone_size: c.zone_size,
                nr_zones: c.nr_zones,
                max_open: c.max_open,
                max_active: c.max_active,
                max_append: c.zone_capacity as u32,
            }),
        }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry())?;
        match (request.op, buffer) {
            (Op::Read, Buffer::Read(out)) => {
                let range = request.offset as usize..(request.offset + request.len) as usize;
                out.copy_from_slice(&self.state.lock().bytes[range]);
            }
            (Op::Write, Buffer::Write(data)) => self.write(request.offset, request.len, Some(data))?,
            (Op::WriteZeroes, _) => self.write(request.offset, request.len, None)?,
            // A discard is a hint, which this device ignores: a reset frees space.
            (Op::Discard | Op::Flush, _) => {}
            (op, buffer) => panic!("{op:?} came with {buffer:?}"),
        }
        Ok(TryResult::Done)
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        let tried = match request.op {
            Op::Read => self.try_io(&request, Buffer::Read(&mut buffer)),
            Op::Write => self.try_io(&request, Buffer::Write(&buffer)),
            _ => self.try_io(&request, Buffer::None),
        };
        done.complete(tried.map(|_| ()), buffer);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let size = self.geometry().size;
        offset.checked_add(len).filter(|&end| len > 0 && end <= size).ok_or(Error::OutOfRange)?;
        row(Extent { offset, len, kind: ExtentKind::Data });
        Ok(len)
    }

    fn zoned(&self) -> Option<&dyn Zoned> {
        Some(self)
    }
}

impl Zoned for ModelZoned {
    fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        if offset >= self.geometry().size {
            return Err(Error::OutOfRange);
        }
        let first = (offset / self.config.zone_size) as usize;
        for index in first..self.config.nr_zones as usize {
            let zone = self.state.lock().zones[index];
            if !row(zone) {
                break;
            }
        }
        Ok(())
    }

    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        use ZoneCondition::{Closed, Empty, ExplicitOpen, Full, ImplicitOpen};
        let index = self.zone_at(offset)?;
        let mut state = self.state.lock();
        let zone = state.zones[index];
        if zone.kind == ZoneType::Conventional {
            return Err(Error::ZoneCondition);
        }
        match (op, zone.condition) {
            (ZoneOp::Reset, _) => state.reset(index),
            (ZoneOp::Open, Full) | (ZoneOp::Close, Empty | Full) => return Err(Error::ZoneCondition),
            (ZoneOp::Open, _) => {
                state.reserve_open(&self.config, index)?;
                state.zones[index].condition = ExplicitOpen;
            }
            (ZoneOp::Close, ImplicitOpen | ExplicitOpen) => {
                let written = zone.write_pointer > zone.start;
                state.zones[index].condition = if written { Closed } else { Empty };
            }
            (ZoneOp::Finish, _) => {
                if zone.condition != Full {
                    state.reserve_open(&self.config, index)?;
                }
                state.zones[index].condition = Full;
                state.zones[index].write_pointer = zone.start + zone.len;
            }
            (ZoneOp::Close, _) => {}
        }
        Ok(())
    }

    fn reset_all(&self) -> Result<()> {
        let mut state = self.state.lock();
        for index in 0..state.zones.len() {
            state.reset(index);
        }
        Ok(())
    }

    fn try_append(&self, offset: u64, data: &[u8], _flags: Flags) -> Result<Option<u64>> {
        let index = self.zone_at(offset)?;
        if data.is_empty() || !data.len().is_multiple_of(LOGICAL_BLOCK as usize) {
            return Err(Error::Misaligned);
        }
        loop {
            let zone = self.state.lock().zones[index];
            if zone.kind == ZoneType::Conventional || zone.condition == ZoneCondition::Full {
                return Err(Error::ZoneCondition);
            }
            let at = zone.write_pointer;
            if at + data.len() as u64 > zone.start + zone.capacity {
                return Err(Error::ZoneWritePointer);
            }
            match self.write(at, data.len() as u64, Some(data)) {
                // A concurrent append has moved the write pointer meanwhile: try again.
                Err(Error::ZoneWritePointer) => {}
                outcome => return outcome.map(|()| Some(at)),
            }
        }
    }

    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion) {
        let tried = self.try_append(offset, &data, flags);
        done(tried.and_then(|at| at.ok_or(Error::Media)));
    }
}
