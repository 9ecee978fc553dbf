//! Tests with a fake of Ceph's libraries (`fake.c`): conformance, errors, deadlines and shutdown.
//! `lab/ceph-rbd.sh` tests with Ceph itself.

mod conformance;
mod harness;
mod requests;
mod setup;
mod waits;
