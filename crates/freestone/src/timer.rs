//! Answers that are given at a time: one thread for the whole process.
