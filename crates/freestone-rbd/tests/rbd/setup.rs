//! Tests of errors from opening an image, and of their messages.

use std::time::Duration;

use freestone_rbd::{Config, Rbd};

use crate::harness::{Cluster, OLD};

const SIZE: u64 = 1 << 20;

fn open_error(config: &Config) -> String {
    Rbd::open(config).unwrap_err().to_string()
}

#[test]
fn missing_library_error_names_package() {
    let cluster = Cluster::new(SIZE);
    let empty = tempfile::tempdir().unwrap();
    let why = open_error(&Config { libraries: Some(empty.path().into()), ..cluster.config() });
    assert!(
        why.contains("librados.so.2 cannot be loaded; Debian's package librbd1 has it (")
            && !why.contains('\n'),
        "{why}"
    );
}

#[test]
fn old_library_error_names_missing_function() {
    let cluster = Cluster::new(SIZE);
    let why = open_error(&Config { libraries: Some(OLD.clone()), ..cluster.config() });
    assert!(why.contains("librbd.so.1 has no rbd_aio_write_zeroes; version 16"), "{why}");
}

#[test]
fn missing_objects_are_named() {
    let cluster = Cluster::new(SIZE);
    let config = cluster.config();
    let image = |text: &str| Config { image: text.parse().unwrap(), ..config.clone() };
    assert_eq!(open_error(&image("rbd/other")), "rbd/other: there is no such image");
    assert_eq!(open_error(&image("none/vm")), "pool none: there is no such pool");
    assert_eq!(open_error(&image("rbd/tenant/vm")), "rbd/tenant/vm: there is no such image");
    let snap = Config { snap: Some("monday".into()), ..config.clone() };
    assert_eq!(open_error(&snap), "rbd/vm@monday: there is no such image, or no such snapshot of it");
    let conf = Config { conf: Some("/none/ceph.conf".into()), ..config.clone() };
    assert_eq!(open_error(&conf), "conf=/none/ceph.conf: there is no such file");
    cluster.image("rbd.empty", 0);
    assert_eq!(open_error(&image("rbd/empty")), "rbd/empty: it is empty (0 bytes)");
    for (errno, why) in [
        (13, "the cluster refuses this user or its key, or the keyring was not found"),
        (2, "the keyring of the user, or the list of monitors, was not found"),
        (110, "no monitor answered in time"),
    ] {
        cluster.control(&format!("fail connect {errno}\n"));
        assert_eq!(open_error(&config), format!("cannot connect to the cluster: {why}"));
    }
}

/// The configuration of an image overrides that of the client.
#[test]
fn writable_image_with_cache_is_refused() {
    let cluster = Cluster::new(SIZE);
    cluster.control("fail rbd_cache 1\n");
    let why = open_error(&cluster.config());
    assert!(
        why.starts_with("rbd/vm: the configuration of the image or of its pool turns rbd_cache on"),
        "{why}"
    );
    drop(Rbd::open(&Config { read_only: true, ..cluster.config() }).unwrap());
    cluster.control("");
    drop(cluster.open());
}

#[test]
fn image_in_namespace_opens() {
    let cluster = Cluster::new(SIZE);
    cluster.image("rbd.tenant.vm", 2 * SIZE);
    let config = Config { image: "rbd/tenant/vm".parse().unwrap(), ..cluster.config() };
    let device = Rbd::open(&config).unwrap();
    assert_eq!(freestone_core::device::Device::geometry(&device).size, 2 * SIZE);
}

#[test]
fn timeouts_are_set_in_library() {
    let cluster = Cluster::new(SIZE);
    let config = Config { timeout: Duration::from_millis(2500), ..cluster.config() };
    drop(Rbd::open(&config).unwrap());
    let log = cluster.log();
    assert!(log.contains(&"set rbd_cache false".to_owned()), "{log:?}");
    for name in ["client_mount_timeout", "rados_mon_op_timeout", "rados_osd_op_timeout"] {
        assert!(log.contains(&format!("set {name} 3")), "{log:?}");
    }
}
