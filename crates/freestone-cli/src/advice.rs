//! What a server warns of: what works, and may not be meant.

use std::net::ToSocketAddrs as _;

use freestone::ram;
use freestone_nbd::Address;

use crate::size::human;

/// A full table of slots takes this part of the disk's size: 8 bytes for each page of 4 KiB.
const DISK_TO_TABLE: u64 = 512;
/// From this part of the memory on, a table is worth a word.
const MEMORY_TO_TABLE: u64 = 8;

/// Warns where a new RAM disk brings the sum of the limits above the memory, and where its table can grow large.
/// `others` are the limits of the disks that are there; 0 is no limit, which somebody asked for and is not counted.
pub fn of_memory(
    name: &str,
    new: &ram::Config,
    others: impl Iterator<Item = u64>,
    memory: u64,
) -> Vec<String> {
    let mut warnings = Vec::new();
    let before = others.fold(0, u64::saturating_add);
    let sum = before.saturating_add(new.mem_limit);
    // Once: the next disk finds it above already.
    if before <= memory && sum > memory {
        let (sum, memory) = (human(sum), human(memory));
        warnings.push(format!(
            "{name}: the RAM disks may take {sum} together (mem_limit), the machine has {memory}"
        ));
    }
    let table = new.disksize / DISK_TO_TABLE;
    if table > memory / MEMORY_TO_TABLE {
        let (disksize, table, memory) = (human(new.disksize), human(table), human(memory));
        warnings.push(format!(
            "{name}: disksize={disksize}: when all of it is written its table takes {table}, which mem_limit does \
             not bound; the machine has {memory}"
        ));
    }
    warnings
}

/// Warns where others than this machine's users can connect.
pub fn of_exposure(address: &Address) -> Option<String> {
    let Address::Tcp { host, port } = address else { return None };
    let local = (host.as_str(), *port)
        .to_socket_addrs()
        .is_ok_and(|mut all| all.all(|a| a.ip().to_canonical().is_loopback()));
    (!local).then(|| {
        format!(
            "{address}: not encrypted, and open to whoever reaches the port: who connects reads and writes"
        )
    })
}

#[cfg(test)]
mod tests {
    use freestone::codec::{Algorithm, Params};
    use freestone::ram::Config;

    use super::{of_exposure, of_memory};

    const GIB: u64 = 1 << 30;

    #[test]
    fn memory_is_added_up() {
        let sum = |sum| format!("r: the RAM disks may take {sum} together (mem_limit), the machine has 8G");
        let table = "r: disksize=513G: when all of it is written its table takes 1G, which mem_limit does not \
                     bound; the machine has 8G";
        for (disksize, mem_limit, others, expected) in [
            (GIB, 4 * GIB, &[4 * GIB][..], vec![]),
            (GIB, 4 * GIB, &[4 * GIB, 1], vec![sum("8G")]),
            (GIB, 5 * GIB, &[4 * GIB, GIB], vec![sum("10G")]),
            // Said before.
            (GIB, 4 * GIB, &[4 * GIB, 5 * GIB], vec![]),
            // No limit was asked for.
            (GIB, 0, &[0, 4 * GIB, 4 * GIB], vec![]),
            (GIB, u64::MAX, &[GIB], vec![sum("16777215.9T")]),
            (512 * GIB, GIB, &[], vec![]),
            (513 * GIB, GIB, &[], vec![table.to_owned()]),
            (513 * GIB, 9 * GIB, &[], vec![sum("9G"), table.to_owned()]),
        ] {
            let new = Config {
                disksize,
                comp_algorithm: Algorithm::Lz4,
                algorithm_params: Params::default(),
                mem_limit,
            };
            assert_eq!(of_memory("r", &new, others.iter().copied(), 8 * GIB), expected);
        }
    }

    #[test]
    fn only_loopback_is_private() {
        for (address, open) in [
            ("unix:/a", false),
            ("tcp:127.0.0.1:10809", false),
            ("tcp:127.9.9.9:0", false),
            ("tcp:[::1]:10809", false),
            ("tcp:[::ffff:127.0.0.1]:10809", false),
            ("tcp:0.0.0.0:10809", true),
            ("tcp:[::]:10809", true),
            ("tcp:192.0.2.1:10809", true),
            ("tcp:[fd00::1]:10809", true),
        ] {
            let said = of_exposure(&address.parse().unwrap());
            assert_eq!(said.is_some(), open, "{address}");
            assert!(said.is_none_or(|text| text.starts_with(&format!("{address}: not encrypted"))));
        }
    }
}
