//! Stores over redb and sled: `explore-rust-stores redb|sled DURABILITY PATH`.
//!
//! Reads requests from standard input, one a line, and prints `ok` after each of the last three:
//! `set KEY VALUE` and `del KEY` collect a change, `commit` applies all changes, `content` prints the pairs, and `close`
//! ends the program.

use std::error::Error;
use std::io::{self, BufRead as _, Write as _};

use redb::{Database, Durability, ReadableDatabase as _, ReadableTable as _, TableDefinition, TableError};

type Result<T> = std::result::Result<T, Box<dyn Error>>;
/// Key and new value; `None` deletes the key.
type Change = (String, Option<String>);

const TABLE: TableDefinition<&str, &str> = TableDefinition::new("t");

trait Store {
    fn commit(&mut self, changes: Vec<Change>) -> Result<()>;
    fn content(&self) -> Result<Vec<(String, String)>>;
}

struct Redb {
    database: Database,
    durability: Durability,
}

impl Store for Redb {
    fn commit(&mut self, changes: Vec<Change>) -> Result<()> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(self.durability)?;
        {
            let mut table = transaction.open_table(TABLE)?;
            for (key, value) in changes {
                match value {
                    Some(value) => table.insert(&*key, &*value)?,
                    None => table.remove(&*key)?,
                };
            }
        }
        Ok(transaction.commit()?)
    }

    fn content(&self) -> Result<Vec<(String, String)>> {
        let table = match self.database.begin_read()?.open_table(TABLE) {
            // The first commit is lost.
            Err(TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
            table => table?,
        };
        let pair = |pair: std::result::Result<(redb::AccessGuard<'_, &str>, redb::AccessGuard<'_, &str>), _>| {
            let (key, value) = pair?;
            Ok((key.value().to_owned(), value.value().to_owned()))
        };
        table.iter()?.map(pair).collect()
    }
}

struct Sled {
    database: sled::Db,
    flushes: bool,
}

impl Store for Sled {
    fn commit(&mut self, changes: Vec<Change>) -> Result<()> {
        let mut batch = sled::Batch::default();
        for (key, value) in changes {
            match value {
                Some(value) => batch.insert(&*key, &*value),
                None => batch.remove(&*key),
            }
        }
        self.database.apply_batch(batch)?;
        if self.flushes {
            self.database.flush()?;
        }
        Ok(())
    }

    fn content(&self) -> Result<Vec<(String, String)>> {
        let text = |bytes: sled::IVec| String::from_utf8(bytes.to_vec());
        self.database
            .iter()
            .map(|pair| {
                let (key, value) = pair?;
                Ok((text(key)?, text(value)?))
            })
            .collect()
    }
}

fn open(database: &str, durability: &str, path: &str) -> Result<Box<dyn Store>> {
    Ok(match (database, durability) {
        ("redb", "immediate" | "none") => {
            let durability = if durability == "none" { Durability::None } else { Durability::Immediate };
            Box::new(Redb { database: Database::create(path)?, durability })
        }
        ("sled", "flush" | "none") => {
            Box::new(Sled { database: sled::open(path)?, flushes: durability == "flush" })
        }
        _ => return Err(format!("{database} {durability}: unknown").into()),
    })
}

fn run() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, database, durability, path] = &arguments[..] else {
        return Err("usage: explore-rust-stores redb|sled DURABILITY PATH".into());
    };
    let mut store = open(database, durability, path)?;
    let mut changes = Vec::new();
    let mut out = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.splitn(3, ' ').collect();
        match words[..] {
            ["set", key, value] => changes.push((key.to_owned(), Some(value.to_owned()))),
            ["del", key] => changes.push((key.to_owned(), None)),
            ["commit"] => {
                store.commit(std::mem::take(&mut changes))?;
                writeln!(out, "ok")?;
            }
            ["content"] => {
                for (key, value) in store.content()? {
                    writeln!(out, "{key} {value}")?;
                }
                writeln!(out, "ok")?;
            }
            ["close"] => {
                drop(store);
                writeln!(out, "ok")?;
                return Ok(());
            }
            _ => return Err(format!("{line}: unknown request").into()),
        }
        out.flush()?;
    }
    Ok(())
}

fn main() -> std::process::ExitCode {
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}
