//! Power loss that repeats from a seed, over any device, and a log of every write.
