//! What a server says of its export, and what a device makes of that.

use freestone_core::device::Geometry;
use freestone_nbd_proto::TransmissionFlags;

use crate::error::LinkError;

/// Smallest block of a device in bytes.
const MIN_BLOCK_BYTES: u32 = 512;
/// Largest block of a device in bytes.
const MAX_BLOCK_BYTES: u32 = 4096;
/// Largest payload where the server does not say, and the largest that is used, in bytes.
pub const DEFAULT_PAYLOAD_BYTES: u32 = 32 << 20;
/// Largest block of the protocol in bytes.
const MAX_MINIMUM_BYTES: u32 = 64 << 10;
/// What a device says at most of the requests it prefers, in bytes.
const MAX_PREFERRED_BYTES: u32 = 1 << 20;
/// Largest size of an export in bytes: what a signed offset reaches, and a block less, so that it
/// can be rounded up.
const MAX_SIZE_BYTES: u64 = i64::MAX as u64 - MAX_BLOCK_BYTES as u64;

/// Block sizes as a server tells them, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// Unit of offsets and lengths.
    pub minimum: u32,
    /// From which on a request is efficient.
    pub preferred: u32,
    /// Largest payload.
    pub maximum: u32,
}

impl Default for BlockSizes {
    /// Of a server that does not tell: it takes any byte.
    fn default() -> Self {
        Self { minimum: 1, preferred: MAX_BLOCK_BYTES, maximum: DEFAULT_PAYLOAD_BYTES }
    }
}

/// An export over one connection; all is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Bytes of the export.
    pub size: u64,
    /// What it offers.
    pub flags: TransmissionFlags,
    /// Its block sizes. The largest payload is a multiple of the device's block.
    pub blocks: BlockSizes,
    /// Replies have chunks.
    pub structured: bool,
    /// The number of the context `base:allocation`.
    pub context: Option<u32>,
}

impl Facts {
    /// Checks what a server has told.
    ///
    /// # Errors
    /// It cannot be, or a device cannot be like that.
    pub fn checked(
        size: u64,
        flags: u16,
        blocks: Option<BlockSizes>,
        structured: bool,
        context: Option<u32>,
    ) -> Result<Self, LinkError> {
        let flags = TransmissionFlags::from_bits_retain(flags);
        if !flags.contains(TransmissionFlags::HAS_FLAGS) {
            return Err(LinkError::Protocol("the flags of the export are not valid"));
        }
        if size == 0 {
            return Err(LinkError::Unfit("the export is empty (0 bytes)".into()));
        }
        if size > MAX_SIZE_BYTES {
            return Err(LinkError::Protocol("the export has 2^63 bytes or more"));
        }
        let mut blocks = blocks.unwrap_or_default();
        let BlockSizes { minimum, preferred, maximum } = blocks;
        if !minimum.is_power_of_two() || minimum > MAX_MINIMUM_BYTES {
            return Err(LinkError::Protocol("the smallest block is no power of two up to 64 KiB"));
        }
        if !preferred.is_power_of_two() || preferred < minimum {
            return Err(LinkError::Protocol("the preferred block is no power of two, or too small"));
        }
        if maximum < minimum || (maximum != u32::MAX && !maximum.is_multiple_of(minimum)) {
            return Err(LinkError::Protocol("the largest request is no multiple of the smallest block"));
        }
        if minimum > MAX_BLOCK_BYTES {
            let why = format!("the export has blocks of {minimum} bytes, a device at most {MAX_BLOCK_BYTES}");
            return Err(LinkError::Unfit(why));
        }
        if !size.is_multiple_of(u64::from(minimum)) {
            return Err(LinkError::Protocol("the size of the export is no multiple of its smallest block"));
        }
        let block = minimum.max(MIN_BLOCK_BYTES);
        let maximum = maximum.min(DEFAULT_PAYLOAD_BYTES);
        blocks.maximum = maximum - maximum % block;
        if blocks.maximum == 0 {
            let why =
                format!("the server takes at most {maximum} bytes at once, less than a block of {block}");
            return Err(LinkError::Unfit(why));
        }
        Ok(Self { size, flags, blocks, structured, context })
    }

    /// Whether this is offered.
    pub fn has(&self, flag: TransmissionFlags) -> bool {
        self.flags.contains(flag)
    }

    /// The device's block in bytes.
    pub fn block(&self) -> u32 {
        self.blocks.minimum.max(MIN_BLOCK_BYTES)
    }

    /// As a device says it of itself.
    pub fn geometry(&self, read_only: bool) -> Geometry {
        let block = self.block();
        let size = self.size.next_multiple_of(u64::from(block));
        let preferred = self.blocks.preferred.clamp(block, MAX_PREFERRED_BYTES);
        Geometry {
            size,
            padding: (size - self.size) as u32,
            logical_block: block,
            physical_block: preferred.min(MAX_BLOCK_BYTES),
            io_min: preferred,
            io_opt: preferred.max((128 << 10).min(self.blocks.maximum)),
            max_request: 0,
            discard_granularity: if self.has(TransmissionFlags::SEND_TRIM) { block } else { 0 },
            fast_zeroes: self.has(TransmissionFlags::SEND_WRITE_ZEROES | TransmissionFlags::SEND_FAST_ZERO),
            volatile_cache: self.has(TransmissionFlags::SEND_FLUSH),
            volatile_media: false,
            rotational: self.has(TransmissionFlags::ROTATIONAL),
            read_only: read_only || self.has(TransmissionFlags::READ_ONLY),
            zones: None,
        }
    }

    /// Why a server that was connected to again is not the same as before.
    ///
    /// # Errors
    /// What differs.
    pub fn follows(&self, before: &Self) -> Result<(), LinkError> {
        let differs =
            |what: String| Err(LinkError::Unfit(format!("it is not the export that it was: {what}")));
        if self.size < before.size {
            return differs(format!("it has {} bytes, and had {}", self.size, before.size));
        }
        let ends_within = |size: u64| !size.is_multiple_of(u64::from(before.block()));
        if self.size > before.size && (ends_within(self.size) || ends_within(before.size)) {
            return differs("it grew, and ends within a block, or did so before".into());
        }
        if self.block() != before.block() {
            return differs(format!("its blocks have {} bytes, and had {}", self.block(), before.block()));
        }
        for (flag, is, was) in [
            (TransmissionFlags::READ_ONLY, "read-only", "writable"),
            (TransmissionFlags::SEND_FLUSH, "with flush", "without"),
        ] {
            match (self.has(flag), before.has(flag)) {
                (true, false) => return differs(format!("it is {is}, and was {was}")),
                (false, true) => return differs(format!("it is {was}, and was {is}")),
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLAGS: u16 = 1;

    fn checked(size: u64, minimum: u32, preferred: u32, maximum: u32) -> Result<Facts, LinkError> {
        Facts::checked(size, FLAGS, Some(BlockSizes { minimum, preferred, maximum }), false, None)
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        assert!(checked(0, 1, 4096, 1 << 20).is_err());
        assert!(checked(u64::MAX, 1, 4096, 1 << 20).is_err());
        assert!(checked(i64::MAX as u64 + 1, 1, 4096, 1 << 20).is_err());
        assert!(checked(1000, 512, 4096, 1 << 20).is_err());
        for (minimum, preferred, maximum) in [
            (0, 4096, 4096),
            (3, 4096, 4096),
            (1 << 17, 1 << 17, 1 << 20),
            (512, 0, 4096),
            (512, 256, 4096),
            (512, 513, 4096),
            (512, 4096, 256),
            (512, 4096, 1000),
            (8192, 8192, 8192),
            (1, 1, 511),
        ] {
            assert!(
                checked(1 << 20, minimum, preferred, maximum).is_err(),
                "{minimum} {preferred} {maximum}"
            );
        }
        assert!(Facts::checked(512, 0, None, false, None).is_err());
    }

    #[test]
    fn an_export_that_ends_within_a_block_is_padded() {
        let geometry = checked(1000, 1, 4096, u32::MAX).unwrap().geometry(false);
        assert_eq!((geometry.size, geometry.padding, geometry.logical_block), (1024, 24, 512));
        let largest = checked(1 << 40, 4096, 65536, u32::MAX).unwrap();
        assert_eq!((largest.blocks.maximum, largest.block()), (DEFAULT_PAYLOAD_BYTES, 4096));
    }

    #[test]
    fn what_may_change_is_a_size_that_grows() {
        let before = checked(1 << 20, 512, 4096, 1 << 20).unwrap();
        assert!(before.follows(&before).is_ok());
        assert!(Facts { size: 1 << 21, ..before }.follows(&before).is_ok());
        assert!(Facts { size: 1 << 19, ..before }.follows(&before).is_err());
        let read_only = Facts { flags: before.flags | TransmissionFlags::READ_ONLY, ..before };
        assert!(read_only.follows(&before).is_err() && before.follows(&read_only).is_err());
        assert!(checked(1 << 20, 4096, 4096, 1 << 20).unwrap().follows(&before).is_err());
    }
}
