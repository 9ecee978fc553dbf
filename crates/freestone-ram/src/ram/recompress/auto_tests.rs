//! Tests of automatic recompression, step by step.

use super::super::sample::{SAMPLE_PAGES, Sample};
use super::*;
use crate::ram::tests::config;
use crate::ram::{Config, Ram, RecompressError, RecompressOptions, Secondary};
use freestone_core::device::{Blocking, Flags};

/// Age at which pages are recompressed: longer than any test runs, so that only [`grow_old`] makes
/// pages old.
const AGE: Duration = Duration::from_secs(24 * 3600);

fn disk(pages: u64) -> Ram {
    Ram::new(Config { auto_recompress: Some(AGE), ..config(pages * PAGE) }).unwrap()
}

/// Returns a page of words from a vocabulary that all pages share: 1500 words of 12 bytes.
fn page(seed: u64) -> Page {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut word = 0;
    std::array::from_fn(|i| {
        if i % 12 == 0 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            // Repeat one word often, so that lz4 can compress the page.
            word = if state >> 62 == 0 { 7 } else { (state >> 33) % 1500 };
        }
        ((word * 12 + i as u64 % 12 + 1).wrapping_mul(0xD6E8_FEB8_6659_FD93) >> 40) as u8
    })
}

fn write(ram: &Ram, slots: std::ops::Range<u64>) {
    for slot in slots {
        ram.write_at(slot * PAGE, &page(slot), Flags::empty()).unwrap();
    }
}

/// Sets the ages of the pages in these slots to the oldest age.
fn grow_old(ram: &Ram, slots: std::ops::Range<u64>) {
    for slot in slots {
        {
            let layer = ram.0.layer();
            let guard = layer.table().leaf(slot).unwrap().lock(slot);
            let old = guard.word().with_age(0);
            guard.publish(old);
        }
    }
}

fn steps_until(ram: &Ram, mut done: impl FnMut(AutoRecompressStat) -> bool) {
    let began = Instant::now();
    while !done(ram.auto_recompress_stat()) {
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", ram.auto_recompress_stat());
        ram.0.family.auto.step();
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn word(ram: &Ram, slot: u64) -> Word {
    ram.0.layer().table().leaf(slot).map_or(Word::EMPTY, |leaf| leaf.peek(slot))
}

#[test]
fn auto_recompress_trains_dictionary_and_shrinks() {
    const PAGES: u64 = 3000;
    let ram = disk(4096);
    write(&ram, 0..PAGES);
    grow_old(&ram, 100..PAGES);
    {
        let layer = ram.0.layer();
        let guard = layer.table().leaf(200).unwrap().lock(200);
        let marked = guard.word().with_idle(true);
        guard.publish(marked);
    }
    let before = ram.mm_stat();
    steps_until(&ram, |done| done.dictionary_bytes > 0);
    let ages: Vec<u8> = (0..PAGES).map(|slot| word(&ram, slot).age()).collect();
    steps_until(&ram, |done| done.pages == PAGES - 100);
    // The following steps compact the pool.
    let mut steps = 0;
    steps_until(&ram, |_| {
        steps += 1;
        steps > 20
    });
    let (done, after) = (ram.auto_recompress_stat(), ram.mm_stat());
    assert_eq!(after.compr_data_size, before.compr_data_size - done.saved_bytes);
    assert!(done.saved_bytes > before.compr_data_size / 3, "{done:?} of {before:?}");
    assert!(before.mem_used_total - after.mem_used_total > done.saved_bytes * 9 / 10, "{before:?} {after:?}");
    assert!(done.dictionary_bytes <= DICTIONARY_BYTES as u64);
    assert!(ram.memory_overhead().streams_bytes > done.dictionary_bytes);
    for slot in 0..PAGES {
        let word = word(&ram, slot);
        assert_eq!(word.algorithm(), if slot < 100 { 0 } else { 3 }, "slot {slot}");
        // Recompression changed neither ages nor idle marks.
        assert_eq!((word.age(), word.is_idle(), word.is_picked()), (ages[slot as usize], slot == 200, false));
        let mut back = [0; PAGE_BYTES];
        ram.read_at(slot * PAGE, &mut back).unwrap();
        assert!(back == page(slot), "slot {slot}");
    }
    // The dictionary survives a reset; the statistics do not.
    ram.reset().unwrap();
    ram.0.family.auto.clear();
    assert_eq!(
        ram.auto_recompress_stat(),
        AutoRecompressStat { dictionary_bytes: done.dictionary_bytes, ..Default::default() }
    );
    write(&ram, 0..50);
    grow_old(&ram, 0..50);
    steps_until(&ram, |done| done.pages == 50);
}

#[test]
fn auto_recompress_small_sample_is_not_trained() {
    let ram = disk(4096);
    write(&ram, 0..500);
    grow_old(&ram, 0..500);
    for _ in 0..20 {
        ram.0.family.auto.step();
    }
    assert_eq!(ram.auto_recompress_stat(), AutoRecompressStat::default());
    assert!(ram.0.family.auto.state.lock().training.is_none());
    assert!(ram.0.pages.codecs.get(3).is_none());
    // Young pages are not used for training, even if there are enough of them.
    write(&ram, 0..3000);
    for _ in 0..20 {
        ram.0.family.auto.step();
    }
    assert!(ram.0.family.auto.state.lock().training.is_none());
}

#[test]
fn auto_recompress_skips_step_during_other_work() {
    let ram = disk(4096);
    write(&ram, 0..3000);
    grow_old(&ram, 0..3000);
    let other = ram.0.pages.background.lock();
    ram.0.family.auto.step();
    assert_eq!(ram.0.family.auto.state.lock().sample.seen, 0);
    drop(other);
    ram.0.family.auto.step();
    assert!(ram.0.family.auto.state.lock().training.is_some());
}

#[test]
fn train_useless_dictionary_is_dropped() {
    // Pages of noise with nothing in common, for which a dictionary is useless.
    let noise = |seed| -> Page {
        let bytes = crate::ram::tests::content(5, seed, PAGE_BYTES);
        std::array::from_fn(|i| if i % 16 < 8 { 0 } else { bytes[i] })
    };
    let pages: Vec<Page> = (0..1024).map(noise).collect();
    let streams = train(&pages).unwrap();
    assert!(streams.dictionary().is_none());
    // Too few pages to train a dictionary.
    assert!(train(&pages[..3]).unwrap().dictionary().is_none());
    assert!(train(&[]).unwrap().dictionary().is_none());
    let pages: Vec<Page> = (0..1024).map(page).collect();
    assert!(train(&pages).unwrap().dictionary().is_some());
}

#[test]
fn sample_is_uniform() {
    let mut sample = Sample::default();
    for slot in 0..100_000 {
        sample.offer((0, slot), Word::compressed(0, 1000, 0));
    }
    assert_eq!((sample.seen, sample.bytes), (100_000, 100_000_000));
    assert_eq!(sample.pages.len(), SAMPLE_PAGES);
    for tenth in 0..10 {
        let of_it = sample.pages.iter().filter(|&&(_, slot)| slot / 10_000 == tenth).count();
        assert!((150..260).contains(&of_it), "{of_it} of the tenth number {tenth}");
    }
}

#[test]
fn recompress_uses_trained_algorithm() {
    let ram = Ram::new(Config {
        recomp_algorithms: [
            Some(Secondary { algorithm: Algorithm::Lz4hc, params: Params::default() }),
            None,
            None,
        ],
        ..disk(4096).config()
    })
    .unwrap();
    write(&ram, 0..3000);
    let third = RecompressOptions { algo: Some(Algorithm::Zstd), ..RecompressOptions::default() };
    let (_, error) = ram.recompress(&third).unwrap_err();
    assert_eq!(error, RecompressError::NoAlgorithm(Algorithm::Zstd));
    grow_old(&ram, 0..3000);
    steps_until(&ram, |done| done.dictionary_bytes > 0);
    let by_request = ram.recompress(&third).unwrap().shrunk;
    // The background thread shrank some of the pages before the requested run began.
    assert_eq!(by_request + ram.auto_recompress_stat().pages, 3000);
}
