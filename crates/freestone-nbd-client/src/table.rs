//! What a connection has asked the server and is not answered yet.

use freestone_core::device::IoBuf;
use freestone_core::sync::Instant;

use crate::covered::Covered;
use crate::job::{Job, Piece};

/// Requests in flight of one connection; more wait for one of these.
pub const MAX_IN_FLIGHT: usize = 32;
/// Bits of a cookie that say the place; the others tell it from the ones before.
const PLACE_BITS: u32 = 8;
const _: () = assert!(MAX_IN_FLIGHT <= 1 << PLACE_BITS);

/// A piece that was sent, or is being sent.
pub struct Sent {
    /// Whose it is.
    pub job: Box<Job>,
    /// What was asked.
    pub piece: Piece,
    /// What of a read has come.
    pub covered: Covered,
    /// The first error that was told.
    pub error: Option<u32>,
    /// When something of it last moved.
    pub since: Instant,
    cookie: u64,
}

/// What a connection waits for.
#[derive(Default)]
pub struct Table {
    places: Vec<Option<Sent>>,
    used: usize,
    serial: u64,
}

impl Table {
    /// A job whose next piece is asked for now. Returns the cookie.
    pub fn add(&mut self, job: Box<Job>, piece: Piece) -> u64 {
        let place = self.places.iter().position(Option::is_none).unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() - 1
        });
        self.serial += 1;
        let cookie = self.serial << PLACE_BITS | place as u64;
        let since = Instant::now();
        self.places[place] =
            Some(Sent { job, piece, covered: Covered::default(), error: None, since, cookie });
        self.used += 1;
        cookie
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.used
    }

    fn place(cookie: u64) -> usize {
        (cookie & ((1 << PLACE_BITS) - 1)) as usize
    }

    /// What the cookie stands for.
    pub fn get(&mut self, cookie: u64) -> Option<&mut Sent> {
        self.places.get_mut(Self::place(cookie))?.as_mut().filter(|sent| sent.cookie == cookie)
    }

    /// The memory of what the cookie stands for.
    pub fn buffer(&mut self, cookie: u64) -> Option<&mut IoBuf> {
        self.get(cookie).map(|sent| &mut sent.job.buffer)
    }

    /// It was answered.
    pub fn take(&mut self, cookie: u64) -> Option<Sent> {
        self.get(cookie)?;
        self.used -= 1;
        self.places[Self::place(cookie)].take()
    }

    /// The moment since which nothing has moved of one of them.
    pub fn oldest(&self) -> Option<Instant> {
        self.places.iter().flatten().map(|sent| sent.since).min()
    }

    /// All of them: the connection is gone.
    pub fn drain(&mut self) -> impl Iterator<Item = Box<Job>> {
        self.used = 0;
        self.places.drain(..).flatten().map(|sent| sent.job)
    }
}
