//! Tools of qemu and libnbd, and fio: what they read, write, copy and report.

mod copy;
mod fio;
mod info;
mod locks;
mod qemu_img;
mod qemu_io;
mod unaligned_requests;
