//! `memcpy` part: memory backing with requests of 128 KiB, compared with memcpy over the same
//! amount of memory.

use std::hint::black_box;

use anyhow::{Result, ensure};
use freestone::PAGE_BYTES;
use freestone::device::{Blocking, Buffer, Device, Flags, IoBuf, Request, TryResult};
use freestone::null::{Config, Memory};
use freestone_report::{Report, Row, Summary, Target};

use crate::data::Random;
use crate::measure::{alternate, median};
use crate::options::Options;

/// Default size of the memory, in bytes.
const BYTES: u64 = 512 << 20;
/// Request sizes in bytes: the size with a target, and a smaller size.
const REQUESTS_BYTES: [usize; 2] = [128 << 10, PAGE_BYTES];
/// Longest time of large requests that meets the target, relative to memcpy.
const TARGET: Target = Target::AtMost(1.15);

pub fn run(options: &Options) -> Result<Report> {
    let bytes = options.bytes(BYTES) / REQUESTS_BYTES[0] as u64 * REQUESTS_BYTES[0] as u64;
    let memory = Memory::new(Config::plain(bytes, 4096))?;
    let mut plain = IoBuf::zeroed(bytes as usize)?;
    // Writes allocate all memory of both sides before the measurement.
    plain.fill(0x5A);
    for (n, piece) in plain.chunks(REQUESTS_BYTES[0]).enumerate() {
        memory.write_at((n * REQUESTS_BYTES[0]) as u64, piece, Flags::empty())?;
    }
    let mut rows = Vec::new();
    for (request, target) in REQUESTS_BYTES.into_iter().zip([Some(TARGET), None]) {
        rows.extend(run_size(&memory, &mut plain, request, target, options)?);
    }
    Ok(Report::new("zones: memory backing", "one byte", bytes, "none")
        .note(
            "Requests at random offsets to a null device with memory_backed=1 that was filled before, and \
             copies at the same offsets from and to one plain allocation of the same size. CPU time of the \
             thread.",
        )
        .rows(rows))
}

fn run_size(
    memory: &Memory,
    plain: &mut [u8],
    request: usize,
    target: Option<Target>,
    options: &Options,
) -> Result<Vec<Row>> {
    let device: &dyn Device = black_box(memory);
    let count_of_offsets = (plain.len() / request) as u64;
    let order = Random::new(request as u64).permutation(count_of_offsets);
    let offset = |n: u64| order[(n % count_of_offsets) as usize] as usize * request;
    let mut buffers = [IoBuf::zeroed(request)?, IoBuf::zeroed(request)?];
    let data = [IoBuf::zeroed(request)?, IoBuf::zeroed(request)?];
    let [ours, theirs] = &mut buffers;
    let mut failed = 0_u64;
    let reads = alternate(
        options.slices(),
        &mut [
            &mut |from, count| {
                for n in from..from + count {
                    let io_request = Request::read(offset(n) as u64, request as u64);
                    failed += u64::from(
                        device.try_io(&io_request, Buffer::Read(black_box(ours))) != Ok(TryResult::Done),
                    );
                }
            },
            &mut |from, count| {
                for n in from..from + count {
                    theirs.copy_from_slice(black_box(&plain[offset(n)..][..request]));
                    black_box(&mut *theirs);
                }
            },
        ],
    );
    let mut failed_writes = 0_u64;
    let writes = alternate(
        options.slices(),
        &mut [
            &mut |from, count| {
                for n in from..from + count {
                    let io_request = Request::write(offset(n) as u64, request as u64);
                    let tried = device.try_io(&io_request, Buffer::Write(black_box(&data[0])));
                    failed_writes += u64::from(tried != Ok(TryResult::Done));
                }
            },
            &mut |from, count| {
                for n in from..from + count {
                    plain[offset(n)..][..request].copy_from_slice(black_box(&data[1]));
                    black_box(&mut *plain);
                }
            },
        ],
    );
    ensure!(failed + failed_writes == 0, "{failed} reads and {failed_writes} writes failed");
    let kib = request >> 10;
    let row = |what: &str, times: &[crate::measure::Times]| {
        let row = Row::ratio_of(format!("{kib} KiB {what} / memcpy"), &times[0].cpu, &times[1].cpu)
            .part("us", median(&times[0].cpu) / 1e3)
            .part("memcpy", median(&times[1].cpu) / 1e3)
            .part("on the wall clock", Summary::ratio(&times[0].wall, &times[1].wall).median);
        match target {
            Some(target) => row.target(target).withhold_if_unsteady(),
            None => row.withhold_if_unsteady(),
        }
    };
    Ok(vec![row("reads", &reads), row("writes", &writes)])
}
