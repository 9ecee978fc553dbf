//! The device over a library that stands for Ceph's (`fake.c`): contract, errors, deadlines, ends. What
//! it is over Ceph itself is tested by `lab/ceph-rbd.sh`.

mod conformance;
mod harness;
mod requests;
mod setup;
mod waits;
