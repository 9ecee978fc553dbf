//! The program `freestone`: serves devices over NBD and controls a running server.

#[macro_use]
extern crate freestone_control;

mod cli;
mod client;
mod error;
mod explore;
mod help;
mod mounts;
mod output;
mod pidfd;
#[doc(hidden)]
pub mod reference;
mod serve;
mod verbs;

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal as _};
use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory as _, FromArgMatches as _};
use freestone::device::{REQUEST_SPANS, span_requests};
use freestone_server::verbs::{content, devices, drives, jobs, status};
use freestone_spec::aliases;
use tracing::Level;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::prelude::*;

use cli::{Cli, Command, DeltaCommand};
use client::long::{LongCall, ask_long};
use client::names::{CallMode, Order, ask_each};
use client::{Call, ask, ask_in_parts};
#[doc(hidden)]
pub use freestone_server::inputs;

/// Runs the program: parses the command line, runs the subcommand, and returns the exit status.
pub fn main() -> ExitCode {
    let args: Vec<OsString> = env::args_os().collect();
    if let Some(text) = help_of_topic(&args) {
        return help::print(&text);
    }
    let (args, renamed) = with_present_names(args);
    let cli = parser().try_get_matches_from(args).and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = cli.unwrap_or_else(|error| error::exit_with_usage_error(&error));
    start_log(&cli);
    for (former, present) in renamed {
        tracing::warn!("{former}: is deprecated, use {present}");
    }
    if let Err(error) = serve::survive_file_size_limit() {
        tracing::warn!("cannot handle SIGXFSZ, so the file size limit would end the program: {error}");
    }
    let code = match run(cli.command) {
        Ok(code) => code,
        Err(error) if error::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            error::print_error(&error);
            ExitCode::from(error::status(&error))
        }
    };
    output::flush();
    code
}

/// Returns the parser of the command line, for manual pages and completions.
#[doc(hidden)]
pub fn parser() -> clap::Command {
    help::grouped(Cli::command())
}

/// Returns the help for `freestone help TOPIC`, if the topic is not a subcommand.
fn help_of_topic(args: &[OsString]) -> Option<String> {
    let [_, help, topic] = args else { return None };
    if help != "help" {
        return None;
    }
    help::devices::topic(topic.to_str()?, &Cli::command())
}

/// Replaces deprecated option names. Returns the arguments, and each replaced argument with its present form.
fn with_present_names(args: Vec<OsString>) -> (Vec<OsString>, Vec<(String, String)>) {
    let mut replaced = Vec::new();
    let mut is_option = true;
    let args = args.into_iter().map(|arg| {
        is_option &= arg != "--";
        let Some(former) = arg.to_str().filter(|_| is_option) else { return arg };
        let Some(present) = aliases::canonical_option(former) else { return arg };
        replaced.push((former.to_owned(), present.clone()));
        present.into()
    });
    let args = args.collect();
    (args, replaced)
}

/// Returns the reference of device kinds, for a manual page.
#[doc(hidden)]
pub fn device_help() -> String {
    help::devices::all()
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Serve(args) => return serve::serve(&args),
        Command::Hold(line) => verbs::hold::hold(&line),
        Command::UblkOwner(line) => return verbs::ublk_owner::print_owner(&line),
        Command::Wait(call) => verbs::wait::wait(&call.args, &call.common),
        Command::Upgrade(call) => verbs::upgrade::ask(&call.args, &call.common),
        Command::Shutdown(call) => verbs::shutdown::ask(&call.args, &call.common),
        Command::List(call) => ask::<status::list::List>(&call.args, &call.common),
        Command::Stat(call) => return verbs::stat::ask(&call.args, &call.common),
        Command::Top(call) => verbs::top::ask(&call.args, &call.common),
        Command::Get(call) => ask::<devices::get::Get>(&call.args.with_present_name(), &call.common),
        Command::Set(call) => ask::<devices::set::Set>(&call.args.try_into()?, &call.common),
        Command::Create(call) => ask::<devices::create::Create>(&call.args.checked()?, &call.common),
        Command::Remove(LongCall { args, long, common }) => {
            let of = |name: &str| args.of(name);
            return ask_each::<devices::remove::Remove>(
                &args.names,
                Order::LastFirst,
                of,
                CallMode::Long(&long),
                &common,
            );
        }
        Command::Reset(Call { args, common }) => {
            let of = |name: &str| args.of(name);
            let manner = CallMode::CallWrapper(mounts::remount::around);
            return ask_each::<devices::reset::Reset>(&args.names, Order::Named, of, manner, &common);
        }
        Command::Compact(LongCall { args, long, common }) => {
            return ask_long::<content::compact::Compact>(&args, &long, &common);
        }
        Command::Idle(call) => ask::<content::idle::Idle>(&call.args, &call.common),
        Command::Writeback(LongCall { args, long, common }) => {
            return ask_long::<content::writeback::Writeback>(&args.try_into()?, &long, &common);
        }
        Command::Recompress(LongCall { args, long, common }) => {
            return ask_long::<content::recompress::Recompress>(&args.try_into()?, &long, &common);
        }
        Command::Push(LongCall { args, long, common }) => {
            if args.is_local() {
                return verbs::push_here::push_here(args, &long, &common);
            }
            return ask_long::<content::push::Push>(&args.try_into()?, &long, &common);
        }
        Command::Pull(LongCall { args, long, common }) => {
            return ask_long::<content::pull::Pull>(&args.checked()?, &long, &common);
        }
        Command::Trace(call) => ask::<content::trace::Trace>(&call.args, &call.common),
        Command::Images(line) => verbs::images::images(&line),
        Command::Prune(line) => return verbs::prune::prune(&line),
        Command::Publish(call) => ask::<devices::publish::Publish>(&call.args.checked()?, &call.common),
        Command::Fork(call) => ask::<devices::fork::Fork>(&call.args.checked()?, &call.common),
        Command::Snapshot(call) => ask::<devices::snapshot::Snapshot>(&call.args.try_into()?, &call.common),
        Command::Merge(LongCall { args, long, common }) => {
            return ask_long::<devices::merge::Merge>(&args.checked()?, &long, &common);
        }
        Command::Delta(DeltaCommand::Show(call)) => ask::<content::delta::Show>(&call.args, &call.common),
        Command::Delta(DeltaCommand::Save(LongCall { args, long, common })) => {
            return ask_long::<content::delta::Save>(&args.checked()?, &long, &common);
        }
        Command::Delta(DeltaCommand::Apply(LongCall { args, long, common })) => {
            return ask_long::<content::delta::Apply>(&args.checked()?, &long, &common);
        }
        Command::Save(LongCall { args, long, common }) => {
            return ask_long::<content::save::Save>(&args.checked()?, &long, &common);
        }
        Command::Restore(LongCall { args, long, common }) => {
            return ask_long::<content::restore::Restore>(&args.checked()?, &long, &common);
        }
        Command::Jobs(call) => ask::<jobs::jobs::AllJobs>(&call.args.into(), &call.common),
        Command::Dump(call) => ask::<devices::dump::Dump>(&call.args, &call.common),
        Command::Apply(call) => ask::<devices::apply::Apply>(&call.args.checked()?, &call.common),
        Command::Cancel(call) => ask::<jobs::cancel::Cancel>(&call.args.into(), &call.common),
        Command::Rewind(Call { args, common }) => {
            let of = |name: &str| args.of(name);
            let manner = CallMode::CallWrapper(mounts::remount::around);
            return ask_each::<devices::rewind::Rewind>(&args.names, Order::Named, of, manner, &common);
        }
        Command::BlockState(call) => {
            let next = content::block_state::Params::next;
            ask_in_parts::<content::block_state::BlockState>(call.args, next, &call.common)
        }
        Command::Zones(call) => ask::<drives::zones::Zones>(&call.args, &call.common),
        Command::PowerCut(call) => ask::<drives::power_cut::PowerCut>(&call.args, &call.common),
        Command::Mark(call) => ask::<drives::mark::Mark>(&call.args, &call.common),
        Command::Explore(line) => return explore::run(&line),
        Command::Release(call) => ask::<drives::release::Release>(&call.args, &call.common),
        Command::Mount(call) => mounts::mount::ask(&call.args, &call.common),
        Command::Umount(call) => return mounts::umount::ask(&call.args, &call.common),
        Command::Unpublish(call) => ask::<devices::unpublish::Unpublish>(&call.args, &call.common),
    }?;
    Ok(ExitCode::SUCCESS)
}

/// Returns true if an environment variable is set and not empty (<https://no-color.org>).
fn is_set(variable: Option<&OsStr>) -> bool {
    variable.is_some_and(|value| !value.is_empty())
}

fn start_log(cli: &Cli) {
    let level = match (cli.quiet, cli.verbose) {
        (true, _) => LevelFilter::ERROR,
        (false, 0) => LevelFilter::WARN,
        (false, 1) => LevelFilter::INFO,
        (false, 2) => LevelFilter::DEBUG,
        (false, _) => LevelFilter::TRACE,
    };
    let targets: Option<Targets> = env::var("RUST_LOG").ok().and_then(|text| text.parse().ok());
    let targets = targets.unwrap_or_else(|| Targets::new().with_default(level));
    if targets.would_enable(REQUEST_SPANS, &Level::TRACE) {
        span_requests();
    }
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(|| output::Stderr)
        .with_ansi(io::stderr().is_terminal() && !is_set(env::var_os("NO_COLOR").as_deref()))
        // Otherwise the layer reports a failed write with `eprintln!`, which panics if stderr is closed.
        .log_internal_errors(false)
        // Logs a span when it closes: otherwise requests, which are spans without events, are not logged.
        .with_span_events(FmtSpan::CLOSE)
        .with_filter(targets);
    tracing_subscriber::registry().with(lines).init();
}
