//! qcow2 images and deltas, compared with qemu-img and qemu-io (Debian package qemu-utils). A
//! missing tool is a failure.

mod corrupt;
mod deltas;
mod fork;
mod full;
mod images;
mod moments;
mod refusals;
mod tools;
