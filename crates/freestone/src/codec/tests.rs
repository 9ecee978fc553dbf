use super::*;

fn pages() -> Vec<Page> {
    let mut state = 7_u64;
    let mut next = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u8
    };
    (0..64)
        .map(|n| {
            let noisy = n * PAGE_BYTES / 80;
            std::array::from_fn(|i| if i < noisy { next() } else { b"the quick brown fox "[i % 20] })
        })
        .collect()
}

fn dictionary() -> (tempfile::NamedTempFile, Params) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), b"the quick brown fox the quick brown fox ".repeat(20)).unwrap();
    let params = Params::parse(&format!("dict={}", file.path().display())).unwrap();
    (file, params)
}

#[test]
fn every_algorithm_gives_back_what_it_took() {
    let (_file, with_dictionary) = dictionary();
    for (algorithm, params) in
        Algorithm::ALL.map(|a| (a, Params::default())).into_iter().chain([(Algorithm::Zstd, with_dictionary)])
    {
        let streams = Streams::new(algorithm, &params).unwrap();
        let mut compressed = 0;
        for page in pages() {
            let mut scratch = Scratch::new();
            let Some(object) = streams.compress(&page, &mut scratch) else { continue };
            compressed += 1;
            assert!(object.len() <= Scratch::BYTES);
            let mut back = [0; PAGE_BYTES];
            streams.decompress(object, &mut back).unwrap();
            assert!(back == page, "{algorithm}");
            // Cut short or followed by garbage it is an error, not a wrong page.
            assert_eq!(
                streams.decompress(&object[..object.len() - 1], &mut back),
                Err(Error::Media),
                "{algorithm}"
            );
        }
        assert_eq!(
            compressed > 40,
            algorithm != Algorithm::Store,
            "{algorithm} compressed {compressed} pages"
        );
    }
}

#[test]
fn a_dictionary_pays() {
    let (_file, params) = dictionary();
    let (plain, with) = (
        Streams::new(Algorithm::Zstd, &Params::default()).unwrap(),
        Streams::new(Algorithm::Zstd, &params).unwrap(),
    );
    let page = &pages()[0];
    let (mut a, mut b) = (Scratch::new(), Scratch::new());
    let (plain, with) =
        (plain.compress(page, &mut a).unwrap().len(), with.compress(page, &mut b).unwrap().len());
    assert!(with < plain, "{with} bytes with the dictionary, {plain} without");
}

#[test]
fn memory_is_bounded_by_cpus() {
    let streams = Streams::new(Algorithm::Lz4, &Params::default()).unwrap();
    let before = streams.bytes();
    assert_eq!(streams.per_cpu.len(), percpu::cpus());
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                for page in pages() {
                    streams.compress(&page, &mut Scratch::new());
                }
            });
        }
    });
    assert_eq!(streams.bytes(), before);
}

#[test]
fn no_page_fault_is_taken_under_a_stream() {
    // Field 10 of the thread's stat is its count of minor faults. Read without allocating, which could fault itself.
    fn faults() -> u64 {
        let mut stat = [0; 1024];
        let len = std::io::Read::read(&mut std::fs::File::open("/proc/thread-self/stat").unwrap(), &mut stat)
            .unwrap();
        let stat = std::str::from_utf8(&stat[..len]).unwrap();
        stat.rsplit_once(") ").unwrap().1.split(' ').nth(7).unwrap().parse().unwrap()
    }
    faults();
    for algorithm in Algorithm::ALL {
        let streams = Streams::new(algorithm, &Params::default()).unwrap();
        let pages = pages();
        let mut scratch = Scratch::new();
        touch::scratch(&mut scratch);
        // Every CPU's stream, whichever this thread runs on.
        for stream in &streams.per_cpu {
            let mut stream = stream.lock();
            let before = faults();
            for page in &pages {
                stream.compress(page, &mut scratch.0);
            }
            assert_eq!(faults() - before, 0, "{algorithm}");
        }
    }
}
