//! Nodes of a page table (directories and leaves): pages of 512 words in a memfd, addressed by number.

#[cfg(not(loom))]
mod real {
    #![expect(unsafe_code)]
    // UNSAFETY: views pages of a shared mapping as arrays of atomics.

    use crate::arena::Arena;
    use crate::device::Result;
    use crate::sync::{AtomicU64, Ordering};

    /// Binary logarithm of the number of words in a node.
    pub const FANOUT_BITS: u32 = 9;
    pub const NODE_BYTES: u64 = 8 << FANOUT_BITS;

    /// The words of a node.
    pub type Node = [AtomicU64; 1 << FANOUT_BITS];

    /// Allocator of nodes, one for each family of page tables (those of a base and its forks).
    pub struct Nodes {
        arena: Arena,
        used: AtomicU64,
    }

    impl Nodes {
        /// Creates an allocator without nodes.
        ///
        /// # Errors
        /// Errors of `memfd_create(2)`.
        pub fn new() -> rustix::io::Result<Self> {
            Ok(Self { arena: Arena::new("freestone-slots", NODE_BYTES)?, used: AtomicU64::new(0) })
        }

        /// Returns the nodes of another process, which has ended.
        ///
        /// # Errors
        /// As [`Arena::adopt`].
        pub fn adopt(file: std::os::fd::OwnedFd) -> rustix::io::Result<Self> {
            Ok(Self { arena: Arena::adopt(file, NODE_BYTES)?, used: AtomicU64::new(0) })
        }

        pub const fn arena(&self) -> &Arena {
            &self.arena
        }

        /// Frees all nodes but `used`, in ascending order. No table may refer to other nodes.
        ///
        /// # Errors
        /// As [`Arena::keep_units`].
        pub fn keep(&self, used: &[u32]) -> Result<()> {
            // SAFETY: nodes are accessed only as atomics.
            unsafe { self.arena.keep_units(used) }?;
            // Relaxed: the number of nodes is a statistic.
            self.used.store(used.len() as u64, Ordering::Relaxed);
            Ok(())
        }

        /// Allocates a zeroed node and returns its number.
        pub fn alloc(&self) -> Result<u32> {
            let node = self.arena.alloc_populated(NODE_BYTES)?;
            // Relaxed: the number of nodes is a statistic.
            self.used.fetch_add(1, Ordering::Relaxed);
            Ok(node)
        }

        /// Frees nodes by number. No table may refer to these nodes any more.
        pub fn free(&self, mut nodes: Vec<u32>) {
            nodes.sort_unstable();
            // Neighbouring nodes are released in one system call.
            for run in nodes.chunk_by(|a, b| a + 1 == *b) {
                // SAFETY: nodes are accessed only as atomics.
                unsafe {
                    self.arena.release(u64::from(run[0]) * NODE_BYTES, run.len() as u64 * NODE_BYTES);
                }
            }
            // Relaxed: the number of nodes is a statistic.
            self.used.fetch_sub(nodes.len() as u64, Ordering::Relaxed);
            for node in nodes {
                // SAFETY: nodes are accessed only as atomics, so a wrong number corrupts a table but not
                // memory safety.
                unsafe { self.arena.free(node) };
            }
        }

        /// Returns the words of an allocated node.
        #[inline]
        pub fn get(&self, node: u32) -> &Node {
            let address = self.arena.at(u64::from(node) * NODE_BYTES).cast::<Node>();
            // SAFETY: a whole mapped page, aligned, accessed only as atomics; it lives as long as the arena.
            unsafe { address.as_ref() }
        }

        /// Returns the size of all allocated nodes in bytes.
        pub fn bytes(&self) -> u64 {
            // Relaxed: the number of nodes is a statistic.
            self.used.load(Ordering::Relaxed) * NODE_BYTES
        }
    }
}

#[cfg(loom)]
mod real {
    use crate::device::{Error, Result};
    use crate::sync::{AtomicU64, Mutex};

    pub const FANOUT_BITS: u32 = 1;
    pub type Node = [AtomicU64; 1 << FANOUT_BITS];
    const NODES: usize = 8;

    /// Allocator for loom models: a few nodes, created in advance.
    pub struct Nodes {
        nodes: Vec<Node>,
        free: Mutex<Vec<u32>>,
    }

    impl Nodes {
        pub fn new() -> rustix::io::Result<Self> {
            let nodes =
                (0..NODES).map(|_| [AtomicU64::new(u64::MAX << 8), AtomicU64::new(u64::MAX << 8)]).collect();
            Ok(Self { nodes, free: Mutex::new((0..NODES as u32).collect()) })
        }
        pub fn alloc(&self) -> Result<u32> {
            let node = self.free.lock().pop().ok_or(Error::NoMemory)?;
            // Zeroes the node, like the kernel zeroes a new page on first access.
            for word in self.get(node) {
                // Relaxed: the caller publishes the node with a Release.
                word.store(0, crate::sync::Ordering::Relaxed);
            }
            Ok(node)
        }
        pub fn free(&self, nodes: Vec<u32>) {
            for &node in &nodes {
                for word in self.get(node) {
                    // Relaxed: no thread may read the node before `alloc` zeroes it.
                    word.store(u64::MAX << 8, crate::sync::Ordering::Relaxed);
                }
            }
            self.free.lock().extend(nodes);
        }
        pub fn get(&self, node: u32) -> &Node {
            &self.nodes[node as usize]
        }
        pub fn left(&self) -> usize {
            self.free.lock().len()
        }
    }
}

pub use real::*;
