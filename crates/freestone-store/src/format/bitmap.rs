//! Bitmaps of the pages of a segment (1 GiB of an image), with a fast rank query.

use super::SEGMENT_PAGES;

const WORDS: usize = SEGMENT_PAGES / 64;
/// Size of a stored bitmap in bytes.
pub const BYTES: usize = SEGMENT_PAGES / 8;
/// Number of 64-bit bitmap words that each entry of the rank index covers.
const STEP: usize = 8;

/// Set of pages of a segment, with a bit for each page.
#[derive(Clone, PartialEq, Eq)]
pub struct Bitmap(Box<[u64]>);

impl Default for Bitmap {
    fn default() -> Self {
        Self(vec![0; WORDS].into())
    }
}

impl Bitmap {
    /// Decodes a bitmap from the output of [`bytes`](Self::bytes).
    pub fn parse(bytes: &[u8; BYTES]) -> Self {
        let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        Self(words.collect())
    }

    /// Encodes the bitmap. Page 0 is the lowest bit of the first byte.
    pub fn bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Returns true if the set contains the page.
    pub fn has(&self, page: usize) -> bool {
        self.0[page / 64] >> (page % 64) & 1 == 1
    }

    /// Adds a page to the set if `is_in` is true, otherwise removes the page.
    pub fn set(&mut self, page: usize, is_in: bool) {
        let bit = 1 << (page % 64);
        if is_in { self.0[page / 64] |= bit } else { self.0[page / 64] &= !bit }
    }

    /// Adds all pages of `other` to this set.
    pub fn add(&mut self, other: &Self) {
        for (word, other) in self.0.iter_mut().zip(&other.0) {
            *word |= other;
        }
    }

    /// Returns the pages of this set that are not in `other`.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(word, other)| word & !other).collect())
    }

    /// Returns the number of pages in the set.
    pub fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Returns the pages of the set in ascending order.
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

/// Immutable set of pages with an index for the rank of a page.
pub struct Ranked {
    bits: Bitmap,
    /// For each group of [`STEP`] words, the number of pages in the set that precede the group.
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
    /// Returns the set of pages.
    pub fn bits(&self) -> &Bitmap {
        &self.bits
    }

    /// Returns the number of pages in the set that precede `page`, or `None` if the set does not contain
    /// `page`.
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
    fn bitmap_rank_counts_earlier_pages() {
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
