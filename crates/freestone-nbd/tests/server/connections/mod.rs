//! Connections: listening addresses, handshakes, limits on clients, and templates.

mod allowed;
mod handshake;
mod listening;
mod places;
mod templates;
