//! Entry point; the program is in the library.

fn main() -> anyhow::Result<()> {
    freestone_benches::main()
}
