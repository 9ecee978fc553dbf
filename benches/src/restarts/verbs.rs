//! `verbs` part: additional time of a verb if the server has a state directory. Compares the
//! creation of an exported fork with and without a state directory, and a durable append to a file.

use std::fs::File;
use std::io::Write as _;
use std::time::Instant;

use anyhow::Result;
use freestone_report::{Report, Row, Summary, Target, Unit};
use serde_json::json;

use super::Bench;
use super::control::Control;
use super::home::{Home, unix};
use crate::measure::median;

const ROUNDS: u32 = 15;
const ROUNDS_QUICK: u32 = 3;
/// Forks per side in a round.
const FORKS: usize = 25;
const FORKS_QUICK: usize = 5;
const BASE_BYTES: u64 = 64 << 20;
/// Size in bytes of the measured append, about as large as that of a verb.
const LINE_BYTES: usize = 256;
/// Target for the additional time with a state directory, in milliseconds.
const COST_MAX_MS: f64 = 1.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Stateful,
    Stateless,
    Append,
}

const SIDES: [Side; 3] = [Side::Stateful, Side::Stateless, Side::Append];

pub(super) fn run(bench: &Bench<'_>) -> Result<Report> {
    let (rounds, forks) =
        (bench.options.rounds(ROUNDS, ROUNDS_QUICK), if bench.options.quick { FORKS_QUICK } else { FORKS });
    let homes = [Home::new(bench)?, Home::new(bench)?];
    let image = homes[0].file("base.img");
    File::create(&image)?.set_len(BASE_BYTES)?;
    let base = format!("base=file,path={},readonly=yes", image.display());
    let (_server_with_state, with) = homes[0].start(&homes[0].command_with_state(&[&base]))?;
    let (_server_without_state, without) = homes[1].start(&homes[1].command_without_state(&[&base]))?;
    let mut controls = [with, without];
    let mut file = File::options().append(true).create(true).open(homes[0].file("appended"))?;
    let mut millis = SIDES.map(|_| Vec::new());
    for round in 0..rounds as usize {
        let mut of_round = SIDES.map(|_| Vec::new());
        for number in 0..forks {
            let mut order = SIDES;
            order.rotate_left((round + number) % SIDES.len());
            for side in order {
                let started = Instant::now();
                match side {
                    Side::Append => append(&mut file)?,
                    _ => fork(&mut controls[side as usize], &homes[side as usize], number)?,
                }
                of_round[side as usize].push(started.elapsed().as_secs_f64() * 1e3);
            }
        }
        for control in &mut controls {
            for number in 0..forks {
                control.call("remove", &json!({ "name": format!("fork-{number}") }))?;
            }
        }
        for (all, of_round) in millis.iter_mut().zip(&of_round) {
            all.push(median(of_round));
        }
    }
    let [with, without, append] = millis;
    let added_millis: Vec<f64> = with.iter().zip(&without).map(|(with, without)| with - without).collect();
    let two_appends: Vec<f64> = append.iter().map(|once| once * 2.0).collect();
    let row = |what: &str, of: &[f64]| Row::new(what, Unit::Millis, Summary::of(of.iter().copied()));
    Ok(Report::new("restarts: verbs", "", 0, "")
        .note(format!(
            "A fork of a file, exported at its own Unix socket, over the control socket. {rounds} rounds with \
             {forks} forks per side, one at a time in turns; a round counts with its median. More: the \
             difference in the same round. A bare append: {LINE_BYTES} bytes appended to a file in the same \
             file system as the state directory, and fdatasync. A verb waits for two of these."
        ))
        .rows(vec![
            row("a fork with an export, without a state", &without),
            row("a fork with an export, with a state", &with),
            row("a bare append and fdatasync", &append),
            row("more with a state", &added_millis)
                .target(Target::AtMost(COST_MAX_MS))
                .part("two bare appends", median(&two_appends)),
            Row::ratio_of("more with a state / two bare appends", &added_millis, &two_appends).withhold_if_unsteady(),
        ]))
}

fn fork(control: &mut Control, home: &Home, number: usize) -> Result<()> {
    let name = format!("fork-{number}");
    let nbd_socket = unix(&home.socket(&name));
    control.call("fork", &json!({ "base": "base", "name": name, "nbd": nbd_socket })).map(drop)
}

fn append(file: &mut File) -> Result<()> {
    file.write_all(&[b'x'; LINE_BYTES])?;
    Ok(file.sync_data()?)
}
