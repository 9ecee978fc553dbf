//! USDT probes for perf, bpftrace, gdb and similar tools. Each probe is a nop, and an ELF note that contains
//! its address and the registers of its arguments. A tracer that attaches sets a breakpoint at the nop and
//! increments a semaphore; while the semaphore is zero, no arguments are computed. x86-64 only.
#![expect(unsafe_code)]
// UNSAFETY: the assembler writes the notes, and the semaphore is in a section known to tracers.

use std::sync::atomic::{AtomicU16, Ordering};

/// Semaphore of all probes: the number of attached tracers, changed by the tracers, plus one if spans are
/// enabled. To find out whether tracing is enabled, requests check only this word.
#[used]
// SAFETY: `.probes` is the section for such semaphores and allows other content.
#[unsafe(link_section = ".probes")]
static SEMAPHORE: AtomicU16 = AtomicU16::new(0);

/// Returns true if a tracer is attached or spans are enabled.
#[inline]
pub fn is_enabled() -> bool {
    // Relaxed: orders no data. A tracer sees the requests that begin later.
    SEMAPHORE.load(Ordering::Relaxed) != 0
}

/// Enables request tracing for spans.
pub fn enable() {
    // Relaxed: orders no data.
    SEMAPHORE.fetch_add(1, Ordering::Relaxed);
}

/// Arguments common to both probes.
#[derive(Clone, Copy)]
pub struct RequestInfo<'a> {
    /// Name of the device.
    pub device: &'a str,
    /// Number of the operation in [`Counter`](super::Counter).
    pub op: usize,
    /// Offset of the first byte on the device.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

#[cfg(target_arch = "x86_64")]
macro_rules! probe {
    ($name:literal, $arguments:literal, $($number:expr),+ $(,)?) => {
        // SAFETY: the instruction is a nop; everything else is in other sections.
        unsafe {
            std::arch::asm!(
                "990: nop",
                ".pushsection .note.stapsdt, \"?\", \"note\"",
                ".balign 4",
                ".4byte 992f - 991f, 994f - 993f, 3",
                "991: .asciz \"stapsdt\"",
                "992: .balign 4",
                "993: .8byte 990b",
                ".8byte _.stapsdt.base",
                ".8byte {semaphore}",
                ".asciz \"freestone\"",
                concat!(".asciz \"", $name, "\""),
                concat!(".asciz \"", $arguments, "\""),
                "994: .balign 4",
                ".popsection",
                ".ifndef _.stapsdt.base",
                ".pushsection .stapsdt.base, \"aGR\", \"progbits\", .stapsdt.base, comdat",
                ".weak _.stapsdt.base",
                ".hidden _.stapsdt.base",
                "_.stapsdt.base: .space 1",
                ".size _.stapsdt.base, 1",
                ".popsection",
                ".endif",
                $(in(reg) $number,)+
                semaphore = sym SEMAPHORE,
                options(att_syntax, readonly, nostack, preserves_flags),
            );
        }
    };
}

#[cfg(not(target_arch = "x86_64"))]
macro_rules! probe {
    ($name:literal, $arguments:literal, $($number:expr),+ $(,)?) => {
        let _ = ($($number),+);
    };
}

/// Fires when a request is tried (`waits` is false) or submitted (`waits` is true).
#[inline(never)]
pub fn request_begin(info: RequestInfo<'_>, waits: bool) {
    let RequestInfo { device, op, offset, bytes } = info;
    let (name, len, waits) = (device.as_ptr(), device.len(), u64::from(waits));
    probe!("request_begin", "8@{0} 8@{1} 8@{2} 8@{3} 8@{4} 8@{5}", name, len, op, offset, bytes, waits);
}

/// Fires when a request ends. `end` is 0 for success, negative for a try that did not complete, or 1 plus the
/// number of the [`Error`](crate::device::Error).
#[inline(never)]
pub fn request_end(info: RequestInfo<'_>, nanoseconds: u64, end: i64) {
    let RequestInfo { device, op, offset, bytes } = info;
    let (name, len) = (device.as_ptr(), device.len());
    probe!(
        "request_end",
        "8@{0} 8@{1} 8@{2} 8@{3} 8@{4} 8@{5} -8@{6}",
        name,
        len,
        op,
        offset,
        bytes,
        nanoseconds,
        end
    );
}
