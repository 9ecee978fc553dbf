//! The program of the benchmarks; all of it is in the library.

fn main() -> anyhow::Result<()> {
    freestone_benches::main()
}
