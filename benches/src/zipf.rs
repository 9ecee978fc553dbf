//! A zipfian choice of pages as fio makes it, and an exact LRU cache to compare with.

use std::f64::consts::LN_2;

use crate::data::Random;

/// What fio multiplies a rank with, so that the popular pages lie scattered: 2^64 by the golden
/// ratio, less the whole.
const SCATTER: u64 = 0x61C8_8646_80B5_83EB;
/// fio sums up the first so many ranks only.
const SUMMED_RANKS: u64 = 10_000_000;

/// fio's `random_distribution=zipf:THETA`: rank k is drawn with a probability that falls as
/// k^-theta. The first two ranks are exact, the others follow the closed approximation of Gray et
/// al., "Quickly Generating Billion-Record Synthetic Databases". Ranks are scattered by a
/// multiplication; with another number of pages than a power of two a few share a page, as in fio.
pub struct Zipf {
    random: Random,
    offset: u64,
    count: u64,
    alpha: f64,
    /// 2^-theta: how likely the second rank is, the first being 1.
    second: f64,
    /// The sum over all ranks.
    zeta: f64,
    eta: f64,
}

impl Zipf {
    /// Over the numbers `0..count`, at least 2; `theta` is above 0 and not 1. A seed gives one
    /// sequence.
    pub fn new(seed: u64, theta: f64, count: u64) -> Self {
        let mut random = Random::new(seed);
        let zeta: f64 = (1..=count.min(SUMMED_RANKS)).map(|rank| (rank as f64).powf(-theta)).sum();
        let second = (-theta * LN_2).exp();
        let eta = (1.0 - (2.0 / count as f64).powf(1.0 - theta)) / (1.0 - (1.0 + second) / zeta);
        Self { offset: random.next_u64() >> 32, random, count, alpha: 1.0 / (1.0 - theta), second, zeta, eta }
    }

    /// The next number.
    pub fn next(&mut self) -> u64 {
        let rank = self.rank();
        (rank.wrapping_mul(SCATTER).wrapping_add(self.offset)) % self.count
    }

    /// The next rank, 0 is the most likely.
    fn rank(&mut self) -> u64 {
        // 53 bits, below 1.
        let uniform = (self.random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        let share = uniform * self.zeta;
        if share < 1.0 {
            0
        } else if share < 1.0 + self.second {
            1
        } else {
            let scaled = (self.eta * uniform - self.eta + 1.0).powf(self.alpha);
            ((self.count as f64 * scaled) as u64).min(self.count - 1)
        }
    }
}

/// An exact LRU cache of pages with sizes of their own.
pub struct Lru {
    /// By page; the last entry is the ring's own: `newer` of it is the oldest page, `older` the
    /// newest.
    links: Vec<Link>,
    bytes: Vec<u16>,
    capacity: u64,
    held: u64,
}

/// `newer == older == OUT` outside the cache.
#[derive(Clone, Copy)]
struct Link {
    newer: u32,
    older: u32,
}

const OUT: u32 = u32::MAX;

impl Lru {
    /// For pages of these sizes. A page of size 0 is always in it.
    pub fn new(bytes: Vec<u16>, capacity: u64) -> Self {
        let root = bytes.len() as u32;
        let mut links = vec![Link { newer: OUT, older: OUT }; bytes.len()];
        links.push(Link { newer: root, older: root });
        Self { links, bytes, capacity, held: 0 }
    }

    /// Uses a page: whether it was there. It is afterwards, and the oldest ones make room.
    pub fn access(&mut self, page: u32) -> bool {
        let bytes = u64::from(self.bytes[page as usize]);
        if bytes == 0 {
            return true;
        }
        let hit = self.links[page as usize].newer != OUT;
        if hit {
            self.unlink(page);
        } else {
            self.held += bytes;
        }
        let root = self.root();
        let newest = self.links[root as usize].older;
        self.links[page as usize] = Link { newer: root, older: newest };
        self.links[newest as usize].newer = page;
        self.links[root as usize].older = page;
        while self.held > self.capacity {
            let oldest = self.links[root as usize].newer;
            self.unlink(oldest);
            self.links[oldest as usize] = Link { newer: OUT, older: OUT };
            self.held -= u64::from(self.bytes[oldest as usize]);
        }
        hit
    }

    fn unlink(&mut self, page: u32) {
        let Link { newer, older } = self.links[page as usize];
        self.links[newer as usize].older = older;
        self.links[older as usize].newer = newer;
    }

    fn root(&self) -> u32 {
        self.bytes.len() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn popular_ranks_are_as_likely_as_the_law_says() {
        const COUNT: u64 = 1 << 17;
        const DRAWS: u32 = 1_000_000;
        let mut zipf = Zipf::new(1, 1.1, COUNT);
        let zeta: f64 = (1..=COUNT).map(|k| (k as f64).powf(-1.1)).sum();
        assert!((zipf.zeta - zeta).abs() < 1e-9);
        let mut ranks = vec![0_u32; COUNT as usize];
        for _ in 0..DRAWS {
            ranks[zipf.rank() as usize] += 1;
        }
        // The first two to the statistics' precision; the head to that of the approximation, which
        // is about 2 %.
        for (rank, exact) in [(0, 1.0 / zeta), (1, 0.5_f64.powf(1.1) / zeta)] {
            let share = f64::from(ranks[rank]) / f64::from(DRAWS);
            assert!((share / exact - 1.0).abs() < 0.02, "rank {rank}: {share} for {exact}");
        }
        for head in [100, 1000, 1 << 15] {
            let exact: f64 = (1..=head).map(|k| (f64::from(k)).powf(-1.1)).sum::<f64>() / zeta;
            let share = f64::from(ranks[..head as usize].iter().sum::<u32>()) / f64::from(DRAWS);
            assert!((share - exact).abs() < 0.02, "the first {head}: {share} for {exact}");
        }
    }

    #[test]
    fn scattering_a_power_of_two_loses_no_page_and_seeds_differ() {
        let draw = |seed| {
            let mut zipf = Zipf::new(seed, 1.1, 64);
            (0..200_000).map(|_| zipf.next()).collect::<Vec<_>>()
        };
        let mut all = draw(1);
        assert_eq!(all, draw(1));
        assert_ne!(all, draw(2));
        all.sort_unstable();
        all.dedup();
        assert!(all.into_iter().eq(0..64));
    }

    #[test]
    fn lru_agrees_with_a_list() {
        let sizes: Vec<u16> = (0..40).map(|page| page * 16).collect();
        let mut random = Random::new(9);
        let mut lru = Lru::new(sizes.clone(), 3000);
        let mut list: Vec<u32> = Vec::new();
        let mut hits = 0;
        for _ in 0..20_000 {
            let page = (random.next_u64() % 40) as u32;
            let expected = page == 0 || list.contains(&page);
            assert_eq!(lru.access(page), expected);
            hits += u32::from(expected);
            if page != 0 {
                list.retain(|held| *held != page);
                list.push(page);
            }
            while list.iter().map(|page| u64::from(sizes[*page as usize])).sum::<u64>() > 3000 {
                list.remove(0);
            }
        }
        assert!((2000..18_000).contains(&hits), "{hits}: the cache is neither empty nor whole");
    }
}
