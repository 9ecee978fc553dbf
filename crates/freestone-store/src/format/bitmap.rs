//! A bit for each page of a segment, and how many are set before a page.

use super::SEGMENT_PAGES;

const WORDS: usize = SEGMENT_PAGES / 64;
/// Bytes of one as it is stored.
pub const BYTES: usize = SEGMENT_PAGES / 8;
/// Words between two that the count before them is kept of.
const STEP: usize = 8;

/// Which pages; changes.
#[derive(Clone, PartialEq, Eq)]
pub struct Bitmap(Box<[u64]>);

impl Default for Bitmap {
    fn default() -> Self {
        Self(vec![0; WORDS].into())
    }
}

impl Bitmap {
    /// From what [`bytes`](Self::bytes) gave.
    pub fn parse(bytes: &[u8; BYTES]) -> Self {
        let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        Self(words.collect())
    }

    /// As it is stored: page 0 is the lowest bit of the first byte.
    pub fn bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Whether the page is in it.
    pub fn has(&self, page: usize) -> bool {
        self.0[page / 64] >> (page % 64) & 1 == 1
    }

    /// Puts a page in, or takes it out.
    pub fn set(&mut self, page: usize, is_in: bool) {
        let bit = 1 << (page % 64);
        if is_in { self.0[page / 64] |= bit } else { self.0[page / 64] &= !bit }
    }

    /// Adds all of another.
    pub fn add(&mut self, other: &Self) {
        for (word, other) in self.0.iter_mut().zip(&other.0) {
            *word |= other;
        }
    }

    /// What is in this and not in the other.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(word, other)| word & !other).collect())
    }

    /// How many pages.
    pub fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The pages, in order.
    pub fn pages(&self) -> impl Iterator<Item = usize> {
        self.0.iter().enumerate().flat_map(|(number, word)| {
            let mut rest = *word;
            std::iter::from_fn(move || {
                let bit = (rest != 0).then(|| rest.trailing_zeros() as usize)?;
                rest &= rest - 1;
                Some(number * 64 + bit)
            })
        })
    }
}

/// A bitmap that does not change, of which the place of a page among those that are in is known soon.
pub struct Ranked {
    bits: Bitmap,
    /// Before each [`STEP`] words.
    before: Box<[u32]>,
}

impl From<Bitmap> for Ranked {
    fn from(bits: Bitmap) -> Self {
        let mut count = 0;
        let before = bits.0.chunks(STEP).map(|words| {
            let before = count;
            count += words.iter().map(|word| word.count_ones()).sum::<u32>();
            before
        });
        Self { before: before.collect(), bits }
    }
}

impl Ranked {
    /// The bitmap.
    pub fn bits(&self) -> &Bitmap {
        &self.bits
    }

    /// How many pages that are in it come before this one, if this one is.
    pub fn place(&self, page: usize) -> Option<usize> {
        if !self.bits.has(page) {
            return None;
        }
        let word = page / 64;
        let first = word / STEP * STEP;
        let whole: u32 = self.bits.0[first..word].iter().map(|word| word.count_ones()).sum();
        let below = (self.bits.0[word] & ((1 << (page % 64)) - 1)).count_ones();
        Some((self.before[word / STEP] + whole + below) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_counted() {
        let mut bits = Bitmap::default();
        let pages: Vec<usize> =
            (0..SEGMENT_PAGES).filter(|page| page * page % 7 == 2 || page % 1000 < 3).collect();
        for page in &pages {
            bits.set(*page, true);
        }
        bits.set(4, true);
        bits.set(4, false);
        let pages: Vec<usize> = pages.into_iter().filter(|page| *page != 4).collect();
        assert_eq!(bits.pages().collect::<Vec<_>>(), pages);
        assert_eq!(bits.count(), pages.len());
        let bytes: [u8; BYTES] = bits.bytes().try_into().unwrap();
        assert!(Bitmap::parse(&bytes) == bits);
        let mut other = Bitmap::default();
        other.set(pages[0], true);
        let mut rest = bits.without(&other);
        assert!(!rest.has(pages[0]) && rest.count() == pages.len() - 1);
        rest.add(&other);
        assert!(rest == bits);
        let ranked = Ranked::from(bits);
        for (place, page) in pages.iter().enumerate() {
            assert_eq!(ranked.place(*page), Some(place));
        }
        assert_eq!(ranked.place(4), None);
    }
}
