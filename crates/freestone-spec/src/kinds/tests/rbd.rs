//! Tests of specifications of images in RBD.

use std::path::Path;
use std::time::Duration;

use crate::entries::Entries;
use crate::kinds::{KindSpec, RbdSpec, Spec};

fn rbd(keys: &str) -> RbdSpec {
    let spec: Spec = format!("d=rbd,{keys}").parse().unwrap();
    let KindSpec::Rbd(spec) = spec.kind else { panic!("{keys}") };
    *spec
}

#[test]
fn rbd_keys_parse() {
    let spec = rbd("image=rbd/vm");
    assert_eq!((spec.image.to_string().as_str(), spec.readonly), ("rbd/vm", false));
    assert_eq!((spec.conf, spec.id, spec.snap), (None, None, None));
    assert_eq!(spec.timeout, Duration::from_secs(120));
    let spec = rbd("image=rbd/tenant/vm,snap=monday,conf=/etc/x.conf,id=vm,timeout=5s,mem_limit=1G");
    assert_eq!((spec.snap.as_deref(), spec.id.as_deref(), spec.readonly), (Some("monday"), Some("vm"), true));
    assert_eq!(
        (spec.conf.as_deref(), spec.timeout),
        (Some(Path::new("/etc/x.conf")), Duration::from_secs(5))
    );
    assert_eq!(spec.family.mem_limit, Some(1 << 30));
    let based = Entries::parse("d=rbd,image=rbd/vm,conf=x.conf").unwrap().with_base(Path::new("/base"));
    assert_eq!(based.to_string(), "d=rbd,image=rbd/vm,conf=/base/x.conf");
}

#[test]
fn invalid_rbd_keys_are_refused() {
    for (text, sentence) in [
        ("d=rbd", "d: image is missing; an rbd device needs it, for example image=rbd/vm"),
        ("d=rbd,image=vm", "d: image=vm: must be POOL/NAME or POOL/NAMESPACE/NAME"),
        ("d=rbd,image=rbd/vm@monday", "d: image=rbd/vm@monday: a snapshot is named with snap=NAME"),
        ("d=rbd,image=rbd/vm,snap=", "d: snap=: must be a name"),
        ("d=rbd,image=rbd/vm,id=", "d: id=: must be a name"),
        ("d=rbd,image=rbd/vm,snap=a,readonly=no", "d: readonly=no: a snapshot of an image is only read"),
        ("d=rbd,image=rbd/vm,timeout=10ms", "d: timeout=10ms: must be 1s to 24h"),
        (
            "d=rbd,image=rbd/vm,mem_limit=1G",
            "d: mem_limit=1G: only with readonly=yes or snap; it is for the forks of the image",
        ),
    ] {
        assert_eq!(text.parse::<Spec>().unwrap_err().to_string(), sentence, "{text}");
    }
}
