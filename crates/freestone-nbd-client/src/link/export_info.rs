//! Validated properties of a server's export, and the geometry derived from them.

use freestone_core::device::Geometry;
use freestone_nbd_proto::TransmissionFlags;

use crate::error::LinkError;

/// Smallest logical block of a device in bytes.
const MIN_BLOCK_BYTES: u32 = 512;
/// Largest logical block of a device in bytes.
const MAX_BLOCK_BYTES: u32 = 4096;
/// Largest payload that the protocol allows by default, and that the client uses, in bytes.
pub const DEFAULT_PAYLOAD_BYTES: u32 = 32 << 20;
/// Largest minimum block size that the protocol allows, in bytes.
const MAX_MINIMUM_BYTES: u32 = 64 << 10;
/// Largest preferred request size that a device reports, in bytes.
const MAX_PREFERRED_BYTES: u32 = 1 << 20;
/// Largest export in bytes: the largest signed offset less one block, so that the size can be
/// rounded up.
const MAX_SIZE_BYTES: u64 = i64::MAX as u64 - MAX_BLOCK_BYTES as u64;

/// Block sizes of a server in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// Alignment of offsets and lengths.
    pub minimum: u32,
    /// Preferred request size.
    pub preferred: u32,
    /// Largest payload of a request or reply.
    pub maximum: u32,
}

impl Default for BlockSizes {
    /// Returns the defaults for a server that reports no block sizes: byte alignment.
    fn default() -> Self {
        Self { minimum: 1, preferred: MAX_BLOCK_BYTES, maximum: DEFAULT_PAYLOAD_BYTES }
    }
}

/// An export as seen by one connection; all fields are validated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExportInfo {
    pub size: u64,
    pub flags: TransmissionFlags,
    /// Block sizes. The largest payload is a multiple of the device's logical block.
    pub blocks: BlockSizes,
    /// True if structured replies are negotiated.
    pub structured: bool,
    /// Id of the `base:allocation` context, if negotiated.
    pub context: Option<u32>,
}

impl ExportInfo {
    /// Validates the properties that a server reported for an export.
    ///
    /// # Errors
    /// The values violate the protocol, or are not possible for a device.
    pub fn validate(
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
            return Err(LinkError::Unusable("the export is empty (0 bytes)".into()));
        }
        if size > MAX_SIZE_BYTES {
            return Err(LinkError::Protocol("the export has 2^63 bytes or more"));
        }
        let mut blocks = blocks.unwrap_or_default();
        let BlockSizes { minimum, preferred, maximum } = blocks;
        if !minimum.is_power_of_two() || minimum > MAX_MINIMUM_BYTES {
            return Err(LinkError::Protocol("the minimum block is not a power of two up to 64 KiB"));
        }
        if !preferred.is_power_of_two() || preferred < minimum {
            return Err(LinkError::Protocol("the preferred block is not a power of two, or too small"));
        }
        if maximum < minimum || (maximum != u32::MAX && !maximum.is_multiple_of(minimum)) {
            return Err(LinkError::Protocol("the maximum payload is not a multiple of the minimum block"));
        }
        if minimum > MAX_BLOCK_BYTES {
            let why = format!("the export has blocks of {minimum} bytes, a device at most {MAX_BLOCK_BYTES}");
            return Err(LinkError::Unusable(why));
        }
        if !size.is_multiple_of(u64::from(minimum)) {
            return Err(LinkError::Protocol("the size of the export is not a multiple of its minimum block"));
        }
        let block = minimum.max(MIN_BLOCK_BYTES);
        let maximum = maximum.min(DEFAULT_PAYLOAD_BYTES);
        blocks.maximum = maximum - maximum % block;
        if blocks.maximum == 0 {
            let why =
                format!("the server takes at most {maximum} bytes at once, less than a block of {block}");
            return Err(LinkError::Unusable(why));
        }
        Ok(Self { size, flags, blocks, structured, context })
    }

    pub fn has(&self, flag: TransmissionFlags) -> bool {
        self.flags.contains(flag)
    }

    /// Returns the size of the device's logical block in bytes.
    pub fn block(&self) -> u32 {
        self.blocks.minimum.max(MIN_BLOCK_BYTES)
    }

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
            ignores_data: false,
            zones: None,
        }
    }

    /// Checks that the export of a reconnected server is compatible with the one before.
    ///
    /// # Errors
    /// The exports are not compatible. The error names the difference.
    pub fn check_compatible(&self, before: &Self) -> Result<(), LinkError> {
        let differs = |what: String| Err(LinkError::Unusable(format!("the export has changed: {what}")));
        if self.size < before.size {
            return differs(format!("it has {} bytes, and had {}", self.size, before.size));
        }
        let ends_within = |size: u64| !size.is_multiple_of(u64::from(before.block()));
        if self.size > before.size && (ends_within(self.size) || ends_within(before.size)) {
            return differs("it grew, and its old or new end lies within a block".into());
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

    fn validate(size: u64, minimum: u32, preferred: u32, maximum: u32) -> Result<ExportInfo, LinkError> {
        ExportInfo::validate(size, FLAGS, Some(BlockSizes { minimum, preferred, maximum }), false, None)
    }

    #[test]
    fn invalid_sizes_are_refused() {
        assert!(validate(0, 1, 4096, 1 << 20).is_err());
        assert!(validate(u64::MAX, 1, 4096, 1 << 20).is_err());
        assert!(validate(i64::MAX as u64 + 1, 1, 4096, 1 << 20).is_err());
        assert!(validate(1000, 512, 4096, 1 << 20).is_err());
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
                validate(1 << 20, minimum, preferred, maximum).is_err(),
                "{minimum} {preferred} {maximum}"
            );
        }
        assert!(ExportInfo::validate(512, 0, None, false, None).is_err());
    }

    #[test]
    fn export_ending_within_block_is_padded() {
        let geometry = validate(1000, 1, 4096, u32::MAX).unwrap().geometry(false);
        assert_eq!((geometry.size, geometry.padding, geometry.logical_block), (1024, 24, 512));
        let largest = validate(1 << 40, 4096, 65536, u32::MAX).unwrap();
        assert_eq!((largest.blocks.maximum, largest.block()), (DEFAULT_PAYLOAD_BYTES, 4096));
    }

    #[test]
    fn reconnected_export_may_only_grow() {
        let before = validate(1 << 20, 512, 4096, 1 << 20).unwrap();
        assert!(before.check_compatible(&before).is_ok());
        assert!(ExportInfo { size: 1 << 21, ..before }.check_compatible(&before).is_ok());
        assert!(ExportInfo { size: 1 << 19, ..before }.check_compatible(&before).is_err());
        let read_only = ExportInfo { flags: before.flags | TransmissionFlags::READ_ONLY, ..before };
        assert!(read_only.check_compatible(&before).is_err() && before.check_compatible(&read_only).is_err());
        assert!(validate(1 << 20, 4096, 4096, 1 << 20).unwrap().check_compatible(&before).is_err());
    }
}
