// UNSAFETY: calls liblz4, and reads memory that is known to be initialised.
use super::*;
use freestone_core::percpu;

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
fn algorithms_round_trip() {
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
            // Decompressing a truncated object fails, and does not return a wrong page.
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

/// The outputs of all sizes: a page that does not fit is refused, and no byte behind the output is written.
#[test]
fn lz4_writes_only_to_the_output() {
    let mut compressor = lz4_page::PageCompressor::new(1);
    for page in pages() {
        let mut whole = [MaybeUninit::new(0xAA); PAGE_BYTES + 64];
        let size = compressor.compress(&page, &mut whole).unwrap();
        for room in (0..whole.len()).step_by(61).chain([size - 1, size, size + 1, size + 20]) {
            let mut out = [MaybeUninit::new(0xAA); PAGE_BYTES + 128];
            let written = compressor.compress(&page, &mut out[..room]);
            assert!(written.is_none_or(|written| written == size && size <= room), "{room}: {written:?}");
            // A sequence may need room for a copy of 16 bytes, of which it keeps fewer.
            assert!(written.is_some() || room < size + 16, "{room}");
            #[expect(unsafe_code)]
            // SAFETY: all bytes were initialised above.
            let behind = out[room..].iter().all(|byte| unsafe { byte.assume_init() } == 0xAA);
            assert!(behind, "{room}");
        }
    }
}

#[test]
fn lz4_blocks_are_as_small_as_those_of_liblz4() {
    let mut compressor = lz4_page::PageCompressor::new(1);
    let (mut own, mut reference) = (0, 0);
    for page in pages() {
        let mut out = [MaybeUninit::uninit(); PAGE_BYTES + 64];
        own += compressor.compress(&page, &mut out).unwrap();
        let mut out = [0_u8; PAGE_BYTES + 64];
        let (from, to) = (page.as_ptr().cast(), out.as_mut_ptr().cast());
        #[expect(unsafe_code)]
        // SAFETY: reads a page, and writes at most the size of `out`.
        let bytes = unsafe { lz4_sys::LZ4_compress_default(from, to, PAGE_BYTES as i32, out.len() as i32) };
        reference += bytes as usize;
    }
    assert!(own * 100 <= reference * 102, "{own} bytes, liblz4 {reference}");
}

/// The stream is built from the format description in the kernel's documentation.
#[test]
fn lzo_reads_reference_stream() {
    let streams = Streams::new(Algorithm::Lzo, &Params::default()).unwrap();
    // Three literals, then a match of 4093 bytes at distance 3, then the end. The match length is
    // 33 by the instruction, 255 for each zero, and the rest.
    let mut object = vec![17 + 3, b'a', b'b', b'c', 0x20];
    object.extend([0; 15]);
    object.extend([(4093 - 33 - 15 * 255) as u8, 2 << 2, 0, 0x11, 0, 0]);
    let mut page = [0; PAGE_BYTES];
    streams.decompress(&object, &mut page).unwrap();
    assert!(page == std::array::from_fn::<u8, PAGE_BYTES, _>(|i| b"abc"[i % 3]));
}

#[test]
fn decompress_damaged_object_does_not_panic() {
    for algorithm in [Algorithm::Lz4, Algorithm::Lzo, Algorithm::Zstd] {
        let streams = Streams::new(algorithm, &Params::default()).unwrap();
        let mut refused = 0;
        for (n, page) in pages().iter().enumerate() {
            let mut scratch = Scratch::new();
            let Some(object) = streams.compress(page, &mut scratch) else { continue };
            for at in 0..object.len() {
                let mut object = object.to_vec();
                object[at] ^= (1 + at * 7 + n) as u8 | 1;
                refused += usize::from(streams.decompress(&object, &mut [0; PAGE_BYTES]).is_err());
            }
        }
        assert!(refused > 100, "{algorithm}: {refused}");
    }
}

#[test]
fn dictionary_shrinks_objects() {
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
fn streams_are_bounded_by_cpus() {
    let streams = Streams::new(Algorithm::Lz4, &Params::default()).unwrap();
    let before = streams.bytes();
    assert_eq!(streams.per_cpu.iter().len(), percpu::cpus());
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
fn compress_takes_no_page_fault() {
    // Field 10 of the thread's stat counts minor faults. The file is read without an allocation,
    // which could cause a fault itself.
    fn faults() -> u64 {
        let mut stat = [0; 1024];
        let len = std::io::Read::read(&mut std::fs::File::open("/proc/thread-self/stat").unwrap(), &mut stat)
            .unwrap();
        let stat = std::str::from_utf8(&stat[..len]).unwrap();
        stat.rsplit_once(") ").unwrap().1.split(' ').nth(7).unwrap().parse().unwrap()
    }
    faults();
    for algorithm in Algorithm::ALL {
        let [first, streams] = [(); 2].map(|()| Streams::new(algorithm, &Params::default()).unwrap());
        let pages = pages();
        let mut scratch = Scratch::new();
        touch::scratch(&mut scratch);
        // The first use of an algorithm maps its code.
        for page in &pages {
            first.compress(page, &mut scratch);
        }
        // Test the streams of all CPUs, not only that of this CPU.
        for stream in streams.per_cpu.iter() {
            let mut stream = stream.lock();
            let before = faults();
            for page in &pages {
                stream.compress(page, &mut scratch.0);
            }
            assert_eq!(faults() - before, 0, "{algorithm}");
        }
    }
}

#[test]
fn streams_share_one_dictionary() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = pages().concat();
    std::fs::write(file.path(), &bytes).unwrap();
    let params = Params::parse(&format!("dict={}", file.path().display())).unwrap();
    let with = Streams::new(Algorithm::Zstd, &params).unwrap();
    let digest = with.digest.as_ref().unwrap();
    // There is one reference per CPU, and `digest` in the streams.
    assert_eq!(Arc::strong_count(digest), percpu::cpus() + 1);
    let streams: u64 = with.per_cpu.iter().map(|stream| stream.lock().bytes() as u64).sum();
    assert_eq!(with.bytes(), streams + (bytes.len() + digest.bytes()) as u64);
    for stream in with.per_cpu.iter() {
        let stream = stream.lock().bytes();
        assert!(
            stream < bytes.len() + digest.bytes(),
            "{stream} bytes: a stream has a dictionary of its own"
        );
    }
    // The per-CPU streams keep the digested dictionary alive.
    let weak = Arc::downgrade(digest);
    let Streams { per_cpu, digest: own, .. } = with;
    drop(own);
    assert!(weak.upgrade().is_some());
    drop(per_cpu);
    assert!(weak.upgrade().is_none());
}

#[test]
fn trained_dictionary_shrinks_pages() {
    // Pages whose words repeat in other pages rather than within a page.
    let mut state = 1_u64;
    let words: Vec<[u8; 16]> = (0..2048)
        .map(|_| {
            std::array::from_fn(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 33) as u8
            })
        })
        .collect();
    let page =
        |n: usize| -> Page { std::array::from_fn(|i| words[(n * 7919 + i / 16 * 31) % words.len()][i % 16]) };
    let samples: Vec<u8> = (0..1024).flat_map(page).collect();
    let dictionary = Dictionary::train(&samples, &vec![PAGE_BYTES; 1024], 32 << 10).unwrap();
    let params = Params { dictionary: Some(dictionary), ..Params::default() };
    let (plain, with) = (
        Streams::new(Algorithm::Zstd, &Params::default()).unwrap(),
        Streams::new(Algorithm::Zstd, &params).unwrap(),
    );
    let (mut a, mut b) = (Scratch::new(), Scratch::new());
    let mut sums = [0; 2];
    for n in 2000..2100 {
        let page = page(n);
        sums[0] += plain.compress(&page, &mut a).map_or(PAGE_BYTES, <[u8]>::len);
        let object = with.compress(&page, &mut b).unwrap();
        sums[1] += object.len();
        let mut back = [0; PAGE_BYTES];
        with.decompress(object, &mut back).unwrap();
        assert!(back == page);
    }
    assert!(sums[1] * 4 < sums[0] * 3, "{sums:?} bytes without and with the dictionary");
}

#[test]
fn codecs_set_twice_fails() {
    let streams = |algorithm| Arc::new(Streams::new(algorithm, &Params::default()).unwrap());
    let codecs = Codecs::new(streams(Algorithm::Lz4));
    let page = &pages()[0];
    let mut back = [0; PAGE_BYTES];
    let (mut lz4, mut zstd) = (Scratch::new(), Scratch::new());
    let lz4 = codecs.primary().compress(page, &mut lz4).unwrap();
    codecs.decompress(0, lz4, &mut back).unwrap();
    assert!(back == *page);
    for unset in 1..5 {
        assert_eq!(codecs.decompress(unset, lz4, &mut back), Err(Error::Media));
    }
    let before = codecs.bytes();
    codecs.set(2, streams(Algorithm::Zstd)).unwrap();
    assert_eq!(codecs.set(2, streams(Algorithm::Lz4hc)), Err(SetError::Taken(2)));
    assert_eq!(codecs.set(0, streams(Algorithm::Lz4hc)), Err(SetError::Range(0)));
    assert_eq!(codecs.set(4, streams(Algorithm::Lz4hc)), Err(SetError::Range(4)));
    assert!(codecs.bytes() > before);
    let set: Vec<_> = codecs.secondary().map(|(priority, streams)| (priority, streams.algorithm())).collect();
    assert_eq!(set, [(2, Algorithm::Zstd)]);
    let zstd = codecs.get(2).unwrap().compress(page, &mut zstd).unwrap();
    codecs.decompress(2, zstd, &mut back).unwrap();
    assert!(back == *page);
    assert_eq!(codecs.decompress(0, zstd, &mut back), Err(Error::Media));
}
