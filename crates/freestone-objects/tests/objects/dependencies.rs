//! Checks the build dependencies: one cryptography library, and no C code that needs more than a compiler.

use std::process::Command;

#[test]
fn neither_openssl_nor_aws_lc_is_built() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["tree", "--locked", "--offline", "--edges", "normal,build", "--prefix", "none"]);
    command.args(["--package", env!("CARGO_PKG_NAME"), "--manifest-path"]);
    let output = command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let names: Vec<_> = text.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(names.contains(&"ring") && names.contains(&"rustls"), "{names:?}");
    for name in ["openssl", "openssl-sys", "native-tls", "cmake", "bindgen", "icu_normalizer"] {
        assert!(!names.contains(&name), "{name} is built");
    }
    assert!(!names.iter().any(|name| name.starts_with("aws-lc")), "{names:?}");
}
