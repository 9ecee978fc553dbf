//! Test drives as their users meet them: the built program, its verbs, and clients on its exports.

#[expect(dead_code, reason = "shared with other tests, which use more of it")]
#[path = "../harness/mod.rs"]
mod harness;
#[expect(dead_code, reason = "shared with other tests, which use more of it")]
#[path = "../clients/tools.rs"]
mod tools;

mod faults;
mod null;
mod power;
mod raw;
mod refusals;
mod zones;
