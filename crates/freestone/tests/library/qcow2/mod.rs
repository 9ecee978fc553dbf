//! qcow2 images and deltas, compared with qemu-img and qemu-io (Debian package qemu-utils). If a
//! tool is missing, the tests fail.

mod corrupt;
mod deltas;
mod full;
mod images;
mod moments;
mod refusals;
mod tools;
