//! The ways by which clients send requests to a device: a connection over any kind of export.
//!
//! Owns the wire formats as clients see them. Knows no oracle and no devices; `world`, `clients` and the modes use it.

pub mod block;
pub mod machine;
pub mod nbd_client;
pub mod protocol;

use std::path::PathBuf;

use freestone_testkit::Rng;

use block::BlockClient;
use machine::MachineClient;
use nbd_client::NbdClient;
use protocol::{ConnectionError, Properties, Reply};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// Path of a socket for NBD clients.
    Nbd(PathBuf),
    /// Path of a vhost-user socket, for a virtual machine.
    Machine(PathBuf),
    /// Path of a ublk block device.
    Block(PathBuf),
}

pub enum Connection {
    Nbd(Box<NbdClient>),
    Machine(Box<MachineClient>),
    Block(Box<BlockClient>),
}

impl Connection {
    /// Connects to the device with this name at the address `place`.
    pub fn connect(place: &Address, name: &str, rng: &mut Rng) -> Result<Self, ConnectionError> {
        Ok(match place {
            Address::Nbd(path) => Self::Nbd(Box::new(NbdClient::connect(path, name, rng)?)),
            Address::Machine(path) => Self::Machine(Box::new(MachineClient::connect(path, rng)?)),
            Address::Block(path) => Self::Block(Box::new(BlockClient::connect(path, rng)?)),
        })
    }

    pub fn properties(&self) -> Properties {
        match self {
            Self::Nbd(wire) => wire.properties,
            Self::Machine(driver) => driver.properties,
            Self::Block(block) => block.properties,
        }
    }

    /// Returns the name of the kind of export, for statistics.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Nbd(_) => "nbd",
            Self::Machine(_) => "vhost-user",
            Self::Block(_) => "ublk",
        }
    }

    /// Returns true if the connection survives verbs that end NBD and vhost-user connections.
    pub fn survives_disconnects(&self) -> bool {
        matches!(self, Self::Block(_))
    }

    pub fn in_flight(&self) -> usize {
        match self {
            Self::Nbd(wire) => wire.in_flight(),
            Self::Machine(driver) => driver.in_flight(),
            Self::Block(block) => block.in_flight(),
        }
    }

    /// Returns the cookie (number) that the next request will have.
    pub fn next(&self) -> u64 {
        match self {
            Self::Nbd(wire) => wire.next(),
            Self::Machine(driver) => driver.next(),
            Self::Block(block) => block.next(),
        }
    }

    pub fn send(
        &mut self,
        flags: u16,
        command: u16,
        offset: u64,
        len: u32,
        data: &[u8],
    ) -> Result<(), ConnectionError> {
        match self {
            Self::Nbd(wire) => wire.send(flags, command, offset, len, data).map(drop),
            Self::Machine(driver) => driver.send(flags, command, offset, len, data),
            Self::Block(block) => {
                block.send(flags, command, offset, len, data);
                Ok(())
            }
        }
    }

    /// Waits for the next reply, which may be to any request in flight.
    pub fn reply(&mut self) -> Result<Reply, ConnectionError> {
        match self {
            Self::Nbd(wire) => wire.reply(),
            Self::Machine(driver) => driver.reply(),
            Self::Block(block) => block.reply(),
        }
    }

    /// Ends the connection in an orderly way: an NBD client announces the end.
    pub fn leave(self) {
        if let Self::Nbd(wire) = self {
            // An error only means that the server has already ended the connection.
            let _ = wire.leave();
        }
    }
}
