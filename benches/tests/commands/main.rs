//! The program of the benchmarks: every command runs and says what it measured. Speed is not judged here.

mod compare;
mod quick;
