//! freestone-nbd
