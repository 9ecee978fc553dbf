//! Tests of `serve`.

use freestone_nbd::{CONNECTION_MEMORY_BYTES, Limits};

use super::MAX_CONNECTIONS_HELP;

#[test]
fn help_states_default_and_memory_of_connections() {
    let (most, memory) = (Limits::default().max_connections, CONNECTION_MEMORY_BYTES.div_ceil(1 << 20));
    assert!(MAX_CONNECTIONS_HELP.contains(&format!("{memory} MiB of buffers [default: {most}]")));
}
