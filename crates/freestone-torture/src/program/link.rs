//! A client's connection to a device, over one of its exports.

use std::path::PathBuf;

use freestone_testkit::Rng;

use super::block::Block;
use super::machine::Driver;
use super::said::{Broken, Offers, Reply};
use super::wire::Wire;

/// Where a device is published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A socket for NBD clients.
    Nbd(PathBuf),
    /// A socket for a virtual machine.
    Machine(PathBuf),
    /// A block device of this machine.
    Block(PathBuf),
}

/// The connection.
pub enum Link {
    Nbd(Box<Wire>),
    Machine(Box<Driver>),
    Block(Box<Block>),
}

impl Link {
    /// Connects to the device of this name.
    pub fn connect(place: &Place, name: &str, rng: &mut Rng) -> Result<Self, Broken> {
        Ok(match place {
            Place::Nbd(path) => Self::Nbd(Box::new(Wire::connect(path, name, rng)?)),
            Place::Machine(path) => Self::Machine(Box::new(Driver::connect(path, rng)?)),
            Place::Block(path) => Self::Block(Box::new(Block::connect(path, rng)?)),
        })
    }

    pub fn offers(&self) -> Offers {
        match self {
            Self::Nbd(wire) => wire.offers,
            Self::Machine(driver) => driver.offers,
            Self::Block(block) => block.offers,
        }
    }

    /// What clients of its kind are counted as.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Nbd(_) => "nbd",
            Self::Machine(_) => "vhost-user",
            Self::Block(_) => "ublk",
        }
    }

    /// Whether it outlives verbs that end connections.
    pub fn stays(&self) -> bool {
        matches!(self, Self::Block(_))
    }

    /// How many requests have no answer yet.
    pub fn on_the_way(&self) -> usize {
        match self {
            Self::Nbd(wire) => wire.on_the_way(),
            Self::Machine(driver) => driver.on_the_way(),
            Self::Block(block) => block.on_the_way(),
        }
    }

    /// The cookie of the request that is sent next.
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
    ) -> Result<(), Broken> {
        match self {
            Self::Nbd(wire) => wire.send(flags, command, offset, len, data).map(drop),
            Self::Machine(driver) => driver.send(flags, command, offset, len, data),
            Self::Block(block) => {
                block.send(flags, command, offset, len, data);
                Ok(())
            }
        }
    }

    /// The next answer, whichever request's it is.
    pub fn reply(&mut self) -> Result<Reply, Broken> {
        match self {
            Self::Nbd(wire) => wire.reply(),
            Self::Machine(driver) => driver.reply(),
            Self::Block(block) => block.reply(),
        }
    }

    /// The end of the conversation, as it should be.
    pub fn leave(self) {
        if let Self::Nbd(wire) = self {
            // Where the server is gone already, it is left.
            let _ = wire.leave();
        }
    }
}
