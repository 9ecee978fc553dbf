//! Zones over any device: write pointers, conditions, limits, one lock per zone.
