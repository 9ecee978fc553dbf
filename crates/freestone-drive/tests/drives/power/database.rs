//! The database redb, with power cuts at each of its writes. With syncs it stays consistent;
//! without syncs the test must detect lost data.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use freestone_core::device::{Blocking, Flags};
use freestone_drive::power::{Config, Power};
use freestone_testkit::{Model, Rng, effort};
use redb::{Database, ReadableTable, StorageBackend, TableDefinition};

const TABLE: TableDefinition<u64, &[u8]> = TableDefinition::new("numbers");
const BLOCK: u64 = 512;
/// Size of the device in bytes. The last block holds the length of the database file.
const SIZE: u64 = 16 << 20;
const LENGTH_AT: u64 = SIZE - BLOCK;
const TRANSACTIONS: u64 = 12;

/// A file on a device, as in a simple file system: its length is always durable, its data only
/// after a sync.
struct Storage {
    power: Arc<Power>,
    /// True if a sync flushes the device, false if a sync does nothing.
    syncs: bool,
    /// Number of writes and syncs that are left, of which the last one cuts the power; 0 after the
    /// cut.
    left: AtomicU64,
    seed: u64,
    length: Mutex<u64>,
}

impl Storage {
    fn open(power: &Arc<Power>, syncs: bool, left: u64, seed: u64) -> Self {
        let mut block = [0; BLOCK as usize];
        power.read_at(LENGTH_AT, &mut block).unwrap();
        let length = u64::from_le_bytes(block[..8].try_into().unwrap());
        let power = Arc::clone(power);
        Self { power, syncs, left: AtomicU64::new(left), seed, length: Mutex::new(length) }
    }

    /// Counts a write or sync. The last one cuts the power and fails.
    fn step(&self) -> io::Result<()> {
        match self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)) {
            Ok(1) => {
                self.power.cut(self.seed).unwrap();
                Err(io::Error::other("the power went"))
            }
            Ok(_) => Ok(()),
            Err(_) => Err(io::Error::other("there is no power")),
        }
    }
}

impl StorageBackend for Storage {
    fn len(&self) -> io::Result<u64> {
        Ok(*self.length.lock().unwrap())
    }

    fn read(&self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        if self.left.load(Ordering::SeqCst) == 0 {
            return Err(io::Error::other("there is no power"));
        }
        let start = offset - offset % BLOCK;
        let end = (offset + len as u64).next_multiple_of(BLOCK);
        let mut data = vec![0; (end - start) as usize];
        self.power.read_at(start, &mut data).map_err(io::Error::other)?;
        data.drain(..(offset - start) as usize);
        data.truncate(len);
        Ok(data)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.step()?;
        let mut length = self.length.lock().unwrap();
        if len > LENGTH_AT {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let (from, to) = (length.next_multiple_of(BLOCK), len.next_multiple_of(BLOCK));
        if from < to {
            self.power.write_zeroes(from, to - from, Flags::FUA).map_err(io::Error::other)?;
        }
        let mut block = [0; BLOCK as usize];
        block[..8].copy_from_slice(&len.to_le_bytes());
        self.power.write_at(LENGTH_AT, &block, Flags::FUA).map_err(io::Error::other)?;
        *length = len;
        Ok(())
    }

    fn sync_data(&self, _eventual: bool) -> io::Result<()> {
        self.step()?;
        if self.syncs { self.power.flush().map_err(io::Error::other) } else { Ok(()) }
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.step()?;
        let start = offset - offset % BLOCK;
        let end = (offset + data.len() as u64).next_multiple_of(BLOCK);
        let mut blocks = self.read(start, (end - start) as usize)?;
        let from = (offset - start) as usize;
        blocks[from..from + data.len()].copy_from_slice(data);
        self.power.write_at(start, &blocks, Flags::empty()).map_err(io::Error::other)
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Storage")
    }
}

type Rows = BTreeMap<u64, Vec<u8>>;

fn change(rng: &mut Rng, rows: &mut Rows) -> Vec<(u64, Option<Vec<u8>>)> {
    (0..=rng.below(8))
        .map(|_| {
            let key = rng.below(60);
            if rng.chance(25) {
                rows.remove(&key);
                return (key, None);
            }
            let mut value = vec![0; rng.below(900) as usize];
            rng.fill(&mut value);
            rows.insert(key, value.clone());
            (key, Some(value))
        })
        .collect()
}

fn commit(database: &Database, changes: &[(u64, Option<Vec<u8>>)]) -> Result<(), Box<dyn Error>> {
    let transaction = database.begin_write()?;
    {
        let mut table = transaction.open_table(TABLE)?;
        for (key, value) in changes {
            match value {
                Some(value) => drop(table.insert(key, value.as_slice())?),
                None => drop(table.remove(key)?),
            }
        }
    }
    transaction.commit()?;
    Ok(())
}

fn rows(database: &Database) -> Result<Rows, Box<dyn Error>> {
    let transaction = database.begin_read()?;
    let table = match transaction.open_table(TABLE) {
        Err(redb::TableError::TableDoesNotExist(_)) => return Ok(Rows::new()),
        table => table?,
    };
    let mut rows = Rows::new();
    for row in table.iter()? {
        let (key, value) = row?;
        rows.insert(key.value(), value.value().to_vec());
    }
    Ok(rows)
}

/// Runs transactions until the power cut, reopens the database and compares its content. Returns a
/// description of the difference as an error.
fn trial(seed: u64, syncs: bool) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let below = Arc::new(Model::new(SIZE as usize, BLOCK as u32));
    let power = Arc::new(Power::new(below, Config::default()).unwrap());
    // The database is created without a power cut.
    let make = |left| Database::builder().create_with_backend(Storage::open(&power, syncs, left, seed));
    drop(make(u64::MAX).unwrap());
    power.flush().unwrap();

    let mut acknowledged = Rows::new();
    let mut last = Rows::new();
    if let Ok(database) = make(5 + rng.below(120)) {
        for _ in 0..TRANSACTIONS {
            let changes = change(&mut rng, &mut last);
            if commit(&database, &changes).is_err() {
                break;
            }
            acknowledged.clone_from(&last);
        }
    }
    // The transactions may have ended before the planned cut.
    power.cut(seed).unwrap();

    let reopened = std::panic::catch_unwind(AssertUnwindSafe(|| {
        let mut database = make(u64::MAX).map_err(|error| format!("it does not open: {error}"))?;
        match database.check_integrity() {
            Ok(true) => {}
            Ok(false) => return Err("it was damaged".into()),
            Err(error) => return Err(format!("it cannot be checked: {error}")),
        }
        rows(&database).map_err(|error| format!("it cannot be read: {error}"))
    }));
    let found = reopened.map_err(|_| "reading it panics".to_string())??;
    if found == acknowledged || found == last { Ok(()) } else { Err("a commit is lost".into()) }
}

#[test]
fn database_with_syncs_loses_nothing() {
    for seed in 0..effort(8, 40) {
        if let Err(what) = trial(seed, true) {
            panic!("seed {seed}: {what}");
        }
    }
}

#[test]
fn database_without_syncs_is_caught() {
    let caught: Vec<String> = (0..10).filter_map(|seed| trial(seed, false).err()).collect();
    assert!(caught.len() > 2, "{caught:?}");
}
