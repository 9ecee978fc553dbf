//! Faults that repeat from a seed, over any device.
