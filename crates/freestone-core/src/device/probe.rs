//! Probes for perf, bpftrace, gdb and the like (USDT): each is one instruction that does nothing, and
//! a note beside the program that says where it is and in which registers its numbers are. Who
//! attaches puts a breakpoint there, and counts a word up, so that otherwise nobody computes these
//! numbers. On x86-64; elsewhere there are none.
#![expect(unsafe_code)]
// UNSAFETY: the notes are written by the assembler, and the word lies in a section that tracers know.

use std::sync::atomic::{AtomicU16, Ordering};

/// How many have attached to any of them, which tracers change, and one for spans: so requests look at
/// one word.
#[used]
// SAFETY: the section is for such words, and one of another sort could lie there as well.
#[unsafe(link_section = ".probes")]
static LOOKING: AtomicU16 = AtomicU16::new(0);

/// Whether anybody looks.
#[inline]
pub fn is_looked_at() -> bool {
    // Relaxed: no data hangs on it. Who begins to look sees what begins later.
    LOOKING.load(Ordering::Relaxed) != 0
}

/// Somebody does from now on.
pub fn look() {
    // Relaxed: as above.
    LOOKING.fetch_add(1, Ordering::Relaxed);
}

/// What is told of a request in both probes.
#[derive(Clone, Copy)]
pub struct Told<'a> {
    /// The device's name.
    pub device: &'a str,
    /// By its number in [`Counter`](super::Counter).
    pub op: usize,
    /// In bytes.
    pub offset: u64,
    /// In bytes.
    pub bytes: u64,
}

#[cfg(target_arch = "x86_64")]
macro_rules! probe {
    ($name:literal, $places:literal, $($number:expr),+ $(,)?) => {
        // SAFETY: an instruction that does nothing; all else lies beside the program.
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
                ".8byte {looking}",
                ".asciz \"freestone\"",
                concat!(".asciz \"", $name, "\""),
                concat!(".asciz \"", $places, "\""),
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
                looking = sym LOOKING,
                options(att_syntax, readonly, nostack, preserves_flags),
            );
        }
    };
}

#[cfg(not(target_arch = "x86_64"))]
macro_rules! probe {
    ($name:literal, $places:literal, $($number:expr),+ $(,)?) => {
        let _ = ($($number),+);
    };
}

/// A device is asked: it tries the request, or takes over one that `waits`.
#[inline(never)]
pub fn request_begin(told: Told<'_>, waits: bool) {
    let Told { device, op, offset, bytes } = told;
    let (name, len, waits) = (device.as_ptr(), device.len(), u64::from(waits));
    probe!("request_begin", "8@{0} 8@{1} 8@{2} 8@{3} 8@{4} 8@{5}", name, len, op, offset, bytes, waits);
}

/// It has answered so many nanoseconds later; `end` says how.
#[inline(never)]
pub fn request_end(told: Told<'_>, nanoseconds: u64, end: i64) {
    let Told { device, op, offset, bytes } = told;
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
