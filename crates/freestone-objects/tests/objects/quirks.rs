//! Tests with object stores whose conditional writes differ from HTTP: each is supported or refused.

use std::sync::Arc;

use freestone_objects::{Options, open};
use freestone_store::format::domain::GRACE;
use freestone_store::format::name::Name;
use freestone_store::format::tag::Tag;
use freestone_store::objects::{Fault, Objects, WriteCondition};
use freestone_store::store::{CreateOptions, Error, Store as Images};
use freestone_testkit::s3::{Conditions, S3Request, Server, ServerFault};

use crate::{Store, soon};

const BEGIN: CreateOptions = CreateOptions { encrypted: false, grace: GRACE };

type Quirk = (&'static str, Conditions, fn(&S3Request<'_>) -> bool, Option<ServerFault>);

fn server(conditions: Conditions, when: fn(&S3Request<'_>) -> bool, trouble: Option<ServerFault>) -> Server {
    let server = Server::start(&["disks"]);
    server.set_conditions(conditions);
    if let Some(trouble) = trouble {
        server.add_fault(when, trouble);
    }
    server
}

fn objects(server: &Server) -> Arc<dyn Objects> {
    let options = Options { endpoint: Some(server.endpoint()), anonymous: true, ..Options::default() };
    open("s3://disks/images", &options).unwrap()
}

fn set_tag(store: &Images, generation: u64) -> Result<(), Error> {
    let before = store.tag("v1", soon())?;
    let tag = Tag::new(store.domain(), "v1", Name([generation as u8; 32]), generation, 0);
    store.set_tag("v1", before.as_ref(), &tag, soon())
}

/// Each object store accepts repeated updates of a tag, and refuses an update if the tag has changed.
#[test]
fn quirky_store_takes_tags() {
    let first_put = |asked: &S3Request<'_>| asked.method == "PUT" && asked.nth == 1;
    let every_third_put = |asked: &S3Request<'_>| asked.method == "PUT" && asked.nth % 3 == 1;
    let never = |_: &S3Request<'_>| false;
    let quirks: [Quirk; 10] = [
        ("any form of a tag", Conditions::Any, never, None),
        ("tags with quotes", Conditions::Quoted, never, None),
        ("tags without quotes", Conditions::Bare, never, None),
        (
            "conflict",
            Conditions::Quoted,
            first_put,
            Some(ServerFault::Status(409, "ConditionalRequestConflict")),
        ),
        ("conflicts", Conditions::Bare, every_third_put, Some(ServerFault::Status(409, "OperationAborted"))),
        ("busy", Conditions::Quoted, first_put, Some(ServerFault::Status(503, "SlowDown"))),
        ("lost answer", Conditions::Quoted, first_put, Some(ServerFault::ResetAfter)),
        (
            "error after a write",
            Conditions::Bare,
            every_third_put,
            Some(ServerFault::StatusAfter(500, "Internal")),
        ),
        ("error in a good answer", Conditions::Quoted, first_put, Some(ServerFault::Status(200, "Internal"))),
        (
            "errors in good answers",
            Conditions::Quoted,
            every_third_put,
            Some(ServerFault::Status(200, "Internal")),
        ),
    ];
    for (name, conditions, when, trouble) in quirks {
        let server = server(conditions, when, trouble);
        let (store, _) = Images::open_or_create(objects(&server), None, BEGIN, soon())
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        for generation in 1..=5 {
            set_tag(&store, generation).unwrap_or_else(|error| panic!("{name}: {generation}: {error}"));
            assert_eq!(store.tag("v1", soon()).unwrap().unwrap().tag.generation, generation, "{name}");
        }
        // Another process changes the tag.
        let before = store.tag("v1", soon()).unwrap();
        let (other, _) = Images::open_or_create(objects(&server), None, BEGIN, soon()).unwrap();
        set_tag(&other, 6).unwrap();
        let tag = Tag::new(store.domain(), "v1", Name([7; 32]), 7, 0);
        let moved = store.set_tag("v1", before.as_ref(), &tag, soon());
        assert_eq!(moved, Err(Error::TagMoved("v1".to_owned())), "{name}");
        let absent = store.set_tag("v1", None, &tag, soon());
        assert_eq!(absent, Err(Error::TagMoved("v1".to_owned())), "{name}");
    }
}

#[test]
fn store_without_conditions_is_not_created() {
    for (conditions, why) in [
        (Conditions::Ignored, "the store ignores If-None-Match"),
        (Conditions::IfMatchIgnored, "the store ignores If-Match"),
        (Conditions::NeverMatch, "answers 412 PreconditionFailed to a write whose condition holds"),
        (Conditions::Unknown, "answers 501 NotImplemented"),
    ] {
        let server = server(conditions, |_| false, None);
        let refused = Images::open_or_create(objects(&server), None, BEGIN, soon());
        let Err(error) = refused else { panic!("{conditions:?}: was begun") };
        assert!(matches!(error, Error::Object { fault: Fault::Unsupported(_), .. }), "{error}");
        assert!(error.to_string().contains(why), "{error}");
        assert_eq!(server.object("disks", "images/freestone.json"), None, "{conditions:?}");
    }
}

#[test]
fn tag_form_is_remembered() {
    for conditions in [Conditions::Quoted, Conditions::Bare] {
        let Store { server, objects, _dir } = &Store::new();
        server.set_conditions(conditions);
        let mut version = objects.put("t", b"0", WriteCondition::Absent, soon()).unwrap().unwrap();
        for round in 1..=5_u8 {
            version =
                objects.put("t", &[round], WriteCondition::Unchanged(&version), soon()).unwrap().unwrap();
        }
        let extra = u64::from(conditions == Conditions::Bare);
        assert_eq!(server.traffic().of("PUT"), 6 + extra, "{conditions:?}");
        assert_eq!(server.traffic().of("HEAD"), extra, "{conditions:?}");
    }
}
