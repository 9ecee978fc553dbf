//! Checks that the device matches a model, whenever the server cuts connections.

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Step {
    Write(u64, u64, u8, bool),
    Zeroes(u64, u64, bool),
    Read(u64, u64),
    Flush,
    Cut,
    CutSoon,
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0_u64..120, 1_u64..8);
    prop_oneof![
        4 => (range(), any::<u8>(), any::<bool>()).prop_map(|((at, len), byte, fua)| {
            Step::Write(at, len, byte, fua)
        }),
        1 => (range(), any::<bool>()).prop_map(|((at, len), free)| Step::Zeroes(at, len, free)),
        3 => range().prop_map(|(at, len)| Step::Read(at, len)),
        1 => Just(Step::Flush),
        1 => Just(Step::Cut),
        1 => Just(Step::CutSoon),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if std::env::var_os("PROPTEST_CASES").is_some() { ProptestConfig::default().cases } else { 24 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn device_matches_model_across_cuts(steps in prop::collection::vec(step(), 1..40)) {
        let machine = CrashServer::new();
        let device = machine.open(LONG);
        let mut model = vec![0; 64 << 10];
        let mut dirty = false;
        let mut cut = false;
        std::thread::scope(|scope| {
            let mut cutters = Vec::new();
            for step in &steps {
                match *step {
                    Step::Write(at, len, byte, fua) => {
                        let flags = if fua { Flags::FUA } else { Flags::empty() };
                        let range = (at * 512) as usize..((at + len) * 512) as usize;
                        model[range.clone()].fill(byte);
                        device.write_at(at * 512, &model[range], flags).unwrap();
                        dirty |= !fua;
                    }
                    Step::Zeroes(at, len, free) => {
                        let flags = if free { Flags::MAY_FREE } else { Flags::empty() };
                        model[(at * 512) as usize..((at + len) * 512) as usize].fill(0);
                        device.write_zeroes(at * 512, len * 512, flags).unwrap();
                        dirty = true;
                    }
                    Step::Read(at, len) => {
                        let mut data = vec![1; (len * 512) as usize];
                        device.read_at(at * 512, &mut data).unwrap();
                        assert!(data == model[(at * 512) as usize..((at + len) * 512) as usize]);
                    }
                    // A flush may fail only if a connection was cut, or is about to be.
                    Step::Flush => {
                        cutters.retain(|cutter: &std::thread::ScopedJoinHandle<'_, ()>| !cutter.is_finished());
                        match device.flush() {
                            Ok(()) => (dirty, cut) = (false, !cutters.is_empty()),
                            Err(error) => {
                                assert!(error == Error::Media && dirty && cut);
                                cut = !cutters.is_empty();
                            }
                        }
                    }
                    Step::Cut => {
                        machine.cut();
                        cut = true;
                    }
                    Step::CutSoon => {
                        cut = true;
                        let machine = &machine;
                        cutters.push(scope.spawn(move || {
                            std::thread::sleep(Duration::from_micros(300));
                            machine.cut();
                        }));
                    }
                }
            }
        });
    }
}
