//! fio's zipfian distribution of pages, and an exact LRU cache to compare with.

use std::f64::consts::LN_2;

use crate::data::Random;

/// Factor by which fio multiplies a rank, to scatter popular pages: the fractional part of 2^64
/// divided by the golden ratio.
const SCATTER: u64 = 0x61C8_8646_80B5_83EB;
/// Largest number of ranks over which fio sums the probabilities.
const SUMMED_RANKS: u64 = 10_000_000;

/// fio's `random_distribution=zipf:THETA`: rank k has a probability proportional to k^-theta. The
/// first two ranks are exact; the others follow the approximation of Gray et al., "Quickly
/// Generating Billion-Record Synthetic Databases". A multiplication scatters the ranks. Unless the
/// number of pages is a power of two, some ranks share a page, as in fio.
pub struct Zipf {
    random: Random,
    offset: u64,
    count: u64,
    alpha: f64,
    /// 2^-theta: probability of the second rank relative to the first.
    second: f64,
    /// Sum of k^-theta over all summed ranks k.
    zeta: f64,
    eta: f64,
}

impl Zipf {
    /// Creates a distribution of the numbers `0..count`. `count` is at least 2, `theta` above 0 and
    /// not 1. The sequence depends on the seed only.
    pub fn new(seed: u64, theta: f64, count: u64) -> Self {
        let mut random = Random::new(seed);
        let zeta: f64 = (1..=count.min(SUMMED_RANKS)).map(|rank| (rank as f64).powf(-theta)).sum();
        let second = (-theta * LN_2).exp();
        let eta = (1.0 - (2.0 / count as f64).powf(1.0 - theta)) / (1.0 - (1.0 + second) / zeta);
        Self { offset: random.next_u64() >> 32, random, count, alpha: 1.0 / (1.0 - theta), second, zeta, eta }
    }

    pub fn next(&mut self) -> u64 {
        let rank = self.rank();
        (rank.wrapping_mul(SCATTER).wrapping_add(self.offset)) % self.count
    }

    /// Returns the next rank; 0 is the most likely.
    fn rank(&mut self) -> u64 {
        // 53 random bits as a number below 1.
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

/// An exact LRU cache of pages of different sizes, without their content.
pub struct Lru {
    /// Neighbours by page. The last entry is the root of the ring of cached pages: the root's
    /// `newer` is the oldest page, the root's `older` the newest.
    links: Vec<Link>,
    bytes: Vec<u16>,
    capacity: u64,
    cached_bytes: u64,
}

/// Neighbours of a page in the ring; both are `OUT` if the page is not cached.
#[derive(Clone, Copy)]
struct Link {
    newer: u32,
    older: u32,
}

const OUT: u32 = u32::MAX;

impl Lru {
    /// Creates a cache for pages of the given sizes. A page of size 0 is always cached.
    pub fn new(bytes: Vec<u16>, capacity: u64) -> Self {
        let root = bytes.len() as u32;
        let mut links = vec![Link { newer: OUT, older: OUT }; bytes.len()];
        links.push(Link { newer: root, older: root });
        Self { links, bytes, capacity, cached_bytes: 0 }
    }

    /// Accesses a page and returns true if it was cached. Afterwards the page is cached; the oldest
    /// pages are evicted to make room.
    pub fn access(&mut self, page: u32) -> bool {
        let bytes = u64::from(self.bytes[page as usize]);
        if bytes == 0 {
            return true;
        }
        let hit = self.links[page as usize].newer != OUT;
        if hit {
            self.unlink(page);
        } else {
            self.cached_bytes += bytes;
        }
        let root = self.root();
        let newest = self.links[root as usize].older;
        self.links[page as usize] = Link { newer: root, older: newest };
        self.links[newest as usize].newer = page;
        self.links[root as usize].older = page;
        while self.cached_bytes > self.capacity {
            let oldest = self.links[root as usize].newer;
            self.unlink(oldest);
            self.links[oldest as usize] = Link { newer: OUT, older: OUT };
            self.cached_bytes -= u64::from(self.bytes[oldest as usize]);
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
    fn zipf_matches_theoretical_probabilities() {
        const COUNT: u64 = 1 << 17;
        const DRAWS: u32 = 1_000_000;
        let mut zipf = Zipf::new(1, 1.1, COUNT);
        let zeta: f64 = (1..=COUNT).map(|k| (k as f64).powf(-1.1)).sum();
        assert!((zipf.zeta - zeta).abs() < 1e-9);
        let mut ranks = vec![0_u32; COUNT as usize];
        for _ in 0..DRAWS {
            ranks[zipf.rank() as usize] += 1;
        }
        // Ranks 0 and 1 are exact; the others are approximated to about 2 %.
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
    fn zipf_covers_power_of_two_and_depends_on_seed() {
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
    fn lru_matches_list_model() {
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
                list.retain(|cached_bytes| *cached_bytes != page);
                list.push(page);
            }
            while list.iter().map(|page| u64::from(sizes[*page as usize])).sum::<u64>() > 3000 {
                list.remove(0);
            }
        }
        assert!((2000..18_000).contains(&hits), "{hits}: the cache is neither empty nor whole");
    }
}
