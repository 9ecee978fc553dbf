//! Per-CPU values, such as the working memory of compressors.

use freestone_core::percpu::PerCpu;
use freestone_core::sync::Mutex;

/// A lockable value of type `T` for each CPU.
pub type Lender<T> = PerCpu<Mutex<T>>;
