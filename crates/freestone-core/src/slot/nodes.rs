//! Nodes of the slot directory: pages of 512 words in a memfd, by number.

#[cfg(not(loom))]
mod real {
    #![expect(unsafe_code)]
    // UNSAFETY: views pages of a shared mapping as arrays of atomics.

    use crate::arena::Arena;
    use crate::device::Result;
    use crate::sync::{AtomicU64, Ordering};

    /// Words in a node.
    pub const FANOUT_BITS: u32 = 9;
    /// Bytes of a node: one page.
    pub const NODE_BYTES: u64 = 8 << FANOUT_BITS;

    /// A node's words.
    pub type Node = [AtomicU64; 1 << FANOUT_BITS];

    /// Allocates nodes. One for each family of tables.
    pub struct Nodes {
        arena: Arena,
        used: AtomicU64,
    }

    impl Nodes {
        /// An empty store.
        ///
        /// # Errors
        /// Those of `memfd_create(2)`.
        pub fn new() -> rustix::io::Result<Self> {
            Ok(Self { arena: Arena::new("freestone-slots", NODE_BYTES)?, used: AtomicU64::new(0) })
        }

        /// A node of zeroes.
        pub fn alloc(&self) -> Result<u32> {
            let node = self.arena.alloc()?;
            if let Err(error) = self.arena.populate(u64::from(node) * NODE_BYTES, NODE_BYTES) {
                // SAFETY: it was just handed out, and is used no more.
                unsafe { self.arena.release(u64::from(node) * NODE_BYTES, NODE_BYTES) };
                // SAFETY: as above.
                unsafe { self.arena.free(node) };
                return Err(error);
            }
            // Relaxed: a statistic.
            self.used.fetch_add(1, Ordering::Relaxed);
            Ok(node)
        }

        /// Gives nodes back; nobody reaches them any more.
        pub fn free(&self, mut nodes: Vec<u32>) {
            nodes.sort_unstable();
            // Neighbours go in one system call.
            for run in nodes.chunk_by(|a, b| a + 1 == *b) {
                // SAFETY: nodes are only ever seen as atomics.
                unsafe {
                    self.arena.release(u64::from(run[0]) * NODE_BYTES, run.len() as u64 * NODE_BYTES);
                }
            }
            // Relaxed: a statistic.
            self.used.fetch_sub(nodes.len() as u64, Ordering::Relaxed);
            for node in nodes {
                // SAFETY: nodes are only ever seen as atomics, so what a wrong number does is a
                // wrong table, and no more.
                unsafe { self.arena.free(node) };
            }
        }

        /// The words of a node that was allocated and not freed.
        #[inline]
        pub fn get(&self, node: u32) -> &Node {
            let address = self.arena.at(u64::from(node) * NODE_BYTES).cast::<Node>();
            // SAFETY: a whole mapped page, aligned, and only ever seen as atomics; it lives as long
            // as the arena.
            unsafe { address.as_ref() }
        }

        /// Bytes of all nodes in use.
        pub fn bytes(&self) -> u64 {
            // Relaxed: a statistic.
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

    /// The model's store: a few nodes, made in advance.
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
            // As the memory of a new page: zeroed by whoever touches it first.
            for word in self.get(node) {
                // Relaxed: publishing it is the caller's business.
                word.store(0, crate::sync::Ordering::Relaxed);
            }
            Ok(node)
        }
        pub fn free(&self, nodes: Vec<u32>) {
            for &node in &nodes {
                for word in self.get(node) {
                    // Relaxed: nobody may see it; the node is zeroed when it is handed out again.
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
